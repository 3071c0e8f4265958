# SPDX-License-Identifier: Apache-2.0
"""Fused products on one GPU: Tutti beside PyTorch's symmetric memory, in the same processes, alternating.

    tutti run -n 4 python3 bench/fused_cuda.py --json out.json

Baseline is PyTorch's matmul of the same local shape on all ranks at once; a ratio is a fused call's time over that. For all-gather B is
(K, N / ranks) on each rank, for reduce-scatter A is (M, K / ranks). Every round measures every candidate once, each by several calls
between two CUDA events; figures are medians over rounds of the slowest rank. Results are checked first, against PyTorch's in f32.
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
parser.add_argument("--libraries", default=os.path.join(here, "..", "build", "release", "src"))
parser.add_argument("--shapes", default="4096x4096x4096,8192x8192x4096,16384x4096x4096", help="MxNxK,…")
parser.add_argument("--kinds", default="gather,scatter,scaled,scaled-rows,scaled-fast,scaled-rows-fast",
                    help="…-fast: with use_fast_accum on both sides")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--calls", type=int, default=0, help="of one measurement; 0: by size")
parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's fused operators out")
parser.add_argument("--graph", action="store_true", help="also replay the matmul and Tutti's calls from a CUDA graph: their second ratio is to the replayed matmul")
parser.add_argument("--together", default="", help="words of TUTTI_TOGETHER: gathers and scatters also in worlds with these, beside the default; plain,off")
parser.add_argument("--json")
arguments = parser.parse_args()

BF16, F8, SUM, CUDA = 4, 5, 65, 0x101
tutti = ctypes.CDLL(os.path.join(arguments.libraries, "libtutti.so"), mode=ctypes.RTLD_GLOBAL)
tensor = ctypes.CDLL(os.path.join(arguments.libraries, "libtutti-tensor.so"))


class List(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("at", ctypes.POINTER(ctypes.c_void_p))]


class Scope(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64)]


class Dlpack(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class MemoryOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("device", ctypes.c_int), ("alignment", ctypes.c_size_t), ("pad", ctypes.c_size_t),
                ("group", ctypes.c_void_p), ("persistent", ctypes.c_bool), ("id", ctypes.c_uint64), ("huge", ctypes.c_int),
                ("stream", ctypes.c_void_p)]


class Call(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("timeout_ns", ctypes.c_int64), ("stream", ctypes.c_void_p)]


class WorldOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("rank", ctypes.c_int), ("rank_count", ctypes.c_int), ("store", ctypes.c_void_p),
                ("store_url", ctypes.c_char_p), ("timeout_ns", ctypes.c_int64), ("threads", ctypes.c_int), ("log", ctypes.c_char_p),
                ("log_callback", ctypes.c_void_p), ("log_user", ctypes.c_void_p), ("settings", ctypes.c_char_p)]


class ScaledOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("biases", List), ("result_scales", List), ("out_dtypes", ctypes.POINTER(ctypes.c_int)),
                ("out_dtype_count", ctypes.c_size_t), ("fast", ctypes.POINTER(ctypes.c_bool)), ("fast_count", ctypes.c_size_t)]


for library, name, result in ((tutti, "tutti_world_group", ctypes.c_void_p), (tutti, "tutti_memory_data", ctypes.c_void_p),
                              (tutti, "tutti_error_message", ctypes.c_char_p), (tensor, "tt_scope_open", Scope),
                              (tensor, "tt_from_dlpack", ctypes.c_void_p), (tensor, "tt_keep", ctypes.c_void_p),
                              (tensor, "tt_fused_all_gather_matmul", List), (tensor, "tt_fused_all_gather_scaled_matmul", List),
                              (tensor, "tt_fused_matmul_reduce_scatter", ctypes.c_void_p), (tensor, "tt_stream_set", ctypes.c_bool),
                              (tensor, "tt_to_dlpack", ctypes.c_void_p)):
    getattr(library, name).restype = result


def must(status):
    if status != 0:
        print(f"rank {rank}: tutti: " + tutti.tutti_error_message().decode(), flush=True)
        os._exit(1)


torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
group_name = dist.group.WORLD.group_name
world = ctypes.c_void_p()
must(tutti.tutti_world_open(None, ctypes.byref(world)))
group = ctypes.c_void_p(tutti.tutti_world_group(world))
main = torch.cuda.Stream()
others = {}  # the words of --together, and the group of a world with each
for word in filter(None, arguments.together.split(",")):
    options = WorldOptions(size=ctypes.sizeof(WorldOptions), name=word.encode(), settings=f"TUTTI_TOGETHER={word}".encode())
    other = ctypes.c_void_p()
    must(tutti.tutti_world_open(ctypes.byref(options), ctypes.byref(other)))
    others[word] = ctypes.c_void_p(tutti.tutti_world_group(other))
torch.cuda.set_stream(main)
tensor.tt_stream_set(CUDA, ctypes.c_void_p(main.cuda_stream))
outer = tensor.tt_scope_open()
kept = []


def there(x):
    """A tensor of Tutti's on the memory of PyTorch's."""
    code, bits = {torch.bfloat16: (4, 16), torch.float8_e4m3fn: (10, 8), torch.float32: (2, 32)}[x.dtype]
    shape = (ctypes.c_int64 * x.ndim)(*x.shape)
    strides = (ctypes.c_int64 * x.ndim)(*x.stride())
    managed = Dlpack(1, 1, None, None, 0, x.data_ptr(), 2, 0, x.ndim, code, bits, 1, shape, strides, 0)
    kept.append((x, shape, strides, managed))
    made = tensor.tt_from_dlpack(ctypes.byref(managed))
    if not made:
        must(tensor.tt_scope_close(ctypes.byref(outer)))
    return ctypes.c_void_p(made)


def here_again(handle, shape, dtype):
    """PyTorch's view of a result of Tutti's."""
    managed = ctypes.cast(ctypes.c_void_p(tensor.tt_to_dlpack(handle)), ctypes.POINTER(Dlpack)).contents
    return View(managed.data, shape, dtype)


class View:
    def __init__(self, address, shape, dtype):
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": {2: "<i2", 1: "|i1"}[torch.empty(0, dtype=dtype).element_size()],
                                         "data": (address, False), "version": 3}


def symmetric(x):
    """The same on Tutti's symmetric memory."""
    bytes_ = x.numel() * x.element_size()
    options = MemoryOptions(ctypes.sizeof(MemoryOptions), CUDA, 0, 0, None, False, 0, 0, None)
    memory, peers = ctypes.c_void_p(), ctypes.c_void_p()
    must(tutti.tutti_memory_alloc(world, ctypes.c_size_t(bytes_), ctypes.byref(options), ctypes.byref(memory)))
    must(tutti.tutti_memory_rendezvous(memory, group, ctypes.byref(peers)))
    y = torch.as_tensor(View(tutti.tutti_memory_data(memory), x.shape, x.dtype), device="cuda").view(x.dtype)
    y.copy_(x)
    kept.append((memory, peers))
    return y


