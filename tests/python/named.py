#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The operations on symmetric memory under PyTorch's names, on NumPy arrays of several ranks, compared with what NumPy computes."""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip  # noqa: E402

os.environ["TUTTI_MULTICAST"] = "software"
import tutti  # noqa: E402

try:
    import numpy
except ImportError:
    skip("NumPy is not installed")
from tutti import named  # noqa: E402


def filled(world, shape, dtype="f32"):
    """Symmetric memory with other numbers on each rank, and those of all ranks."""
    memory = world.empty(shape, dtype)
    everybody = [numpy.random.default_rng(rank).integers(-9, 9, shape).astype(memory.array.dtype) for rank in range(world.size)]
    memory.array[:] = everybody[world.rank]
    return memory, everybody


def reductions(world):
    group, rank, size = world.group, world.rank, world.size
    memory, everybody = filled(world, (4, 6))
    total = sum(everybody)
    for function in (named.one_shot_all_reduce, named.two_shot_all_reduce_out, named.multimem_one_shot_all_reduce):
        assert (function(group, memory.array) == total).all() and (function(group, memory.array, "max") == numpy.max(everybody, 0)).all()
    out = numpy.empty((4, 6), "f4")
    assert named.one_shot_all_reduce(group, memory.array, out=out) is out and (out == total).all()
    buffer = world.empty(64)
    assert (named.one_shot_all_reduce_copy(group, buffer.array, everybody[rank].copy()) == total).all()
    wrong = raises(TypeError, named.one_shot_all_reduce, memory.rendezvous(), memory.array)
    assert "Group" in str(wrong) and "Peers" in str(wrong) and "one_shot_all_reduce" in str(wrong), wrong
    raises(TypeError, named.tile_reduce, world, memory.array)
    raises(tutti.Error, named.one_shot_all_reduce_copy, group, world.empty(3).array, everybody[rank].copy())  # too short
    assert (named.reduce_scatter_out(group, memory.array) == total[4 // size * rank:4 // size * (rank + 1)]).all()
    assert (named.reduce_scatter_out(group, memory.array, split_last_dim=True) == total[:, 6 // size * rank:6 // size * (rank + 1)]).all()
    assert (named.low_contention_reduce_scatter(group, memory.array) == total[4 // size * rank:4 // size * (rank + 1)]).all()
    assert (named.low_contention_all_gather(group, memory.array) == everybody).all()
    reduced = named.multimem_one_shot_reduce_out(group, memory.array, root=1)
    assert (reduced == total).all() if rank == 1 else reduced is None
    gathered = world.empty((size, 4, 6))
    assert (named.multimem_all_gather_out(group, memory.array, gathered.array) == everybody).all()
    gathered.array[:] = 0
    group.barrier()
    assert (named.low_contention_all_gather(group, everybody[rank].copy(), gathered.array, multicast=True) == everybody).all()
    assert named.two_shot_all_reduce_(group, memory.array) is not None and (memory.array == total).all()
    again, everybody = filled(world, 5, "i64")
    assert (named.multimem_all_reduce_(group, again.array) == sum(everybody)).all()
    raises(tutti.Error, named.one_shot_all_reduce, group, numpy.zeros(3, "f4"))  # not symmetric
    raises(ValueError, named.low_contention_reduce_scatter, group, numpy.zeros(3, "f4"))


def rows(world):
    """Tokens for experts, there and back."""
    group, rank, size = world.group, world.rank, world.size
    splits, result = world.empty(size, "i64"), world.empty((2, size), "i64")
    source, out = world.empty((8, 3)), world.empty((16, 3))
    splits.array[:] = [rank + 1] * size
    source.array[:] = rank
    named.all_to_all_vdev(group, source.array, splits.array, out.array, result.array)
    assert result.array[0].tolist() == [r + 1 for r in range(size)] and result.array[1].tolist() == [sum(range(1, r + 1)) for r in range(size)]
    assert out.array[:sum(range(1, size + 1)), 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    experts = 2
    splits, result, back = world.empty((size, experts), "i64"), world.empty((2, experts * size), "i64"), world.empty((2, experts * size), "i64")
    splits.array[:] = 1
    source.array[:4, 0] = [10 * rank + i for i in range(4)]
    named.all_to_all_vdev_2d(group, source.array, splits.array, out.array, result.array, experts, major_align=4)
    assert out.array[0, 0] == experts * rank and result.array[1].tolist() == [0, 1, 4, 5]
    home = world.empty((8, 3))
    named.all_to_all_vdev_2d_offset(group, out.array, result.array, home.array, back.array, experts)
    assert home.array[:4, 0].tolist() == source.array[:4, 0].tolist()
    raises(ValueError, named.all_to_all_vdev, group, source.array, splits.array, out.array, result.array)
    raises(ValueError, named.all_to_all_vdev, group, source.array, numpy.zeros(size, "i4"), out.array, result.array)
    raises(ValueError, named.all_to_all_vdev, group, source.array, world.empty(size, "i64").array, world.empty((4, 2)).array, world.empty((2, size), "i64").array)


def tiles(world):
    group, rank, size = world.group, world.rank, world.size
    memory, everybody = filled(world, (4, 6), "i64")
    total, matrix = sum(everybody), memory.array
    found = named.tile_reduce(group, matrix[1:3, 2:5], root=1)
    assert (found == total[1:3, 2:5]).all() if rank == 1 else found is None
    into = numpy.zeros((4, 4), numpy.int64)
    named.tile_reduce(group, matrix[:2, :2], into[1:3, 1:3], op="max")
    if rank == 0:
        assert (into[1:3, 1:3] == numpy.max(everybody, 0)[:2, :2]).all() and into[0].sum() == into[:, 0].sum() == 0
    parts = named.multi_root_tile_reduce(group, [matrix[:2, :3], matrix[2:, 3:], matrix[:1]], [1, 0, 0])
    wanted = [None, total[2:, 3:], total[:1]] if rank == 0 else [total[:2, :3], None, None] if rank == 1 else [None] * 3
    assert all(part is want if want is None else (part == want).all() for part, want in zip(parts, wanted))
    rows_ = named.reduce_scatter_offset(group, matrix, [1, 4])
    assert len(rows_) == (rank < 2) and (rank > 1 or (rows_[0] == (total[:1], total[1:])[rank]).all())
    columns = named.reduce_scatter_offset(group, matrix, [2, 3, 6], dim=1, targets=[1, 1, 0])
    wanted = [total[:, 3:]] if rank == 0 else [total[:, :2], total[:, 2:3]]
    assert len(columns) == len(wanted) and all((part == want).all() for part, want in zip(columns, wanted))
    whole = named.all_gather_offset(group, matrix, [3, 20])
    assert [part.tolist() for part in whole] == [numpy.concatenate([m.ravel()[a:b] for m in everybody]).tolist() for a, b in ((0, 3), (3, 23))]
    sent, everybody = filled(world, (2, 2 * size, 3))
    dealt = named.all_to_all_nd(group, sent.array, 1)
    assert (dealt == numpy.concatenate([m[:, 2 * rank:2 * rank + 2] for m in everybody])).all()
    back = world.empty(dealt.shape)
    back.array[:] = dealt
    assert (named.all_to_all_nd(group, back.array, 0) == everybody[rank]).all()
    raises(ValueError, named.all_to_all_nd, group, sent.array, 2)
    raises(TypeError, named.tile_reduce, group, matrix[0])
    raises(ValueError, named.tile_reduce, group, matrix[:, ::2])
    raises(ValueError, named.multi_root_tile_reduce, group, [matrix], [0, 1])
    raises(ValueError, named.all_gather_offset, group, matrix, [30])
    raises(TypeError, named.multi_root_tile_reduce, group, [matrix, numpy.ones((2, 2), "f4")], [0, 1])
    if rank == 0:  # the root's alone, and so found before anybody is met
        raises(TypeError, named.tile_reduce, group, matrix, numpy.zeros((4, 6), "i4"))
        raises(TypeError, named.multi_root_tile_reduce, group, [matrix], [0], [numpy.zeros((4, 6), "i4")])


def results_that_do_not_fit(world):
    """Nothing is written beyond an out that is too short."""
    group, size = world.group, world.size
    memory = world.empty((2 * size, 3))
    array, short = memory.array, numpy.zeros(2, "f4")
    for function in (named.one_shot_all_reduce, named.two_shot_all_reduce_out, named.low_contention_all_gather, named.low_contention_reduce_scatter,
                     named.multimem_all_gather_out, named.multimem_one_shot_all_reduce, named.reduce_scatter_out):
        raises(ValueError, function, group, array, out=short)
        raises(TypeError, function, group, array, out=numpy.zeros(array.shape, "i4"))
    raises(ValueError, named.one_shot_all_reduce_copy, group, array, numpy.ones(6, "f4"), out=short)
    raises(TypeError, named.one_shot_all_reduce_copy, group, array, numpy.ones(2, "i4"))
    assert short.tolist() == [0, 0]


def blocks(world):
    """Persistent memory, and options of a block."""
    first = world.empty(8, "i64", persistent_id=5)
    first.array[:] = 7
    address = first.array.ctypes.data
    first._release()
    again = world.empty(8, "i64", persistent_id=5)
    assert again.array.ctypes.data == address and again.array.tolist() == [7] * 8
    raises(tutti.StateError, world.empty, 8, "i64", persistent_id=5)  # still active
    assert world.empty(3, alignment=4096).array.ctypes.data % 4096 == 0
    raises(ValueError, world.empty, 3, alignment=3)


def together():
    with tutti.World() as world:
        reductions(world)
        rows(world)
        tiles(world)
        results_that_do_not_fit(world)
        blocks(world)
        world.group.barrier()


def named_operations_compute_what_numpy_does():
    tutti.spawn(together, 2)


if __name__ == "__main__":
    run((named_operations_compute_what_numpy_does,))
