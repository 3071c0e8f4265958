# SPDX-License-Identifier: Apache-2.0
"""tutti run starts programs of PyTorch as they are: a gloo script that takes everything from the environment."""
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, equal, main, test  # noqa: E402

SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
dist.barrier()
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], int(value.item()))
dist.destroy_process_group()
"""


def python_with_torch():
    named = (os.environ.get("TEST_PYTHON"),)
    for python in filter(None, (*named, sys.executable, "python3", "/usr/bin/python3")):
        try:
            if subprocess.run([python, "-c", "import torch.distributed"], capture_output=True, timeout=LIMIT).returncode == 0:
                return python
        except OSError:
            pass
    return None


@test
def a_gloo_script_runs_unchanged():
    python = python_with_torch()
    if python is None:
        return "no python3 here can import torch; TEST_PYTHON names one"
    done = subprocess.run([TUTTI, "run", "-q", "-n", "3", python, "-c", SCRIPT], capture_output=True, text=True, timeout=2 * LIMIT,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    equal(sorted(done.stdout.splitlines()), [f"{rank} 3 {rank} 6" for rank in range(3)])


main()
