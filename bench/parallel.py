#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of a small GPT on several ranks, Tutti's and PyTorch's on gloo, in turns.

    bench/parallel.py [--build build/release] [--ranks 2] [--steps 10] [--rounds 3] [--python PYTHON_WITH_TORCH] [NAME=NUMBER…]
    bench/parallel.py --hidden 2,4,8 [--build build/release] [--steps 10] [--rounds 3] [NAME=NUMBER…]

Prints the median step of the slowest rank for one rank, data parallel (DDP) and fully sharded (FSDP2), the ratios, how much of the communication is hidden, and
the peak memory of a rank. Each rank has one thread. Without PyTorch its columns are left out. Names are those of bench/parallel.c: width=1024 layers=4 length=32
batch=1 makes a model that has much to communicate for what it computes.

With --hidden it is Tutti alone, and how much of the communication is hidden, for each of these numbers of ranks, with the parts that are not: where steps wait. Each
rank has its share of the cores, one thread that computes, and one that communicates: a figure means something where ranks have two cores each.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

LETTERS, WARM = 256, 4
MODEL = {"width": 256, "heads": 4, "layers": 6, "length": 128, "batch": 4}


# ---- PyTorch's side, run once per measurement with the arguments MODE RANKS STEPS [NAME=NUMBER…] ----

def torch_rank(rank, ranks, mode, steps, port, model):
    import resource
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F
    WIDTH, HEADS, LAYERS, LENGTH, BATCH = (model[name] for name in ("width", "heads", "layers", "length", "batch"))
    torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            parts = self.qkv(self.first(x)).chunk(3, -1)
            query, key, value = (part.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
            return x + self.hidden(self.second(x))

    model = nn.Sequential(nn.Embedding(LETTERS, WIDTH), *[Block() for _ in range(LAYERS)], nn.RMSNorm(WIDTH, 1e-5),
                          nn.Linear(WIDTH, LETTERS, bias=False))
    if mode in ("data", "local"):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif mode == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (ranks,))
        for index, block in enumerate(list(model)[1:1 + LAYERS]):  # the last one's backward comes next
            fully_shard(block, mesh=mesh, reshard_after_forward=index < LAYERS - 1)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    times = []
    for step in range(-WARM, steps):
        inputs, targets = torch.randint(LETTERS, (BATCH, LENGTH)), torch.randint(LETTERS, (BATCH * LENGTH,))
        begin = time.perf_counter()
        F.cross_entropy(model(inputs).view(-1, LETTERS), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 0:
            times.append(time.perf_counter() - begin)
    worst = torch.tensor([statistics.median(times), float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"mode": mode, "ranks": ranks, "step": worst[0].item(), "peak": worst[1].item()}), flush=True)
    dist.destroy_process_group()


def torch_side(mode, ranks, steps, *changes):
    model = {**MODEL, **{name: int(float(number)) for name, number in (change.split("=") for change in changes)}}
    import socket
    import torch.multiprocessing as processes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.start_processes(torch_rank, args=(int(ranks), mode, int(steps), port, model), nprocs=int(ranks), start_method="fork")


# ---- measuring ----

def measure(command):
    environment = {**os.environ, "TUTTI_THREADS": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1])


def median(rows, key):
    return statistics.median(row[key] for row in rows)


# ---- what is hidden ----

LARGE = ["width=768", "heads=8", "layers=6", "length=64", "batch=1", "bucket=8"]


def parts_text(row):
    """Where a step waited, in milliseconds, on the average of the ranks."""
    parts = [1e3 * seconds for seconds in row["parts"]]
    layers = (len(parts) - 3) // 2
    forward, backward = parts[:layers], parts[layers + 1:2 * layers + 1]

    def each(numbers):
        return " ".join(f"{number:.1f}" for number in numbers)
    if sum(forward) + sum(backward) == 0:
        return f"in the forward {parts[layers]:.1f}, in the backward {parts[-2]:.1f}, in the optimizer's step {parts[-1]:.1f}"
    return (f"in the forward of each layer {each(forward)}, then {parts[layers]:.1f}; in the backward, last layer first, {each(backward)}, then {parts[-2]:.1f}; "
            f"in the optimizer's step {parts[-1]:.1f}")


