#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# tutti_main: the first program of the README starts its own ranks when it is alone, is one rank under a launcher, and says what went wrong.
set -u
first=$TEST_BUILD/examples/first tutti=$TEST_BUILD/tutti
[ -x "$tutti" ] || tutti=$(find "$TEST_BUILD" -maxdepth 2 -type f -name tutti -perm -u+x | head -1)
[ -x "$first" ] || { echo "skipped: $first was not built"; exit 77; }
passed=0 failed=0
unset $(compgen -e | grep -E '^(TUTTI_(RANK|SIZE|STORE|LOCAL_|SECRET|FAULT)|RANK$|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI_|SLURM_)')

# a sentence; exit status; how many lines of that pattern; the pattern; the command …
says() {
    local sentence=$1 code=$2 wanted=$3 pattern=$4 output status found
    shift 4
    output=$(timeout 120 "$@" 2>&1)
    status=$?
    found=$(grep -cE "$pattern" <<<"$output")
    if [ "$status" -eq "$code" ] && [ "$found" -eq "$wanted" ]; then
        passed=$((passed + 1))
        echo "ok      $sentence"
    else
        failed=$((failed + 1))
        echo "FAILED  $sentence: exit status $status, not $code; $found lines match, not $wanted"
        sed 's/^/    /' <<<"$output"
    fi
}

says "alone it starts four ranks" 0 4 '^rank [0-3] of 4: 16$' "$first"
says "under a launcher it starts none" 0 2 'rank [01] of 2: 8$' "$tutti" run -n 2 "$first"
says "one rank under a launcher stays one" 0 1 'rank 0 of 1: 4$' "$tutti" run -n 1 "$first"
says "a failure is printed once, with the rank, and is the exit status" 1 1 '^first: (rank [0-3]: )?.*rank 2' \
    env TUTTI_FAULT=rank=2,op=all_reduce,at=0,do=kill "$first"
says "a contradictory environment is an error and no reason to spawn" 1 1 '^first: .*TUTTI_RANK' env TUTTI_RANK=5 TUTTI_SIZE=2 "$first"
says "a setting that does not parse is an error" 1 1 '^first: .*TUTTI_TIMEOUT' env TUTTI_TIMEOUT=soon "$first"
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
