# SPDX-License-Identifier: Apache-2.0
"""PyTorch's symmetric memory on CPUs: the names and meanings of torch.distributed._symmetric_memory, for tensors of the CPU and groups of the backend tutti.

    import tutti.torch.symm_mem as symm_mem

    t = symm_mem.empty(1024)
    handle = symm_mem.rendezvous(t, dist.group.WORLD)
    t.fill_(rank)
    handle.barrier()
    neighbour = handle.get_buffer((rank + 1) % size, (1024,), torch.float32)      # its memory, where it lies

Importing it also gives torch.ops.symm_mem.* (one_shot_all_reduce, fused_all_gather_matmul ...) kernels for the CPU, and defines torch.ops.tutti.* for those of
them that can be differentiated.
"""
import copy
import ctypes
import os
import weakref
from typing import Any, List, Optional, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # noqa: F401  defines the operations

from .. import _interrupt
from .._arguments import integer, integers, sizes, wide_integer, wide_unsigned
from .._library import lib, struct
from ..world import _nanoseconds, _release_here
from .group import _DTYPES, _REDUCTIONS, _number
from .member import destroyed, member_of, worlds
from .work import raise_error

_Call, _Tile = struct("tutti_call"), struct("tutti_tile")
_group_named: Any = dist.distributed_c10d._resolve_process_group


def _resolve(group: Any) -> Any:
    """This rank in a process group, given as that or by its name."""
    if isinstance(group, str):
        group = _group_named(group)
    member = member_of(group)
    if member is None:
        raise ValueError(f"tutti: symmetric memory of the CPU needs a process group of the backend tutti, not of {dist.get_backend(group)}")
    if member._handle is None:
        destroyed()
    return member


def _checked(group: Any, function: Any, *arguments: Any) -> None:
    status = _interrupt.call(group._world._handle, function, *arguments)
    if status:
        raise_error(status)


def _tensor_over(address: Any, shape: Sequence[int], dtype: torch.dtype, owner: Any) -> Any:
    """A tensor where something lies; it keeps the owner."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    block: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    block._owner = owner
    return torch.frombuffer(block, dtype=dtype).view(shape)


class _Block:
    """A block of symmetric memory; tensors over it keep it."""

    def __init__(self, handle: int, group_name: Optional[str] = None) -> None:
        self.handle, self.address, self.group_name = handle, lib.tutti_memory_data(handle), group_name
        self.rendezvoused: List[Any] = []
        self._release = weakref.finalize(self, _release_here, os.getpid(), lib.tutti_memory_release, handle)
        self._release.atexit = False


_blocks: Any = weakref.WeakValueDictionary()  # by address


def _world() -> Any:
    world = worlds.get(os.getpid())
    if world is None:
        raise RuntimeError('tutti: symmetric memory needs the default process group: dist.init_process_group("tutti")')
    return world


def get_signal_pad_size() -> int:
    """Bytes of the signal pad that tensors get which are made from now on; handles tell what theirs has."""
    return lib.tutti_memory_signal_pad_bytes(_world()._handle)


def set_signal_pad_size(size: int) -> None:
    """Sets it for tensors that are made later, on this rank: all ranks say the same. 0 is the default again."""
    status = lib.tutti_memory_set_signal_pad_bytes(_world()._handle, wide_unsigned(size))
    if status:
        raise_error(status)


def get_backend(device: Any) -> Optional[str]:
    """Who provides the symmetric memory of a device: "shm" for the CPU, and None for others, which this module has none of."""
    return "shm" if torch.device(device).type == "cpu" else None


def set_backend(name: str) -> None:
    """There is one for the CPU, and others are refused."""
    if name.lower() != "shm":
        raise ValueError(f"tutti: there is no backend {name!r} for symmetric memory of the CPU, but 'shm'; torch.distributed._symmetric_memory has those of GPUs")


def is_nvshmem_available() -> bool:
    """Never: NVSHMEM has no symmetric memory of the CPU."""
    return False


def empty(*size: Any, dtype: Optional[torch.dtype] = None, device: Any = None) -> torch.Tensor:
    """As torch.empty, in symmetric memory of the default group's world. Local; rendezvous makes it reachable."""
    size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
    return _empty(size, None, torch.get_default_dtype() if dtype is None else dtype, device, None, None)


