#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The same program under the launchers of others: each that is installed must start four ranks that find each other.
set -u
hello=$TEST_BUILD/examples/hello
ranks=4
tried=0 failed=0

# name, words that the ranks must say of their launcher, command …
under() {
    local name=$1 said=$2
    shift 2
    tried=$((tried + 1))
    local output
    output=$(timeout 60 "$@" "$hello" 2>&1)
    local code=$?
    local found
    found=$(grep -c "^.*Hello from rank [0-3] of $ranks .*started by $said)" <<<"$output")
    if [ "$code" -eq 0 ] && [ "$found" -eq "$ranks" ]; then
        echo "ok      ranks meet under $name"
    else
        echo "FAILED  ranks meet under $name: exit status $code, $found of $ranks ranks said hello:"
        sed 's/^/    /' <<<"$output"
        failed=$((failed + 1))
    fi
}

[ -x "$hello" ] || { echo "skipped: $hello was not built"; exit 77; }

if command -v mpirun.openmpi >/dev/null; then
    root=
    [ "$(id -u)" -eq 0 ] && root=--allow-run-as-root
    under "Open MPI" "Open MPI" mpirun.openmpi $root --oversubscribe -n $ranks
fi
if command -v mpirun.mpich >/dev/null; then
    under "MPICH" "Hydra" mpirun.mpich -n $ranks
fi
torch=
for python in "${TEST_PYTHON:-}" python3 /usr/bin/python3; do
    if [ -n "$python" ] && "$python" -c 'import torch.distributed.run' 2>/dev/null; then
        torch=$python
        break
    fi
done
if [ -n "$torch" ]; then
    under "torchrun (its agent serves the store)" "torchrun" \
        env OMP_NUM_THREADS=1 "$torch" -m torch.distributed.run --standalone --nproc-per-node $ranks --no-python
fi
if command -v srun >/dev/null && srun -n 1 true 2>/dev/null; then
    under "Slurm" "Slurm" srun -n $ranks
fi

if [ "$tried" -eq 0 ]; then
    echo "skipped: none of mpirun.openmpi, mpirun.mpich, torchrun, srun is here"
    exit 77
fi
echo "$((tried - failed)) passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
