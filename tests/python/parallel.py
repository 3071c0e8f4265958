#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors of several ranks from Python: collectives with gradients, symmetric tensors, training in parallel, errors, deaths and Ctrl-C."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip  # noqa: E402
import tutti  # noqa: E402

try:
    import numpy
except ImportError:
    skip("NumPy is not installed")


def same(ours, theirs, tolerance=1e-5):
    numpy.testing.assert_allclose(numpy.asarray(ours.detach()), theirs, rtol=tolerance, atol=tolerance)


# ---- what ranks do ----

def collectives(group):
    from tutti import tensor as tt
    rank, size = group.rank, group.size
    x = tt.full((2, 3), rank + 1.0, requires_grad=True)
    total = size * (size + 1) / 2
    same(tt.all_reduce(x, group), numpy.full((2, 3), total))
    same(x.all_reduce(group, "max"), numpy.full((2, 3), size))
    gathered = tt.all_gather(x, group, dim=1)
    assert gathered.shape == (2, 3 * size)
    (gathered * tt.arange(3 * size, dtype="f32")).sum().backward()
    same(x.grad, numpy.tile(size * (3 * rank + numpy.arange(3)), (2, 1)))
    same(tt.reduce_scatter(tt.ones((2 * size, 3)), group), numpy.full((2, 3), size))
    same(tt.broadcast(x.detach(), group, root=1), numpy.full((2, 3), 2))
    splits = [rank + 1] * size
    moved = tt.all_to_all_single(tt.full((size * (rank + 1),), float(rank)), group, out_splits=[r + 1 for r in range(size)], in_splits=splits)
    same(moved, numpy.repeat(numpy.arange(size), numpy.arange(size) + 1))
    raises(ValueError, tt.all_to_all_single, x, group, [1], [1])
    same(tt.permute_ranks(x.detach(), [(r + 1) % size for r in range(size)], group), numpy.full((2, 3), (rank - 1) % size + 1))
    both = tt.all_reduce_coalesced([tt.ones(2), tt.ones(3)], group)
    assert [tensor.tolist() for tensor in both] == [[size] * 2, [size] * 3]
    parts = tt.reduce_scatter_coalesced([tt.ones((size, 2)), tt.ones((2, size))], [0, 1], group)
    assert [tensor.shape for tensor in parts] == [(1, 2), (2, 1)]
    assert [rows.shape for rows in tt.all_gather_list(tt.ones((rank + 1, 2)), group, rows=[r + 1 for r in range(size)])] == [(r + 1, 2) for r in range(size)]
    y = tt.ones(4)
    assert y.all_reduce_(group) is y and y.tolist() == [size] * 4
    after, before = (rank + 1) % size, (rank - 1) % size
    got = tt.zeros(2)
    marks = tt.batch_p2p([("send", tt.full(2, float(rank)), after, 5), ("recv", got, before, 5)], group)
    for mark in marks:
        mark.wait()
    assert got.tolist() == [before] * 2
    shard, weight = tt.full((2, 3), float(rank)), tt.randn((3, 4))
    gathered, (product,) = tt.fused_all_gather_matmul(shard, [weight], group, return_gathered=True)
    same(product, numpy.repeat(numpy.arange(size), 2)[:, None] * numpy.ones((1, 3)) @ weight.numpy())
    assert gathered.shape == (2 * size, 3)
    part = tt.fused_matmul_reduce_scatter(tt.ones((2 * size, 3)), tt.ones((3, 4)), 0, group)
    same(part, numpy.full((2, 4), 3 * size))
    late = tt.all_gather(x.detach(), group)
    assert tt.pending_works(group.world) > 0  # among those that nobody has read
    tt.wait_all(group.world)
    assert not late.is_async and tt.pending_works(group.world) == 0


def symmetric(group):
    from tutti import tensor as tt
    rank, size, world = group.rank, group.size, group.world
    x = tt.symm_empty(world, (4,), group=group)
    assert tt.is_symmetric(x) and x.tolist() == [0] * 4 and not tt.is_symmetric(tt.ones(1))
    x.fill_(rank)
    same(tt.one_shot_all_reduce(x, group), numpy.full(4, sum(range(size))))
    beside = tt.peer_tensor(x, (rank + 1) % size, group)
    group.barrier()
    assert beside.tolist() == [(rank + 1) % size] * 4
    group.barrier()
    beside[0] = 100 + rank
    group.barrier()
    assert x[0].item() == 100 + (rank - 1) % size
    pool = tutti.tensor.SymmetricPool(world)
    with pool.use(group):
        y = tt.ones(8) * (rank + 1)
    assert tt.is_symmetric(y)
    same(tt.one_shot_all_reduce(y, group), numpy.full(8, size * (size + 1) / 2))


def network(nn, tt):
    tt.seed(1)
    return nn.Sequential(nn.Linear(4, 8), tt.tanh, nn.Linear(8, 2))