def _empty(size: Sequence[int], stride: Optional[Sequence[int]], dtype: torch.dtype, device: Any, group_name: Optional[str], persistent_id: Optional[int]) -> torch.Tensor:
    if device is not None and torch.device(device).type != "cpu":
        raise TypeError(f"tutti: symmetric memory on {device}: here it is for the CPU; torch.distributed._symmetric_memory has others")
    world = _world()
    layout = torch.empty(size, dtype=dtype, device="meta") if stride is None else torch.empty_strided(size, stride, dtype=dtype, device="meta")
    count = max(1, layout.untyped_storage().nbytes() // dtype.itemsize)
    options = struct("tutti_memory_options")(persistent=persistent_id is not None, persistent_id=wide_unsigned(persistent_id or 0))
    handle: Any = ctypes.c_void_p()
    status = lib.tutti_memory_alloc(world._handle, count * dtype.itemsize, ctypes.byref(options), ctypes.byref(handle))
    if status:
        raise_error(status)
    block = _Block(handle.value, group_name)
    _blocks[block.address] = block
    return _tensor_over(block.address, (count,), dtype, block).as_strided(layout.size(), layout.stride())  # one of no elements lies there, too


def _block_of(tensor: torch.Tensor) -> Any:
    return _blocks.get(tensor.untyped_storage().data_ptr())


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether it lies in symmetric memory that `empty` gave."""
    return tensor.is_cpu and _block_of(tensor) is not None


class SymmetricMemory:
    """What rendezvous returns: the blocks of all ranks of a group."""

    def __init__(self, group: Any, tensor: torch.Tensor, peers: Any) -> None:
        self._group, self._peers, self.device = group, peers, torch.device("cpu")
        self.rank, self.world_size, self.group_name = group.rank(), group.size(), group.group_name
        self.buffer_size, self.signal_pad_size = lib.tutti_peers_bytes(peers), lib.tutti_peers_pad_bytes(peers)
        self.offset = tensor.storage_offset() * tensor.element_size()
        self._lists = [(ctypes.c_void_p * self.world_size)(*each) for each in (self.buffer_ptrs, self.signal_pad_ptrs)]
        self._release = weakref.finalize(self, _release_here, os.getpid(), lib.tutti_peers_release, peers)
        self._release.atexit = False

    def _at(self, offset: int) -> Any:
        """The same blocks, for a tensor that lies elsewhere in them."""
        other: Any = copy.copy(self)
        other.offset, other._first = offset, self  # which releases them
        return other

    buffer_ptrs = property(lambda self: [lib.tutti_peers_buffer(self._peers, rank) for rank in range(self.world_size)])
    signal_pad_ptrs = property(lambda self: [lib.tutti_peers_signal_pad(self._peers, rank) for rank in range(self.world_size)])
    multicast_ptr = 0  # there is no switch between processors
    buffer_ptrs_dev = property(lambda self: ctypes.addressof(self._lists[0]), doc="Where buffer_ptrs lie one after the other, for kernels.")
    signal_pad_ptrs_dev = property(lambda self: ctypes.addressof(self._lists[1]), doc="Likewise signal_pad_ptrs.")

    @staticmethod
    def empty_strided_p2p(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any, group_name: Optional[str] = None,
                          alloc_id: Optional[int] = None) -> torch.Tensor:
        """As torch.empty_strided. With alloc_id the memory keeps its address and contents: once nobody has it any more, the next call with that number finds it again.
        group_name is for a rendezvous that names no group."""
        return _empty(tuple(size), tuple(stride), dtype, device, group_name, alloc_id)

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: Optional[str] = None) -> "SymmetricMemory":
        """The function of that name; without a group, with the one that empty_strided_p2p was given."""
        if group_name is None:
            group_name = getattr(_block_of(tensor), "group_name", None)
        if group_name is None:
            raise ValueError("tutti: rendezvous needs a group, since the tensor was made without one")
        return rendezvous(tensor, group_name)

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        return is_symm_mem_tensor(tensor)

    @staticmethod
    def get_backend(device: Any) -> Optional[str]:
        return get_backend(device)

    @staticmethod
    def set_backend(name: str) -> None:
        set_backend(name)

    @staticmethod
    def has_multicast_support(device_type: Any = None, device_index: int = 0) -> Any:
        return False

    def _view(self, function: Any, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> Any:
        view = struct("tutti_view")()
        number = _DTYPES.get(dtype)
        if number is None:
            raise TypeError(f"tutti: {dtype} is no element type of the library")
        sizes = tuple(sizes)
        status = function(self._peers, rank, (ctypes.c_int64 * max(1, len(sizes)))(*sizes), len(sizes), number, storage_offset, ctypes.byref(view))
        if status:
            raise_error(status, rank)
        return _tensor_over(view.data, sizes, dtype, self)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: Any = 0) -> torch.Tensor:
        """A part of a rank's block as a tensor over that very memory; storage_offset in elements."""
        return self._view(lib.tutti_peers_get_buffer, rank, sizes, dtype, storage_offset)

    def get_signal_pad(self, rank: int, sizes: Sequence[int] = (), dtype: Optional[torch.dtype] = None, storage_offset: int = 0) -> torch.Tensor:
        """A rank's signal pad, or a part of it."""
        dtype = torch.uint32 if dtype is None else dtype
        sizes = sizes if len(sizes) else (self.signal_pad_size // dtype.itemsize - storage_offset,)
        return self._view(lib.tutti_peers_get_signal_pad, rank, sizes, dtype, storage_offset)

    def get_remote_tensor(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of a rank that lies where the one given to rendezvous does."""
        return self.get_buffer(rank, sizes, dtype, self.offset // dtype.itemsize)

    def _call(self, function: Any, *arguments: Any, timeout_ms: int) -> Any:
        call = _Call(timeout_ns=_nanoseconds(timeout_ms / 1e3 if timeout_ms else None))
        _checked(self._group, function, self._peers, *arguments, ctypes.byref(call))

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> Any:
        """Of all ranks; each then sees what the others have written."""
        self._call(lib.tutti_peers_barrier, channel, timeout_ms=timeout_ms)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Tells a rank; waits while the last signal on this channel was not taken yet."""
        self._call(lib.tutti_peers_signal, dst_rank, channel, timeout_ms=timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Takes the signal of a rank, and sees what it has written before."""
        self._call(lib.tutti_peers_wait_signal, src_rank, channel, timeout_ms=timeout_ms)

    @staticmethod
    def memset32(input: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        """Sets so many words from word `offset` on, of a flat tensor of uint32, such as a signal pad."""
        return _memset32(input, offset, val, count)

    @staticmethod
    def stream_write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """Writes one word after everything that this thread has written before: who sees the value sees that."""
        return _write_value32(input, offset, val)


def _words(function: Any, input: torch.Tensor, *arguments: int) -> torch.Tensor:
    if not input.is_cpu:
        raise TypeError(f"tutti: a tensor on {input.device}: here it is for the CPU; torch.distributed._symmetric_memory has others")
    shape, strides = input.shape[:2], input.stride()[:2]  # more than one are refused
    view = struct("tutti_view")(data=input.data_ptr(), dtype=_DTYPES.get(input.dtype, 0), dim_count=len(shape))
    view.shape[:len(shape)], view.strides[:len(shape)] = shape, strides
    status = function(_world()._handle, ctypes.byref(view), *map(wide_integer, arguments), None)
    if status:
        raise_error(status)
    return input


def _memset32(input: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
    return _words(lib.tutti_view_memset32, input, offset, val, count)


def _write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
    return _words(lib.tutti_view_write_value32, input, offset, val)


def rendezvous(tensor: torch.Tensor, group: Any) -> SymmetricMemory:
    """Collective: maps the blocks of all ranks of the group. The tensor is one of `empty`, or a part of it. A second call for the same block and group is local."""
    group, block = _resolve(group), _block_of(tensor)
    if block is None:
        raise ValueError("tutti: the tensor does not lie in symmetric memory; symm_mem.empty makes one that does")
    offset = tensor.storage_offset() * tensor.element_size()
    for handle in block.rendezvoused:
        if handle._group is group:
            return handle if handle.offset == offset else handle._at(offset)
    peers = ctypes.c_void_p()
    _checked(group, lib.tutti_memory_rendezvous, block.handle, group._handle, ctypes.byref(peers))
    handle = SymmetricMemory(group, tensor, peers.value)
    block.rendezvoused.append(handle)
    return handle


def put_signal(src: torch.Tensor, hdl: SymmetricMemory, peer: int) -> None:
    """Writes a tensor to where the one that was given to rendezvous lies on a peer, whatever the peer does with it at the moment, and tells the peer; that waits while
    the last signal to it was not taken yet. Signals are those of the handle's channel 0."""
    if not src.is_cpu:
        raise TypeError(f"tutti: a tensor on {src.device}: here it is for the CPU; torch.distributed._symmetric_memory has others")
    source = src.detach().contiguous()
    hdl._call(lib.tutti_peers_put, peer, hdl.offset, source.data_ptr(), source.numel() * source.element_size(), timeout_ms=0)
    hdl.put_signal(peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Takes the signal of a peer; what it has put is there then."""
    hdl.wait_signal(peer)


def get_symm_mem_workspace(group_name: str, min_size: int) -> SymmetricMemory:
    """A block of at least min_size bytes that all operations of the group share. Collective when it has to grow."""
    group = _resolve(group_name)
    if group._workspace is None or group._workspace.numel() < min_size:
        group._workspace = empty(max(min_size, 1 << 16), dtype=torch.uint8)
    return rendezvous(group._workspace, group)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Nothing has to be switched on; a group of another backend is refused."""
    _resolve(group_name)


def is_symm_mem_enabled_for_group(group_name: str) -> bool:
    return member_of(_group_named(group_name)) is not None


# ---- operations ----

def _op(name: str) -> int:
    for kind, number in _REDUCTIONS.items():
        if kind.name.lower() == name.lower():
            return number
    raise ValueError(f"tutti: there is no reduction {name!r}; there are {', '.join(kind.name.lower() for kind in _REDUCTIONS)}")


def _dense(tensor: torch.Tensor, who: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"tutti: {who} wants tensors that are contiguous")
    return tensor


def _named(function: Any, group: Any, *arguments: Any) -> None:
    group = _resolve(group)
    _checked(group, function, group._handle, *arguments, None)


def _one_shot_out(input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> Any:
    _named(lib.tutti_one_shot_all_reduce, group_name, _dense(input, "one_shot_all_reduce").data_ptr(), _dense(out, "one_shot_all_reduce").data_ptr(), input.numel(),
           _number(input, "one_shot_all_reduce"), _op(reduce_op))
    return out


def _one_shot(input: torch.Tensor, reduce_op: str, group_name: str) -> Any:
    return _one_shot_out(input, reduce_op, group_name, torch.empty_like(input))


def _one_shot_copy_out(symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> Any:
    source = local_input.contiguous()
    _named(lib.tutti_one_shot_all_reduce_copy, group_name, symm_buffer.data_ptr(), symm_buffer.numel(), source.data_ptr(), _dense(out, "one_shot_all_reduce").data_ptr(),
           source.numel(), _number(source, "one_shot_all_reduce"), _op(reduce_op))
    return out


def _one_shot_copy(symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str) -> Any:
    return _one_shot_copy_out(symm_buffer, local_input, reduce_op, group_name, torch.empty_like(local_input, memory_format=torch.contiguous_format))


def _two_shot(input: torch.Tensor, reduce_op: str, group_name: str) -> Any:
    _named(lib.tutti_two_shot_all_reduce, group_name, _dense(input, "two_shot_all_reduce").data_ptr(), input.numel(), _number(input, "two_shot_all_reduce"),
           _op(reduce_op))
    return input


def _two_shot_out(input: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor) -> Any:
    _named(lib.tutti_two_shot_all_reduce_out, group_name, _dense(input, "two_shot_all_reduce").data_ptr(), _dense(output, "two_shot_all_reduce").data_ptr(),
           input.numel(), _number(input, "two_shot_all_reduce"), _op(reduce_op))
    return output


def _reduce_scatter_out(input: torch.Tensor, group_name: str, split_last_dim: Any, output: torch.Tensor) -> Any:
    columns = input.shape[-1] if input.dim() else 1
    _named(lib.tutti_reduce_scatter_out, group_name, _dense(input, "reduce_scatter").data_ptr(), _dense(output, "reduce_scatter").data_ptr(),
           input.numel() // max(1, columns), columns, split_last_dim, _number(input, "reduce_scatter"), _op("sum"))
    return output


def _low_contention_all_gather(tensor: torch.Tensor, group_name: str) -> Any:
    source = tensor.contiguous()
    out = source.new_empty((source.shape[0] * _resolve(group_name).size(), *source.shape[1:]))
    _named(lib.tutti_low_contention_all_gather, group_name, source.data_ptr(), out.data_ptr(), source.numel(), _number(source, "all_gather"))
    return out


def _low_contention_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> Any:
    source, size = tensor.contiguous(), _resolve(group_name).size()
    if source.shape[0] % size:
        raise ValueError(f"tutti: reduce_scatter: {source.shape[0]} rows cannot be cut into {size} parts")
    out = source.new_empty((source.shape[0] // size, *source.shape[1:]))
    _named(lib.tutti_low_contention_reduce_scatter, group_name, source.data_ptr(), out.data_ptr(), out.numel(), _number(source, "reduce_scatter"), _op(reduce_op))
    return out


def _get_remote_tensors(x: Any, group_name: str) -> Any:
    handle = rendezvous(x, group_name)
    offset = x.storage_offset()
    return [handle.get_buffer(rank, x.shape, x.dtype, offset) for rank in range(handle.world_size)]


# ---- tiles: matrices, or parts of one, whose rows may lie apart ----

def _tile(tensor: torch.Tensor, who: str) -> Any:
    rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
    stride = tensor.stride(0) if rows > 1 else columns
    if not tensor.is_cpu or tensor.dim() != 2 or (columns > 1 and tensor.stride(1) != 1) or stride < columns:
        raise ValueError(f"tutti: {who} wants matrices of the CPU, in each row of which the elements lie one after the other, and not {tuple(tensor.shape)} with "
                         f"strides {tensor.stride()} on {tensor.device}")
    return _Tile(data=tensor.data_ptr(), rows=rows, columns=columns, stride=stride)


def _of_tile(out: torch.Tensor, tile: torch.Tensor, who: str) -> Any:
    """Where a tile is reduced into."""
    if out.dtype != tile.dtype or out.shape != tile.shape:
        raise ValueError(f"tutti: {who}: {tuple(tile.shape)} of {tile.dtype} is not reduced into {tuple(out.shape)} of {out.dtype}")
    return _tile(out, who)


def _tile_reduce(in_tile: torch.Tensor, out_tile: torch.Tensor, root: int, group_name: str, reduce_op: str = "sum") -> None:
    source = _tile(in_tile, "tile_reduce")
    target = _of_tile(out_tile, in_tile, "tile_reduce") if _resolve(group_name).rank() == root else None
    _named(lib.tutti_tile_reduce, group_name, ctypes.byref(source), ctypes.byref(target) if target is not None else None, _number(in_tile, "tile_reduce"),
           _op(reduce_op), integer(root))


def _multi_root_tile_reduce(in_tiles: Sequence[torch.Tensor], out_tile: torch.Tensor, roots: Sequence[int], group_name: str, reduce_op: str = "sum") -> None:
    if len(roots) != len(in_tiles) or not in_tiles or len(set(roots)) != len(roots):
        raise ValueError(f"tutti: multi_root_tile_reduce of {len(in_tiles)} tiles with the roots {list(roots)}: each has one of its own, since there is one out_tile")
    if any(tile.dtype != in_tiles[0].dtype for tile in in_tiles):
        raise TypeError("tutti: multi_root_tile_reduce: tiles of different element types cannot be reduced in one call")
    rank = _resolve(group_name).rank()
    sources = [_tile(tile, "multi_root_tile_reduce") for tile in in_tiles]
    targets = [_of_tile(out_tile, tile, "multi_root_tile_reduce") if root == rank else None for tile, root in zip(in_tiles, roots)]
    _named(lib.tutti_multi_root_tile_reduce, group_name, _addresses(sources), _addresses(targets), integers(roots), len(sources),
           _number(in_tiles[0], "multi_root_tile_reduce"), _op(reduce_op))


def _addresses(tiles: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(tiles))(*[ctypes.addressof(tile) if tile is not None else None for tile in tiles])


def reduce_scatter_offset(input: torch.Tensor, out: List[torch.Tensor], group: str, *, dim: int, offsets: Optional[List[int]] = None,
                          dst_ranks: Optional[List[int]] = None, red_op: str = "sum") -> None:
    """Cuts a symmetric matrix along a dimension into blocks, of which block i ends before offsets[i] (default: one of the same size for each rank), and reduces block i
    into an out of rank dst_ranks[i] (default: in turn). out: this rank's blocks, in their order."""
    who, member = "reduce_scatter_offset", _resolve(group)
    source, size = _tile(input, who), member.size()
    if dim not in (0, 1):
        raise ValueError(f"tutti: {who}: a matrix has no dimension {dim}")
    if offsets is None:
        if input.shape[dim] % size:
            raise ValueError(f"tutti: {who}: {input.shape[dim]} cannot be cut into {size} blocks of the same size; offsets say where others end")
        offsets = [input.shape[dim] // size * (i + 1) for i in range(size)]
    targets = [i % size for i in range(len(offsets))] if dst_ranks is None else list(dst_ranks)
    if len(targets) != len(offsets):
        raise ValueError(f"tutti: {who}: {len(offsets)} blocks and {len(targets)} ranks that get them")
    mine = [end - begin for begin, end, to in zip([0, *offsets], offsets, targets) if to == member.rank()]
    wanted = [(each, input.shape[1]) if dim == 0 else (input.shape[0], each) for each in mine]
    if [tuple(each.shape) for each in out] != wanted or any(each.dtype != input.dtype or not each.is_contiguous() or not each.is_cpu for each in out):
        raise ValueError(f"tutti: {who}: rank {member.rank()} gets contiguous blocks {wanted} of {input.dtype}, and out is "
                         f"{[(tuple(each.shape), each.dtype) for each in out]}")
    room = (ctypes.c_void_p * max(1, len(out)))(*[each.data_ptr() for each in out])
    _named(lib.tutti_reduce_scatter_offset, member, ctypes.byref(source), dim, sizes(offsets), integers(targets), len(offsets), room, _number(input, who), _op(red_op))


# ---- all-to-all whose splits are data: rows are those of dimension 0 ----

def _vdev(function: Any, input: torch.Tensor, out: torch.Tensor, group_name: str, *arguments: Any) -> None:
    for each in (input, out):
        _dense(each, "all_to_all_vdev")
    if input.dtype != out.dtype or input.dim() == 0 or input.shape[1:] != out.shape[1:] or input.shape[1:].numel() == 0:
        raise ValueError(f"tutti: all_to_all_vdev: {tuple(input.shape)} of {input.dtype} has no rows for {tuple(out.shape)} of {out.dtype}")
    rows = struct("tutti_rows")(out=out.data_ptr(), in_rows=input.shape[0], out_rows=out.shape[0], row=input.shape[1:].numel(), dtype=_number(input, "all_to_all_vdev"))
    setattr(rows, "in", input.data_ptr())
    _named(function, group_name, ctypes.byref(rows), *arguments)


def _splits(tensor: torch.Tensor, count: int) -> Any:
    if tensor.dtype != torch.int64 or not tensor.is_contiguous() or tensor.numel() != count:
        raise ValueError(f"tutti: all_to_all_vdev: splits are {count} contiguous numbers of int64, and not {tuple(tensor.shape)} of {tensor.dtype}")
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int64))


def _experts(splits: torch.Tensor, each: int, group_name: str) -> int:
    """How many there are on each rank, where a rank's have so many numbers each."""
    size = _resolve(group_name).size()
    if splits.numel() == 0 or splits.numel() % (each * size):
        raise ValueError(f"tutti: all_to_all_vdev: {splits.numel()} splits are not {each} for each of so many experts on {size} ranks")
    return splits.numel() // (each * size)


def _all_to_all_vdev(input: torch.Tensor, out: torch.Tensor, in_splits: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str) -> None:
    size = _resolve(group_name).size()
    _vdev(lib.tutti_all_to_all_vdev, input, out, group_name, _splits(in_splits, size), _splits(out_splits_offsets, 2 * size))


def _all_to_all_vdev_2d(input: torch.Tensor, out: torch.Tensor, in_splits: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str,
                        major_align: Optional[int] = None) -> None:
    experts = _experts(in_splits, 1, group_name)
    _vdev(lib.tutti_all_to_all_vdev_2d, input, out, group_name, experts, 1 if major_align is None else wide_integer(major_align), _splits(in_splits, in_splits.numel()),
          _splits(out_splits_offsets, 2 * in_splits.numel()))


def _all_to_all_vdev_2d_offset(input: torch.Tensor, out: torch.Tensor, in_splits_offsets: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str) -> None:
    experts = _experts(in_splits_offsets, 2, group_name)
    _vdev(lib.tutti_all_to_all_vdev_2d_offset, input, out, group_name, experts, _splits(in_splits_offsets, in_splits_offsets.numel()),
          _splits(out_splits_offsets, in_splits_offsets.numel()))


# ---- fused products ----

def restride_A_shard_for_fused_all_gather_matmul(t: torch.Tensor, gather_dim: int) -> torch.Tensor:
    """The same values, laid out as fused_all_gather_matmul takes them without a copy: the dimension that is gathered outermost."""
    return t.movedim(gather_dim, 0).contiguous().movedim(0, gather_dim)


def restride_A_for_fused_matmul_reduce_scatter(t: torch.Tensor, scatter_dim: int) -> torch.Tensor:
    """Likewise for fused_matmul_reduce_scatter and the dimension that is scattered."""
    return t.movedim(scatter_dim, 0).contiguous().movedim(0, scatter_dim)


def _fused_all_gather_matmul(A: torch.Tensor, Bs: Sequence[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True) -> Any:
    """Each rank multiplies its own rows first, then those of the others where they lie. Nothing is gathered unless A is asked for."""
    group = _resolve(group_name)
    rank, size, gather_dim = group.rank(), group.size(), gather_dim % A.dim()
    if gather_dim == A.dim() - 1:  # along the inner dimension every product needs all of it
        parts = A.movedim(gather_dim, 0).contiguous()
        whole = _low_contention_all_gather(parts, group_name).movedim(0, gather_dim).contiguous()
        return (whole if return_A else None), [whole @ B for B in Bs]
    moved = A.movedim(gather_dim, 0)
    rows = moved.flatten(0, -2)  # and not reshape(-1, …), which of no elements cannot tell how many rows there are
    if is_symm_mem_tensor(A) and moved.is_contiguous():
        handle, first = rendezvous(A, group_name), A.storage_offset()
    else:
        handle, first = get_symm_mem_workspace(group_name, rows.numel() * rows.element_size()), 0
        handle.get_buffer(rank, rows.shape, rows.dtype).copy_(rows)
    outputs = [A.new_empty((size * rows.shape[0], B.shape[1])) for B in Bs]
    whole = A.new_empty((size * rows.shape[0], rows.shape[1])) if return_A else None

    def use(shard, other):
        place = slice(other * rows.shape[0], (other + 1) * rows.shape[0])
        for B, output in zip(Bs, outputs):
            torch.mm(shard, B, out=output[place])
        if whole is not None:
            whole[place] = shard
    use(rows, rank)
    handle.barrier()  # the others' rows are there
    for step in range(1, size):
        other = (rank + step) % size
        use(handle.get_buffer(other, rows.shape, rows.dtype, first), other)
    handle.barrier()  # nobody reads mine any more

    def unflatten(flat):
        return flat.view(size * moved.shape[0], *moved.shape[1:-1], flat.shape[1]).movedim(0, gather_dim)
    return (unflatten(whole) if return_A else None), [unflatten(output) for output in outputs]


def _fused_matmul_reduce_scatter(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Any:
    """Each rank multiplies the rows of the others first and its own last; an owner adds up what is its own, in the order of the ranks, in f32."""
    group = _resolve(group_name)
    rank, size, scatter_dim = group.rank(), group.size(), scatter_dim % A.dim()
    if reduce_op not in ("sum", "avg"):
        raise ValueError("tutti: fused_matmul_reduce_scatter adds or averages")
    if scatter_dim == A.dim() - 1:
        product = (A @ B).movedim(-1, 0).contiguous()
        return _low_contention_reduce_scatter(product, reduce_op, group_name).movedim(0, -1)
    if A.shape[scatter_dim] % size:
        raise ValueError(f"tutti: {A.shape[scatter_dim]} rows cannot be cut into {size} parts")
    moved = A.movedim(scatter_dim, 0)
    rows = moved.reshape(size, moved.shape[:-1].numel() // size, A.shape[-1])
    shape = (rows.shape[1], B.shape[1])
    count = shape[0] * shape[1]
    handle = get_symm_mem_workspace(group_name, size * count * A.element_size())
    for step in range(1, size + 1):
        owner = (rank + step) % size
        torch.mm(rows[owner], B, out=handle.get_buffer(rank, shape, A.dtype, owner * count))
    handle.barrier()
    wide = torch.float32 if A.dtype in (torch.bfloat16, torch.float16) else A.dtype
    total = handle.get_buffer(0, shape, A.dtype, rank * count).to(wide, copy=True)
    for other in range(1, size):
        total += handle.get_buffer(other, shape, A.dtype, rank * count)
    if reduce_op == "avg":
        total /= size
    handle.barrier()
    return total.to(A.dtype).view(moved.shape[0] // size, *moved.shape[1:-1], shape[1]).movedim(0, scatter_dim)


def _fused_all_gather_scaled_matmul(A: torch.Tensor, Bs: Sequence[torch.Tensor], A_scale: Any, B_scales: Any, gather_dim: int, group_name: str,
                                    biases: Any, result_scales: Any, out_dtypes: Any, use_fast_accum: Any) -> Any:
    from . import scaled
    return scaled.all_gather_scaled_matmul(_resolve(group_name), A, Bs, A_scale, B_scales, gather_dim, biases, result_scales, out_dtypes,
                                           use_fast_accum)


def _fused_scaled_matmul_reduce_scatter(A: torch.Tensor, B: torch.Tensor, A_scale: Any, B_scale: Any, reduce_op: str, orig_scatter_dim: Any,
                                        scatter_dim_after_maybe_reshape: Any, group_name: str, output_shape: Any, bias: Any = None, result_scale: Any = None, out_dtype: Any = None, use_fast_accum: bool = False) -> Any:
    from . import scaled
    return scaled.scaled_matmul_reduce_scatter(_resolve(group_name), A, B, A_scale, B_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape,
                                               output_shape, bias, result_scale, out_dtype, use_fast_accum)


_kernels = torch.library.Library("symm_mem", "IMPL", "CPU")
for _name, _function in {"one_shot_all_reduce": _one_shot, "one_shot_all_reduce_out": _one_shot_out, "one_shot_all_reduce_copy": _one_shot_copy,
                         "one_shot_all_reduce_copy_out": _one_shot_copy_out, "two_shot_all_reduce_": _two_shot, "two_shot_all_reduce_out": _two_shot_out,
                         "reduce_scatter_out": _reduce_scatter_out, "_low_contention_all_gather": _low_contention_all_gather,
                         "_low_contention_reduce_scatter": _low_contention_reduce_scatter, "get_remote_tensors": _get_remote_tensors,
                         "fused_all_gather_matmul": _fused_all_gather_matmul, "fused_matmul_reduce_scatter": _fused_matmul_reduce_scatter,
                         "fused_all_gather_scaled_matmul": _fused_all_gather_scaled_matmul,
                         "fused_scaled_matmul_reduce_scatter": _fused_scaled_matmul_reduce_scatter,
                         "memset32_": _memset32, "stream_write_value32_": _write_value32, "all_to_all_vdev": _all_to_all_vdev,
                         "all_to_all_vdev_2d": _all_to_all_vdev_2d, "all_to_all_vdev_2d_offset": _all_to_all_vdev_2d_offset, "tile_reduce": _tile_reduce,
                         "multi_root_tile_reduce": _multi_root_tile_reduce}.items():
    if hasattr(torch.ops.symm_mem, _name):  # versions differ
        _kernels.impl(_name, _function)


# ---- the same with gradients, under a name of their own ----

def _size_of(group_name: str) -> Any:
    return _group_named(group_name).size()


@torch.library.custom_op("tutti::one_shot_all_reduce", mutates_args=())
def one_shot_all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """Any tensor, which goes through the group's workspace where it is not symmetric."""
    source = input.contiguous()
    if is_symm_mem_tensor(source):
        return _one_shot(source, reduce_op, group_name)
    handle = get_symm_mem_workspace(group_name, source.numel() * source.element_size())
    return _one_shot_copy(handle.get_buffer(handle.rank, source.shape, source.dtype), source, reduce_op, group_name)


@torch.library.custom_op("tutti::fused_all_gather_matmul", mutates_args=())
def fused_all_gather_matmul(A: torch.Tensor, B: torch.Tensor, gather_dim: int, group_name: str) -> torch.Tensor:
    """The rows of all ranks times B."""
    return _fused_all_gather_matmul(A, [B], gather_dim, group_name, return_A=False)[1][0].contiguous()


@torch.library.custom_op("tutti::fused_matmul_reduce_scatter", mutates_args=())
def fused_matmul_reduce_scatter(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> torch.Tensor:
    """The sum over the ranks of A times B, of which each rank gets its rows."""
    return _fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name).contiguous()


@one_shot_all_reduce.register_fake
def _(input: torch.Tensor, reduce_op: str, group_name: str) -> Any:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@fused_all_gather_matmul.register_fake
def _(A: torch.Tensor, B: torch.Tensor, gather_dim: int, group_name: str) -> Any:
    shape = [*A.shape[:-1], B.shape[1]]
    if gather_dim % A.dim() != A.dim() - 1:
        shape[gather_dim] *= _size_of(group_name)
    return A.new_empty(shape)


@fused_matmul_reduce_scatter.register_fake
def _(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Any:
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] //= _size_of(group_name)
    return A.new_empty(shape)


def _remember(ctx: Any, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> Any:
    tensors = [entry for entry in inputs if isinstance(entry, torch.Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.rest = [entry for entry in inputs if not isinstance(entry, torch.Tensor)]


def _linear(reduce_op: str, who: str) -> Any:
    if reduce_op not in ("sum", "avg"):
        raise NotImplementedError(f"tutti: {who} with {reduce_op!r} has no gradient; sum and avg have")


def _one_shot_backward(context: Any, gradient: Any) -> Any:
    reduce_op, group_name = context.rest
    _linear(reduce_op, "one_shot_all_reduce")
    return torch.ops.tutti.one_shot_all_reduce(gradient, reduce_op, group_name), None, None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2)


def _gather_matmul_backward(context: Any, gradient: Any) -> Any:
    """Of rows, or columns, that were gathered: the gradient is added up and scattered, which is the other fused operation. Operations alone are called here: a
    compiled program has tensors without memory at this point."""
    A, B = context.saved_tensors
    gather_dim, group_name = context.rest
    of_a = torch.ops.tutti.fused_matmul_reduce_scatter(gradient, B.t().contiguous(), "sum", gather_dim, group_name)
    moved = A.movedim(gather_dim, 0).contiguous()
    whole = torch.ops.symm_mem._low_contention_all_gather(moved, group_name).movedim(0, gather_dim)
    return of_a, _flat(whole).t() @ _flat(gradient), None, None


def _matmul_scatter_backward(context: Any, gradient: Any) -> Any:
    """And the other way round: the gradients of all ranks are gathered."""
    A, B = context.saved_tensors
    reduce_op, scatter_dim, group_name = context.rest
    size = _size_of(group_name)
    scale = 1 / size if reduce_op == "avg" else 1
    whole, (of_a,) = torch.ops.symm_mem.fused_all_gather_matmul(gradient.contiguous(), [B.t().contiguous()], scatter_dim % A.dim(), group_name)
    return of_a.contiguous() * scale, _flat(A).t() @ _flat(whole) * scale, None, None, None


one_shot_all_reduce.register_autograd(_one_shot_backward, setup_context=_remember)
fused_all_gather_matmul.register_autograd(_gather_matmul_backward, setup_context=_remember)
fused_matmul_reduce_scatter.register_autograd(_matmul_scatter_backward, setup_context=_remember)
