#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What examples/gpt says: its options, what it does not understand or cannot do, where it goes on, and a share of waiting that is one.
set -u
tutti=$TEST_BUILD/bin/tutti gpt=$TEST_BUILD/examples/gpt
[ -x "$gpt" ] || { echo "skipped: $gpt was not built"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TUTTI_TIMEOUT=5m
fail() {
    echo "FAILED  $1"
    cat "$folder/log"
    exit 1
}
refuses() { # WORDS: of the message; options of gpt
    local words=$1
    shift
    "$gpt" "$@" >"$folder/log" 2>&1
    [ $? -eq 2 ] || fail "$* is refused"
    grep -qF -- "$words" "$folder/log" || fail "$* is refused with \"$words\""
}
train() { # options of gpt
    "$tutti" run -n 2 "$gpt" --every 1 --checkpoint "$folder/checkpoint" "$@" >"$folder/log" 2>&1 || fail "$* trains"
}

"$gpt" --help >"$folder/log" 2>&1 || fail "--help is understood"
grep -q -- "--checkpoint DIR" "$folder/log" || fail "--help lists the options"
refuses "--steps abc is not understood" --steps abc
refuses "--steps 3x is not understood" --steps 3x
refuses "--every 0 is not understood" --every 0
refuses "--steps is not understood" --steps
refuses "--checkpoint needs --mode sharded" --mode data --checkpoint "$folder/checkpoint"
refuses "without --tensor" --tensor 2 --checkpoint "$folder/checkpoint"
refuses "without --tensor" --tensor 2 --save "$folder/saved"
refuses "--kill and --at belong together" --kill 1
refuses "--kill and --at belong together" --at 1
refuses "--write is at most 4096" --write 4097
refuses "--replace needs --at above 0" --kill 1 --at 0 --replace 1 --checkpoint "$folder/checkpoint"
fails() { # WORDS: of the message; options of gpt, which are understood, and cannot be done
    local words=$1
    shift
    "$tutti" run -n 2 "$gpt" --steps 1 "$@" >"$folder/log" 2>&1 && fail "$* ends with an error"
    grep -qF -- "$words" "$folder/log" || fail "$* fails with \"$words\""
}
fails "--kill must name one of the ranks" --kill 2 --at 0
fails "no file can be made beside \"$folder/none/saved\"" --save "$folder/none/saved"
fails "no file can be made beside \"$folder/none/saved\"" --save "$folder/none/saved" --write 2
fails "no file can be made in the folder of --results" --results "$folder/none"

train --steps 2
grep -q "goes on" "$folder/log" && fail "a run that begins does not go on"
grep -oE "[0-9]+ % of it" "$folder/log" >"$folder/shares"
[ -s "$folder/shares" ] || fail "it tells the share of waiting"
while read -r share _; do
    [ "$share" -le 100 ] || fail "a share of waiting is at most 100 %"
done <"$folder/shares"
train --steps 3
grep -qF "goes on from step 2 in $folder/checkpoint" "$folder/log" || fail "it says where it goes on"
train --steps 3
grep -qF "no step was made: 3 of 3 were there already" "$folder/log" || fail "it says that all is done"
grep -q "loss" "$folder/log" && fail "without a step there is no loss"
echo "1 passed, 0 failed, 0 skipped"
