#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# examples/backends.c: one program on every backend, by one name. The driver, NCCL (one rank: its stand-in takes threads) and NVSHMEM are stand-ins;
# scripts/gpu-test runs it on a GPU.
set -u
example=$TEST_BUILD/examples/backends tests=$TEST_BUILD/tests
tutti=$(find "$TEST_BUILD" -maxdepth 2 -type f -name tutti -perm -u+x | head -1)
[ -x "$example" ] && [ -x "$tutti" ] || { echo "skipped: $example was not built"; exit 77; }
passed=0 failed=0 skipped=0
unset $(compgen -e | grep -E '^(TUTTI_(RANK|SIZE|STORE|LOCAL_|SECRET|FAULT)|RANK$|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI_|SLURM_)')

# the backend; ranks; the folder of its plug-in; that of the stand-in for its library; then the files that must be there
runs() {
    local name=$1 ranks=$2 folder=$3 library=$4 output needed
    shift 4
    for needed in "$@"; do
        [ -e "$needed" ] && continue
        skipped=$((skipped + 1))
        echo "skipped $name: $needed was not built"
        return
    done
    output=$(TUTTI_PLUGIN_PATH=$folder LD_LIBRARY_PATH=$tests/standin:$library TUTTI_NVSHMEM_HEAP=32M timeout 120 "$tutti" run -n "$ranks" "$example" "$name" 2>&1)
    if [ $? -eq 0 ] && [ "$(grep -c "on $name: rank . has the sum of all" <<<"$output")" -eq "$ranks" ]; then
        passed=$((passed + 1))
        echo "ok      the example of backends runs on $name"
    else
        failed=$((failed + 1))
        echo "FAILED  the example of backends on $name"
        sed 's/^/    /' <<<"$output"
    fi
}

plugins=$TEST_BUILD/plugins driver=$tests/standin/libcuda.so.1
runs shm 2 "$plugins" ""
runs cuda 2 "$plugins" "" "$driver" "$plugins/libtutti-cuda.so"
runs nccl 1 "$plugins" "$tests/standin_nccl" "$driver" "$plugins/libtutti-nccl.so" "$tests/standin_nccl/libnccl.so.2"
runs nvshmem 2 "$tests/standin_nvshmem" "$tests/standin_nvshmem" "$driver" "$tests/standin_nvshmem/libtutti-nvshmem.so"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