def ours(function, *args):
    scope = tensor.tt_scope_open()
    made = function(*args)
    must(tensor.tt_scope_close(ctypes.byref(scope)))
    return made


def one(handle):
    array = (ctypes.c_void_p * 1)(handle)
    kept.append(array)
    return List(1, array)


def drawn(seed, *shape):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator) / 8


def candidates(kind, m, n, k):
    """name -> function that enqueues one call and, for checks, returns the result."""
    table = {}
    if kind == "gather":
        shards = [drawn(r, m // size, k).bfloat16() for r in range(size)]
        whole, b, own = torch.cat(shards), drawn(100 + rank, k, n // size).bfloat16(), shards[rank].clone()
        shape, expected = (m, n // size), whole.float() @ b.float()
        table["matmul"] = lambda: torch.matmul(whole, b)
        table["torch"] = lambda: torch.ops.symm_mem.fused_all_gather_matmul(own, [b], 0, group_name)[1][0]
        right = one(there(b))
        for name, source in (("tutti", own), ("tutti symmetric", symmetric(own))):
            table[name] = lambda a=there(source): ours(tensor.tt_fused_all_gather_matmul, a, right, 0, group, None)
        for word, its in others.items():
            table["tutti " + word] = lambda a=there(own), g=its: ours(tensor.tt_fused_all_gather_matmul, a, right, 0, g, None)
    elif kind == "scatter":
        lefts, rights = [drawn(r, m, k // size).bfloat16() for r in range(size)], [drawn(100 + r, k // size, n).bfloat16() for r in range(size)]
        rows = slice(rank * (m // size), (rank + 1) * (m // size))
        expected = sum((lefts[r][rows].float() @ rights[r].float()).bfloat16().float() for r in range(size))
        a, b, shape = lefts[rank].clone(), rights[rank].clone(), (m // size, n)
        table["matmul"] = lambda: torch.matmul(a, b)
        table["torch"] = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group_name)
        left, right = there(a), there(b)
        table["tutti"] = lambda: ours(tensor.tt_fused_matmul_reduce_scatter, left, right, SUM, 0, group)
        for word, its in others.items():
            table["tutti " + word] = lambda g=its: ours(tensor.tt_fused_matmul_reduce_scatter, left, right, SUM, 0, g)
    else:
        by_rows, fast = "rows" in kind, kind.endswith("-fast")
        shards = [(drawn(r, m // size, k) * 8).to(torch.float8_e4m3fn) for r in range(size)]
        b = (drawn(100 + rank, n // size, k) * 8).to(torch.float8_e4m3fn).t()
        scales = [drawn(200 + r, m // size, 1).abs() + 0.5 if by_rows else torch.full((1,), 0.25, device="cuda") for r in range(size)]
        of_b = drawn(300, 1, n // size).abs() + 0.5 if by_rows else torch.full((1,), 0.5, device="cuda")
        whole, own, of_a = torch.cat(shards), shards[rank].clone(), torch.cat(scales) if by_rows else scales[0]
        shape, expected = (m, n // size), (whole.float() @ b.float()) * of_a * of_b
        table["matmul"] = lambda: torch._scaled_mm(whole, b, of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=fast)
        table["torch"] = lambda: torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            own, [b], scales[rank], [of_b], 0, group_name, [None], [None], [torch.bfloat16], [fast])[1][0]
        right, right_scale = one(there(b)), one(there(of_b))
        dtypes = (ctypes.c_int * 1)(BF16)
        flags = (ctypes.c_bool * 1)(fast)
        options = ScaledOptions(ctypes.sizeof(ScaledOptions), List(), List(), dtypes, 1, flags, 1)
        kept.append((dtypes, flags, options))
        for name, source in (("tutti", own), ("tutti symmetric", symmetric(own))):
            table[name] = lambda a=there(source), s=there(scales[rank]): ours(
                tensor.tt_fused_all_gather_scaled_matmul, a, right, s, right_scale, 0, group, ctypes.byref(options), None)
    if arguments.no_torch:
        del table["torch"]
    return table, shape, expected


def check(name, kind, run, shape, expected):
    scope = tensor.tt_scope_open()
    made = run_kept(run) if name.startswith("tutti") else run()
    if name.startswith("tutti"):
        made = torch.as_tensor(here_again(made, shape, torch.bfloat16), device="cuda").view(torch.bfloat16)
    torch.cuda.synchronize()
    error = ((made.float() - expected).norm() / expected.norm()).item()
    must(tensor.tt_scope_close(ctypes.byref(scope)))
    must(tutti.tutti_group_check(group))
    if not error < 1e-2 or made.shape != expected.shape:
        print(f"rank {rank}: {kind}: {name} is wrong: relative error {error:.3g}", flush=True)
    return error


def run_kept(run):
    global ours
    ordinary, ours = ours, lambda function, *args: function(*args)
    made = run()
    ours = ordinary
    return ctypes.c_void_p(made.at[0] if isinstance(made, List) else made)


def measure(run, calls):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    run()
    together = Call(ctypes.sizeof(Call), 20_000_000_000, main.cuda_stream)
    must(tutti.tutti_barrier(group, ctypes.byref(together)))  # of the streams: all ranks begin at the same moment
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / calls


def slowest(values):
    gathered = [None] * size
    dist.all_gather_object(gathered, values)
    return statistics.median(max(of_ranks) for of_ranks in zip(*gathered))


def replayed(row, name):
    return f", {row[name] / row['matmul graph']:.2f}" if name.startswith("tutti") and name.endswith("graph") else ""


rows = []
for kind in arguments.kinds.split(","):
    for text in arguments.shapes.split(","):
        m, n, k = map(int, text.split("x"))
        table, shape, expected = candidates(kind, m, n, k)
        errors = {}
        for name, run in list(table.items()):
            if name == "matmul" and kind == "scatter":  # the whole product, of which a rank keeps a part
                continue
            try:
                errors[name] = check(name, kind, run, shape, expected)
            except RuntimeError as problem:  # one that this PyTorch does not have
                print(f"rank {rank}: {kind}: {name}: {str(problem).splitlines()[0]}", flush=True)
                del table[name]
            dist.barrier()
        del expected
        if arguments.graph:
            for name in [name for name in table if name != "torch"]:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=main):
                    table[name]()
                kept.append(graph)
                table[name + " graph"] = graph.replay
                dist.barrier()
        calls = arguments.calls or max(10, int(2e12 / (m * n * k)))
        times = {name: [] for name in table}
        for _ in range(arguments.rounds):
            for name, run in table.items():
                times[name].append(measure(run, calls))
        for checked in [group, *others.values()]:
            must(tutti.tutti_group_check(checked))
        row = {"kind": kind, "shape": text, "ranks": size, **{name: slowest(values) for name, values in times.items()}}
        rows.append(row)
        if rank == 0:
            base = row["matmul"]
            print(f"{size} ranks {kind:16} {text:17} matmul {base:7.1f} us  " +
                  "  ".join(f"{name} {row[name]:.1f} ({row[name] / base:.2f}{replayed(row, name)})" for name in times if name != "matmul") +
                  f"  errors {max(errors.values()):.1e}", flush=True)
        torch.cuda.synchronize()
        dist.barrier()
if rank == 0 and arguments.json:
    with open(arguments.json, "w") as file:
        json.dump({"ranks": size, "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}, file)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # graphs hold addresses of both libraries: leave the order of their ends to the process's
