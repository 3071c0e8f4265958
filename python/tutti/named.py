# SPDX-License-Identifier: Apache-2.0
"""The operations on symmetric memory that people know from PyTorch, under their own names, on arrays:

    from tutti import named

    memory = world.empty((4, 6), "f32")
    named.two_shot_all_reduce_(world.group, memory.array)

Arrays that a function calls symmetric lie in blocks of World.empty (Memory.array, and parts of it); a block that was not rendezvoused with the group is at its first
use. Of tensors tutti.tensor has the same functions. Ranks call them together, as all collectives; op is a reduction, timeout is in seconds."""
from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar, cast

from ._arguments import integer, integers, sizes
from ._library import lib, struct
from .buffers import buffer_of, new_like
from .world import Group, reduction_number

__all__ = ["all_gather_offset", "all_to_all_nd", "all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "low_contention_all_gather",
           "low_contention_reduce_scatter", "multi_root_tile_reduce", "multimem_all_gather_out", "multimem_all_reduce_", "multimem_one_shot_all_reduce",
           "multimem_one_shot_reduce_out", "one_shot_all_reduce", "one_shot_all_reduce_copy", "reduce_scatter_offset", "reduce_scatter_out", "tile_reduce",
           "two_shot_all_reduce_", "two_shot_all_reduce_out"]
_Rows, _Tile = struct("tutti_rows"), struct("tutti_tile")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _of_group(function: _Function) -> _Function:
    """A function whose first argument must be a Group: Peers have a rank and a size, too."""
    @functools.wraps(function)
    def checked(group: Group, *arguments: Any, **named: Any) -> Any:
        if not isinstance(group, Group):
            raise TypeError(f"{function.__name__}: the first argument is a Group (World.group, Peers.group), not {type(group).__name__}")
        return function(group, *arguments, **named)
    return cast(_Function, checked)


def _both(group: Group, function: Any, array: Any, out: Any, shape: Any, *more: Any, timeout: Optional[float], count: Optional[int] = None,
          wanted: Optional[int] = None) -> Any:
    """function(group, in, out, count, dtype, ...): out is made where none is given. wanted: how many elements it has, where that is another number than the input's."""
    source, target, out = group._pair(function.__name__, array, out, shape)
    group._length(function.__name__, target, wanted if wanted is not None else source.count)
    return group._run(function, (source.address, target.address, source.count if count is None else count, source.number, *more), out, (source, target), True, timeout)


def _shape(array: Any) -> Tuple[int, ...]:
    return tuple(buffer_of(array).shape)


# ---- all-reduce ----

