# SPDX-License-Identifier: Apache-2.0
"""Tensors in files, on symmetric memory, products fused with gathers, and waits for collectives: what takes more than tensors and numbers."""
from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from .._arguments import Unique, name_of, path_of
from .._library import constants, lib, struct
from ..buffers import dtype_number
from ..errors import check
from ..world import World
from . import _calls
from ._autograd import address_of
from ._calls import AnyGroup, Device, Dims, Dtype
from ._tensor import Tensor

_pointer = ctypes.c_void_p
_SymmOptions, _ScaledOptions, _P2p = struct("tt_symm_options"), struct("tt_fused_scaled_options"), struct("tt_p2p")
_symm_empty = _calls.bind("tt_symm_empty", "tensor", "PDYP")
_symm_strided = _calls.bind("tt_symm_empty_strided", "tensor", "PDDYP")
_pool_begin, _pool_end = _calls.bind("tt_symm_pool_begin", "done", "PG"), _calls.bind("tt_symm_pool_end", "done", "")
_gather_matmul = _calls.bind("tt_fused_all_gather_matmul", "tensors", "TLiGP")
_gather_scaled = _calls.bind("tt_fused_all_gather_scaled_matmul", "tensors", "TLTLiGPP")
_save_npy, _load_npy = _calls.bind("tt_save_npy", "done", "Ts"), _calls.bind("tt_load_npy", "tensor", "s")
_save_npz, _save_safetensors = _calls.bind("tt_save_npz", "done", "LPs"), _calls.bind("tt_save_safetensors_with", "done", "LPPs")
_Metadata = struct("tt_metadata")
_save_safetensors.argtypes = [_calls._PARAMETERS["L"], _pointer, _Metadata, ctypes.c_char_p]
_load_npz, _load_safetensors = _calls.bind("tt_load_npz", "done", "s"), _calls.bind("tt_load_safetensors", "done", "s")
_load_npz.restype = _load_safetensors.restype = struct("tt_named_list")
_load_metadata = _calls.bind("tt_load_metadata", "done", "s")
_load_metadata.restype = _Metadata
_wait_all = _calls.bind("tt_wait_all", "done", "P")
_batch = _calls.bind("tt_batch_p2p", "tensors", "zPG")
_gather_consume = _calls.bind("tt_pipelined_all_gather_and_consume", "status", "LPPLG")
_produce_scatter = _calls.bind("tt_pipelined_produce_and_all_to_all", "status", "PPTiG")


# ---- files ----

def save(path: Any, tensors: Any, metadata: Optional[Mapping[str, str]] = None) -> None:
    """Writes a tensor (.npy), or a dict of tensors by name (.npz, .safetensors, by the end of the path), all or nothing. safetensors has every element type
    but c128, and may carry texts."""
    name, text = path_of(path), os.fspath(path)
    if isinstance(tensors, Tensor):
        _calls.done(_save_npy, tensors, name)
        return
    names = (ctypes.c_char_p * max(1, len(tensors)))(*[name_of(key) for key in tensors])
    if str(text).endswith(".npz"):
        if metadata:
            raise ValueError("tutti: .npz files carry no metadata")
        _calls.done(_save_npz, list(tensors.values()), names, name)
        return
    keys = (ctypes.c_char_p * max(1, len(metadata or {})))(*[name_of(key) for key in metadata or {}])
    values = (ctypes.c_char_p * max(1, len(metadata or {})))(*[name_of(value) for value in (metadata or {}).values()])
    extra = _Metadata(count=len(metadata or {}), keys=ctypes.addressof(keys), values=ctypes.addressof(values))
    _calls.done(_save_safetensors, list(tensors.values()), names, extra, name)


def load(path: Any) -> Any:
    """What a .npy file holds, or a .npz or .safetensors file, as a dict by name."""
    name, text = path_of(path), str(os.fspath(path))
    if text.endswith(".npy"):
        return _calls.tensor(_load_npy, name)
    return dict(_calls.named(_load_npz if text.endswith(".npz") else _load_safetensors, name))


