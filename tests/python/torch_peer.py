#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on Tutti: every call gives what gloo gives, and functional collectives, torch.compile and symmetric memory on them. Deaths and mismatches are errors
that name the rank. What PyTorch trains with is training_torch_peer.py's subject."""
import copy
import datetime
import os
import pathlib
import signal
import sys
import threading
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises  # noqa: E402
from torch_ranks import LONG, Network, data, run_all, same, shimmed, train, within  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402

import tutti.torch  # noqa: E402

warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch is about to change


# ---- what ranks do; `gloo` is a group of the same ranks ----

def reductions(rank, size, gloo):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            ours, theirs = data(rank, (5, 3), dtype), data(rank, (5, 3), dtype)
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op, group=gloo)
            torch.testing.assert_close(ours, theirs, rtol=0.02 if dtype.itemsize == 2 else None, atol=0.02 if dtype.itemsize == 2 else None)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        ours, theirs = data(rank, (7,), torch.int32), data(rank, (7,), torch.int32)
        dist.all_reduce(ours, op)
        dist.all_reduce(theirs, op, group=gloo)
        same(ours, theirs)
    average = torch.full((2,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average[0] == (size - 1) / 2
    for root in range(size):
        ours, theirs = data(rank, (4,), torch.float32, root), data(rank, (4,), torch.float32, root)
        dist.reduce(ours, root)
        dist.reduce(theirs, root, group=gloo)
        if rank == root:
            same(ours, theirs)
    column = data(rank, (4, 3), torch.float32)
    expected = column.clone()
    dist.all_reduce(expected, group=gloo)
    base = column.t().contiguous().t()  # not dense in its own order
    work = dist.all_reduce(base, async_op=True)
    work.wait()
    same(base, expected)
    several, wanted = [data(rank, (3,), torch.float32, i) for i in range(3)], [data(rank, (3,), torch.float32, i) for i in range(3)]
    dist.all_reduce_coalesced(several)
    for tensor in wanted:
        dist.all_reduce(tensor, group=gloo)
    same(several, wanted)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        several = [data(rank, (3,), torch.float32, i) for i in range(3)]
        for tensor in several:
            dist.all_reduce(tensor)
    manager.wait()
    same(several, wanted)
    ours = torch.view_as_complex(data(rank, (3, 2), torch.float32))
    theirs = ours.clone()
    dist.all_reduce(ours)
    dist.all_reduce(theirs, group=gloo)
    same(ours, theirs)


def premultiplied(rank, size, gloo):
    """PREMUL_SUM: each rank's tensor times its own factor, a number or a tensor of one, and then the sum."""
    def factor(other, shape=()):
        return torch.full(shape, 0.5 + other)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        def given(other, shape, dtype=dtype):
            real = data(other, (*shape, 2), torch.float32)
            return torch.view_as_complex(real) if dtype.is_complex else real[..., 0].to(dtype)

        def summed(shape):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return sum(given(other, shape).to(wide) * (0.5 + other) for other in range(size)).to(dtype)

        for op in (dist._make_nccl_premul_sum(0.5 + rank), dist._make_nccl_premul_sum(factor(rank)), dist._make_nccl_premul_sum(factor(rank, (1,)).double())):
            close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            dist.all_reduce(tensor := given(rank, (5, 3)), op)
            torch.testing.assert_close(tensor, summed((5, 3)), **close)
            dist.all_reduce(tensor := given(rank, (5, 3)).t(), op, async_op=True).wait()
            torch.testing.assert_close(tensor, summed((5, 3)).t(), **close)
            dist.reduce(tensor := given(rank, (4,)), 1, op)
            if rank == 1:
                torch.testing.assert_close(tensor, summed((4,)), **close)
            wanted = summed((size * 2,)).chunk(size)[rank]
            dist.reduce_scatter_tensor(part := torch.empty_like(wanted), given(rank, (size * 2,)), op)
            torch.testing.assert_close(part, wanted, **close)
            dist.reduce_scatter(part := torch.empty_like(wanted), list(given(rank, (size * 2,)).chunk(size)), op)
            torch.testing.assert_close(part, wanted, **close)
            several, parts = [given(rank, (3,)), given(rank, (size * 2,))], [torch.empty_like(wanted) for _ in range(2)]
            dist.all_reduce_coalesced(several, op)
            for tensor in several:
                torch.testing.assert_close(tensor, summed(tensor.shape), **close)
            with dist.distributed_c10d._coalescing_manager():
                for part in parts:
                    dist.reduce_scatter_tensor(part, given(rank, (size * 2,)), op)
            for part in parts:
                torch.testing.assert_close(part, wanted, **close)
    for dtype in (torch.int32, torch.bool):
        error = raises(dist.DistBackendError, dist.all_reduce, torch.ones(2).to(dtype), dist._make_nccl_premul_sum(2.0))
        assert error.status == "TYPE" and "premul_sum is not defined" in str(error), error
    text = str(raises(ValueError, dist.all_reduce, torch.ones(2), dist._make_nccl_premul_sum(torch.tensor(2j))))
    assert "real number" in text, text


def moves(rank, size, gloo):
    for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.uint8):
        for group in (None, gloo):
            whole = [data(other, (2, 3), dtype) for other in range(size)]
            mine = whole[rank].clone()
            dist.broadcast(mine, 1, group=group)
            same(mine, whole[1])
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, whole[rank], group=group)
            same(parts, whole)
            flat = torch.empty((2 * size, 3), dtype=dtype)
            dist.all_gather_into_tensor(flat, whole[rank], group=group)
            same(flat, torch.cat(whole))
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
            dist.gather(whole[rank], gathered, 0, group=group)
            assert rank != 0 or same(gathered, whole) is None
            mine = torch.empty_like(mine)
            dist.scatter(mine, whole if rank == 1 else None, 1, group=group)
            same(mine, whole[rank])
    total = torch.stack([data(other, (size * 2, 3), torch.float32) for other in range(size)]).sum(0)
    part = torch.empty(2, 3)
    dist.reduce_scatter_tensor(part, data(rank, (size * 2, 3), torch.float32))
    same(part, total[2 * rank:2 * rank + 2])
    dist.reduce_scatter(part, list(data(rank, (size * 2, 3), torch.float32).chunk(size)))
    same(part, total[2 * rank:2 * rank + 2])
    found = []
    for group in (None, gloo):  # several tensors as one operation
        lists = [[torch.empty(2), torch.empty(3, 2).t()] for _ in range(size)]
        dist.all_gather_coalesced(lists, [data(rank, (2,), torch.float32), data(rank, (2, 3), torch.float32, 1)], group=group)
        wide, parts = [torch.empty(2 * size), torch.empty(3 * size)], [torch.empty(2), torch.empty(3)]
        with dist.distributed_c10d._coalescing_manager(group=group):
            for out, count in zip(wide, (2, 3)):
                dist.all_gather_into_tensor(out, data(rank, (count,), torch.float32), group=group)
        with dist.distributed_c10d._coalescing_manager(group=group):
            for out, count in zip(parts, (2, 3)):
                dist.reduce_scatter_tensor(out, data(rank, (count * size,), torch.float32), group=group)
        found.append([lists, wide, parts])
    same(*found)
    lengths = [other + 1 for other in range(size)]  # of different lengths
    uneven = [torch.empty(length) for length in lengths]
    dist.all_gather(uneven, torch.full((lengths[rank],), float(rank)))
    same(uneven, [torch.full((length,), float(other)) for other, length in enumerate(lengths)])
    part = torch.empty(lengths[rank])
    dist.reduce_scatter(part, [torch.ones(length) * (rank + 1) for length in lengths])
    same(part, torch.full((lengths[rank],), size * (size + 1) / 2))
    for group in (None, gloo):
        sent = [rank + 1] * size
        received = [other + 1 for other in range(size)]
        out = torch.empty(sum(received), 2)
        dist.all_to_all_single(out, torch.full((sum(sent), 2), float(rank)), received, sent, group=group)
        same(out, torch.cat([torch.full((other + 1, 2), float(other)) for other in range(size)]))
        out = torch.empty(size)
        dist.all_to_all_single(out, torch.arange(size, dtype=torch.float32) + 10 * rank, group=group)
        same(out, torch.arange(size, dtype=torch.float32) * 10 + rank)
    outs = [torch.empty(other + 1) for other in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 1,), 1.0 * rank) for _ in range(size)])
    same(outs, [torch.full((other + 1,), 1.0 * other) for other in range(size)])


