#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Nothing that is built here is linked with a library of GPUs: the plug-ins load those at run time, and everything else does not know them.
set -u
command -v readelf >/dev/null || { echo "skipped: no readelf here"; exit 77; }
passed=0 failed=0
for file in "$TEST_BUILD"/src/libtutti*.so "$TEST_BUILD"/plugins/*.so "$TEST_BUILD"/bin/tutti; do
    [ -f "$file" ] || continue
    found=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -E '^lib(cuda|cudart|cublas|cublasLt|nvrtc|cudnn|nccl|nvshmem|nvidia)')
    if [ -z "$found" ]; then
        passed=$((passed + 1))
        echo "ok      ${file##*/} needs no library of GPUs to be loaded"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s needs %s\n' "${file##*/}" "$found"
    fi
done
[ $passed -gt 0 ] || { echo "skipped: no library was built"; exit 77; }
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
