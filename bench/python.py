#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on Tutti beside gloo, in the same processes, in turns: all_reduce of several sizes, a step of DDP and one of FSDP2. Beside long reductions
stands the floor of the same turns, a copy of as many bytes on all ranks at once, and beside the step of DDP one that exchanges nothing. Then what Python itself costs: an import, one call by ctypes, dist.all_reduce in Python and in C++, an operator on tensors. TUTTI_TORCH_SHIM=off compares the backend in Python.

    PYTHONPATH=build/release/python python3 bench/python.py [--ranks 2] [--rounds 9] [--sizes 8,4096,1048576,67108864] [--steps] [--calls]
"""
import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn as nn

import tutti.torch  # noqa: F401

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore", FutureWarning)


def timed(function, count):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        function()
    seconds = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compare(name, ours, theirs, count, rounds, rank, floor=None):
    functions = (ours, theirs) if floor is None else (ours, theirs, floor)
    for function in functions:
        function()
        function()
    times = [[] for _ in functions]
    for _ in range(rounds):
        for i, function in enumerate(functions):
            times[i].append(timed(function, count[i % 2]))
    ratios = sorted(left / right for left, right in zip(*times[:2]))
    if rank == 0:
        left, right, *lowest = (statistics.median(each) * 1e6 for each in times)
        below = f"   floor {lowest[0]:.1f} us, {lowest[0] / right:.3f}" if lowest else ""
        print(f"{name:24} {left:12.1f} us {right:12.1f} us   {statistics.median(ratios):.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f}){below}", flush=True)


def silent(model):
    """DDP without an exchange: what a step costs in any case."""
    def keep(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=None)
    wrapped.register_comm_hook(None, keep)
    return wrapped


def model():
    torch.manual_seed(1)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())])


def step(wrapped, x):
    def run():
        wrapped.zero_grad()
        wrapped(x).square().mean().backward()
    return run


def main(rank, options, meet):
    torch.set_num_threads(1)
    dist.init_process_group("tutti", rank=rank, world_size=options.ranks, store=dist.FileStore(meet, options.ranks), timeout=datetime.timedelta(seconds=300))
    gloo = dist.new_group(list(range(options.ranks)), backend="gloo")
    if rank == 0:
        print(f"{options.ranks} ranks, PyTorch {torch.__version__}\n{'':24} {'tutti':>12}    {'gloo':>12}      ratio", flush=True)
    for size in [int(text) for text in options.sizes.split(",") if text]:
        x = torch.ones(max(1, size // 4))
        count = (max(2, min(2000, (1 << 24) // size)), max(1, min(100, (1 << 23) // size)))
        other = torch.empty_like(x)
        compare(f"all_reduce {size} B", lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, group=gloo), count, options.rounds, rank,
                (lambda: other.copy_(x)) if size >= 1 << 20 else None)
    if options.steps:
        x = torch.randn(32, 512)
        compare("DDP step", step(nn.parallel.DistributedDataParallel(model(), process_group=None), x),
                step(nn.parallel.DistributedDataParallel(model(), process_group=gloo), x), (5, 5), options.rounds, rank, step(silent(model()), x))
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import fully_shard
        steps = []
        for mesh in (init_device_mesh("cpu", (options.ranks,)), DeviceMesh.from_group(gloo, "cpu")):
            whole = model()
            for layer in whole:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            steps.append(step(fully_shard(whole, mesh=mesh), x))
        compare("FSDP2 step", *steps, (5, 5), options.rounds, rank)
    dist.destroy_process_group()


def best(function, count=5000, rounds=9):
    """Microseconds of a call, in the quickest round: what the machine can do."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(count):
            function()
        times.append((time.perf_counter() - begin) / count)
    return min(times) * 1e6


def calls():
    import ctypes

    import tutti
    from tutti import tensor as tt
    from tutti._library import constants, lib
    program = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"
    for name in ("tutti", "tutti.tensor"):
        seconds = sorted(float(subprocess.run([sys.executable, "-c", program.format(name)], capture_output=True, text=True, check=True).stdout) for _ in range(9))
        print(f"import {name:17} {seconds[4] * 1e3:12.1f} ms")
    x, y, z = tt.ones(4), tt.ones(4), torch.ones(4)
    with tutti.World() as world:
        print(f"{'a C function':24} {best(lib.tt_error_pending):12.2f} us")
        plain = ctypes.c_float(1)
        arguments = world.group._handle, ctypes.byref(plain), ctypes.byref(plain), 1, constants["TUTTI_F32"], constants["TUTTI_SUM"], None
        print(f"{'all_reduce by ctypes':24} {best(lambda: lib.tutti_all_reduce(*arguments)):12.2f} us  (one rank)")
        print(f"{'Group.all_reduce':24} {best(lambda: world.group.all_reduce(z)):12.2f} us  (one rank)")
    for way, name in (("off", "Python"), ("on", "C++")):
        os.environ["TUTTI_TORCH_SHIM"] = way
        dist.init_process_group("tutti", rank=0, world_size=1, store=dist.HashStore())
        print(f"{'dist.all_reduce, ' + name:24} {best(lambda: dist.all_reduce(z)):12.2f} us  (one rank)")
        dist.destroy_process_group()
    print(f"{'a + b of 4 numbers':24} {best(lambda: x + y):12.2f} us {best(lambda: z + z):12.2f} us by PyTorch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="8,4096,1048576,67108864")
    parser.add_argument("--steps", action="store_true", help="also steps of DDP and FSDP2")
    parser.add_argument("--calls", action="store_true", help="only what imports and calls cost")
    given = parser.parse_args()
    if given.calls:
        calls()
        sys.exit(0)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(main, (given, folder + "/meet"), given.ranks)