def messages(rank, size, gloo):
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(3):
        got = torch.empty(4)
        works = [dist.isend(torch.full((4,), float(rank + turn)), after, tag=7), dist.irecv(got, before, tag=7)]
        for work in works:
            work.wait()
        same(got, torch.full((4,), float(before + turn)))
    got = torch.empty(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(3) * rank, after), dist.P2POp(dist.irecv, got, before)]):
        work.wait()
    same(got, torch.ones(3) * before)
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            got = torch.empty(1, dtype=torch.int64)
            source = dist.recv(got)
            assert got.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([rank]), 0)
    if rank == 0:  # tags keep messages apart
        dist.send(torch.ones(1), 1, tag=1)
        dist.send(torch.ones(1) * 2, 1, tag=2)
    elif rank == 1:
        first, second = torch.empty(1), torch.empty(1)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        assert first.item() == 1 and second.item() == 2
    if rank == 0:  # from anybody, by tags
        for tag in (6, 5):
            for _ in range(size - 1):
                got = torch.empty(1)
                source = dist.recv(got, tag=tag)
                assert got.item() == 10 * source + tag
    else:
        for work in [dist.isend(torch.tensor([10.0 * rank + tag]), 0, tag=tag) for tag in (5, 6)]:
            work.wait()
    dropped = [torch.zeros(1) for _ in range(50)]
    for tensor in dropped:  # receives that nobody holds: messages still come
        dist.irecv(tensor, before, tag=8)
    for i in range(len(dropped)):
        dist.send(torch.tensor([float(i)]), after, tag=8)
    assert within(lambda: [tensor.item() for tensor in dropped] == list(range(len(dropped))))
    wide = torch.zeros(4, 2)
    if rank == 0:
        dist.send(torch.arange(4.0), 1)
    elif rank == 1:
        dist.recv(wide[:, 0], 0)  # a column
        same(wide[:, 0], torch.arange(4.0))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 100})
    assert [entry["rank"] for entry in objects] == list(range(size))
    shared = [{"from": rank}] if rank == 0 else [None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [{"from": 0}]
    given = [None]
    dist.scatter_object_list(given, list(range(size)) if rank == 0 else None, 0)
    assert given == [rank]
    everybody = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, everybody, 0)
    assert rank != 0 or everybody == [{"rank": other} for other in range(size)]
    pair = [rank, "x" * rank] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(pair, 1)
    elif rank == 1:
        dist.recv_object_list(pair, 0)
        assert pair == [0, ""]


def dropped_after_a_failure():
    """A work on a GPU that nobody waited for, and that cannot be joined (here there is no GPU), frees its buffers and says nothing."""
    from tutti import world as module
    from tutti.torch import cuda
    if torch.cuda.is_available():
        return
    told, before = [], sys.unraisablehook
    place = module.hold(None)
    number, sys.unraisablehook = id(place), lambda about: told.append(about.exc_value)
    try:
        work = cuda.Work(None, place, torch.device("cuda", 0), [], None, lambda: None)
        assert number in module._running
        del work
    finally:
        sys.unraisablehook = before
    assert number not in module._running and not told, told


