#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on Tutti with tensors on a GPU: every call gives what gloo gives for the same tensors on the CPU, in PyTorch's streams. Ranks share one GPU."""
import datetime
import faulthandler
import os
import pathlib
import signal
import sys
import tempfile
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip, with_pytorch  # noqa: E402

with_pytorch()
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
except ImportError:
    skip("PyTorch is not installed (make test-peers installs it)")
if not torch.cuda.is_available():
    skip("there is no GPU, or PyTorch has no CUDA")
LIMIT = datetime.timedelta(seconds=float(os.environ.get("TEST_LIMIT", 60)))


def data(rank, shape, dtype=torch.float32, salt=0):
    generator = torch.Generator().manual_seed(100 * rank + salt)
    return torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point else torch.randint(0, 5, shape, generator=generator).to(dtype)


def same(ours, theirs):
    """Whether both are the same. What went wrong on the device is told by the next call: a deadline that has passed shall not be taken for wrong values."""
    import tutti.torch.member
    from tutti._library import lib
    assert ours.is_cuda
    torch.cuda.current_stream().synchronize()  # so it was when four ranks passed
    tutti.errors.check(lib.tutti_group_check(tutti.torch.member.member_of(dist.group.WORLD)._handle))
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0.02 if theirs.dtype.itemsize == 2 else 1e-6, atol=0.02 if theirs.dtype.itemsize == 2 else 1e-6)


def reductions(rank, size, gloo):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            for length in (5, 100_000):
                theirs = data(rank, (length,), dtype)
                ours = theirs.cuda()
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                same(ours, theirs)


def moves(rank, size, gloo):
    mine = data(rank, (4, 3))
    whole = torch.cat([data(other, (4, 3)) for other in range(size)])
    parts = [torch.empty(4, 3, device="cuda") for _ in range(size)]
    dist.all_gather(parts, mine.cuda())
    same(torch.cat(parts), whole)
    flat = torch.empty(4 * size, 3, device="cuda")
    dist.all_gather_into_tensor(flat, mine.cuda())
    same(flat, whole)
    given = mine.cuda()
    dist.broadcast(given, 1)
    same(given, data(1, (4, 3)))
    out = torch.empty(4, 3, device="cuda")
    dist.reduce_scatter_tensor(out, torch.cat([mine.cuda()] * size))
    same(out, sum(data(other, (4, 3)) for other in range(size)))
    exchanged = torch.empty(2 * size, device="cuda")
    dist.all_to_all_single(exchanged, torch.arange(2.0 * size, device="cuda") + 100 * rank)
    same(exchanged, torch.cat([torch.arange(2.0) + 2 * rank + 100 * other for other in range(size)]))
    dist.all_reduce(column := mine.cuda().t())  # not dense in its own order
    same(column, sum(data(other, (4, 3)) for other in range(size)).t())
    raises(TypeError, dist.all_gather, [torch.empty(1)] * size, torch.ones(1, device="cuda"))


def several_at_once(rank, size, gloo):
    several = [data(rank, (3,), salt=i).cuda() for i in range(3)]
    dist.all_reduce_coalesced(several)
    for i, tensor in enumerate(several):
        same(tensor, sum(data(other, (3,), salt=i) for other in range(size)))


def messages(rank, size, gloo):
    mine, got = data(rank, (4, 3)), torch.empty(4, 3, device="cuda")
    dist.all_reduce(torch.ones(1, device="cuda"))  # a group has to be used on the device before its first message
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine.cuda(), (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)])
    for request in requests:
        request.wait()
    same(got, data((rank - 1) % size, (4, 3)))


def groups(rank, size, gloo):
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(few := torch.ones(3, device="cuda"), group=pair)
        same(few, torch.full((3,), 2.0))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [entry["rank"] for entry in objects] == list(range(size))
    dist.barrier()


def streams(rank, size, gloo):
    """Results are seen by what follows in the stream, without the host."""
    big = torch.full((1 << 20,), 1.0, device="cuda")
    for _ in range(20):
        big *= 1.0
        dist.all_reduce(big)
        big /= size
    same(big[:4], torch.ones(4))
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        x = torch.full((1 << 18,), float(rank), device="cuda")
        work = dist.all_reduce(x, async_op=True)
        y = torch.ones(1 << 18, device="cuda") * 3  # beside it
        work.wait()
        x += y
    torch.cuda.current_stream().wait_stream(other)
    same(x[:3], torch.full((3,), sum(range(size)) + 3.0))
    work = dist.all_reduce(z := torch.full((1000,), 2.0, device="cuda"), async_op=True)
    assert work.get_future().wait()[0].data_ptr() == z.data_ptr()
    same(z[:2], torch.full((2,), 2.0 * size))
    torch.cuda.synchronize()
    assert work.is_completed() and work.is_success()


def models(rank, size, gloo):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).cuda()
    alone = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).cuda()
    alone.load_state_dict(net.state_dict())
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    batch = data(7, (8 * size, 16)).cuda()
    for module, rows in ((parallel, batch[8 * rank:8 * rank + 8]), (alone, batch)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(rows).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    from torch.distributed.fsdp import fully_shard
    mesh = dist.init_device_mesh("cuda", (size,))
    shared = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).cuda()
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).cuda()
    shared.load_state_dict(whole.state_dict())
    fully_shard(shared, mesh=mesh)
    shared(batch[8 * rank:8 * rank + 8]).square().mean().backward()
    whole(batch).square().mean().backward()
    for ours, theirs in zip(shared.parameters(), whole.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)


def _rank(rank, size, path, names):
    faulthandler.dump_traceback_later(1.5 * LIMIT.total_seconds(), exit=True)  # where it hangs
    faulthandler.register(signal.SIGUSR1)  # and where it is, when asked
    import tutti.torch
    assert tutti.torch._cuda.here, "the plug-in was not found"
    torch.cuda.set_device(0)
    dist.init_process_group("tutti", init_method=f"file://{path}", rank=rank, world_size=size, timeout=LIMIT)
    gloo = dist.new_group(backend="gloo")
    for name in names:
        try:
            globals()[name](rank, size, gloo)
            torch.cuda.synchronize()
        except BaseException:  # told at once: the others may wait for this rank
            print(f"rank {rank} of {size} in {name}:\n{traceback.format_exc()}", flush=True)
            # A process of MPS that goes while its kernels run may take others with it: they are told to leave, on all ranks, and awaited.
            tutti.torch.member.member_of(dist.group.WORLD).abort()
            torch.cuda.synchronize()
            raise
        if rank == 0:
            print(f"        {name} with {size} ranks", flush=True)
    dist.destroy_process_group()


def _with(size, *names):
    if size > 2:  # a share of the GPU for each: else MPS may let kernels of some take the place that others wait for
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // size)
    else:
        os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (size, os.path.join(folder, "store"), names), nprocs=size)


def collectives_are_those_of_gloo():
    for size in [int(text) for text in os.environ.get("RANKS", "2").split()]:
        _with(size, "reductions", "moves", "several_at_once", "messages", "groups")


def streams_are_pytorchs():
    _with(2, "streams")


def data_parallel_and_fully_sharded():
    _with(2, "models")


if __name__ == "__main__":
    run((collectives_are_those_of_gloo, streams_are_pytorchs, data_parallel_and_fully_sharded))
