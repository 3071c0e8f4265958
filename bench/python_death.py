#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From a SIGKILL of one rank to the exception of the last survivor, in milliseconds: in Python (Group.all_reduce), in torch.distributed with the backend in Python
and in C++ (dist.all_reduce, a backward pass of DDP), and on gloo, beside the same of C (bench/death), in turns. Each rank is the dead one in turn.

    PYTHONPATH=build/release/python python3 bench/python_death.py [--ranks 4] [--rounds 9] [--c build/release/bench/death]
"""
import argparse
import datetime
import mmap
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # which DDP would import in each rank
import torch.distributed as dist

import tutti
import tutti.torch

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
LIMIT = datetime.timedelta(seconds=60)


class Report:
    """What the ranks of a round tell, in memory that they share by fork: for each one a number, of which it alone is the writer."""

    def __init__(self, ranks):
        self.memory, self.ranks = mmap.mmap(-1, 16 * ranks), ranks

    def tell(self, rank, row, number):
        struct.pack_into("q", self.memory, 8 * (2 * rank + row), number)

    def told(self, row):
        return [struct.unpack_from("q", self.memory, 8 * (2 * rank + row))[0] for rank in range(self.ranks)]


# ---- where ranks wait: each opens what it needs, and returns the call in which the survivors will wait ----

def in_group(rank, size, folder):
    world = tutti.World(rank=rank, size=size, store=f"file://{folder}/store", timeout=60)
    numbers = bytearray(4000)
    return lambda: world.group.all_reduce(memoryview(numbers).cast("f"))


def _torch(rank, size, folder, backend):
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size, timeout=LIMIT)


def in_torch(rank, size, folder, backend="tutti"):
    _torch(rank, size, folder, backend)
    return lambda: dist.all_reduce(torch.zeros(1000))


def in_gloo(rank, size, folder):
    return in_torch(rank, size, folder, "gloo")


def in_backward(rank, size, folder, backend="tutti"):
    _torch(rank, size, folder, backend)
    wrapped, x = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64)), torch.ones(4, 64)
    return lambda: wrapped(x).sum().backward()


def in_backward_of_gloo(rank, size, folder):
    return in_backward(rank, size, folder, "gloo")


PLACES = (("Group.all_reduce", in_group, None), ("dist.all_reduce, Python", in_torch, "off"), ("dist.all_reduce, C++", in_torch, "on"),
          ("DDP backward, Python", in_backward, "off"), ("DDP backward, C++", in_backward, "on"), ("dist.all_reduce, gloo", in_gloo, None),
          ("DDP backward, gloo", in_backward_of_gloo, None))


def rank_main(place, rank, size, victim, folder, report):
    torch.set_num_threads(1)
    call = place(rank, size, folder)
    call()  # everything is set up
    report.tell(rank, 0, 1)
    if rank == victim:
        signal.pause()
    try:
        while True:
            call()
    except Exception as error:
        report.tell(rank, 1, time.monotonic_ns())
        named = getattr(error, "ranks", None)
        if named is not None and (error.status != "DEAD" or victim not in named):
            print(f"rank {rank}: {error.status} {named}: {error}", file=sys.stderr, flush=True)
            report.tell(rank, 1, -1)


def measure(place, size, victim):
    """Milliseconds, or None where a survivor was told something else."""
    report = Report(size)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            processes.append(os.fork())
            if processes[-1] == 0:
                try:
                    rank_main(place, rank, size, victim, folder, report)
                except BaseException:
                    traceback.print_exc()
                    os.kill(os.getppid(), signal.SIGTERM)  # there is nothing to measure
                finally:
                    os._exit(0)
        while not all(report.told(0)):
            time.sleep(0.001)
        time.sleep(0.05)
        killed = time.monotonic_ns()
        os.kill(processes[victim], signal.SIGKILL)
        for process in processes:
            os.waitpid(process, 0)
    told = [when for rank, when in enumerate(report.told(1)) if rank != victim]
    return (max(told) - killed) / 1e6 if min(told) > 0 else None


def resident():
    """Bytes of memory that this process has: as many as each of its ranks, and the kernel tears them down before a death is complete."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def measure_c(program, size, heap):
    done = subprocess.run([program, str(size), str(heap), str(size), "all_reduce"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return float(re.search(r"median\s+([\d.]+)", done.stdout).group(1))


def main(options):
    heaps = {"C (bench/death)": 0, f"C, {resident() >> 20} MiB touched": resident()}  # the second is what a rank of Python has
    times = {}
    for round in range(options.rounds):
        for name, heap in heaps.items():
            times.setdefault(name, []).append(measure_c(options.c, options.ranks, heap))
        for name, place, shim in PLACES:
            if shim is not None:
                os.environ["TUTTI_TORCH_SHIM"] = shim
            times.setdefault(name, []).append(measure(place, options.ranks, round % options.ranks))
    print(f"from SIGKILL to the last survivor's error, {options.ranks} ranks, {options.rounds} rounds, PyTorch {torch.__version__}:")
    for name, each in times.items():
        known = sorted(value for value in each if value is not None)
        wrong = f"   {len(each) - len(known)} without the death's error" if len(known) < len(each) else ""
        print(f"  {name:26} median {statistics.median(known):7.2f} ms   ({known[0]:.2f} .. {known[-1]:.2f}){wrong}" if known else f"  {name:26}{wrong}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--c", default="build/release/bench/death")
    main(parser.parse_args())