def interrupted_between_calls(group):
    """An interrupt that comes after a batch has begun leaves none behind, and a signal's handler may wait for the work that its thread is about to finish."""
    from tutti.torch.group import lib
    cancel, cancelled, run = lib.tutti_batch_cancel, [], group._run

    def forgotten(batch):
        cancelled.append(batch.value)
        cancel(batch)

    def interrupt(*arguments):
        raise KeyboardInterrupt
    lib.tutti_batch_cancel, group._run = forgotten, interrupt
    try:
        raises(KeyboardInterrupt, group.allreduce_coalesced, [torch.ones(2), torch.ones(3)])
    finally:
        lib.tutti_batch_cancel, group._run = cancel, run
    assert len(cancelled) == 1 and cancelled[0], cancelled
    work = dist.all_reduce(table := torch.ones(4, 6).t(), async_op=True)
    finish, asked = work._finish, []

    def handled():
        if not asked:
            asked.append(True)
            work.wait()  # as a handler does
            assert table[0, 0] == dist.get_world_size()
        finish()
    work._finish = handled
    waiting = threading.Thread(target=work.wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive() and work.is_success()


def works(rank, size, gloo):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and tensor[0] == size
    tensors = [torch.full((8,), float(rank)) for _ in range(20)]
    futures = [dist.all_reduce(entry, async_op=True).get_future() for entry in tensors]
    doubled = [future.then(lambda done: done.value()[0] * 2) for future in futures]
    for future in doubled:
        same(future.wait(), torch.full((8,), float(size * (size - 1))))

    def again(done):  # what is called when a future completes may wait for others, as PyTorch's PowerSGD does
        def once_more(done):
            return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0] + 1
        return dist.all_reduce(done.value()[0], async_op=True).get_future().then(once_more).wait()
    nested = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again)
    assert within(nested.done), "a future that is waited for where another one completes does not"
    same(nested.wait(), torch.full((2,), size ** 3 + 1.0))
    values = []  # the values of futures are lists of tensors, as gloo's are
    for group in (None, gloo):
        calls = (lambda: dist.all_gather([torch.zeros(1) for _ in range(size)], torch.ones(1) * rank, group=group, async_op=True),
                 lambda: dist.all_to_all_single(torch.zeros(size), torch.ones(size) * rank, group=group, async_op=True),
                 lambda: dist.broadcast(torch.ones(1) * rank, 0, group=group, async_op=True), lambda: dist.barrier(group=group, async_op=True))
        values.append([call().get_future().wait() for call in calls])
    same(*values)
    same(dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(size), async_op=True).get_future().wait(), [torch.tensor([float(size)])])  # gloo has no future of it
    same(dist.all_gather_into_tensor(torch.zeros(size), torch.ones(1), async_op=True).get_future().wait(), [torch.ones(size)])  # gloo has the parts
    table = torch.ones(4, 6).t()  # not dense: its result is copied back, once, whoever waits
    work = dist.all_reduce(table, async_op=True)
    future = work.get_future()
    work.wait()
    same(table, torch.full((6, 4), float(size)))
    table.fill_(7)
    future.wait()
    same(table, torch.full((6, 4), 7.0))
    dist.all_reduce(table, async_op=True)  # nobody waits
    gathered = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(gathered, torch.full((3,), float(rank)), async_op=True)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()  # futures complete in order
    same(table, torch.full((6, 4), 7.0 * size))
    same(gathered, [torch.full((3,), float(other)) for other in range(size)])
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(size)]  # results may go to what PyTorch lets nobody write
    dist.all_gather(parameters, torch.ones(2))
    assert all(parameter.is_leaf and parameter.detach()[0] == 1 for parameter in parameters)
    with torch.inference_mode():
        gathered = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(gathered, torch.ones(2), async_op=True).get_future().wait()
    same(gathered, [torch.ones(2)] * size)
    dist.all_gather(gathered := [torch.zeros(2) for _ in range(size)], torch._neg_view(torch.ones(2)))
    same(gathered, [-torch.ones(2)] * size)
    assert "clone" in str(raises(ValueError, dist.all_reduce, torch.ones(1).expand(3)))
    outputs = [torch.ones(1).expand(3) for _ in range(size)]  # an error while it is copied is the future's, and the next one completes
    raises(RuntimeError, dist.all_gather(outputs, torch.ones(3), async_op=True).get_future().wait)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    big = torch.ones(1 << 18)
    dropped = dist.all_reduce(big, async_op=True)
    del dropped  # its buffers stay until it has ended
    dist.barrier()
    assert big[0] == size
    gathered = [torch.zeros(1 << 14) for _ in range(size)]
    for _ in range(100):  # the thread of futures frees the input, for which it takes Python's lock, while this one asks
        work = dist.all_gather(gathered, torch.ones(1 << 14), async_op=True)
        future = work.get_future()
        while not work.is_completed():
            pass
        future.wait()
    dist.barrier(async_op=True).wait()
    tutti.torch.monitored_barrier()
    tutti.torch.monitored_barrier(None, LONG, wait_all_ranks=True)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # a group in C++ knows numbers of PyTorch's own backends alone
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 1
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # the others count what they have begun, none of which can end without this rank
        assert within(lambda: store.add("counted", 0) == size - 1)
    started = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
    assert backend._get_sequence_number_for_group() == before + 4  # the same on every rank: TORCH_DISTRIBUTED_DEBUG=DETAIL compares them
    store.add("counted", 1)
    for work in started:
        work.wait()
    assert dist.get_backend() == "tutti" and dist.get_rank() == rank and dist.get_world_size() == size
    dropped_after_a_failure()
    if not shimmed():
        interrupted_between_calls(dist.group.WORLD)
    if shimmed():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(2))
            dist.all_gather_into_tensor(torch.ones(2 * size), torch.ones(2), async_op=True).wait()
        assert {"tutti:all_reduce", "tutti:_all_gather_base"} <= {event.name for event in profile.events()}, [event.name for event in profile.events()]


def groups(rank, size, gloo):
    for ranks in ([0], [0, 1], list(range(size)), [size - 1, 0]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == len(set(ranks)) and dist.get_group_rank(group, rank) == sorted(ranks).index(rank)
            dist.destroy_process_group(group)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):  # what is destroyed leaves nothing behind
        group = dist.new_group(list(range(size)))
        dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)
    assert within(lambda: len(os.listdir("/proc/self/task")) < before + 10), os.listdir("/proc/self/task")
    mine, _ = dist.new_subgroups(1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == 1
    local = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if local is not None:
        dist.all_reduce(tensor, group=local)
        assert tensor.item() == 2
    short = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=60))
    dist.barrier(group=short)