def trained(nn, tt, optim, make, rows, count=3):
    net = network(nn, tt)
    helper = make(net)
    optimizer = optim.SGD(net, learning_rate=0.1, momentum=0.9)
    data = numpy.random.default_rng(3).standard_normal((8, 4)).astype("f4")
    for _ in range(count):
        loss = (net(tt.from_numpy(data[rows].copy())) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, helper, optimizer


def parallel(group):
    from tutti import nn, optim, parallel as parallel_, tensor as tt
    rank, size = group.rank, group.size
    rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
    alone, *_ = trained(nn, tt, optim, lambda net: None, slice(0, 8))
    wanted = {name: tensor.detach().numpy() for name, tensor in alone.named_parameters()}
    net, helper, _ = trained(nn, tt, optim, lambda net: parallel_.DataParallel(net, group), rows)
    for name, tensor in net.named_parameters():
        same(tensor, wanted[name], 1e-4)
    assert helper.counts()["backwards"] == 3
    with helper.no_sync():
        net(tt.ones((1, 4)) * (rank + 1)).sum().backward()
    helper.close()
    net, helper, optimizer = trained(nn, tt, optim, lambda net: parallel_.FullySharded(net, group, units=[net[0]]), rows)
    for name, tensor in helper.named_parameters():
        same(tensor, wanted[name], 1e-4)
    assert net[0].weight.shape == (8 // size, 4) and helper.counts()["units"] == 2
    helper.switch("free_forward", False, net[0])
    helper.prefetch(net, [net[0]])
    helper.prefetch(net[0], [], backward=True)
    gathers = helper.counts()["gathers"]
    net(tt.ones((1, 4)) * (rank + 1)).sum().backward()
    assert helper.counts()["gathers"] == gathers + 2
    largest = optim.clip_grad_norm([tensor for _, tensor in net.named_parameters()], 1e-3, group, p=float("inf"), finite=True).item()
    assert largest > 1e-3
    again = optim.clip_grad_norm([tensor for _, tensor in net.named_parameters()], 1.0, group, p=float("inf")).item()
    assert abs(again - 1e-3) < 1e-6
    raises(ValueError, helper.switch, "free", True)
    raises(tutti.Error, helper.switch, "replicas", False)
    folder = group.broadcast(numpy.frombuffer(tempfile.mkdtemp().ljust(200).encode(), "u1").copy()).tobytes().decode().strip()
    helper.save(folder, optimizer)
    helper.load_parameters({name: tensor * 0 for name, tensor in helper.named_parameters()})
    helper.load(folder, optimizer)
    for name, tensor in helper.named_parameters():
        same(tensor, wanted[name], 1e-4)
    helper.close()
    buckets, seen = [], []

    def reduce(bucket):
        buckets.append((bucket.number, bucket.total, [gradient.shape for gradient in bucket.gradients]))
        bucket.values.all_reduce_(bucket.group, "avg")
    net, helper, _ = trained(nn, tt, optim, lambda net: parallel_.DataParallel(net, group, reduce=reduce), rows)
    for name, tensor in net.named_parameters():
        same(tensor, wanted[name], 1e-4)
    assert len(buckets) == helper.counts()["reductions"] and sum(len(shapes) for _, _, shapes in buckets) == 3 * len(wanted), buckets
    helper.close()
    net, helper, _ = trained(nn, tt, optim, lambda net: parallel_.FullySharded(net, group, units=[net[0]], watch=lambda *event: seen.append(event),
                                                                              dimension=lambda name, parameter: parameter.ndim - 1), rows)
    for name, tensor in helper.named_parameters():
        same(tensor, wanted[name], 1e-4)
    assert net[0].weight.shape == (8, 4 // size) and {kind for kind, unit in seen} >= {"gather", "free", "reduce"} and {unit for kind, unit in seen} == {"", "0"}, seen
    helper.close()
    tt.seed(9)
    first, second = nn.ColumnLinear(4, 8, group), nn.RowLinear(8, 4, group)
    tt.seed(9)
    whole_first, whole_second = nn.Linear(4, 8), nn.Linear(8, 4)
    x = tt.ones((2, 4))
    same(second(first(x).relu()), whole_second(whole_first(x).relu()).detach().numpy())
    fast = tutti.compile(lambda x: tt.all_reduce(x * 2, group).sum(), full=True)
    assert [fast(tt.ones(3)).item() for _ in range(3)] == [6 * size] * 3


def pipelines(group):
    """Work of one's own on shards as they come, and on chunks before they go."""
    from tutti import tensor as tt
    rank, size = group.rank, group.size
    shard, seen = tt.full((2, 3), float(rank + 1)), []
    gathered = tt.zeros((2 * size, 3))
    tt.pipelined_all_gather_and_consume([shard], lambda shards, source: seen.append((source, shards[0].sum().item())), group, [gathered])
    assert seen[0][0] == rank and sorted(seen) == [(source, 6.0 * (source + 1)) for source in range(size)], seen
    same(gathered, numpy.repeat(numpy.arange(1, size + 1), 2)[:, None] * numpy.ones((1, 3)))
    tt.pipelined_all_gather_and_consume([shard, tt.ones(4)], lambda shards, source: seen.append(len(shards)), group)
    assert seen[-size:] == [2] * size
    output, order = tt.zeros((2 * size, 3)), []

    def produce(to, out):
        order.append(to)
        out.fill_(float(10 * rank + to))
    tt.pipelined_produce_and_all_to_all(produce, output, group)
    assert order[-1] == rank and sorted(order) == list(range(size)) and output[:, 0].tolist() == [10.0 * source + rank for source in range(size) for _ in range(2)]
    tt.pipelined_produce_and_all_to_all(lambda to, out: out.fill_(float(rank)), output.reshape(2, 3 * size), group, chunk_dim=1)
    assert tt.fused_workspace_bytes(group) > 0 and tt.waited(group.world) >= 0


def failing_pipelines():
    """What a consumer or a producer raises is raised, and ends the group for the others with its words."""
    from tutti import tensor as tt
    with tutti.World() as world:
        def work(*given):
            if world.rank == 0:
                raise ZeroDivisionError("in the middle")
        group = world.new_group(range(world.size))
        if world.rank == 0:
            raises(ZeroDivisionError, tt.pipelined_all_gather_and_consume, [tt.ones(2)], work, group)
        else:
            try:
                tt.pipelined_all_gather_and_consume([tt.ones(2)], work, group)
            except tutti.AbortedError as error:  # unless it had all of it already
                assert "in the middle" in str(error), error
        group = world.new_group(range(world.size))
        error = raises(ZeroDivisionError if world.rank == 0 else tutti.AbortedError, tt.pipelined_produce_and_all_to_all, work, tt.ones(4), group)
        assert "in the middle" in str(error), error
        world.group.barrier()


def together():
    with tutti.World() as world:
        collectives(world.group)
        pipelines(world.group)
        symmetric(world.group)
        parallel(world.group)
        world.group.barrier()


def mismatched():
    from tutti import tensor as tt
    with tutti.World() as world:
        error = raises(tutti.MismatchError, lambda: tt.all_reduce(tt.ones(2 + world.rank), world).tolist())
        assert error.operation == "all_reduce"


def dying():
    from tutti import tensor as tt
    with tutti.World() as world:
        tt.all_reduce(tt.ones(2), world).wait()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error = raises(tutti.DeadError, lambda: tt.all_reduce(tt.ones(2), world).tolist())
        assert error.ranks == (1,)


# ---- tests ----

def ranks_compute_together():
    for ranks in (2, 4) if os.environ.get("TEST_LONG") else (2,):
        tutti.spawn(together, ranks)


def mismatches_and_deaths_are_exceptions():
    tutti.spawn(mismatched, 2)
    tutti.spawn(failing_pipelines, 2)
    error = raises(tutti.DeadError, tutti.spawn, dying, 2)
    assert error.ranks == (1,)


def ctrl_c_ends_a_wait_for_a_tensor():
    program = ("import os, sys, tutti\n"
               "from tutti import tensor as tt\n"
               "world = tutti.World()\n"
               "tt.all_reduce(tt.ones(2), world).wait()\n"
               "if world.rank == 1:\n"
               "    world.store.wait('over', timeout=300)\n"
               "    sys.exit(0)\n"
               "try:\n"
               "    late = tt.all_reduce(tt.ones(2), world)\n"
               "    print('waits', os.getpid(), flush=True)\n"
               "    late.tolist()\n"
               "except KeyboardInterrupt:\n"
               "    print('heard', flush=True)\n"
               "    world.store.set('over', '')\n")
    child = subprocess.Popen([sys.executable, "-m", "tutti.run", "-n", "2", sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    words = child.stdout.readline().split()
    assert words[-2] == "waits", words
    time.sleep(0.2)  # it most probably waits by now; earlier is right, too
    os.kill(int(words[-1]), signal.SIGINT)
    output = child.communicate(timeout=300)[0]
    assert "heard" in output, output


def the_example_trains():
    source = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).parent.parent.parent))
    ran = subprocess.run([sys.executable, "-m", "tutti.run", "-n", "2", str(source / "examples/python_train.py"), "61"], capture_output=True, text=True, timeout=600)
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines() if "loss" in line]
    assert ran.returncode == 0 and losses[-1] < losses[0] / 2, (ran.stdout, ran.stderr)
    assert ran.stdout.count("writes cdefghij") == 2, ran.stdout


def the_example_of_numpy_fits_a_line():
    source = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).parent.parent.parent))
    ran = subprocess.run([sys.executable, "-m", "tutti.run", "-q", "-n", "3", str(source / "examples/python_numpy.py")], capture_output=True, text=True, timeout=600)
    lines = [line.partition(": y")[2] for line in ran.stdout.splitlines()]
    assert ran.returncode == 0 and len(lines) == 3 and len(set(lines)) == 1, (ran.stdout, ran.stderr)
    assert "= 3.00" in lines[0] and "all ranks have the same: True" in lines[0], ran.stdout


if __name__ == "__main__":
    run((the_example_trains, the_example_of_numpy_fits_a_line, ranks_compute_together, mismatches_and_deaths_are_exceptions, ctrl_c_ends_a_wait_for_a_tensor))
