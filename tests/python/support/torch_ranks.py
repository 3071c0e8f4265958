# SPDX-License-Identifier: Apache-2.0
"""What the tests of the torch.distributed backend beside gloo share: numbers, a network, and ranks that run functions of the program in processes of their own, with
the backend in Python and in C++."""
import datetime
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback

from harness import skip, with_pytorch

with_pytorch()
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
except ImportError:
    skip("PyTorch is not installed (make test-peers installs it)")
import torch.nn as nn

import tutti.torch

LONG = datetime.timedelta(seconds=120)


def within(condition, seconds=60):
    """Whether it comes true: threads end when they get to it."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def same(left, right):
    if isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right):
            same(*pair)
    else:
        torch.testing.assert_close(left, right, equal_nan=True)


def shimmed():
    """Whether this run is of the C++ part."""
    return os.environ["TUTTI_TORCH_SHIM"] == "on"


def data(rank, shape, dtype, salt=0):
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def train(model, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(data(rank, (6, 8), torch.float32, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


# ---- starting them ----

def rank_main(rank, name, size, folder):
    """Runs the functions of the program that the name lists, each with the rank, their number, and a group of gloo's of the same ranks."""
    try:
        os.environ["TEST_MEET"] = f"{folder}/{name}"
        dist.init_process_group("tutti", rank=rank, world_size=size, store=dist.FileStore(f"{folder}/{name}", size), timeout=LONG)
        gloo = dist.new_group(list(range(size)), backend="gloo", timeout=LONG)
        for part in name.split("+"):
            getattr(sys.modules["__main__"], part)(rank, size, gloo)
        if "death" in name:
            os._exit(0)  # gloo would wait for the dead
        dist.destroy_process_group()
        result = None
    except BaseException:
        result = traceback.format_exc()
    with open(f"{folder}/{name}.{rank}.result", "wb") as file:
        pickle.dump(result, file)
    if "death" in name or result is not None:
        os._exit(1)


def run(name, size):
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(rank, name, size, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        bad = [rank for rank, process in enumerate(ranks) if process.exitcode != (-signal.SIGKILL if name == "death" and rank == size - 1 else 0)]
        for rank in bad:
            path = pathlib.Path(folder, f"{name}.{rank}.result")
            print(f"FAILED {name}: rank {rank} of {size} ended with {ranks[rank].exitcode}\n{pickle.loads(path.read_bytes()) if path.exists() else ''}", flush=True)
        if bad:
            return False
    print(f"ok {name} with {size} ranks", flush=True)
    return True


def run_all(tests):
    """Runs each, a list of functions and a number of ranks, in Python and in C++, and ends with what came of them. Arguments choose: "on" (C++) or "off", parts of names."""
    chosen = sys.argv[1:]
    ways = [word for word in chosen if word in ("on", "off")] or ["off", "on"]
    chosen = [word for word in chosen if word not in ways]
    good = []
    if "on" in ways:  # built once, before ranks have deadlines
        os.environ["TUTTI_TORCH_SHIM"] = "on"
        try:
            tutti.torch.group.shim.load()
        except RuntimeError as error:
            if "there is no C++ compiler" not in str(error) and "Python.h is not there" not in str(error):
                raise
            print(f"not in C++: {error}")
            ways = [way for way in ways if way != "on"]
    for way in ways:
        os.environ["TUTTI_TORCH_SHIM"] = way
        print("in C++:" if way == "on" else "in Python:", flush=True)
        good += [run(name, size) for name, size in tests if not chosen or any(word in name for word in chosen)]
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(0 if all(good) else 1)