@_of_group
def one_shot_all_reduce(group: Group, array: Any, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """Every rank reads all arrays, which are symmetric and stay as they are, and writes its own out."""
    return _both(group, lib.tutti_one_shot_all_reduce, array, out, _shape(array), reduction_number(op), timeout=timeout)


@_of_group
def one_shot_all_reduce_copy(group: Group, buffer: Any, array: Any, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """The same of an array of any memory, which goes through buffer, symmetric and at least as long."""
    room = buffer_of(buffer, writable=True)
    source, target, out = group._pair("one_shot_all_reduce_copy", array, out, _shape(array))
    if room.dtype != source.dtype:
        raise TypeError(f"one_shot_all_reduce_copy: the input is {source.dtype} and buffer is {room.dtype}")
    group._length("one_shot_all_reduce_copy", target, source.count)
    return group._run(lib.tutti_one_shot_all_reduce_copy, (room.address, room.count, source.address, target.address, source.count, source.number, reduction_number(op)),
                      out, (room, source, target), True, timeout)


@_of_group
def two_shot_all_reduce_(group: Group, array: Any, op: str = "sum", timeout: Optional[float] = None) -> Any:
    """In place: each rank reduces its slice and stores it into the arrays of all. They are symmetric."""
    return _in_place(group, lib.tutti_two_shot_all_reduce, array, op, timeout)


@_of_group
def two_shot_all_reduce_out(group: Group, array: Any, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """The same into out, any memory; the array, symmetric, stays as it was."""
    return _both(group, lib.tutti_two_shot_all_reduce_out, array, out, _shape(array), reduction_number(op), timeout=timeout)


def _in_place(group: Group, function: Any, array: Any, op: str, timeout: Optional[float]) -> Any:
    data = buffer_of(array, writable=True)
    return group._run(function, (data.address, data.count, data.number, reduction_number(op)), array, data, True, timeout)


# ---- reduce-scatter and all-gather ----

@_of_group
def reduce_scatter_out(group: Group, array: Any, split_last_dim: bool = False, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """This rank's part of the sum of symmetric matrices: of their rows, or with split_last_dim of their columns."""
    shape = _shape(array)
    rows, columns = _matrix(shape)
    parts = (*shape[:-1], columns // group.size) if split_last_dim else (max(1, rows // group.size), *shape[1:])
    source, target, out = group._pair("reduce_scatter_out", array, out, parts)
    group._length("reduce_scatter_out", target, source.count // group.size)
    return group._run(lib.tutti_reduce_scatter_out, (source.address, target.address, rows, columns, bool(split_last_dim), source.number, reduction_number(op)), out,
                      (source, target), True, timeout)


def _matrix(shape: Sequence[int]) -> Tuple[int, int]:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if shape else 1


@_of_group
def low_contention_all_gather(group: Group, array: Any, out: Any = None, multicast: bool = False, timeout: Optional[float] = None) -> Any:
    """all_gather that touches one peer after the other, each rank beginning with another. With multicast, one copy of each rank to all at once, into an out that is
    symmetric."""
    function = lib.tutti_low_contention_all_gather_multicast if multicast else lib.tutti_low_contention_all_gather
    return _both(group, function, array, out, (group.size, *_shape(array)), timeout=timeout, wanted=group.size * buffer_of(array).count)


@_of_group
def low_contention_reduce_scatter(group: Group, array: Any, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """reduce_scatter that touches one peer after the other, each rank beginning with another."""
    shape = _shape(array)
    if not shape or shape[0] % group.size:
        raise ValueError(f"low_contention_reduce_scatter: {shape} cannot be cut into {group.size} parts")
    count = buffer_of(array).count // group.size
    return _both(group, lib.tutti_low_contention_reduce_scatter, array, out, (shape[0] // group.size, *shape[1:]), reduction_number(op), timeout=timeout, count=count,
                 wanted=count)


# ---- multicast: where the device has it, or TUTTI_MULTICAST is "software" ----

@_of_group
def multimem_all_reduce_(group: Group, array: Any, op: str = "sum", timeout: Optional[float] = None) -> Any:
    """In place, by the switch; the array is symmetric."""
    return _in_place(group, lib.tutti_multimem_all_reduce, array, op, timeout)


@_of_group
def multimem_one_shot_all_reduce(group: Group, array: Any, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """Into out, any memory; the array is symmetric."""
    return _both(group, lib.tutti_multimem_one_shot_all_reduce, array, out, _shape(array), reduction_number(op), timeout=timeout)


@_of_group
def multimem_one_shot_reduce_out(group: Group, array: Any, root: int = 0, op: str = "sum", out: Any = None, timeout: Optional[float] = None) -> Any:
    """Into the root's out alone; None elsewhere."""
    if group.rank == root:
        return _both(group, lib.tutti_multimem_one_shot_reduce_out, array, out, _shape(array), reduction_number(op), integer(root), timeout=timeout)
    source = buffer_of(array)
    return group._run(lib.tutti_multimem_one_shot_reduce_out, (source.address, None, source.count, source.number, reduction_number(op), integer(root)), None, source, True,
                      timeout)


@_of_group
def multimem_all_gather_out(group: Group, array: Any, out: Any, timeout: Optional[float] = None) -> Any:
    """All ranks' arrays, one behind the other, into out, which is symmetric."""
    return _both(group, lib.tutti_multimem_all_gather_out, array, out, None, timeout=timeout, wanted=group.size * buffer_of(array).count)


# ---- all-to-all whose splits are data ----

def _rows(array: Any, out: Any) -> Any:
    """Two symmetric arrays whose first dimension counts rows."""
    source, target = buffer_of(array), buffer_of(out, writable=True)
    shapes = source.shape, target.shape
    if source.dtype != target.dtype or not shapes[0] or not shapes[1] or tuple(shapes[0][1:]) != tuple(shapes[1][1:]):
        raise ValueError(f"tutti: rows of {tuple(shapes[0])} {source.dtype} do not fit into {tuple(shapes[1])} {target.dtype}")
    row = 1
    for size in shapes[0][1:]:
        row *= size
    fields = {"in": source.address, "in_rows": shapes[0][0], "out": target.address, "out_rows": shapes[1][0], "row": row, "dtype": source.number}
    return _Rows(**fields), (source, target)


def _splits(array: Any, count: int, writable: bool, name: str) -> Any:
    found = buffer_of(array, writable=writable)
    if found.dtype != "i64" or found.count != count:
        raise ValueError(f"tutti: {name} is {found.count} elements of {found.dtype}, and {count} of i64 are wanted")
    return found


@_of_group
def all_to_all_vdev(group: Group, array: Any, in_splits: Any, out: Any, out_splits_offsets: Any, timeout: Optional[float] = None) -> Any:
    """in_splits[r] rows go to rank r; afterwards out_splits_offsets[0][r] rows came from rank r, and begin at row out_splits_offsets[1][r] of out. All are symmetric,
    splits are of i64, and read when the call runs."""
    rows, kept = _rows(array, out)
    splits, result = _splits(in_splits, group.size, False, "in_splits"), _splits(out_splits_offsets, 2 * group.size, True, "out_splits_offsets")
    return group._run(lib.tutti_all_to_all_vdev, (ctypes.byref(rows), splits.address, result.address), out, (rows, kept, splits, result), True, timeout)


@_of_group
def all_to_all_vdev_2d(group: Group, array: Any, in_splits: Any, out: Any, out_splits_offsets: Any, experts: int, major_align: int = 1,
                       timeout: Optional[float] = None) -> Any:
    """The same for so many experts on each rank: in_splits[rank][expert]; what comes lies expert by expert, each at a multiple of major_align rows."""
    rows, kept = _rows(array, out)
    count = group.size * experts
    splits, result = _splits(in_splits, count, False, "in_splits"), _splits(out_splits_offsets, 2 * count, True, "out_splits_offsets")
    return group._run(lib.tutti_all_to_all_vdev_2d, (ctypes.byref(rows), experts, major_align, splits.address, result.address), out, (rows, kept, splits, result), True,
                      timeout)


@_of_group
def all_to_all_vdev_2d_offset(group: Group, array: Any, in_splits_offsets: Any, out: Any, out_splits_offsets: Any, experts: int,
                              timeout: Optional[float] = None) -> Any:
    """The way back: from expert by expert, with offsets, to rank by rank, without gaps."""
    rows, kept = _rows(array, out)
    count = 2 * group.size * experts
    splits, result = _splits(in_splits_offsets, count, False, "in_splits_offsets"), _splits(out_splits_offsets, count, True, "out_splits_offsets")
    return group._run(lib.tutti_all_to_all_vdev_2d_offset, (ctypes.byref(rows), experts, splits.address, result.address), out, (rows, kept, splits, result), True, timeout)


# ---- tiles ----

def _tile(array: Any, like: Any = None) -> Any:
    """A matrix, or a part of one, of NumPy: rows may lie apart. like: the tile that is reduced, where this one is written."""
    strides = getattr(array, "strides", None)
    if strides is None or getattr(array, "ndim", 0) != 2:
        raise TypeError("tutti: a tile is a NumPy array of two dimensions")
    if array.shape[1] > 1 and strides[1] != array.itemsize or strides[0] % array.itemsize or strides[0] < 0:
        raise ValueError("tutti: the elements of a row of a tile lie one behind the other")
    if like is not None and not array.flags.writeable:
        raise ValueError("tutti: the tile is read-only")
    if like is not None and array.dtype != like.dtype:
        raise TypeError(f"tutti: a tile of {like.dtype} is not reduced into one of {array.dtype}")
    stride = strides[0] // array.itemsize if array.shape[0] > 1 else array.shape[1]
    tile = _Tile(data=array.ctypes.data, rows=array.shape[0], columns=array.shape[1], stride=stride)
    tile._array = array
    return tile


def _dtype(array: Any) -> int:
    return buffer_of(new_like(array, (1,), "tiles")).number


@_of_group
def tile_reduce(group: Group, tile: Any, out: Any = None, root: int = 0, op: str = "sum", timeout: Optional[float] = None) -> Any:
    """Reduces a part of a symmetric matrix over all ranks into the root's out, whose rows may lie apart, too; None elsewhere."""
    source, number = _tile(tile), _dtype(tile)
    if group.rank != root:
        return group._run(lib.tutti_tile_reduce, (ctypes.byref(source), None, number, reduction_number(op), integer(root)), None, source, True, timeout)
    out = new_like(tile, tile.shape, "tile_reduce") if out is None else out
    target = _tile(out, like=tile)
    return group._run(lib.tutti_tile_reduce, (ctypes.byref(source), ctypes.byref(target), number, reduction_number(op), integer(root)), out, (source, target), True, timeout)


@_of_group
def multi_root_tile_reduce(group: Group, tiles: Sequence[Any], roots: Sequence[int], outs: Optional[Sequence[Any]] = None, op: str = "sum",
                           timeout: Optional[float] = None) -> List[Any]:
    """The same for several tiles of one block at once, tile i for rank roots[i]: a list with the results of this rank, None in the other places."""
    if len(roots) != len(tiles) or (outs is not None and len(outs) != len(tiles)) or not tiles:
        raise ValueError(f"tutti: {len(tiles)} tiles, {len(roots)} roots, {len(outs) if outs is not None else 'no'} outs")
    if any(getattr(tile, "dtype", None) != getattr(tiles[0], "dtype", None) for tile in tiles):
        raise TypeError("tutti: tiles of different element types cannot be reduced in one call")
    results = [None if root != group.rank else outs[i] if outs is not None else new_like(tile, tile.shape, "multi_root_tile_reduce")
               for i, (tile, root) in enumerate(zip(tiles, roots))]
    sources = [_tile(tile) for tile in tiles]
    targets = [_tile(result, like=tile) if result is not None else None for tile, result in zip(tiles, results)]
    rows = (ctypes.c_void_p * len(tiles))(*[ctypes.addressof(tile) for tile in sources])
    room = (ctypes.c_void_p * len(tiles))(*[ctypes.addressof(tile) if tile is not None else None for tile in targets])
    numbers = integers(roots)
    return group._run(lib.tutti_multi_root_tile_reduce, (rows, room, numbers, len(tiles), _dtype(tiles[0]), reduction_number(op)), results,
                      (sources, targets, rows, room, numbers), True, timeout)


@_of_group
def reduce_scatter_offset(group: Group, matrix: Any, ends: Sequence[int], dim: int = 0, targets: Optional[Sequence[int]] = None, op: str = "sum",
                          timeout: Optional[float] = None) -> List[Any]:
    """Cuts a symmetric matrix into parts along rows (dim 0) or columns (1), part i ending before ends[i], and reduces part i for rank targets[i] (default: in turn). The
    parts of this rank."""
    source, whom = _tile(matrix), list(targets) if targets is not None else [i % group.size for i in range(len(ends))]
    if len(whom) != len(ends):
        raise ValueError(f"tutti: {len(ends)} parts and {len(whom)} targets")
    begins = [0, *ends[:-1]]
    shapes = [(end - begin, matrix.shape[1]) if dim == 0 else (matrix.shape[0], end - begin) for begin, end in zip(begins, ends)]
    outs = [new_like(matrix, shape, "reduce_scatter_offset") for shape, rank in zip(shapes, whom) if rank == group.rank]
    room = (ctypes.c_void_p * max(1, len(outs)))(*[out.ctypes.data for out in outs])
    limits, numbers = sizes(ends), integers(whom)
    return group._run(lib.tutti_reduce_scatter_offset, (ctypes.byref(source), dim, limits, numbers, len(ends), room, _dtype(matrix), reduction_number(op)), outs,
                      (source, limits, numbers, room, outs), True, timeout)


@_of_group
def all_gather_offset(group: Group, array: Any, counts: Sequence[int], timeout: Optional[float] = None) -> List[Any]:
    """A symmetric array has parts of counts[i] elements, shares of parameters: part i of all ranks, in rank order, as the i-th result."""
    source = buffer_of(array)
    if sum(counts) > source.count:
        raise ValueError(f"tutti: parts of {sum(counts)} elements, and the array has {source.count}")
    outs = [new_like(array, (group.size * count,), "all_gather_offset") for count in counts]
    room, lengths = (ctypes.c_void_p * max(1, len(outs)))(*[buffer_of(out).address for out in outs]), sizes(counts)
    return group._run(lib.tutti_all_gather_offset, (source.address, lengths, len(counts), room, source.number), outs, (source, lengths, room, outs), True, timeout)


@_of_group
def all_to_all_nd(group: Group, array: Any, scatter_dim: int, out: Any = None, timeout: Optional[float] = None) -> Any:
    """A symmetric array [rows][columns][...], cut along one dimension over the ranks, is afterwards cut along the other. scatter_dim 1: columns are dealt out and rows
    put together; 0: the way back."""
    shape, size = _shape(array), group.size
    if len(shape) < 2 or scatter_dim not in (0, 1) or shape[scatter_dim] % size:
        raise ValueError(f"tutti: dimension {scatter_dim} of {shape} cannot be dealt out to {size} ranks")
    result = (shape[0] * size, shape[1] // size, *shape[2:]) if scatter_dim == 1 else (shape[0] // size, shape[1] * size, *shape[2:])
    source, target, out = group._pair("all_to_all_nd", array, out, result)
    group._length("all_to_all_nd", target, source.count)
    item = 1
    for count in shape[2:]:
        item *= count
    return group._run(lib.tutti_all_to_all_nd, (source.address, target.address, shape[0], shape[1], item, scatter_dim, source.number), out, (source, target), True, timeout)
