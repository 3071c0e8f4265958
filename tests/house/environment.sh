#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What a user sees of the environment: a variable that means nothing is warned about once per process with the nearest that does, what is
# known is not; and the first program of the README, four ranks that find each other.
set -u
hello=$TEST_BUILD/examples/hello
[ -x "$hello" ] || { echo "skipped: $hello was not built"; exit 77; }
passed=0 failed=0
check() { # a sentence, then a command that must succeed
    local sentence=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        echo "ok      $sentence"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s\n%s\n' "$sentence" "$output"
    fi
}

output=$(TUTTI_TIMEOT=3s "$hello" 2>&1)
check "an unknown variable is warned about" grep -q 'TUTTI_TIMEOT\b' <<<"$output"
check "the warning names the nearest variable" grep -q 'TUTTI_TIMEOUT\b' <<<"$output"
check "the program runs all the same" grep -q 'Hello from rank 0 of 1' <<<"$output"

output=$(TUTTI_TIMEOUT=30s TUTTI_LOG=warn "$hello" 2>&1 >/dev/null)
check "known variables are not warned about" test -z "$output"

output=$(TUTTI_TIMEOUT=soon "$hello" 2>&1)
check "a value that does not parse fails" test $? -ne 0
check "the message names the variable" grep -q 'TUTTI_TIMEOUT' <<<"$output"

output=$(timeout 60 "$TEST_BUILD/bin/tutti" run -n 4 "$hello" 2>&1)
check "the demo: four ranks" test "$(grep -c 'Hello from rank [0-3] of 4' <<<"$output")" -eq 4

echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
