#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A whole run is killed in the middle of training and started anew: it goes on from its last checkpoint, and ends with the bits of a run that nobody killed.
# It can go on with another number of ranks, too.
set -u
tutti=$TEST_BUILD/bin/tutti gpt=$TEST_BUILD/examples/gpt
[ -x "$gpt" ] || { echo "skipped: $gpt was not built"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TUTTI_TIMEOUT=5m
train() { # FILE: where parameters go at the end; ranks; options of gpt
    local file=$1 ranks=$2
    shift 2
    "$tutti" run -n "$ranks" "$gpt" --steps 8 --every 2 --save "$folder/$file" "$@" >"$folder/$file.log" 2>&1
}
fail() {
    echo "FAILED  $1"
    cat "$folder"/*.log
    exit 1
}

train undisturbed 2 || fail "a run that nobody kills"
setsid "$tutti" run -n 2 "$gpt" --steps 8 --every 2 --save "$folder/killed" --checkpoint "$folder/checkpoint" >"$folder/killed.log" 2>&1 &
for ((i = 0; i < 6000; i++)); do # a minute; the first checkpoint is there after two steps
    [ -e "$folder/checkpoint/checkpoint.safetensors" ] && break
    sleep 0.01
done
kill -KILL -- -$! || fail "the run is there, and is killed with all its ranks"
wait $! 2>/dev/null
cp -r "$folder/checkpoint" "$folder/copy"
train resumed 2 --checkpoint "$folder/checkpoint" || fail "it goes on"
grep -q "step   [12] of" "$folder/resumed.log" && fail "it does not begin anew"
cmp "$folder/undisturbed" "$folder/resumed" || fail "both end with the same bits"
train elsewhere 3 --checkpoint "$folder/copy" || fail "it goes on with another number of ranks"
echo "1 passed, 0 failed, 0 skipped"
