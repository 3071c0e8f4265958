# SPDX-License-Identifier: Apache-2.0
"""All-reduce by NCCL: through Tutti and through PyTorch, in the same processes, alternating.

    tutti run -n 2 python3 bench/nccl_peers.py

Both use the same libnccl.so.2. With one GPU each rank is a host of its own for NCCL (NCCL_HOSTID), so data goes through sockets: what is compared is
what Tutti's meeting on the host, its checks and its marks cost beside PyTorch's. Every round measures both once; figures are medians over rounds.
"""
import argparse
import ctypes
import os
import statistics
import sys
import time

here = os.path.dirname(os.path.abspath(__file__))
parser = argparse.ArgumentParser()
parser.add_argument("--library", default=os.path.join(here, "..", "build", "release", "src", "libtutti.so"))
parser.add_argument("--sizes", default="8K,1M,16M")
parser.add_argument("--rounds", type=int, default=7)
arguments = parser.parse_args()

rank = os.environ.get("TUTTI_RANK", os.environ.get("RANK", "0"))
os.environ["NCCL_HOSTID"] = "tutti-" + rank
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
import torch
import torch.distributed as dist


class Call(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("timeout_ns", ctypes.c_int64), ("stream", ctypes.c_void_p), ("algorithm", ctypes.c_int),
                ("factor", ctypes.c_void_p), ("received", ctypes.c_void_p), ("work", ctypes.c_void_p), ("batch", ctypes.c_void_p),
                ("executor", ctypes.c_char_p), ("device", ctypes.c_int)]


def must(status):
    if status != 0:
        sys.exit("tutti: " + tutti.tutti_error_message().decode())


tutti = ctypes.CDLL(arguments.library)
tutti.tutti_world_group.restype = ctypes.c_void_p
tutti.tutti_error_message.restype = ctypes.c_char_p
F32, SUM, CUDA0 = 2, 65, 0x101
torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
dist.init_process_group("nccl")
world = ctypes.c_void_p()
must(tutti.tutti_world_open(None, ctypes.byref(world)))
group = ctypes.c_void_p(tutti.tutti_world_group(world))
size = dist.get_world_size()


def by_tutti(tensor):
    call = Call(ctypes.sizeof(Call), 60_000_000_000, torch.cuda.current_stream().cuda_stream, 0, None, None, None, None, b"nccl", CUDA0)
    address = ctypes.c_void_p(tensor.data_ptr())
    must(tutti.tutti_all_reduce(group, address, address, ctypes.c_size_t(tensor.numel()), F32, SUM, ctypes.byref(call)))


def measure(run, tensor, calls):
    torch.cuda.synchronize()
    must(tutti.tutti_barrier(group, None))
    begin = time.perf_counter()
    for _ in range(calls):
        run(tensor)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


if dist.get_rank() == 0:
    print(f"{'bytes':>10} {'Tutti, us':>12} {'PyTorch, us':>12}")
for text in arguments.sizes.split(","):
    bytes_ = int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]
    tensor = torch.ones(bytes_ // 4, device="cuda")
    for run in (by_tutti, dist.all_reduce):  # both add to what is there
        before = tensor[0].item()
        run(tensor)
        torch.cuda.synchronize()
        if not bool((tensor == before * size).all()):
            sys.exit(f"rank {rank}: wrong sum")
    calls = 100 if bytes_ < 1 << 20 else 10
    times = {by_tutti: [], dist.all_reduce: []}
    tensor.zero_()
    for _ in range(arguments.rounds):
        for run in times:
            times[run].append(measure(run, tensor, calls))
    if dist.get_rank() == 0:
        print(f"{bytes_:>10} {statistics.median(times[by_tutti]):>12.1f} {statistics.median(times[dist.all_reduce]):>12.1f}")
dist.destroy_process_group()
must(tutti.tutti_world_close(world))