def load_metadata(path: Any) -> Dict[str, str]:
    """The texts that a safetensors file carries."""
    def read(made):
        keys, values = (ctypes.cast(field, ctypes.POINTER(ctypes.c_char_p)) for field in (made.keys, made.values))
        return {keys[i].decode(): values[i].decode() for i in range(made.count)}
    return _calls.call(read, _load_metadata, path_of(path))


# ---- symmetric memory ----

def symm_empty(world: World, shape: Dims, dtype: Dtype = "f32", strides: Optional[Dims] = None, group: Optional[AnyGroup] = None, requires_grad: bool = False,
               device: Optional[Device] = None) -> Tensor:
    """A zeroed tensor on symmetric memory: peer_tensor is that of another rank, and collectives use it where it lies."""
    options = _SymmOptions(group=_calls.group_handle(group).value, requires_grad=requires_grad, device=_calls.device_number(device))
    if strides is None:
        return _calls.tensor(_symm_empty, world._open(), shape, dtype, ctypes.byref(options))
    return _calls.tensor(_symm_strided, world._open(), shape, strides, dtype, ctypes.byref(options))


def is_symmetric(x: Tensor) -> bool:
    """Whether it lies in symmetric memory."""
    return bool(lib.tt_symm_memory(x._handle))


class SymmetricPool(Unique):
    """Symmetric memory that tensors are made in: `with pool.use(group):` all tensors of the thread, results and gradients too, come from it."""

    def __init__(self, world: World) -> None:
        handle = _pointer()
        check(lib.tutti_pool_new(world._open(), None, ctypes.byref(handle)))
        self._handle = handle.value
        self._release = weakref.finalize(self, _end_pool, os.getpid(), handle.value)
        self._release.atexit = False

    @contextlib.contextmanager
    def use(self, group: Optional[AnyGroup] = None) -> Iterator[None]:
        """Ranks make the same tensors in the same order; with a group the end compares them."""
        _calls.done(_pool_begin, self._handle, group)
        try:
            yield
        finally:
            _calls.done(_pool_end)


    def statistics(self) -> Dict[str, int]:
        """Blocks and bytes that are given out and kept for the next tensor, and how often a used block served one."""
        found = struct("tutti_pool_statistics")()
        check(lib.tutti_pool_query(self._handle, ctypes.byref(found)))
        return {name: getattr(found, name) for name, *_ in found._fields_[1:]}

    def trim(self) -> None:
        """Gives the unused blocks back to the system."""
        lib.tutti_pool_trim(self._handle)


def _end_pool(process: int, handle: Any) -> None:
    if process == os.getpid():
        lib.tutti_pool_release(handle)


# ---- products fused with gathers ----

def _with_gathered(wanted: bool, function: Any, *arguments: Any) -> Any:
    """The products; with `wanted` a pair of what was gathered and them."""
    gathered = _pointer()

    def read(made):
        return _calls._keep(gathered.value) if gathered.value else None, _calls._kept_list(made)
    first, rest = _calls.call(read, function, *arguments, ctypes.byref(gathered) if wanted else None)
    products = [_calls.wrap(address) for address in rest]
    return (_calls.wrap(first), products) if wanted else products


def fused_all_gather_matmul(a_shard: Tensor, bs: Sequence[Tensor], group: AnyGroup, gather_dim: int = 0, return_gathered: bool = False) -> Any:
    """The products A b for each b of `bs`, where A is all ranks' a_shard one after the other along gather_dim. With return_gathered a pair of A and them."""
    return _with_gathered(return_gathered, _gather_matmul, a_shard, bs, gather_dim, group)