def parts(rank, size, gloo):
    """Groups that are split off others: what dist.split_group calls, which itself wants an accelerator. All ranks come, and those of the part alone make it."""
    world, device = dist.group.WORLD, torch.device("cpu")
    options = world._get_backend(device).options
    assert options.backend == "tutti" and options._timeout == LONG and options.global_ranks_in_group == list(range(size)), options.global_ranks_in_group
    copied = copy.deepcopy(options)
    copied._timeout = datetime.timedelta(seconds=50)
    assert world._get_backend(device).options._timeout == LONG and copied.global_ranks_in_group == options.global_ranks_in_group
    assert world._get_backend(device).supports_splitting
    for turn, ranks in enumerate(([0], [1, 0], list(range(size)), [size - 1, 0])):
        part = world.split_group(ranks, timeout=LONG, opts=copy.deepcopy(options), group_name=f"part {turn}", group_desc="of the world")
        assert (part is not None) == (rank in ranks)
        if part is not None:
            assert (part.rank(), part.size(), part.group_name, part.group_desc) == (sorted(ranks).index(rank), len(set(ranks)), f"part {turn}", "of the world")
            assert part._get_backend(device).options.global_ranks_in_group == sorted(set(ranks))
            part.allreduce([tensor := torch.full((3,), rank + 1.0)]).wait()
            same(tensor, torch.full((3,), sum(other + 1.0 for other in set(ranks))))
            if len(ranks) == size > 1:  # and a part of the part
                inner = part.split_group([1], timeout=datetime.timedelta(seconds=1), opts=copy.deepcopy(options), group_name="inner")
                assert (inner is not None) == (rank == 1)
                if inner is not None:
                    assert inner._get_backend(device).options.global_ranks_in_group == [1]
                    inner.barrier().wait()
                    inner.shutdown()
            part.shutdown()
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=77))
    assert group._get_backend(device).options._timeout == datetime.timedelta(seconds=77)
    group.set_timeout(datetime.timedelta(seconds=78))
    assert group._get_backend(device).options._timeout == datetime.timedelta(seconds=78)


