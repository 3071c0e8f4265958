# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: every rank has a part of the batch, and the whole module (DataParallel) or a part of every parameter (FullySharded). Layers of
which each rank has a part are in tutti.nn."""
from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ._arguments import Unique, name_of, path_of
from ._library import constants, struct
from .buffers import dtype_number
from .nn._module import Module, _named_list
from .optim import Optimizer
from .tensor import _calls
from .tensor._autograd import address_of
from .tensor._calls import AnyGroup, Device, Dtype
from .tensor._tensor import Tensor

_DataOptions, _ShardOptions = struct("tt_data_parallel_options"), struct("tt_fully_sharded_options")
_DataCounts, _ShardCounts, _Named = struct("tt_data_parallel_counts"), struct("tt_fully_sharded_counts"), struct("tt_named_list")
_BucketStruct = struct("tt_bucket")
_EVENTS = {constants[f"TT_SHARD_{name.upper()}"]: name for name in ("gather", "free", "reduce", "shrink")}
_data_parallel = _calls.bind("tt_data_parallel_new", "pointer", "PGP")
_data_count = _calls.bind("tt_data_parallel_count", "done", "PP")
_shard = _calls.bind("tt_fully_shard", "pointer", "PzPGP")
_shard_count = _calls.bind("tt_fully_sharded_count", "done", "PP")
_gather, _free = _calls.bind("tt_fully_sharded_gather", "done", "PP"), _calls.bind("tt_fully_sharded_free", "done", "PP")
_switch = _calls.bind("tt_fully_sharded_switch", "done", "PPi?")
_prefetch = _calls.bind("tt_fully_sharded_prefetch", "done", "PiPzP")
_whole = _named_list("tt_fully_sharded_parameters")
_protect, _step = _calls.bind("tt_fully_sharded_protect", "done", "PP"), _calls.bind("tt_fully_sharded_step", "done", "P")
_regroup = _calls.bind("tt_fully_sharded_regroup", "done", "PG")
_save, _load = _calls.bind("tt_fully_sharded_save", "done", "PPs"), _calls.bind("tt_fully_sharded_load", "done", "PPs")
_data_sync, _shard_sync = _calls.bind("tt_data_parallel_sync", "done", "P?"), _calls.bind("tt_fully_sharded_sync", "done", "P?")
_data_release, _shard_release = _calls.bind("tt_data_parallel_release", "done", "P"), _calls.bind("tt_fully_sharded_release", "done", "P")
_set_whole = _calls.bind("tt_fully_sharded_set_parameters", "done", "P")
_set_whole.argtypes = [ctypes.c_void_p, _Named]


def _counted(function: Any, handle: Any, counts: Any) -> Dict[str, int]:
    _calls.done(function, handle, ctypes.byref(counts))
    return {name: getattr(counts, name) for name, *_ in counts._fields_[1:]}


def _end(process: int, release: Any, handle: int, number: Optional[int]) -> None:
    """Ends it, and what its callbacks were given by."""
    if process == os.getpid():
        _calls.done(release, handle)
        _calls.kept.drop(number)


class Bucket(NamedTuple):
    """Gradients that are reduced together: bucket `number` of `total`; values is flat, gradients are the parts of it, one per parameter."""
    number: int
    total: int
    values: Tensor
    gradients: List[Tensor]
    group: Any


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
@_calls.callback(None)
def _reduce(user, address):
    function, group = _calls.kept.get(user)
    bucket = _BucketStruct.from_address(address)
    function(Bucket(bucket.index, bucket.count, _calls.borrow(bucket.values), _calls.list_of(bucket.gradients), group))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
@_calls.callback(0)
def _dimension(user, name, parameter):
    return operator.index(_calls.kept.get(user)[0](name.decode(), _calls.borrow(parameter)))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
@_calls.callback(None)
def _watch(user, kind, name):
    _calls.kept.get(user)[1](_EVENTS[kind], name.decode())


class _Parallel(Unique):
    _sync: Any
    _end: Any

    def __init__(self, module: Module, handle: int, number: Optional[int] = None) -> None:
        self.module, self._handle = module, handle
        self._release = weakref.finalize(self, _end, os.getpid(), type(self)._end, handle, number)
        self._release.atexit = False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The module's."""
        return self.module(*arguments, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank; the next backward outside reduces the sum. All ranks do the same."""
        before = _calls.answer(type(self)._sync, self._handle, False)
        try:
            yield
        finally:
            _calls.answer(type(self)._sync, self._handle, before)

    def close(self) -> None:
        """Ends it; the module stays. Waits for reductions that are under way."""
        self._release()


class DataParallel(_Parallel):
    """Gradients of the module are averaged over the group while its backward runs. A collective; the weights of rank 0 become everybody's."""
    _sync, _end = _data_sync, _data_release

    def __init__(self, module: Module, group: AnyGroup, bucket_bytes: int = 0, first_bucket_bytes: int = 0, find_unused: bool = False,
                 static_graph: bool = False, own_buffers: bool = False, reduce: Optional[Callable[[Bucket], Any]] = None) -> None:
        """reduce(bucket) brings the values of a bucket of gradients to what all ranks shall have, in place, instead of averaging them."""
        options = _DataOptions(bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, find_unused=find_unused, static_graph=static_graph,
                               own_buffers=own_buffers)
        number = _calls.kept.add((reduce, group)) if reduce is not None else None
        if number is not None:
            options.reduce, options.user = address_of(_reduce).value, number
        try:
            super().__init__(module, _calls.answer(_data_parallel, module._need(), group, ctypes.byref(options)), number)
        except BaseException:
            _calls.kept.drop(number)
            raise

    def counts(self) -> Dict[str, int]:
        """What was done so far, on this rank."""
        return _counted(_data_count, self._handle, _DataCounts())


class FullySharded(_Parallel):
    """Every rank keeps a part of every parameter. `units` are modules below the root that are gathered and freed by themselves. A collective. Make the
    optimizer afterwards: it is over the shards. reshard is "units", "always" or "never"."""
    _sync, _end = _shard_sync, _shard_release

    def __init__(self, module: Module, group: AnyGroup, units: Sequence[Module] = (), reshard: str = "units", replicas: Optional[AnyGroup] = None,
                 param_dtype: Optional[Dtype] = None, reduce_dtype: Optional[Dtype] = None, output_dtype: Optional[Dtype] = None, keep_inputs: bool = False,
                 own_values: bool = False, prefetch: bool = True, divisor: float = 0.0, device: Optional[Device] = None, near_ranks: int = 0,
                 dimension: Optional[Callable[[str, Tensor], int]] = None, watch: Optional[Callable[[str, str], Any]] = None) -> None:
        """device: where parameters are gathered to and computed with, while shards, gradients and the optimizer stay where the parameters are. near_ranks: so many
        consecutive ranks keep a unit among them after its forward. dimension(name, parameter) says along which one a parameter is cut (0 without it).
        watch(event, unit) is told "gather", "free", "reduce" and "shrink" of each unit, by its path."""
        number = constants.get(f"TT_RESHARD_{reshard.upper()}")
        if number is None:
            raise ValueError(f"tutti: {reshard!r} is no way to reshard; there are units, always and never")
        options = _ShardOptions(reshard=number, replicas=_calls.group_handle(replicas).value, keep_inputs=keep_inputs, own_values=own_values,
                                no_prefetch=not prefetch, divisor=divisor, device=_calls.device_number(device), near_ranks=near_ranks)
        options.dimension, options.watch = address_of(_dimension).value if dimension is not None else None, address_of(_watch).value if watch is not None else None
        for field, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype), ("output_dtype", output_dtype)):
            setattr(options, field, dtype_number(dtype) if dtype is not None else 0)
        if not hasattr(units, "__len__") or not all(isinstance(unit, Module) for unit in units):
            raise TypeError("tutti: the units of FullySharded are a list of modules, behind the group: FullySharded(net, group, [net[0], net[2]])")
        handles = (ctypes.c_void_p * max(1, len(units)))(*[unit._need() for unit in units])
        options.user = kept = _calls.kept.add((dimension, watch))
        try:
            super().__init__(module, _calls.answer(_shard, module._need(), len(units), handles, group, ctypes.byref(options)), kept)
        except BaseException:
            _calls.kept.drop(kept)
            raise

    def gather(self, unit: Optional[Module] = None) -> None:
        """Gathers a unit by hand (None: all), until free or its next forward or backward. A collective."""
        _calls.done(_gather, self._handle, unit._need() if unit is not None else None)

    def free(self, unit: Optional[Module] = None) -> None:
        """Frees what was gathered."""
        _calls.done(_free, self._handle, unit._need() if unit is not None else None)

    def switch(self, which: str, on: bool, unit: Optional[Module] = None) -> None:
        """Switches a unit (None: all): "free_forward" and "free_backward" (whole parameters are freed behind it), "gather_backward" (they are gathered for
        it), "replicas" (gradients are averaged over them). All ranks do the same."""
        number = constants.get(f"TT_SWITCH_{which.upper()}")
        if number is None:
            raise ValueError(f"tutti: {which!r} is no switch; there are free_forward, free_backward, gather_backward and replicas")
        _calls.done(_switch, self._handle, unit._need() if unit is not None else None, number, on)

    def prefetch(self, unit: Module, ahead: Sequence[Module], backward: bool = False) -> None:
        """These units, and no others, begin to be gathered when the forward, or the backward, of `unit` begins."""
        handles = (ctypes.c_void_p * max(1, len(ahead)))(*[each._need() for each in ahead])
        number = constants["TT_PASS_BACKWARD" if backward else "TT_PASS_FORWARD"]
        _calls.done(_prefetch, self._handle, number, unit._need(), len(ahead), handles)

    def named_parameters(self) -> List[Tuple[str, Tensor]]:
        """All parameters whole, on every rank: copies. A collective."""
        return _calls.named(_whole, self._handle)

    def load_parameters(self, whole: Mapping[str, Tensor]) -> None:
        """Takes this rank's rows of whole parameters: all of them, with the names and shapes that named_parameters gives."""
        tensors = _calls.handle_list(list(whole.values()))
        names = (ctypes.c_char_p * max(1, len(whole)))(*[name_of(name) for name in whole])
        _calls.done(_set_whole, self._handle, _Named(count=len(whole), at=tensors.at, names=ctypes.addressof(names)))

    def protect(self, optimizer: Optimizer) -> None:
        """Puts what the optimizer remembers where survivors of a death find it. A collective; step with FullySharded.step from then on."""
        _calls.done(_protect, self._handle, optimizer._handle)
        self._optimizer = optimizer

    def step(self) -> None:
        """A step of the protected optimizer."""
        _calls.done(_step, self._handle)

    def regroup(self, group: AnyGroup) -> None:
        """After a death: cuts parameters and states anew over the survivors, and goes on from memory. A collective of that group."""
        _calls.done(_regroup, self._handle, group)

    def save(self, folder: Any, optimizer: Optional[Optimizer] = None) -> None:
        """Writes a checkpoint, each rank its part, all or nothing. A collective."""
        _calls.done(_save, self._handle, optimizer._handle if optimizer is not None else None, path_of(folder))

    def load(self, folder: Any, optimizer: Optional[Optimizer] = None) -> None:
        """Reads one, also of another number of ranks. A collective."""
        _calls.done(_load, self._handle, optimizer._handle if optimizer is not None else None, path_of(folder))

    def counts(self) -> Dict[str, int]:
        """What was done so far, on this rank."""
        return _counted(_shard_count, self._handle, _ShardCounts())
