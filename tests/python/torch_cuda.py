#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on Tutti with tensors on a GPU: every call gives what gloo gives for the same tensors on the CPU, in PyTorch's streams. Ranks share one GPU.
With TEST_STANDIN the GPU is the CPU: standin_torch_peer.py."""
import datetime
import faulthandler
import os
import pathlib
import signal
import sys
import tempfile
import time
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
if os.environ.get("TEST_STANDIN"):
    import standin
    standin.install()
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
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            for length in (5, 100_000):
                theirs = data(rank, (length,), dtype)
                ours = theirs.cuda()
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                same(ours, theirs)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        theirs = data(rank, (7,), torch.int32)
        dist.all_reduce(ours := theirs.cuda(), op)
        dist.all_reduce(theirs, op, group=gloo)
        same(ours, theirs)
    pairs = torch.view_as_complex(data(rank, (5, 2)))
    dist.all_reduce(ours := pairs.cuda())
    dist.all_reduce(pairs, group=gloo)
    same(torch.view_as_real(ours), torch.view_as_real(pairs))
    total = sum(data(other, (5,)) for other in range(size))
    dist.all_reduce(ours := data(rank, (5,)).cuda(), dist.ReduceOp.AVG)  # gloo has none
    same(ours, total / size)
    dist.reduce(ours := data(rank, (5,)).cuda(), size - 1)
    if rank == size - 1:
        same(ours, total)


def premultiplied(rank, size, gloo):
    """Each rank's tensor times its own factor: a number, or a tensor on the device."""
    total = sum(data(other, (2 * size,)) * (other + 0.5) for other in range(size))
    for factor in (rank + 0.5, torch.full((1,), rank + 0.5), torch.full((1,), rank + 0.5, device="cuda")):
        op = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(ours := data(rank, (2 * size,)).cuda(), op)
        same(ours, total)
        dist.all_reduce(ours := data(rank, (2 * size,)).cuda().bfloat16(), op, async_op=True).wait()
        torch.testing.assert_close(ours.cpu().float(), total, rtol=0.05, atol=0.05)
        dist.reduce_scatter_tensor(part := torch.empty(2, device="cuda"), data(rank, (2 * size,)).cuda(), op)
        same(part, total[2 * rank:2 * rank + 2])
        dist.all_reduce_coalesced(several := [data(rank, (2 * size,)).cuda() for _ in range(2)], op)
        for tensor in several:
            same(tensor, total)


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
    gathered = [torch.empty(4, 3, device="cuda") for _ in range(size)] if rank == 0 else None
    dist.gather(mine.cuda(), gathered, 0)
    if rank == 0:
        same(torch.cat(gathered), whole)
    given = torch.empty(4, 3, device="cuda")
    dist.scatter(given, list(whole.cuda().chunk(size)) if rank == 1 else None, 1)
    same(given, mine)
    uneven = [torch.empty(other + 1, device="cuda") for other in range(size)]  # of different lengths
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"))
    same(torch.cat(uneven), torch.cat([torch.full((other + 1,), float(other)) for other in range(size)]))
    part = torch.empty(rank + 1, device="cuda")
    dist.reduce_scatter(part, [torch.full((other + 1,), rank + 1.0, device="cuda") for other in range(size)])
    same(part, torch.full((rank + 1,), size * (size + 1) / 2))
    exchanged = torch.empty(sum(other + 1 for other in range(size)), 2, device="cuda")
    dist.all_to_all_single(exchanged, torch.full(((rank + 1) * size, 2), float(rank), device="cuda"), [other + 1 for other in range(size)], [rank + 1] * size)
    same(exchanged, torch.cat([torch.full((other + 1, 2), float(other)) for other in range(size)]))
    outs = [torch.empty(other + 1, device="cuda") for other in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 1,), 10.0 * rank + other, device="cuda") for other in range(size)])
    same(torch.cat(outs), torch.cat([torch.full((other + 1,), 10.0 * other + rank) for other in range(size)]))


