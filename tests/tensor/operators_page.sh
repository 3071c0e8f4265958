#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# docs/operators.md is what the operator table says.
set -u
build=${TEST_BUILD:-build/release} source=${TEST_SOURCE:-.}
if [ ! -x "$build/examples/tensor_operators" ]; then
    echo "skipped: the examples are not built"
    exit 77
fi
"$source/scripts/operators" --check "$build"