def functional(rank, size, gloo):
    import torch.distributed._functional_collectives as funcol
    x = data(rank, (4, 2), torch.float32)
    for ours, theirs in ((funcol.all_reduce(x, "sum", dist.group.WORLD), funcol.all_reduce(x, "sum", gloo)),
                         (funcol.all_gather_tensor(x, 0, dist.group.WORLD), funcol.all_gather_tensor(x, 0, gloo)),
                         (funcol.all_to_all_single(x[:size * (4 // size)], None, None, dist.group.WORLD),
                          funcol.all_to_all_single(x[:size * (4 // size)], None, None, gloo)),
                         (funcol.broadcast(x, 1, dist.group.WORLD), funcol.broadcast(x, 1, gloo))):
        same(funcol.wait_tensor(ours), funcol.wait_tensor(theirs))
    y = data(rank, (size * 2, 2), torch.float32)
    scattered = funcol.wait_tensor(funcol.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD))
    whole = y.clone()
    dist.all_reduce(whole, group=gloo)
    same(scattered, whole[2 * rank:2 * rank + 2])
    pair = funcol.all_reduce_coalesced([x, y], "sum", dist.group.WORLD)
    same(funcol.wait_tensor(pair[1]), whole)
    parts = funcol.all_gather_into_tensor_coalesced([x, y], dist.group.WORLD)
    same(funcol.wait_tensor(parts[0]), funcol.wait_tensor(funcol.all_gather_tensor(x, 0, gloo)))
    if not shimmed():  # PyTorch itself does not hand nothing on to a backend in C++
        assert funcol.all_gather_into_tensor_coalesced([], dist.group.WORLD) == []
    parts = funcol.reduce_scatter_tensor_coalesced([y, y * 2], "sum", [0, 0], dist.group.WORLD)
    same(funcol.wait_tensor(parts[1]), 2 * scattered)


def functional_forms(rank, size, gloo):
    """Other dimensions, reductions and types, results in place and in tensors that are given, messages, and gradients."""
    import torch.distributed._functional_collectives as funcol
    ops, groups = torch.ops._c10d_functional, {group.group_name: group for group in (dist.group.WORLD, gloo)}
    names = list(groups)

    def each(function):
        same(*[[ops.wait_tensor(tensor) for tensor in (found if isinstance(found, list) else [found])] for found in map(function, names)])
    x, z = data(rank, (2 * size, 3, size), torch.float32), torch.view_as_complex(data(rank, (2 * size, 3, 2), torch.float32))
    for dim in (0, 1, -1):
        each(lambda name: funcol.all_gather_tensor(x, dim, name))
        same(funcol.wait_tensor(funcol.reduce_scatter_tensor(x.movedim(0, dim), "sum", dim, names[0])),
             funcol.wait_tensor(funcol.all_reduce(x, "sum", names[1])).chunk(size)[rank].movedim(0, dim))
    for op in ("sum", "product", "min", "max"):
        each(lambda name: funcol.all_reduce(x, op, name))
    for op in ("avg", "sum", "max"):
        whole = funcol.wait_tensor(funcol.all_reduce(x, "sum" if op == "avg" else op, names[1])) / (size if op == "avg" else 1)
        same(funcol.wait_tensor(funcol.all_reduce(x, op, names[0])), whole)
        same(funcol.wait_tensor(funcol.reduce_scatter_tensor(x, op, 0, names[0])), whole.chunk(size)[rank])
        out = torch.empty(2, 3, size)
        assert ops.wait_tensor(ops.reduce_scatter_tensor_out(x, op, size, names[0], out=out)) is out
        same(out, whole.chunk(size)[rank])
    each(lambda name: funcol.all_reduce(z, "sum", name))
    each(lambda name: funcol.all_gather_tensor(z, 0, name))
    each(lambda name: funcol.broadcast(z, size - 1, name))
    rows = data(rank, (sum(k + 1 for k in range(size)), 2), torch.float32)
    each(lambda name: funcol.all_to_all_single(rows, [rank + 1] * size, [k + 1 for k in range(size)], name))
    each(lambda name: funcol.permute_tensor(x.flatten(), [(k + 1) % size for k in range(size)], groups[name]))
    each(lambda name: torch.ops._dtensor.shard_dim_alltoall(x, 2, 0, name))
    each(lambda name: ops.all_reduce_(x.clone(), "sum", name))
    each(lambda name: ops.broadcast_(x.clone(), 1, name))
    each(lambda name: ops.all_reduce_coalesced_([x.clone(), x + 1], "sum", name))
    each(lambda name: ops.all_gather_into_tensor_out(x, size, name, out=torch.empty(size * x.shape[0], *x.shape[1:])))
    if hasattr(ops, "batch_p2p_ops"):  # since PyTorch 2.12
        after, before = (rank + 1) % size, (rank - 1) % size
        each(lambda name: [ops.isend(x, after, 3, name), ops.irecv(torch.empty_like(x), before, 3, name)])
        each(lambda name: ops.batch_p2p_ops(["isend", "irecv", "isend", "irecv"], [after, before, after, before], [0, 0, 1, 1],
                                            [x, torch.empty_like(x), x + 1, torch.empty_like(x)], name))
    found = []
    for name in names:
        gradients = []
        for function in (lambda t: funcol.all_gather_tensor_autograd(t, 0, name), lambda t: funcol.all_gather_tensor_autograd(t, 1, name),
                         lambda t: funcol.reduce_scatter_tensor_autograd(t, "sum", 0, name), lambda t: funcol.all_to_all_single_autograd(t, None, None, name)):
            leaf = x.clone().requires_grad_()
            result = funcol.wait_tensor(function(leaf))
            (result * torch.arange(float(result.numel())).view(result.shape)).sum().backward()
            gradients += [result.detach(), leaf.grad]
        found.append(gradients)
    same(*found)


def compiled(rank, size, gloo):
    import torch.distributed._functional_collectives as funcol

    def function(x, group):
        return funcol.all_reduce(x * 2, "sum", group) + funcol.all_gather_tensor(x, 0, group).sum()
    x = data(rank, (4,), torch.float32)
    for backend in ("aot_eager", "inductor"):  # the second one writes code, and builds it
        found = []
        for group in (dist.group.WORLD, gloo):
            fast = torch.compile(lambda x, group=group: function(x, group), backend=backend, fullgraph=True)
            found.append([fast(x), function(x, group) + 0])
        same(*found)
        same(*found[0])

    def started(x, group):
        work = dist.all_reduce(x, group=group, async_op=True)
        y = x.shape[0] * torch.ones(2)
        work.wait()
        return x + y.sum()
    same(*[torch.compile(lambda x, group=group: started(x, group), backend="aot_eager")(x.clone()) for group in (None, gloo)])
    losses = []
    for group in (None, gloo):  # whose buckets are made anew in the second step, while a compiled program runs
        losses.append(train(torch.compile(nn.parallel.DistributedDataParallel(Network(), process_group=group), backend="aot_eager"), rank))
    same(*losses)


def scaled(rank, size, name):
    """f8 with scales, beside the same numbers in f32."""
    narrow, rows, depth, columns = torch.float8_e4m3fn, 4, 16, 8
    A = [data(other, (rows, depth), torch.float32, 31).to(narrow) for other in range(size)]
    B = data(9, (columns, depth), torch.float32, 32).to(narrow).t()  # as torch._scaled_mm wants it
    a_scales, b_scale = [torch.full((rows, 1), 0.5 + other) for other in range(size)], torch.rand(1, columns, generator=torch.Generator().manual_seed(3)) + 0.5
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(A[rank], [B], a_scales[rank], [b_scale], 0, name, [None], [None], [torch.bfloat16], [True])
    wanted = (torch.cat(A).float() * torch.cat(a_scales)) @ (B.float() * b_scale)
    assert product.dtype == torch.bfloat16 and torch.equal(gathered.float(), torch.cat(A).float())
    torch.testing.assert_close(product.float(), wanted, rtol=0.02, atol=0.05)
    wide = [data(other, (rows * size, depth), torch.float32, 33).to(narrow) for other in range(size)]
    part = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(wide[rank], B, torch.tensor(0.5), torch.tensor(2.0), "sum", 0, 0, name, [rows * size, columns],
                                                                 out_dtype=torch.float32, use_fast_accum=True)
    torch.testing.assert_close(part, sum(each.float() @ B.float() for each in wide).chunk(size)[rank], rtol=1e-3, atol=1e-3)


def metas(rank, size, name):
    """Each operation says of meta tensors what comes of real ones."""
    A, B, inner, wide = (data(rank, shape, torch.bfloat16) for shape in ((2 * size, 3 * size, 8), (8, 2 * size), (8 * size, 5), (5, 3)))
    ours = torch.ops.tutti
    calls = [(ours.one_shot_all_reduce, (x, "sum", name)) for x in (wide, wide.t(), wide[0, 0], wide.float())]
    calls += [(ours.fused_all_gather_matmul, (A, B if dim % 3 < 2 else inner, dim, name)) for dim in (0, 1, 2, -1, -2, -3)]
    calls += [(ours.fused_matmul_reduce_scatter, (A, B, op, dim, name)) for dim in (0, 1, 2, -1, -2, -3) for op in ("sum", "avg")]
    for function, arguments in calls:
        real = function(*arguments)
        meta = function(*[entry.to("meta") if isinstance(entry, torch.Tensor) else entry for entry in arguments])
        assert meta.is_meta and (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride()), (function, arguments[2:], meta.shape, real.shape)
    assert {str(function).replace(".", "::") for function, _ in calls} == {each for each in torch._C._dispatch_get_all_op_names() if each.startswith("tutti::")}


def inner_gradients(rank, size, name):
    """Of operations along the last dimension, which each rank has a part of: those of the same on all ranks' tensors at once. A loss of each rank counts."""
    def parts(shape, salt):
        return [data(other, shape, torch.float64, salt).to(torch.float64).requires_grad_() for other in range(size)]
    for shape in ((3, 4), (2, 3, 4)):
        A, B = parts(shape, 41), parts((4 * size, 5), 42)
        weights = [data(other, (*shape[:-1], 5), torch.float64, 43) for other in range(size)]
        sum((torch.cat(A, -1) @ B[other] * weights[other]).sum() for other in range(size)).backward()
        own = [each[rank].detach().clone().requires_grad_() for each in (A, B)]
        (torch.ops.tutti.fused_all_gather_matmul(own[0], own[1], -1, name) * weights[rank]).sum().backward()
        same([part.grad for part in own], [A[rank].grad, B[rank].grad])
        for op in ("sum", "avg"):
            A, B = parts((*shape[:-1], 4), 44), parts((4, 2 * size), 45)
            weights = [data(other, (*shape[:-1], 2), torch.float64, 46) for other in range(size)]
            whole = sum(a @ b for a, b in zip(A, B)) / (size if op == "avg" else 1)
            (whole * torch.cat(weights, -1)).sum().backward()
            own = [each[rank].detach().clone().requires_grad_() for each in (A, B)]
            (torch.ops.tutti.fused_matmul_reduce_scatter(own[0], own[1], op, -1, name) * weights[rank]).sum().backward()
            same([part.grad for part in own], [A[rank].grad, B[rank].grad])


def symmetric(rank, size, gloo):
    import tutti.torch.symm_mem as symm_mem
    name = dist.group.WORLD.group_name
    tensor = symm_mem.empty(4, 3)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    assert symm_mem.is_symm_mem_tensor(tensor) and not symm_mem.is_symm_mem_tensor(torch.ones(1)) and symm_mem.rendezvous(tensor, name) is handle
    assert handle.rank == rank and handle.world_size == size and handle.buffer_size >= 48
    tensor.fill_(rank)
    handle.barrier()
    after = (rank + 1) % size
    same(handle.get_buffer(after, (4, 3), torch.float32), torch.full((4, 3), float(after)))
    handle.barrier()
    handle.get_buffer(after, (3,), torch.float32, 3).fill_(100 + rank)  # its second row
    handle.put_signal(after)
    handle.wait_signal((rank - 1) % size)
    same(tensor[1], torch.full((3,), 100.0 + (rank - 1) % size))
    raises(dist.DistBackendError, handle.get_buffer, size, (1,), torch.float32)
    raises(dist.DistBackendError, handle.get_buffer, 0, (1 << 20,), torch.float32)
    error = raises(dist.DistBackendError, handle.wait_signal, after, 1, 50)
    assert error.status == "TIMEOUT", error
    raises(ValueError, symm_mem.rendezvous, torch.ones(2), name)
    part = symm_mem.rendezvous(tensor[2:], name)  # the same blocks, from another place on
    assert part.offset == 24 and part.get_remote_tensor(after, (6,), torch.float32).data_ptr() == handle.buffer_ptrs[after] + 24
    del part
    x = symm_mem.empty(1000)
    x.copy_(data(rank, (1000,), torch.float32))
    total = torch.stack([data(other, (1000,), torch.float32) for other in range(size)]).sum(0)
    same(torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name), total)
    same(torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", name), total)
    del tensor, handle, x
    A, B = [data(other, (2, 6, 8), torch.float32) for other in range(size)], data(9, (8, 5), torch.float32)
    for dim in (0, 1, 2):
        whole = torch.cat(A, dim)
        right = B if dim < 2 else data(9, (8 * size, 5), torch.float32)
        gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(A[rank], [right], dim, name)
        same(gathered, whole)
        same(product, whole @ right)
    wide = [data(other, (2 * size, 3 * size, 8), torch.float32, 1) for other in range(size)]
    summed = torch.stack([each @ B for each in wide]).sum(0)
    for dim in (0, 1):
        same(torch.ops.symm_mem.fused_matmul_reduce_scatter(wide[rank], B, "sum", dim, name), summed.chunk(size, dim)[rank])
    scaled(rank, size, name)
    metas(rank, size, name)
    # Gradients: a column-wise and a row-wise layer, against the same on one rank.
    torch.manual_seed(5)
    first, second, rows = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 4 * size), (4 * size, 8), (2 * size, 8)))
    own = [part.clone().requires_grad_() for part in (rows.chunk(size)[rank], first.chunk(size, 1)[rank], second.chunk(size)[rank])]
    hidden = torch.relu(torch.ops.tutti.fused_all_gather_matmul(own[0], own[1].contiguous(), 0, name))
    result = torch.ops.tutti.fused_matmul_reduce_scatter(hidden, own[2], "sum", 0, name)
    result.square().sum().backward()
    reference = [part.clone().requires_grad_() for part in (rows, first, second)]
    expected = torch.relu(reference[0] @ reference[1]) @ reference[2]
    expected.square().sum().backward()
    same(result, expected.chunk(size)[rank])
    same([part.grad for part in own], [reference[0].grad.chunk(size)[rank], reference[1].grad.chunk(size, 1)[rank], reference[2].grad.chunk(size)[rank]])
    leaf = data(rank, (5,), torch.float32).requires_grad_()
    torch.ops.tutti.one_shot_all_reduce(leaf, "sum", name).sum().backward()
    same(leaf.grad, torch.full((5,), float(size)))
    raises(NotImplementedError, torch.ops.tutti.one_shot_all_reduce(leaf, "max", name).sum().backward)
    inner_gradients(rank, size, name)
    words(rank, size, symm_mem)
    splits_that_are_data(rank, size, name, symm_mem)


def words(rank, size, symm_mem):
    """Of 32 bits, and of how many a signal pad has."""
    ones = symm_mem.empty(4, dtype=torch.uint32).zero_()
    for i in range(4):
        assert symm_mem.SymmetricMemory.stream_write_value32(ones, i, 1) is ones
        same(ones.to(torch.int64), torch.tensor([1] * (i + 1) + [0] * (3 - i)))
    zeros = symm_mem.empty(64, dtype=torch.uint32).zero_()
    torch.ops.symm_mem.memset32_(zeros, 32, 1, 16)
    same(zeros.to(torch.int64), torch.tensor([0] * 32 + [1] * 16 + [0] * 16))
    for offset, count in ((0, 64), (63, 1)):
        symm_mem.SymmetricMemory.memset32(zeros, offset, 2**32 - 1, count)
    assert zeros.to(torch.int64).sum() == 64 * (2**32 - 1)
    for call, text in ((lambda: symm_mem.SymmetricMemory.memset32(zeros.view(8, 8), 0, 1), "must be a flat, contiguous uint32 tensor"),
                       (lambda: symm_mem.SymmetricMemory.memset32(zeros[::2], 0, 1), "must be a flat, contiguous uint32 tensor"),
                       (lambda: symm_mem.SymmetricMemory.memset32(zeros.view(torch.int32), 0, 1), "must be a flat, contiguous uint32 tensor"),
                       (lambda: symm_mem.SymmetricMemory.memset32(zeros, -1, 1), "offset must be greater than or equal to 0"),
                       (lambda: symm_mem.SymmetricMemory.memset32(zeros, 0, 1, 0), "count must be a positive integer"),
                       (lambda: symm_mem.SymmetricMemory.memset32(zeros, 0, 2**32), "val must be in the range of"),
                       (lambda: symm_mem.SymmetricMemory.memset32(zeros, 60, 1, 5), "exceeded the numel"),
                       (lambda: torch.ops.symm_mem.stream_write_value32_(zeros, 64, 1), "exceeded the numel"),
                       (lambda: symm_mem.SymmetricMemory.stream_write_value32(zeros, 0, -1), "val must be in the range of")):
        assert text in str(raises(RuntimeError, call)), text
    before = symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(2 * before)
    larger = symm_mem.rendezvous(symm_mem.empty(8), dist.group.WORLD)
    symm_mem.set_signal_pad_size(0)  # the default, which the next one has again
    other = symm_mem.rendezvous(symm_mem.empty(8), dist.group.WORLD)
    assert (larger.signal_pad_size, other.signal_pad_size, symm_mem.get_signal_pad_size()) == (2 * before, before, before)
    assert larger.get_signal_pad(rank).numel() == 2 * before // 4
    raises(dist.DistBackendError, symm_mem.set_signal_pad_size, 6)


def splits_that_are_data(rank, size, name, symm_mem):
    """all_to_all_vdev: rank r sends r + k rows to rank k; with experts r + k + e to the e-th of rank k, and back again."""
    most = 2 * (size * 2 * size * 2 + 2 * 4)  # rows of every block: they are as long on all ranks

    def symmetric_of(value):
        return symm_mem.empty(most, *value.shape[1:], dtype=value.dtype)[:len(value)].copy_(value)

    def rows_of(r, splits):  # of 3 numbers, none twice
        count = int(splits.sum())
        return torch.arange(count * 3, dtype=torch.float32).view(count, 3) + 1000 * r

    counts = [torch.tensor([r + k for k in range(size)]) for r in range(size)]
    sent, splits = symmetric_of(rows_of(rank, counts[rank])), symmetric_of(counts[rank])
    room = sum(int(each[rank]) for each in counts)
    out, found = symm_mem.empty(most, 3).fill_(-1), symm_mem.empty(2, size, dtype=torch.int64).zero_()
    torch.ops.symm_mem.all_to_all_vdev(sent, out, splits, found, name)
    same(out[:room], torch.cat([rows_of(r, counts[r]).split(counts[r].tolist())[rank] for r in range(size)]))
    same(out[room:], torch.full((most - room, 3), -1.0))
    got = torch.stack([each[rank] for each in counts])
    same(found, torch.stack([got, got.cumsum(0) - got]))
    experts, align = 2, 4
    counts = [torch.tensor([[r + k + e for e in range(experts)] for k in range(size)]) for r in range(size)]
    sent, splits = symmetric_of(rows_of(rank, counts[rank])), symmetric_of(counts[rank].flatten())
    out, found = symm_mem.empty(most, 3).fill_(-1), symm_mem.empty(2, experts * size, dtype=torch.int64).zero_()
    torch.ops.symm_mem.all_to_all_vdev_2d(sent, out, splits, found, name, align)
    for expert in range(experts):
        assert int(found[1, expert * size]) % align == 0
        for r in range(size):
            parts = rows_of(r, counts[r]).split(counts[r].flatten().tolist())
            at, number = int(found[1, expert * size + r]), int(found[0, expert * size + r])
            same(out[at:at + number], parts[rank * experts + expert])
    back, places = symmetric_of(torch.full_like(sent, -1)), symm_mem.empty(2, experts * size, dtype=torch.int64).zero_()
    torch.ops.symm_mem.all_to_all_vdev_2d_offset(out, back, found, places, name)
    same(back, sent)
    same(places[0], splits)
    for arguments in ((sent, out[:, :2].contiguous(), splits, found), (sent, out, splits.to(torch.int32), found), (sent, out, splits, found[0])):
        raises(ValueError, torch.ops.symm_mem.all_to_all_vdev_2d, *arguments, name)


def errors(rank, size, gloo):
    text = str(raises(TypeError, dist.all_reduce, torch.eye(2).to_sparse()))
    assert "sparse" in text and "to_dense" in text, text
    raises(ValueError, dist.all_gather_into_tensor, torch.empty(3), torch.empty(2))
    raises(ValueError, dist.all_to_all_single, torch.empty(size), torch.empty(size), [1] * size, [2] * size)
    raises(ValueError, dist.all_to_all_single, torch.empty(size), torch.empty(size), [-1, 3] + [1] * (size - 2), [1] * size)
    group = dist.group.WORLD
    for outputs, inputs in ((1, 2), (2, 1)):
        raises(ValueError, group.allgather_into_tensor_coalesced, [torch.zeros(2 * size)] * outputs, [torch.ones(2)] * inputs)
        raises(ValueError, group.reduce_scatter_tensor_coalesced, [torch.zeros(2)] * outputs, [torch.ones(2 * size)] * inputs)
    for lists in ([[torch.zeros(2)]] * size, [[torch.zeros(3)]] * (size + 1), [[]] * size):  # too short, too many ranks, too few tensors
        raises(ValueError, dist.all_gather_coalesced, lists, [torch.ones(3)])
    raises(TypeError, dist.all_gather_coalesced, [[torch.zeros(3, dtype=torch.int32)]] * size, [torch.ones(3)])
    error = raises(dist.DistBackendError, dist.all_reduce, torch.ones(2 + (rank == 0)), group=dist.new_group(list(range(size))))
    assert error.status == "MISMATCH", error
    late = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=1))
    if rank != 1:
        error = raises(dist.DistBackendError, dist.all_reduce, torch.ones(2), group=late)
        assert error.status == "TIMEOUT" and error.ranks == (1,), error
    late = dist.new_group(list(range(size)))
    late.set_timeout(datetime.timedelta(seconds=1))  # from now on
    if rank != 1:
        error = raises(dist.DistBackendError, dist.all_reduce, torch.ones(2), group=late)
        assert error.status == "TIMEOUT" and error.ranks == (1,), error
    late = dist.new_group(list(range(size)))
    if rank == 0:
        error = raises(dist.DistBackendError, tutti.torch.monitored_barrier, late, datetime.timedelta(seconds=1), True)
        assert error.status == "TIMEOUT" and error.ranks == tuple(range(1, size)), error
    ended = dist.new_group(list(range(size)))
    dist.barrier(group=ended)
    if rank == 0:
        ended.abort()
    assert raises(dist.DistBackendError, dist.barrier, group=ended).status == "ABORTED"


def twice(rank, size, gloo):
    import tutti.torch.symm_mem  # noqa: F401
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()  # starts the thread of futures
    left = dist.all_reduce(torch.ones(1), async_op=True)
    dist.barrier()
    dist.destroy_process_group()
    left.get_future().wait()  # which has ended with the group
    dist.init_process_group("tutti", rank=rank, world_size=size, store=dist.FileStore(os.environ["TEST_MEET"] + "-again", size), timeout=LONG)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    same(torch.ops.tutti.one_shot_all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name), torch.full((3,), float(size)))
    if not shimmed():
        mixed = str(raises(ValueError, dist.new_group, list(range(size)), backend="cpu:tutti,cuda:gloo"))
        assert "tutti" in mixed, mixed
        return
    both = dist.new_group(list(range(size)), backend="cpu:tutti,cuda:gloo")
    dist.all_reduce(tensor, group=both)
    dist.barrier(group=both)
    assert tensor.item() == size * size and type(both._get_backend(torch.device("cuda"))) is dist.ProcessGroupGloo


