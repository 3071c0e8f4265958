#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A short soak, as `make soak` runs it for longer; another seed each day.
set -eu
cd "$TEST_SOURCE"
BUILD=$TEST_BUILD exec scripts/soak 8 "$(date +%Y%m%d)"