def fused_all_gather_scaled_matmul(a_shard: Tensor, bs: Sequence[Tensor], a_scale: Tensor, b_scales: Sequence[Tensor], group: AnyGroup, gather_dim: int = 0,
                                   biases: Sequence[Optional[Tensor]] = (), result_scales: Sequence[Optional[Tensor]] = (),
                                   out_dtypes: Sequence[Optional[Dtype]] = (), use_fast_accum: Sequence[bool] = (), return_gathered: bool = False) -> Any:
    """scaled_matmul of A and each b, for narrow types: see fused_all_gather_matmul. Scales are of f32, one, or one per row of a_shard and column of b."""
    options = _ScaledOptions()
    held = _calls.handle_list(biases), _calls.handle_list(result_scales)
    options.biases, options.result_scales = held
    numbers = (ctypes.c_int * max(1, len(out_dtypes)))(*[dtype_number(dtype) if dtype is not None else 0 for dtype in out_dtypes])
    if out_dtypes:
        options.out_dtypes, options.out_dtype_count = ctypes.addressof(numbers), len(out_dtypes)
    fast = (ctypes.c_bool * max(1, len(use_fast_accum)))(*use_fast_accum)
    if use_fast_accum:
        options.use_fast_accum, options.use_fast_accum_count = ctypes.addressof(fast), len(use_fast_accum)
    return _with_gathered(return_gathered, _gather_scaled, a_shard, bs, a_scale, b_scales, gather_dim, group, ctypes.byref(options))


# ---- pipelines for work of one's own ----

def _status_of(failed: Any) -> Any:
    """A decorator for callbacks that return a status: what they raise is raised by the Python call, and is the failure meanwhile."""
    return _calls.callback(constants["TUTTI_ERROR_STATE"])(failed)


@ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _calls.ListStruct, ctypes.c_int)
@_status_of
def _consume(user, shards, rank):
    _calls.kept.get(user)(_calls.list_of(shards), rank)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, _pointer, ctypes.c_int, _pointer)
@_status_of
def _produce(user, rank, out):
    _calls.kept.get(user)(rank, _calls.borrow(out))
    return 0


def _pipelined(function: Any, user: Any, arguments: Any) -> None:
    number = _calls.kept.add(user)
    try:
        with _calls.Calls():
            _calls.checked(function, *arguments(number))
    finally:
        _calls.kept.drop(number)


def pipelined_all_gather_and_consume(shards: Sequence[Tensor], consume: Callable[[List[Tensor], int], Any], group: AnyGroup,
                                     ag_out: Sequence[Tensor] = ()) -> None:
    """Gathers several contiguous tensors along dimension 0 and hands each rank's to consume(shards, rank), this rank's first, then the others' as they become
    ready, each once. ag_out, one contiguous tensor for each of the shards, receives what is gathered. The tensors that consume gets are read only, and valid
    until it returns. No gradient."""
    _pipelined(_gather_consume, consume, lambda number: (shards, address_of(_consume), number, ag_out, group))


def pipelined_produce_and_all_to_all(produce: Callable[[int, Tensor], Any], output: Tensor, group: AnyGroup, chunk_dim: int = 0) -> None:
    """Every rank makes one chunk for each rank, by produce(rank, out) that writes into out, the others' first, and receives those made for it: chunk r of output,
    along chunk_dim, comes from rank r. No gradient."""
    _pipelined(_produce_scatter, produce, lambda number: (address_of(_produce), number, output, chunk_dim, group))


def fused_workspace_bytes(group: AnyGroup) -> int:
    """Bytes of symmetric memory that fused operations of this rank keep for the group."""
    return lib.tt_fused_workspace_bytes(_calls.group_handle(group))


# ---- waiting, and messages ----

def wait_all(world: World) -> None:
    """Waits for all collectives on tensors of this world that nobody has waited for."""
    _calls.done(_wait_all, world._open())


def pending_works(world: World) -> int:
    """Collectives on tensors of this world that nobody has waited for."""
    return lib.tt_pending_works(world._open())


def waited(world: World) -> float:
    """Seconds that this rank has waited for collectives on tensors of this world."""
    return lib.tt_waited_ns(world._open()) * 1e-9


def batch_p2p(operations: Sequence[Tuple[str, Tensor, int, int]], group: AnyGroup) -> List[Tensor]:
    """Sends and receives all at once, each as ("send" or "recv", tensor, rank, tag): a mark to wait for per send, the tensor itself per receive."""
    kinds = {"send": 1, "recv": 2}
    rows = (_P2p * max(1, len(operations)))()
    for row, (kind, tensor, peer, tag) in zip(rows, operations):
        if kind not in kinds:
            raise ValueError(f"tutti: {kind!r} is neither send nor recv")
        row.kind, row.tensor, row.peer, row.tag = kinds[kind], tensor._handle, peer, tag
    return _calls.tensors(_batch, len(operations), rows, group)