def several_at_once(rank, size, gloo):
    several = [data(rank, (3,), salt=i).cuda() for i in range(3)]
    dist.all_reduce_coalesced(several)
    for i, tensor in enumerate(several):
        same(tensor, sum(data(other, (3,), salt=i) for other in range(size)))
    wide, parts = [torch.empty(count * size, device="cuda") for count in (2, 3)], [torch.empty(count, device="cuda") for count in (2, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for out, count in zip(wide, (2, 3)):
            dist.all_gather_into_tensor(out, data(rank, (count,)).cuda())
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for out, count in zip(parts, (2, 3)):
            dist.reduce_scatter_tensor(out, data(rank, (count * size,)).cuda())
    manager.wait()
    for out, part, count in zip(wide, parts, (2, 3)):
        same(out, torch.cat([data(other, (count,)) for other in range(size)]))
        same(part, sum(data(other, (count * size,)) for other in range(size))[rank * count:(rank + 1) * count])


def functional(rank, size, gloo):
    """Functional collectives, compiled ones, and those that compilers write."""
    import torch.distributed._functional_collectives as funcol
    ops, world = torch.ops._c10d_functional, dist.group.WORLD
    name, x = world.group_name, data(rank, (2 * size, 3, size))
    whole = [data(other, (2 * size, 3, size)) for other in range(size)]
    for dim in (0, 1, -1):
        same(ops.wait_tensor(funcol.all_gather_tensor(x.cuda(), dim, world)), torch.cat(whole, dim))
    for op, total in (("sum", sum(whole)), ("avg", sum(whole) / size), ("max", torch.stack(whole).amax(0))):
        same(ops.wait_tensor(funcol.all_reduce(x.cuda(), op, world)), total)
        same(ops.wait_tensor(funcol.reduce_scatter_tensor(x.cuda(), op, 0, world)), total.chunk(size)[rank])
    same(ops.wait_tensor(funcol.broadcast(x.cuda(), 1, world)), whole[1])
    same(ops.wait_tensor(funcol.all_to_all_single(x.cuda(), None, None, world)), torch.cat([each.chunk(size)[rank] for each in whole]))
    same(ops.wait_tensor(funcol.all_reduce_coalesced([x.cuda(), x.cuda() + 1], "sum", world)[1]), sum(whole) + size)
    out = torch.empty(2 * size * size, 3, size, device="cuda")
    assert ops.wait_tensor(ops.all_gather_into_tensor_out(x.cuda(), size, name, out=out)) is out
    same(out, torch.cat(whole))
    out = torch.empty(2, 3, size, device="cuda")
    ops.wait_tensor(ops.reduce_scatter_tensor_out(x.cuda(), "sum", size, name, out=out))
    same(out, sum(whole).chunk(size)[rank])
    if hasattr(ops, "batch_p2p_ops"):  # since PyTorch 2.12
        got = ops.batch_p2p_ops(["isend", "irecv"], [(rank + 1) % size, (rank - 1) % size], [0, 0], [x.cuda(), torch.empty_like(x, device="cuda")], name)
        same(ops.wait_tensor(got[1]), whole[rank - 1])
    leaf = x.cuda().requires_grad_()
    (funcol.wait_tensor(funcol.all_gather_tensor_autograd(leaf, 0, world)) * torch.full((2 * size * size, 3, size), 2.0, device="cuda")).sum().backward()
    same(leaf.grad, torch.full((2 * size, 3, size), 2.0 * size))


def messages(rank, size, gloo):
    mine, got = data(rank, (4, 3)), torch.empty(4, 3, device="cuda")
    dist.all_reduce(torch.ones(1, device="cuda"))  # a group has to be used on the device before its first message
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine.cuda(), (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)])
    for request in requests:
        request.wait()
    same(got, data((rank - 1) % size, (4, 3)))
    error = raises(dist.DistBackendError, dist.recv, torch.empty(1, device="cuda"))  # from anybody: NCCL's backend, too, refuses it
    assert error.status == "UNSUPPORTED" and "a rank and a tag" in str(error), error
    dist.all_reduce(torch.ones(1, device="cuda"))  # the group goes on


