#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.distributed on Tutti as users start them: by torchrun, by `tutti run`, which has a store of its own, and with PyTorch's checks of each call
(TORCH_DISTRIBUTED_DEBUG=DETAIL); and the example."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import run, skip, with_pytorch  # noqa: E402

with_pytorch()
if subprocess.run([sys.executable, "-c", "import torch.distributed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
    skip("PyTorch is not installed (make test-peers installs it)")

LIMIT = 600  # seconds
SOURCE = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).parent.parent.parent))
CALLS = """
import os, sys, torch, torch.distributed as dist, tutti.torch
dist.init_process_group("tutti")
rank, size = dist.get_rank(), dist.get_world_size()
assert os.environ["LOCAL_RANK"] == str(rank)
found = []
dist.all_reduce(x := torch.full((3,), rank + 1.0))
found.append(int(x.sum()))
dist.all_gather_into_tensor(flat := torch.empty(size), torch.full((1,), float(rank)))
found.append(flat.int().tolist())
work = dist.reduce_scatter_tensor(part := torch.empty(1), torch.arange(float(size)), async_op=True)
work.wait()
found.append(int(part.item()) == rank * size)
for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, got := torch.empty(3), (rank - 1) % size)]):
    request.wait()
found.append(got.equal(x))
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(two := torch.ones(1), group=pair)
found.append(rank >= 2 or two.item() == 2)
objects = [None] * size
dist.all_gather_object(objects, rank)
found.append(objects)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
dist.barrier()
sys.stdout.write(f"{found}\\n")  # at once: lines of ranks stay whole
dist.destroy_process_group()
"""


def _lines(launcher, program, *arguments, **environment):
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", *launcher, str(program), *arguments], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert done.returncode == 0, (launcher, environment, done.stdout, done.stderr)
    return done.stdout.splitlines()


def _ways():
    """In Python, and in C++ where that can be built."""
    built = subprocess.run([sys.executable, "-c", "import tutti.torch.shim as shim; raise SystemExit(shim.load() is None)"], env={**os.environ, "TUTTI_TORCH_SHIM": "auto"})
    return ("off",) if built.returncode else ("off", "on")


def _calls(launcher, **environment):
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "program.py")
        program.write_text(CALLS)
        for way in _ways():
            lines = _lines(launcher, program, TUTTI_TORCH_SHIM=way, **environment)
            assert lines == ["[18, [0, 1, 2], True, True, True, [0, 1, 2]]"] * 3, (way, lines)


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "3")
TUTTI_RUN = ("tutti.run", "-q", "-n", "3")


def torchrun_starts_it():
    _calls(TORCHRUN)


def tutti_run_starts_it():
    _calls(TUTTI_RUN)


def with_pytorchs_checks_of_each_call():
    _calls(TORCHRUN, TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_CPP_LOG_LEVEL="ERROR")


def the_example_trains():
    for launcher in (TORCHRUN, TUTTI_RUN):
        text = "\n".join(_lines(launcher, SOURCE / "examples" / "python_torch.py", "61"))
        losses = [float(number) for number in re.findall(r"loss ([0-9.]+)", text)]
        assert len(losses) == 4 and losses[-1] < losses[0] / 2 and text.count("the same weights as all") == 3, text


if __name__ == "__main__":
    run((torchrun_starts_it, tutti_run_starts_it, with_pytorchs_checks_of_each_call, the_example_trains))
