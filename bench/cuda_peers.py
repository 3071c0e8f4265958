# SPDX-License-Identifier: Apache-2.0
"""All-reduce on one GPU: Tutti beside PyTorch's symmetric memory, in the same processes, alternating.

    tutti run -n 4 python3 bench/cuda_peers.py --json out.json

Each measurement replays a CUDA graph of several calls, so that the host's launch overhead counts for neither side; CUDA events give
the time. Every round measures every candidate once; the figures are medians over rounds. Results are checked first.
"""
import argparse
import ctypes
import json
import os
import statistics
import sys

os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

here = os.path.dirname(os.path.abspath(__file__))
parser = argparse.ArgumentParser()
parser.add_argument("--library", default=os.path.join(here, "..", "build", "release", "src", "libtutti.so"))
parser.add_argument("--sizes", default="4K,64K,256K,1M,4M,16M,64M")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--json")
arguments = parser.parse_args()


def size_of(text):
    return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]


class Call(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("timeout_ns", ctypes.c_int64), ("stream", ctypes.c_void_p), ("algorithm", ctypes.c_int),
                ("factor", ctypes.c_void_p), ("received", ctypes.c_void_p), ("work", ctypes.c_void_p), ("batch", ctypes.c_void_p)]


class MemoryOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("device", ctypes.c_int), ("alignment", ctypes.c_size_t),
                ("pad", ctypes.c_size_t), ("group", ctypes.c_void_p), ("persistent", ctypes.c_bool), ("id", ctypes.c_uint64), ("huge", ctypes.c_int)]


tutti = ctypes.CDLL(arguments.library)
for name in ("tutti_world_group", "tutti_memory_data"):
    getattr(tutti, name).restype = ctypes.c_void_p
tutti.tutti_error_message.restype = ctypes.c_char_p
BF16, SUM, CUDA = 4, 65, 0x100


def must(status):
    if status != 0:
        sys.exit("tutti: " + tutti.tutti_error_message().decode())


torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
world = ctypes.c_void_p()
must(tutti.tutti_world_open(None, ctypes.byref(world)))
group = ctypes.c_void_p(tutti.tutti_world_group(world))


class View:
    """A tensor over Tutti's memory, by the CUDA array interface."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i2", "data": (address, False), "version": 3}


def candidates(bytes_):
    """name -> (tensor, function that enqueues one all-reduce on the current stream)."""
    count = bytes_ // 2
    theirs = symm_mem.empty(count, dtype=torch.bfloat16, device="cuda")
    symm_mem.rendezvous(theirs, dist.group.WORLD)
    options = MemoryOptions(ctypes.sizeof(MemoryOptions), CUDA + 1, 0, 0, None, False, 0, 0)
    memory, peers = ctypes.c_void_p(), ctypes.c_void_p()
    must(tutti.tutti_memory_alloc(world, ctypes.c_size_t(2 * bytes_), ctypes.byref(options), ctypes.byref(memory)))
    must(tutti.tutti_memory_rendezvous(memory, group, ctypes.byref(peers)))
    must(tutti.tutti_group_prepare(group, None))
    address = tutti.tutti_memory_data(memory)
    ours = torch.as_tensor(View(address, count), device="cuda").view(torch.bfloat16)
    out = torch.as_tensor(View(address + bytes_, count), device="cuda").view(torch.bfloat16)
    group_name = dist.group.WORLD.group_name

    lone, lone_out = torch.empty(count, dtype=torch.bfloat16, device="cuda"), torch.empty(count, dtype=torch.bfloat16, device="cuda")

    def call(algorithm, target, source=address):
        def run():
            options = Call(ctypes.sizeof(Call), 60_000_000_000, torch.cuda.current_stream().cuda_stream, algorithm, None, None, None, None)
            must(tutti.tutti_all_reduce(group, ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_size_t(count), BF16, SUM, ctypes.byref(options)))
        return run

    table = {
        "torch one-shot": (theirs, theirs, lambda: torch.ops.symm_mem.one_shot_all_reduce(theirs, "sum", group_name)),
        "torch two-shot": (theirs, theirs, lambda: torch.ops.symm_mem.two_shot_all_reduce_(theirs, "sum", group_name)),
        "tutti one-shot": (ours, out, call(2, address + bytes_)),
        "tutti two-shot": (ours, ours, call(3, address)),
        "tutti auto": (ours, out, call(0, address + bytes_)),
        "tutti private": (lone, lone_out, call(0, lone_out.data_ptr(), lone.data_ptr())),
    }
    if size == 8 and bytes_ > 2 << 20:
        del table["torch two-shot"]  # its grid does not fit one GPU at this size: it never finishes
    return table, (memory, peers, theirs, out, lone, lone_out)


def check(name, tensor, result, run):
    tensor.fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    returned = run()
    torch.cuda.synchronize()
    value = (returned if isinstance(returned, torch.Tensor) else result).float()
    expected = size * (size + 1) / 2
    if not bool((value == expected).all()):
        sys.exit(f"rank {rank}: {name} gives {value[0].item()}, not {expected}")
    dist.barrier()


rows = []
for text in arguments.sizes.split(","):
    bytes_ = size_of(text)
    table, kept = candidates(bytes_)
    calls = 20 if bytes_ <= 1 << 20 else 5
    graphs = {}
    for name, (tensor, result, run) in table.items():
        check(name, tensor, result, run)
        tensor.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        graphs[name] = graph
        dist.barrier()
    times = {name: [] for name in graphs}
    for _ in range(arguments.rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            graph.replay()
            begin.record()
            for _ in range(4):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / 4 / calls)
    must(tutti.tutti_group_check(group))
    row = {"size": bytes_, "ranks": size}
    for name, values in times.items():
        gathered = [None] * size
        dist.all_gather_object(gathered, statistics.median(values))
        row[name] = max(gathered)
    rows.append(row)
    if rank == 0:
        print(f"{size} ranks {text:>5}: " + "  ".join(f"{name} {value:.1f} us" for name, value in row.items() if isinstance(value, float)), flush=True)
    del graphs
    torch.cuda.synchronize()
    dist.barrier()

# What a call costs at least: a barrier of the streams, one meeting and nothing else.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(20):
        options = Call(ctypes.sizeof(Call), 60_000_000_000, torch.cuda.current_stream().cuda_stream, 0, None, None, None, None)
        must(tutti.tutti_barrier(group, ctypes.byref(options)))
times = []
for _ in range(arguments.rounds):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    graph.replay()
    begin.record()
    for _ in range(4):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    times.append(begin.elapsed_time(end) * 1000 / 80)
if rank == 0:
    print(f"{size} ranks: a barrier of the streams {statistics.median(times):.1f} us", flush=True)
del graph

# What the device can move: one large copy, alone.
dist.barrier()
bandwidth = 0.0
if rank == 0:
    a, b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        b.copy_(a)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        b.copy_(a)
    end.record()
    torch.cuda.synchronize()
    bandwidth = 2 * (1 << 30) * 10 / (begin.elapsed_time(end) / 1000)
    print(f"device copy: {bandwidth / 1e12:.2f} TB/s read and written", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"ranks": size, "bandwidth": bandwidth, "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}, file)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # graphs hold addresses of both libraries: leave the order of their ends to the process's