def groups(rank, size, gloo):
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(few := torch.ones(3, device="cuda"), group=pair)
        same(few, torch.full((3,), 2.0))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [entry["rank"] for entry in objects] == list(range(size))
    shared = [{"from": rank}] if rank == 0 else [None]
    dist.broadcast_object_list(shared, 0, device=torch.device("cuda", 0))
    assert shared == [{"from": 0}]
    dist.barrier()


def meshes(rank, size, gloo):
    """DTensor, and layers whose rows and columns the ranks share."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh, full = dist.init_device_mesh("cuda", (size,)), data(0, (2 * size, 2 * size))
    sharded = distribute_tensor(full.cuda(), mesh, [Shard(0)])
    same(sharded.full_tensor(), full)
    same(sharded.redistribute(mesh, [Shard(1)]).to_local(), full.chunk(size, 1)[rank])
    same((sharded @ sharded.t()).redistribute(mesh, [Replicate()]).to_local(), full @ full.t())
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 4 * size), torch.nn.Tanh(), torch.nn.Linear(4 * size, 3)).cuda()
    shared = torch.nn.Sequential(torch.nn.Linear(8, 4 * size), torch.nn.Tanh(), torch.nn.Linear(4 * size, 3)).cuda()
    shared.load_state_dict(whole.state_dict())
    parallelize_module(shared, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (shared, whole):
        module(data(7, (6, 8)).cuda()).square().mean().backward()
    for ours, theirs in zip(shared.parameters(), whole.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def bound(rank, size, gloo):
    """Ranks that have named their device when they began, whose groups PyTorch splits: dist.split_group, and DeviceMesh by itself."""
    dist.destroy_process_group()
    device = torch.device("cuda", 0)
    dist.init_process_group("tutti", init_method=f"file://{os.environ['TEST_MEET']}-bound", rank=rank, world_size=size, timeout=LIMIT, device_id=device)
    world = dist.group.WORLD
    assert world.bound_device_id == device and world._get_backend(device).supports_splitting

    def summed(group, ranks):
        for place in ("cuda", "cpu"):
            dist.all_reduce(x := torch.full((3,), rank + 1.0, device=place), group=group)
            assert x.tolist() == [sum(other + 1.0 for other in ranks)] * 3, (place, x)
    mesh = dist.init_device_mesh("cuda", (1, size), mesh_dim_names=("copies", "shards"))
    summed(mesh.get_group("shards"), range(size))
    summed(mesh.get_group("copies"), [rank])
    summed(dist.init_device_mesh("cpu", (size,)).get_group(), range(size))
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    mine = halves[rank >= size // 2]
    part = dist.split_group(split_ranks=halves, group_desc="a half")
    assert part.group_desc == "a half" and part.bound_device_id == device and dist.get_process_group_ranks(part) == mine
    assert dist.get_backend(part) == "tutti" and part._get_backend(device).options.global_ranks_in_group == mine
    summed(part, mine)
    inner = dist.split_group(part, split_ranks=[[len(mine) - 1]])  # ranks are the part's own; the others are in none
    assert (inner is None) == (rank != mine[-1])
    if inner is not None:
        summed(inner, [rank])
        dist.destroy_process_group(inner)
    dist.destroy_process_group(part)
    alone = dist.new_group([size - 1])  # the others are told that they are not in it
    if rank == size - 1:
        summed(alone, [rank])
    from torch.distributed.fsdp import fully_shard
    shared = torch.nn.Linear(8, 8 * size).cuda()
    fully_shard(shared, mesh=mesh["shards"])
    shared(torch.ones(2, 8, device=device)).sum().backward()
    summed(world, range(size))


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
    doubled = dist.all_reduce(torch.full((1000,), 3.0, device="cuda"), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    same(doubled.wait()[:2], torch.full((2,), 6.0 * size))
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


def buffers(rank, size, gloo):
    """Memory that only a work holds is given to nobody else while the device uses it, whichever stream the work is waited for in: here it waits for the last rank,
    whose stream is busy, while the others ask for as much memory in their own stream, and write to it."""
    length = 1 << 18
    for ask in ("wait", "future", "drop"):
        if rank == size - 1:
            torch.cuda._sleep(300_000_000)
        mine, parts = torch.full((length,), rank + 1.0, device="cuda"), [torch.zeros(length, device="cuda") for _ in range(size)]
        column = torch.full((length, 2), rank + 1.0, device="cuda").t()  # not dense in its own order
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        futures = []
        with torch.cuda.stream(side):
            works = [dist.all_gather(parts, mine, async_op=True), dist.all_reduce(column, async_op=True)]
        if ask == "future":
            futures = [work.get_future() for work in works]
        elif ask == "wait":
            with torch.cuda.stream(side):
                for work in works:
                    work.wait()
        del works
        others = []
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                others += [torch.full((count * length,), -1.0, device="cuda") for count in (1, 2, size) for _ in range(4)]
        for future in futures:
            future.wait()
        torch.cuda.synchronize()
        for other in others:
            assert (other == -1).all().item(), f"{ask}: memory was given out twice"
        for other, part in enumerate(parts):
            same(part[:7], torch.full((7,), other + 1.0))
            assert (part == other + 1).all().item(), ask
        assert (column == sum(range(1, size + 1))).all().item(), ask


def arrays(rank, size, gloo):
    """Groups of Tutti itself take arrays where they lie, in the stream that is current in their library: PyTorch's, tutti.tensor's, and CuPy's where it is installed."""
    import tutti
    from tutti import streams, tensor as tt
    group = tutti.torch.member.member_of(dist.group.WORLD)._world.group
    total = float(sum(range(1, size + 1)))
    x, other = torch.full((1 << 16,), rank + 1.0, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        x *= 2
        assert group.all_reduce(x) is x
        x += 1
        gathered = group.all_gather(x)
    torch.cuda.current_stream().wait_stream(other)
    assert gathered.is_cuda and (gathered == 2 * total + 1).all().item()
    work = group.all_reduce(y := torch.ones(1000, device="cuda"), wait=False)
    work.join(torch.cuda.current_stream().cuda_stream)
    assert (y + 1).sum().item() == 1000 * (size + 1) and work.wait() is y and work.done()
    with group.batch():
        group.all_reduce(a := torch.ones(3, device="cuda"))
        group.all_reduce(b := torch.ones(4, device="cuda"), op="max")
    assert a.tolist() == [float(size)] * 3 and b.tolist() == [1.0] * 4
    raises(TypeError, group.all_reduce, a, out=torch.ones(3))
    t = tt.full((8,), rank + 1.0, device="cuda")
    made = streams.Event()
    with streams.Stream():
        made.join()
        assert (group.all_reduce(t * 3) + 0).tolist() == [3 * total] * 8
        shared = torch.from_dlpack(t)  # PyTorch's current stream is ordered behind this one
        assert shared.is_cuda and shared.tolist() == [rank + 1.0] * 8
        shared.fill_(7.0)
        back = tt.from_dlpack(shared)
        assert (back + 1).tolist() == [8.0] * 8
    assert torch.from_dlpack(back).data_ptr() == shared.data_ptr()
    for library in (_cupy, _jax):
        try:
            library(group, size, float(rank + 1), total)
        except ImportError as error:
            print(f"skipped: arrays of {library.__name__[1:]}: {error}", flush=True)


def _cupy(group, size, mine, total):
    import cupy
    from tutti import tensor as tt
    c = cupy.full((1000,), mine, dtype=cupy.float32)
    with cupy.cuda.Stream():
        c *= 2
        assert group.all_reduce(c) is c
        c += 1
        gathered = group.all_gather(c)
        assert gathered.shape == (size, 1000) and c.get().tolist() == [2 * total + 1] * 1000 and float(gathered.sum()) == size * 1000 * (2 * total + 1)
    assert (tt.from_dlpack(c) + 1).tolist()[:2] == [2 * total + 2] * 2
    t = tt.full((8,), 7.0, device="cuda")
    assert float(cupy.from_dlpack(t).sum()) == 56.0


def _jax(group, size, mine, total):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # it would take most of the GPU
    import jax
    from tutti import tensor as tt
    j = jax.device_put(jax.numpy.full((1000,), mine, jax.numpy.float32) * 2, jax.devices("gpu")[0])
    summed = group.all_reduce(j, out=tt.empty(1000, device="cuda"))
    gathered = group.all_gather(j)
    assert gathered.device == "cuda:0" and gathered.shape == (size, 1000) and summed.tolist() == [2 * total] * 1000
    assert float(jax.numpy.from_dlpack(gathered).sum()) == 2000 * total and j.tolist() == [2 * mine] * 1000
    raises(TypeError, group.all_reduce, j)
    assert (tt.from_dlpack(j) + 1).tolist()[:2] == [2 * mine + 1] * 2


def mixture(rank, size, gloo):
    """A group whose tensors on GPUs are Tutti's, and those of the CPU gloo's."""
    group = dist.new_group(backend="cpu:gloo,cuda:tutti")
    for device in ("cpu", "cuda"):
        dist.all_reduce(x := torch.full((5,), rank + 1.0, device=device), group=group)
        assert x.tolist() == [float(sum(range(1, size + 1)))] * 5
    dist.destroy_process_group(group)


def _until_it_fails(length):
    """What goes wrong on the device is told by the next call."""
    for _ in range(1000):
        dist.all_reduce(torch.ones(length, device="cuda"))
        torch.cuda.synchronize()


def mismatch(rank, size, gloo):
    error = raises(dist.DistBackendError, _until_it_fails, 10 + rank)
    print(f"rank {rank}: {error.status} {error.ranks}: {error}", flush=True)
    assert error.status == "MISMATCH" and error.ranks


def aborted(rank, size, gloo):
    """One rank ends the group: the others are told, and the device goes on."""
    group = dist.new_group(list(range(size)))
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)
    torch.cuda.synchronize()
    dist.barrier(group=gloo)
    if rank == 0:
        group.abort()

    def until():
        for _ in range(1000):
            dist.all_reduce(torch.ones(3, device="cuda"), group=group)
            torch.cuda.synchronize()
    assert raises(dist.DistBackendError, until).status == "ABORTED"
    dist.barrier(group=gloo)