def hidden(options):
    """The share of the communication that is hidden, and what is not."""
    build = pathlib.Path(options.build)
    model = options.model or LARGE
    cpus = len(os.sched_getaffinity(0))
    print(f"load {os.getloadavg()[0]:.1f}, {cpus} CPUs, {options.rounds} rounds of {options.steps} steps of each kind, {' '.join(model)}; ms", flush=True)
    print(f"{'ranks':>5} {'mode':8} {'step':>7} {'silent':>7} {'shown':>7} {'skew':>6} {'alone':>7} {'hidden':>7} {'but skew':>9} {'waited':>13}", flush=True)
    for ranks in (int(number) for number in options.hidden.split(",")):
        for mode in ("data", "sharded"):
            rows = [measure([build / "bin/tutti", "run", "-q", "-n", str(ranks), build / "bench/parallel", mode, str(ranks), str(options.steps), *model])
                    for _ in range(options.rounds)]
            step, silent, shown, skew, alone, waited, least = (1e3 * median(rows, key) for key in ("step", "silent", "shown", "skew", "alone", "waited", "least"))
            print(f"{ranks:5} {mode:8} {step:7.1f} {silent:7.1f} {shown:7.1f} {skew:6.1f} {alone:7.1f} {1 - shown / alone:7.2f} {1 - (shown - skew) / alone:9.2f} "
                  f"{least:5.1f} to {waited:4.1f}{'' if 2 * ranks <= cpus else '   (fewer than two CPUs each)'}", flush=True)
            print(f"      {'waited':8} {parts_text(sorted(rows, key=lambda row: row['shown'])[len(rows) // 2])}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--hidden", metavar="RANKS,…", help="only how much of the communication is hidden, with each of these numbers of ranks")
    parser.add_argument("model", nargs="*", metavar="NAME=NUMBER")
    options = parser.parse_args()
    if options.hidden:
        hidden(options)
        return
    program = pathlib.Path(options.build) / "bench/parallel"
    has_torch = subprocess.run([options.python, "-c", "import torch"], capture_output=True).returncode == 0
    modes = [("single", 1), ("local", options.ranks), ("data", options.ranks), ("sharded", options.ranks)]
    ours, theirs = {}, {}
    for _ in range(options.rounds):
        for mode, ranks in modes:
            ours.setdefault(mode, []).append(measure([program, mode, str(ranks), str(options.steps), *options.model]))
            if has_torch and mode != "local":
                theirs.setdefault(mode, []).append(measure([options.python, __file__, "--torch", mode, str(ranks), str(options.steps), *options.model]))

    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, {options.ranks} ranks of one thread, {options.rounds} rounds of {options.steps} steps")
    print(f"{'':10} {'Tutti ms':>10} {'PyTorch ms':>11} {'ratio':>7} {'Tutti MiB':>10} {'PyTorch MiB':>12}")
    for mode, ranks in modes:
        step, peak = median(ours[mode], "step"), median(ours[mode], "peak")
        line = f"{mode:10} {1e3 * step:10.1f}"
        if mode in theirs:
            other, other_peak = median(theirs[mode], "step"), median(theirs[mode], "peak")
            line += f" {1e3 * other:11.1f} {step / other:7.2f} {peak / 2**20:10.0f} {other_peak / 2**20:12.0f}"
        else:
            line += f" {'':11} {'':7} {peak / 2**20:10.0f}"
        print(line)
    # Of one rank: activations, and 16 bytes per parameter (it, its gradient, two of AdamW). Sharded: of those 16 a part, and what is whole at a time, with
    # the gradients of one unit.
    parameters, gathered = ours["single"][0]["parameters"], ours["sharded"][0]["gathered"]
    taken, alone = median(ours["sharded"], "taken"), median(ours["single"], "taken")
    formula = alone - 16 * parameters * (1 - 1 / options.ranks) + 1.5 * gathered
    print(f"memory that steps take: one rank {alone / 2**20:.0f} MiB, sharded {taken / 2**20:.0f} MiB, by the formula {formula / 2**20:.0f} MiB: {taken / formula:.2f}")
    for mode in ("data", "sharded"):
        alone, shown, skew = (median(ours[mode], key) for key in ("alone", "shown", "skew"))
        print(f"communication of a step ({mode}) alone {1e3 * alone:.1f} ms, the step {1e3 * shown:.1f} ms longer than one that sends nothing: {1 - shown / alone:.2f} hidden "
              f"({1e3 * skew:.1f} ms where ranks only meet, {1e3 * median(ours[mode], 'waited'):.1f} ms waited)")
    print(f"scaling from 1 to {options.ranks} ranks: {median(ours['single'], 'step') / median(ours['data'], 'step'):.2f} (data), "
          f"{median(ours['single'], 'step') / median(ours['sharded'], 'step'):.2f} (sharded)")


if __name__ == "__main__":
    if len(sys.argv) > 4 and sys.argv[1] == "--torch":
        torch_side(*(argument for argument in sys.argv[2:] if not argument.startswith("bucket=")))
    else:
        main()
