#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A rank dies in the middle of training and is replaced: at the end the parameters have the bits of a run in which nobody died.
set -u
tutti=$TEST_BUILD/bin/tutti gpt=$TEST_BUILD/examples/gpt
[ -x "$gpt" ] || { echo "skipped: $gpt was not built"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TUTTI_TIMEOUT=5m
train() { # FILE: where parameters go at the end; then options of `tutti run`, "--" and options of gpt
    local file=$1 launch=()
    shift
    while [ "$1" != -- ]; do launch+=("$1"); shift; done
    shift
    "$tutti" run -n 3 "${launch[@]}" "$gpt" --steps 4 --save "$folder/$file" "$@" >"$folder/$file.log" 2>&1
}
fail() {
    echo "FAILED  $1"
    cat "$folder"/*.log
    exit 1
}

train undisturbed -- || fail "a run in which nobody dies"
train replaced --refill 1 -- --kill 1 --at 2 --replace 1 --checkpoint "$folder/checkpoint" || fail "a run in which a rank is replaced"
grep -q 'rank 1 (pid [0-9]*) was killed by signal 9 (Killed); a newcomer' "$folder/replaced.log" || fail "the death and the newcomer are told"
grep -q '3 ranks go on from .* at step 2' "$folder/replaced.log" || fail "all ranks go on, and no step is lost"
cmp "$folder/undisturbed" "$folder/replaced" || fail "both end with the same bits"
echo "1 passed, 0 failed, 0 skipped"