def late(rank, size, gloo):
    """A rank that does not come in time is named."""
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=2))
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)
    torch.cuda.synchronize()
    if rank != 1:
        def until():
            for _ in range(1000):
                dist.all_reduce(torch.ones(3, device="cuda"), group=group)
                torch.cuda.synchronize()
        error = raises(dist.DistBackendError, until)
        assert error.status == "TIMEOUT" and 1 in error.ranks, error
    dist.barrier(group=gloo)


def death(rank, size, gloo):
    """A rank that is killed while it has nothing on the device: the others, who wait for it there, are told who."""
    dist.all_reduce(torch.ones(10, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier(group=gloo)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error = raises(dist.DistBackendError, _until_it_fails, 10)
    print(f"rank {rank}: {error.status} {error.ranks} after {1e3 * (time.monotonic() - begin):.0f} ms: {error}", flush=True)
    assert error.status == "DEAD" and tuple(error.ranks) == (size - 1,)
    os._exit(0)  # gloo, too, misses a rank


def _init(rank, size, path, limit):
    os.environ["TEST_MEET"] = path
    faulthandler.dump_traceback_later(2 * LIMIT.total_seconds(), exit=True)  # where it hangs
    faulthandler.register(signal.SIGUSR1)  # and where it is, when asked
    import tutti.torch
    assert tutti.torch._cuda.here, "the plug-in was not found"
    torch.cuda.set_device(0)
    dist.init_process_group("tutti", init_method=f"file://{path}", rank=rank, world_size=size, timeout=limit)
    return dist.new_group(backend="gloo")


def _rank(rank, size, path, names):
    import tutti.torch
    gloo = _init(rank, size, path, LIMIT)
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


def _without_share(rank, size, path, names):
    """Each call gives the right values, or an error that names a rank which did not come to the device in time."""
    import tutti
    gloo = _init(rank, size, path, LIMIT)
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=4))  # of calls: on a busy machine ranks take longer to begin
    told = "nothing"
    for name in names:
        try:
            globals()[name](rank, size, gloo)
            torch.cuda.synchronize()
        except (dist.DistBackendError, tutti.Error) as error:
            assert error.status == "TIMEOUT" and error.ranks and "deadline" in str(error), f"rank {rank} of {size} in {name}: {error.status} {error.ranks}: {error}"
            told = f"{name}: {error}"
            break
        except BaseException:
            print(f"rank {rank} of {size} in {name}:\n{traceback.format_exc()}", flush=True)
            tutti.torch.member.member_of(dist.group.WORLD).abort()
            torch.cuda.synchronize()
            raise
    torch.cuda.synchronize()  # the device is as well as before
    assert (torch.ones(3, device="cuda") + rank).tolist() == [1.0 + rank] * 3
    print(f"        rank {rank} of {size} without a share was told {told}", flush=True)
    dist.barrier(group=gloo)


