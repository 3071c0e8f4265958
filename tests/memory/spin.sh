#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the Spin models in models/: every interleaving, with a rank that may die at any step. Also proves that the checks can fail, by taking
# what makes a protocol right out of it.
set -eu
command -v spin >/dev/null || { echo "skipped: spin is not installed"; exit 77; }
source_folder=${TEST_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

errors() { # model, flags of spin: prints the number of errors
    rm -f pan pan.* ./*.trail
    spin $2 -a "$source_folder/models/$1.pml" >spin.log 2>&1 || { cat spin.log; exit 1; }
    ${CC:-cc} -O2 -DSAFETY -DCOLLAPSE -w -o pan pan.c
    ./pan -m1000000 >pan.log 2>&1
    if grep -q 'max search depth too small' pan.log; then echo "depth"; else sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.log; fi
}

failed=0
for model in mailbox wait turn group_end vote making close; do
    found=$(errors $model "")
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
    if [ "$found" = 0 ]; then
        echo "$model: proved over $states states"
    else
        echo "$model: $found errors"; cat pan.log; failed=1
    fi
done
if [ "$(errors wait -DNO_MEMBARRIER)" = 0 ]; then
    echo "wait without membarrier: no lost wake-up was found, so the model proves nothing"; failed=1
else
    echo "wait without membarrier: loses a wake-up, as it must"
fi
if [ "$(errors turn -DNO_MEMBARRIER)" = 0 ]; then
    echo "turn without membarrier: nobody met inside, so the model proves nothing"; failed=1
else
    echo "turn without membarrier: two threads meet inside, as they must"
fi
if [ "$(errors vote -DNO_ABANDON)" = 0 ]; then
    echo "vote without the abandoned word: nobody was left waiting, so the model proves nothing"; failed=1
else
    echo "vote without the abandoned word: a rank is left waiting, as it must"
fi
if [ "$(errors making -DNO_REFUSAL)" = 0 ]; then
    echo "making without refusals: nobody was left waiting, so the model proves nothing"; failed=1
else
    echo "making without refusals: a rank is left waiting, as it must"
fi
if [ "$(errors close -DNO_MEMBARRIER)" = 0 ]; then
    echo "close without membarrier: nobody used what was freed, so the model proves nothing"; failed=1
else
    echo "close without membarrier: a call uses what was freed, as it must"
fi
exit $failed