def tcp_store(rank, size, gloo):
    """env:// and tcp:// with a server that outlives the groups, as torchrun's does: each group meets in it anew."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True) if rank == 0 else None  # rank 0 finds its own again
    port = [server.port if rank == 0 else None]
    dist.broadcast_object_list(port, 0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]), RANK=str(rank), WORLD_SIZE=str(size))
    turn = 0
    for method, named in (("env://", {}), (f"tcp://127.0.0.1:{port[0]}", {"rank": rank, "world_size": size})):
        for _ in range(2):
            dist.destroy_process_group()
            dist.init_process_group("tutti", init_method=method, timeout=LONG, **named)
            turn += 1
            assert int(tutti.torch.member.member_of(dist.group.WORLD)._store.get(f"tutti/turns/{rank}")) == turn
            dist.all_reduce(tensor := torch.ones(1))
            assert tensor.item() == size
            pair = dist.new_group(list(range(size)))
            dist.barrier(group=pair)


def interrupts(rank, size, gloo):
    """Ctrl-C ends the waits of the main thread: for a work whose future is waited for, too, and for ranks that do not come when a group opens."""
    def interrupted(function, *arguments, **named):
        def both():
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            function(*arguments, **named)
        raises(KeyboardInterrupt, both)
    def handled(signal_number, frame):
        heard.append(signal_number)
    heard, before = [], signal.signal(signal.SIGINT, handled)  # with a handler that raises nothing a wait goes on
    work = dist.all_reduce(torch.ones(1 << 16), async_op=True) if rank == 0 else None
    if rank == 0:
        threading.Timer(0.3, lambda: (os.kill(os.getpid(), signal.SIGINT), dist.barrier(group=gloo))).start()
        assert work.wait() and heard == [signal.SIGINT]
    else:
        dist.barrier(group=gloo)  # rank 0 was sent it by now
        dist.all_reduce(torch.ones(1 << 16))
    signal.signal(signal.SIGINT, before)
    for _ in range(10):  # one that was heard before a call does not end it
        if rank == 0:
            raises(KeyboardInterrupt, lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(300)))
            threading.Timer(0.02, lambda: dist.barrier(group=gloo)).start()
        else:
            dist.barrier(group=gloo)
        dist.all_reduce(torch.ones(1))
    alone, at_once = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    if rank == 0:
        interrupted(dist.all_reduce, torch.ones(4), group=at_once)
        work = dist.all_reduce(torch.ones(1 << 16), group=alone, async_op=True)
        future = work.get_future()
        interrupted(work.wait)
        alone.abort()
        raises(RuntimeError, future.wait)
        store = dist.FileStore(os.environ["TEST_MEET"] + "-alone", 2)
        config = dist.distributed_c10d._DistributedBackendOptions()
        config.store, config.group_rank, config.group_size, config.timeout = store, 0, 2, LONG
        interrupted(tutti.torch.group.create, config, None)
        config.timeout = datetime.timedelta(seconds=0.2)
        error = raises(dist.DistBackendError, tutti.torch.group.create, config, None)
        assert error.status == "TIMEOUT" and error.ranks == (1,) and "rank 1 did not come" in str(error), error
    dist.barrier()


def death(rank, size, gloo):
    """The last rank dies in the middle of a step of DDP: everybody else hears which one, and nobody hangs."""
    model = nn.parallel.DistributedDataParallel(Network(), process_group=None)
    train(model, rank, 1)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raises(RuntimeError, train, model, rank, 3)
    assert f"rank {size - 1}" in str(error), error
    error = raises(dist.DistBackendError, dist.barrier)
    assert error.status == "DEAD" and error.ranks == (size - 1,), error


if __name__ == "__main__":
    run_all([("reductions+premultiplied+moves+messages+works+groups+parts+functional+functional_forms", 2), ("premultiplied+moves+messages+groups+parts+errors+functional_forms", 3), ("symmetric+compiled+interrupts+twice+tcp_store", 2),
             ("symmetric", 3), ("death", 3)])