def _with(size, *names, body=_rank, share=True):
    if size > 2 and share:  # a share of the GPU for each: else MPS may let kernels of some take the place that others wait for
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // size)
    else:
        os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(body, (size, os.path.join(folder, "store"), names), nprocs=size)


def _sizes():
    return [int(text) for text in os.environ.get("RANKS", "2").split()]


def collectives_are_those_of_gloo():
    for size in _sizes():
        _with(size, "reductions", "premultiplied", "moves", "several_at_once", "messages", "groups", "buffers", "functional", "meshes")


def ranks_that_have_a_device_split_their_groups():
    for size in _sizes():
        _with(size, "bound")


def streams_are_pytorchs():
    for size in _sizes():
        _with(size, "streams")


def data_parallel_and_fully_sharded():
    for size in _sizes():
        _with(size, "models")


def a_group_has_a_backend_for_each_device():
    if os.environ.get("TUTTI_TORCH_SHIM") == "on":
        _with(2, "mixture")


def arrays_of_every_library():
    _with(2, "arrays")


def calls_that_do_not_match_are_told():
    _with(2, "mismatch")


def groups_that_end_say_why():
    _with(2, "aborted", "late")


def a_rank_that_dies_is_told():
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):  # not under MPS, whose server it may take with it
        os.environ.pop(name, None)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, 2, os.path.join(folder, "store"), ("death",))) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL], ranks


def ranks_without_shares_are_right_or_told():
    _with(4, "reductions", "moves", "several_at_once", "messages", "reductions", "moves", body=_without_share, share=False)


if __name__ == "__main__":
    run((collectives_are_those_of_gloo, ranks_that_have_a_device_split_their_groups, streams_are_pytorchs, data_parallel_and_fully_sharded, a_group_has_a_backend_for_each_device, arrays_of_every_library, calls_that_do_not_match_are_told, groups_that_end_say_why,
         ranks_without_shares_are_right_or_told, a_rank_that_dies_is_told))
