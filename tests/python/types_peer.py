#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The package's types, as mypy sees them: the package itself holds together, right programs pass, and wrong ones are told."""
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import run, skip, with_pytorch  # noqa: E402

with_pytorch()
import tutti  # noqa: E402

try:
    import mypy  # noqa: F401
except ImportError:
    skip("mypy is not installed (make test-peers installs it)")
import inspect  # noqa: E402

RIGHT = """
from typing import List
import tutti
from tutti import nn, optim, tensor as tt

def main() -> None:
    with tutti.World(timeout=5) as world:
        x = tt.randn((2, 3), requires_grad=True)
        y: tutti.tensor.Tensor = (x @ x.T).relu().sum(0, keep_dims=True) + 1
        parts: List[tutti.tensor.Tensor] = y.chunk(2, dim=1)
        z = tt.all_reduce(parts[0], world.group, reduction="avg").softmax()
        shape: int = z.shape[0]
        net = nn.Sequential(nn.Linear(3, 3), tt.gelu)
        optim.AdamW(net, learning_rate=1e-3).step()
        names: List[str] = [name for name, parameter in net.named_parameters()]
        world.group.send(b"a", to=0, tag=shape)
        received = world.group.recv(bytearray(1), source=0, status=True, executor="shm")
        world.group.all_reduce(x, "premul_sum", factor=0.5, order="any", algorithm="one_shot")
        total: int = world.store.add("n") if world.store is not None else 0
        with tutti.CompiledBackward() as compiled, tutti.data.Progress(steps=total) as progress:
            z.sum().backward()
            progress.step(z.sum().item())
        if z.grad_fn is not None:
            z.grad_fn.register_prehook(lambda grads: [grads[0]])
        mesh = tutti.Mesh(world, (1, world.size), names=("data", "model"))
        row = mesh.group("model")
        members: List[int] = row.ranks if row is not None else []
        value: bytes = tutti.Store.memory().get("key", timeout=1.5)
        kind: str = world.next_event(timeout=1).kind
        with tutti.streams.Stream("cuda") as stream:
            number: int = stream.handle
"""
WITH_TORCH = """
import torch
import tutti.torch
import tutti.torch.symm_mem as symm_mem

def main() -> None:
    x: torch.Tensor = symm_mem.empty(4, 3, dtype=torch.float32)
    handle = symm_mem.rendezvous(x, "0")
    y: torch.Tensor = handle.get_buffer(0, (4, 3), torch.float32)
    handle.put_signal(1, channel=2)
    tutti.torch.monitored_barrier()
"""
WRONG = {"tt.add(tt.ones(2), 'text')": "arg-type", "tt.ones(2).softmax(dim='last')": "arg-type", "tt.softmaxx(tt.ones(2))": "attr-defined",
         "tt.layer_norm()": "call-arg", "tutti.World(rank='first')": "arg-type", "x: str = tt.ones(2).sum()": "assignment"}


def checked(*arguments):
    folder = pathlib.Path(tutti.__file__).parent.parent
    environment = {**os.environ, "MYPYPATH": str(folder), "MYPY_CACHE_DIR": str(pathlib.Path(tempfile.gettempdir()) / f"tutti-mypy-{os.getpid()}")}
    return subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary", *arguments], capture_output=True, text=True, env=environment, cwd=folder, timeout=900)


def the_package_and_programs_are_checked():
    found = checked("--python-version", "3.10", "-p", "tutti")
    faults = [line for line in found.stdout.splitlines() if "error:" in line and line.startswith("tutti/")]  # PyTorch's are its own
    assert not faults and found.returncode < 2, "\n".join(faults) or found.stderr  # 2: mypy itself has failed
    with tempfile.TemporaryDirectory() as folder:
        right, wrong = pathlib.Path(folder) / "right.py", pathlib.Path(folder) / "wrong.py"
        right.write_text(RIGHT)
        found = checked("--strict", str(right))
        assert found.returncode == 0, found.stdout
        right.write_text(WITH_TORCH)
        found = checked("--python-version", "3.10", "--strict", "--follow-imports=silent", str(right))
        assert found.returncode == 0, found.stdout
        wrong.write_text("import tutti\nfrom tutti import tensor as tt\n" + "\n".join(WRONG) + "\n")
        found = checked(str(wrong))
        for line, (statement, kind) in enumerate(WRONG.items(), 3):
            assert f"wrong.py:{line}: error" in found.stdout and kind in found.stdout, (statement, found.stdout)


def everything_has_a_docstring():
    missing = []
    for module in (tutti, tutti.data, tutti.graph, tutti.named, tutti.nn, tutti.optim, tutti.parallel, tutti.streams, tutti.tensor):
        for name in getattr(module, "__all__", None) or [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]:
            thing = getattr(module, name)
            if not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)) and not thing.__doc__:
                missing.append(f"{module.__name__}.{name}")
    assert not missing, missing


if __name__ == "__main__":
    run((everything_has_a_docstring, the_package_and_programs_are_checked))
