# SPDX-License-Identifier: Apache-2.0
"""Worlds, groups and what they do together."""
from __future__ import annotations

import collections
import ctypes
import operator
import os
import traceback
import weakref
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

from . import _interrupt
from ._library import constants, lib, struct
from .buffers import buffer_of, dtype_bytes, dtype_number, new_like, numpy_dtype
from .errors import check, error_of

_Call = struct("tutti_call")
_REDUCTIONS = {name: constants["TUTTI_" + name.upper()] for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")}


def _text(value):
    return value.encode() if value is not None else None


def _nanoseconds(seconds):
    return 0 if seconds is None else min(2**63 - 1, max(1, int(seconds * 1e9)))


def _int(value):
    """An int of C; ctypes alone would cut a larger one."""
    value = operator.index(value)
    if not -2**31 <= value < 2**31:
        raise OverflowError(f"tutti: {value} is no rank and no tag: it does not fit into 32 bits")
    return value


def _ints(values):
    return (ctypes.c_int * len(values))(*[_int(value) for value in values])


def _sizes(values):
    return (ctypes.c_size_t * len(values))(*values)


def reduction_number(name: Optional[str]) -> int:
    if name not in _REDUCTIONS:
        raise ValueError(f"tutti: {name!r} is no reduction; there are {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name]


def _release_here(process, function, handle):
    """A forked child has copies of these objects, and the library's locks as they were at that moment: it touches nothing."""
    if process == os.getpid():
        function(handle)


_left: Deque[Tuple[int, Any]] = collections.deque()  # works that nobody waits for any more, with their buffers, which the library uses until they end


def _drop(process, handle, kept):
    """A work's object has gone. Its buffers may not go before it has finished."""
    if process == os.getpid():
        _left.append((handle, kept))
        _sweep()


def _sweep():
    for _ in range(len(_left)):
        try:
            handle, kept = _left.popleft()
        except IndexError:  # another thread took it
            return
        finished = ctypes.c_bool()
        if lib.tutti_work_test(handle, ctypes.byref(finished)) or finished.value:
            lib.tutti_work_release(handle)
        else:
            _left.append((handle, kept))


def _reason(kind, value):
    """An exception in words, for other ranks."""
    return "".join(traceback.format_exception_only(kind, value)).strip().encode(errors="replace")


def finished(handle: Any) -> bool:
    """Whether a work has come to its end, well or not."""
    done = ctypes.c_bool()
    return lib.tutti_work_test(handle, ctypes.byref(done)) != 0 or done.value


def wait_for(world: Any, handle: Any, nanoseconds: int) -> int:
    """The status of a work, when it has finished."""
    return _interrupt.wait(world, lambda limit: lib.tutti_work_wait(handle, limit), nanoseconds, lambda: finished(handle))


class Work:
    """A call that was started with wait=False. Wait for it, or await it; its buffers stay alive until it has finished."""

    def __init__(self, world: Any, handle: Any, result: Any, kept: Any) -> None:
        _sweep()
        self._world, self._handle, self._kept, self.result = world, handle, [kept], result
        self._release = weakref.finalize(self, _drop, os.getpid(), handle, self._kept)
        self._release.atexit = False

    def done(self) -> bool:
        """Whether it has finished, well or not."""
        finished = ctypes.c_bool()
        check(lib.tutti_work_test(self._handle, ctypes.byref(finished)))
        return finished.value

    def wait(self, timeout: Optional[float] = None) -> Any:
        """Waits, and returns what the call would have returned."""
        check(wait_for(self._world, self._handle, _nanoseconds(timeout)))
        self._kept.clear()
        return self.result

    def __await__(self) -> Any:
        import asyncio  # late, since it takes long
        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()


class Group:
    """Ranks that do something together. Collectives are called by all of them, in the same order. Arrays may be NumPy's, PyTorch's (CPU), or anything
    with the buffer protocol or DLPack; they are read and written where they lie. With wait=False a call returns a Work. timeout is in seconds."""

    def __init__(self, world: Any, handle: Any, owned: bool = True) -> None:
        self.world, self._handle, self._batch = world, handle, None
        if owned:
            world._groups.add(self)
            self._release = weakref.finalize(self, _release_here, os.getpid(), lib.tutti_group_release, handle)

    rank = property(lambda self: lib.tutti_group_rank(self._handle), doc="This rank in the group.")
    size = property(lambda self: lib.tutti_group_size(self._handle), doc="How many ranks it has.")
    name = property(lambda self: lib.tutti_group_name(self._handle).decode(), doc="Its name.")

    @property
    def ranks(self) -> List[int]:
        """Its ranks, as numbers of the world."""
        ranks = ctypes.cast(lib.tutti_group_ranks(self._handle), ctypes.POINTER(ctypes.c_int))
        return [ranks[i] for i in range(self.size)]

    @property
    def timeout(self) -> Any:
        """Seconds that a call may take."""
        return lib.tutti_group_timeout(self._handle) * 1e-9

    @timeout.setter
    def timeout(self, seconds: float) -> Any:
        check(lib.tutti_group_set_timeout(self._handle, _nanoseconds(seconds)))

    def __repr__(self) -> str:
        return f"<tutti.Group {self.name!r}, rank {self.rank} of {self.size}>"

    def close(self) -> None:
        """Gives the group back. That of the whole world stays until the world is closed."""
        if "_release" in self.__dict__:
            self.world._groups.discard(self)
            self._release()
            self._handle = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Gives it back. An exception ends it on all ranks, and is the reason in their errors."""
        if value is not None:
            lib.tutti_group_abort(self._handle, _reason(kind, value))
        self.close()

    # ---- making calls ----

    def _run(self, function, arguments, result, kept, wait, timeout, **fields):
        call = _Call(timeout_ns=_nanoseconds(timeout), **fields)
        if self._batch is not None:
            call.batch = self._batch._handle
            self._batch._kept.append((kept, result))
            check(function(self._handle, *arguments, ctypes.byref(call)))
            return result
        if not wait:
            handle = ctypes.c_void_p()
            call.work = ctypes.addressof(handle)
            check(_interrupt.call(self.world._handle, function, self._handle, *arguments, ctypes.byref(call)))
            return Work(self.world._handle, handle.value, result, (kept, result))
        status = _interrupt.call(self.world._handle, function, self._handle, *arguments, ctypes.byref(call))
        if status:
            raise error_of(status)
        return result

    def _pair(self, who, array, out, shape):
        """Input and output, which is made where none is given."""
        out = new_like(array, shape, who) if out is None else out
        source, target = buffer_of(array), buffer_of(out, writable=True)
        if source.dtype != target.dtype:
            raise TypeError(f"{who}: the input is {source.dtype} and out is {target.dtype}")
        return source, target, out

    def _length(self, who, target, count):
        if target.count != count:
            raise ValueError(f"{who}: out has {target.count} elements and needs {count}")

    def barrier(self, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """Returns when all ranks have called it."""
        return self._run(lib.tutti_barrier, (), None, None, wait, timeout)

    def all_reduce(self, array: Any, op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """The sum (or avg, product, min, max, band, bor, bxor) over all ranks, in place or into out, which is returned. Added in the order of the ranks:
        the same bits on every rank, every time."""
        out = array if out is None else out
        source, target, out = self._pair("all_reduce", array, out, None)
        self._length("all_reduce", target, source.count)
        return self._run(lib.tutti_all_reduce, (source.address, target.address, source.count, source.number, reduction_number(op)), out, (source, target), wait, timeout)

    def reduce(self, array: Any, root: int = 0, op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """all_reduce whose result the root alone gets; elsewhere out is not touched."""
        out = array if out is None else out
        source, target, out = self._pair("reduce", array, out, None)
        self._length("reduce", target, source.count)
        return self._run(lib.tutti_reduce, (source.address, target.address, source.count, source.number, reduction_number(op), _int(root)), out, (source, target), wait,
                         timeout)

    def broadcast(self, array: Any, root: int = 0, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """The root's array, in everybody's."""
        target = buffer_of(array, writable=True)
        return self._run(lib.tutti_broadcast, (target.address, target.address, target.count, target.number, _int(root)), array, target, wait, timeout)

    def all_gather(self, array: Any, out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """The arrays of all ranks, one after the other: shape (size, *shape) where out is not given."""
        source = buffer_of(array)
        source, target, out = self._pair("all_gather", array, out, (self.size, *source.shape))
        self._length("all_gather", target, source.count * self.size)
        return self._run(lib.tutti_all_gather, (source.address, target.address, source.count, source.number), out, (source, target), wait, timeout)

    def all_gather_v(self, array: Any, counts: Sequence[int], out: Any, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """all_gather of arrays of counts[rank] elements, one after the other in out."""
        source, target, out = self._pair("all_gather_v", array, out, None)
        if len(counts) != self.size or counts[self.rank] != source.count:
            raise ValueError(f"all_gather_v: counts are {list(counts)}, for {self.size} ranks and {source.count} elements of rank {self.rank}")
        self._length("all_gather_v", target, sum(counts))
        kept = _sizes(counts)
        return self._run(lib.tutti_all_gather_v, (source.address, target.address, kept, None, source.number), out, (source, target, kept), wait, timeout)

    def reduce_scatter(self, array: Any, op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """This rank's part of the sum: the first dimension is cut by the number of ranks."""
        source = buffer_of(array)
        if source.count % self.size:
            raise ValueError(f"reduce_scatter: {source.count} elements cannot be cut into {self.size} parts")
        first = source.shape[0] if source.shape else 1
        shape = (first // self.size, *source.shape[1:]) if first % self.size == 0 else (source.count // self.size,)
        source, target, out = self._pair("reduce_scatter", array, out, shape)
        self._length("reduce_scatter", target, source.count // self.size)
        return self._run(lib.tutti_reduce_scatter, (source.address, target.address, target.count, source.number, reduction_number(op)), out, (source, target), wait,
                         timeout)

    def gather(self, array: Any, root: int = 0, out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """all_gather whose result the root alone gets; None elsewhere."""
        source = buffer_of(array)
        if self.rank != root:
            return self._run(lib.tutti_gather, (source.address, None, source.count, source.number, _int(root)), None, source, wait, timeout)
        source, target, out = self._pair("gather", array, out, (self.size, *source.shape))
        self._length("gather", target, source.count * self.size)
        return self._run(lib.tutti_gather, (source.address, target.address, source.count, source.number, _int(root)), out, (source, target), wait, timeout)

    def scatter(self, array: Any, out: Any, root: int = 0, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """Parts of the root's array, one to each rank's out; elsewhere array is None."""
        target = buffer_of(out, writable=True)
        source = buffer_of(array) if self.rank == root else None
        if source is not None and (source.count != target.count * self.size or source.dtype != target.dtype):
            raise ValueError(f"scatter: {source.count} elements of {source.dtype} cannot be cut into {self.size} parts of {target.count} {target.dtype}")
        return self._run(lib.tutti_scatter, (source.address if source else None, target.address, target.count, target.number, _int(root)), out, (source, target), wait,
                         timeout)

    def all_to_all(self, array: Any, out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """Part r of the array goes to rank r; out has what came, in the order of the ranks."""
        source = buffer_of(array)
        source, target, out = self._pair("all_to_all", array, out, source.shape)
        if source.count % self.size:
            raise ValueError(f"all_to_all: {source.count} elements cannot be cut into {self.size} parts")
        self._length("all_to_all", target, source.count)
        return self._run(lib.tutti_all_to_all, (source.address, target.address, source.count // self.size, source.number), out, (source, target), wait, timeout)

    def all_to_all_v(self, array: Any, counts: Sequence[int], out: Any, out_counts: Sequence[int], wait: bool = True, timeout: Optional[float] = None) -> Any:
        """all_to_all of parts of different lengths: counts[r] elements go to rank r, out_counts[r] come from it, one after the other."""
        source, target, out = self._pair("all_to_all_v", array, out, None)
        self._length("all_to_all_v", target, sum(out_counts))
        if len(counts) != self.size or len(out_counts) != self.size or sum(counts) != source.count:
            raise ValueError(f"all_to_all_v: counts are {list(counts)} and {list(out_counts)}, for {self.size} ranks and {source.count} elements")
        sent, received = _sizes(counts), _sizes(out_counts)
        return self._run(lib.tutti_all_to_all_v, (source.address, sent, None, target.address, received, None, source.number), out,
                         (source, target, sent, received), wait, timeout)

    def permute(self, array: Any, to: Sequence[int], out: Any = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """The array goes to rank to[rank]; out has what came."""
        source = buffer_of(array)
        source, target, out = self._pair("permute", array, out, source.shape)
        self._length("permute", target, source.count)
        if len(to) != self.size:
            raise ValueError(f"permute: to has {len(to)} entries, and there are {self.size} ranks")
        kept = _ints(to)
        return self._run(lib.tutti_permute, (source.address, target.address, source.count, source.number, kept), out, (source, target, kept), wait, timeout)

    def send(self, array: Any, to: int, tag: Optional[int] = 0, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """To one rank, which receives it."""
        source = buffer_of(array)
        return self._run(lib.tutti_send, (source.address, source.count, source.number, _int(to), _int(tag)), None, source, wait, timeout)

    def recv(self, array: Any, source: Optional[int] = None, tag: Optional[int] = None, wait: bool = True, timeout: Optional[float] = None) -> Any:
        """From one rank (None: any), with that tag (None: any), into the array, which is returned."""
        target = buffer_of(array, writable=True)
        return self._run(lib.tutti_recv, (target.address, target.count, target.number, constants["TUTTI_ANY_SOURCE"] if source is None else _int(source),
                                          constants["TUTTI_ANY_TAG"] if tag is None else _int(tag)), array, target, wait, timeout)

    def batch(self) -> Batch:
        """Sends, receives and collectives inside of `with group.batch():` run as one."""
        return Batch(self)

    # ---- groups of groups, and their end ----

    def shrink(self, exclude: Sequence[int] = (), timeout: Optional[float] = None) -> Group:
        """The ranks that live, without those excluded, as a new group. Every one of them calls it, also after this group has ended."""
        numbers = _ints(list(exclude))
        options = struct("tutti_shrink_options")(exclude=ctypes.addressof(numbers) if exclude else None, exclude_count=len(numbers),
                                                 timeout_ns=_nanoseconds(timeout))
        return self._new(lib.tutti_group_shrink, self._handle, ctypes.byref(options))

    def refill(self, timeout: Optional[float] = None) -> Group:
        """Whole again, with newcomers in the places of the dead (`tutti run --refill`)."""
        return self._new(lib.tutti_group_refill, self._handle, _nanoseconds(timeout))

    def _new(self, function, *arguments):
        handle = ctypes.c_void_p()
        check(_interrupt.call(self.world._handle, function, *arguments, ctypes.byref(handle)))
        return Group(self.world, handle.value)

    def agree(self, mine: bool) -> bool:
        """Whether `mine` was true on every rank that came. Deaths do not disturb it."""
        every = ctypes.c_bool()
        check(_interrupt.call(self.world._handle, lib.tutti_group_agree, self._handle, bool(mine), ctypes.byref(every)))
        return every.value

    def check(self) -> None:
        """Raises what has ended the group, if anything has."""
        check(lib.tutti_group_check(self._handle))

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks, with this reason in their errors."""
        check(lib.tutti_group_abort(self._handle, _text(reason)))

    def ran(self) -> Dict[str, str]:
        """What the last call was run by: operation, algorithm, executor, and why."""
        ran = struct("tutti_ran")()
        check(lib.tutti_group_ran(self._handle, ctypes.byref(ran)))
        return {"operation": ran.operation.decode(), "algorithm": lib.tutti_algorithm_name(ran.algorithm).decode(), "executor": ran.executor.decode(),
                "why": ran.why.decode()}


class Batch:
    """See Group.batch."""

    def __init__(self, group: Any) -> None:
        self._group, self._handle, self._kept = group, None, []  # type: Any, Any, List[Any]

    def __enter__(self) -> Batch:
        if self._group._batch is not None:
            raise RuntimeError("tutti: a batch of this group is open already")
        handle = ctypes.c_void_p()
        check(lib.tutti_batch_begin(self._group._handle, ctypes.byref(handle)))
        self._handle, self._group._batch = handle.value, self
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._group._batch = None
        if kind is not None:
            lib.tutti_batch_cancel(self._handle)
            return
        check(_interrupt.call(self._group.world._handle, lib.tutti_batch_end, self._handle, None))
        self._kept = []


class Peers:
    """The blocks of all ranks of a group, mapped."""

    def __init__(self, memory: Memory, group: Any, handle: Any) -> None:
        self.group, self._memory, self._handle = group, memory, handle
        self._release = weakref.finalize(self, _release_here, os.getpid(), lib.tutti_peers_release, handle)

    def array(self, rank: int, shape: Any = None, dtype: Any = None, offset: int = 0) -> Any:
        """The block of a rank, or a part of it, as a NumPy array over that very memory. offset is in elements."""
        import numpy
        shape = self._memory.shape if shape is None else shape
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = self._memory.dtype if dtype is None else dtype
        view = struct("tutti_view")()
        check(lib.tutti_peers_get_buffer(self._handle, rank, (ctypes.c_int64 * max(1, len(shape)))(*shape), len(shape), dtype_number(dtype), offset,
                                         ctypes.byref(view)))
        count = 1
        for size in shape:
            count *= size
        block: Any = (ctypes.c_char * (count * dtype_bytes(dtype))).from_address(view.data or 1) if count else (ctypes.c_char * 0)()
        block._owner = self  # the array keeps the mapping
        return numpy.frombuffer(block, numpy_dtype(dtype)).reshape(shape)

    def put(self, to: int, array: Any, offset: int = 0, timeout: Optional[float] = None) -> Any:
        """Writes an array into a rank's block, offset bytes from its beginning."""
        source = buffer_of(array)
        self._call(lib.tutti_peers_put, to, offset, source.address, source.count * dtype_bytes(source.dtype), timeout=timeout)

    def get(self, source: Optional[int], array: Any, offset: int = 0, timeout: Optional[float] = None) -> bytes:
        """Reads from a rank's block into an array, which is returned."""
        target = buffer_of(array, writable=True)
        self._call(lib.tutti_peers_get, source, offset, target.address, target.count * dtype_bytes(target.dtype), timeout=timeout)
        return array

    def signal(self, to: int, channel: int = 0, timeout: Optional[float] = None) -> Any:
        """Tells a rank that waits for it; it sees what was put before."""
        self._call(lib.tutti_peers_signal, to, channel, timeout=timeout)

    def wait_signal(self, source: Optional[int], channel: int = 0, timeout: Optional[float] = None) -> Any:
        """Waits for the signal of a rank."""
        self._call(lib.tutti_peers_wait_signal, source, channel, timeout=timeout)

    def barrier(self, channel: int = 0, timeout: Optional[float] = None) -> Any:
        """Of all ranks; each sees what the others have put before."""
        self._call(lib.tutti_peers_barrier, channel, timeout=timeout)

    def _call(self, function, *arguments, timeout):
        call = _Call(timeout_ns=_nanoseconds(timeout))
        check(_interrupt.call(self.group.world._handle, function, self._handle, *arguments, ctypes.byref(call)))


class Memory:
    """Symmetric memory: a block of this rank that others can map. Arrays over it keep it alive, also beyond the world."""

    def __init__(self, world: Any, shape: Any, dtype: Any, handle: Any) -> None:
        self.world, self.shape, self.dtype, self._handle = world, shape, dtype, handle
        self._release = weakref.finalize(self, _release_here, os.getpid(), lib.tutti_memory_release, handle)

    def rendezvous(self, group: Optional[Group] = None) -> Peers:
        """A collective of the group (default: the world's): maps the blocks of all, which must be equally long."""
        group = group if group is not None else self.world.group
        handle = ctypes.c_void_p()
        check(_interrupt.call(self.world._handle, lib.tutti_memory_rendezvous, self._handle, group._handle, ctypes.byref(handle)))
        return Peers(self, group, handle.value)

    @property
    def array(self) -> Any:
        """The block itself, as a NumPy array over it."""
        import numpy
        block: Any = (ctypes.c_char * lib.tutti_memory_bytes(self._handle)).from_address(lib.tutti_memory_data(self._handle))
        block._owner = self
        dtype = numpy_dtype(self.dtype)
        count = 1
        for size in self.shape:
            count *= size
        return numpy.frombuffer(block, dtype, count).reshape(self.shape)


class Store:
    """Keys and values that all ranks see: world.store."""

    def __init__(self, world: Any, handle: Any) -> None:
        self._world, self._lent = world, handle

    @property
    def _handle(self):
        self._world._open()  # the store goes with it
        return self._lent

    def set(self, key: str, value: Any) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        check(_interrupt.call(self._world._handle, lib.tutti_store_set, self._handle, _text(key), value, len(value)))

    def get(self, key: str, timeout: Optional[float] = None) -> bytes:
        """The value, as bytes; waits until it is there."""
        value, length = ctypes.c_void_p(), ctypes.c_size_t()
        self._wait(lambda limit: lib.tutti_store_get(self._handle, _text(key), limit, ctypes.byref(value), ctypes.byref(length)), timeout)
        found = ctypes.string_at(value, length.value)
        lib.tutti_free(value)
        return found

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, and returns the sum."""
        total = ctypes.c_int64()
        check(_interrupt.call(self._world._handle, lib.tutti_store_add, self._handle, _text(key), amount, ctypes.byref(total)))
        return total.value

    def wait(self, *keys: str, timeout: Optional[float] = None) -> Any:
        """Until all keys are there."""
        names = (ctypes.c_char_p * len(keys))(*[key.encode() for key in keys])
        self._wait(lambda limit: lib.tutti_store_wait(self._handle, names, len(keys), limit), timeout)

    def _wait(self, attempt, timeout):
        nanoseconds = _nanoseconds(timeout) or lib.tutti_group_timeout(lib.tutti_world_group(self._world._open()))
        check(_interrupt.wait(self._world._handle, attempt, nanoseconds))

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        existed = ctypes.c_bool()
        check(lib.tutti_store_delete(self._handle, _text(key), ctypes.byref(existed)))
        return existed.value


class World:
    """All ranks of a job. Without arguments the launcher's environment decides (`tutti run`, torchrun, mpirun, srun, tutti.spawn), and there is one rank
    where there is none of them.

        with tutti.World() as world:
            world.group.all_reduce(array)
    """

    def __init__(self, rank: Optional[int] = None, size: Optional[int] = None, store: Optional[str] = None, name: Optional[str] = None, timeout: Optional[float] = None, threads: Optional[int] = None, settings: Optional[str] = None) -> None:
        if (rank is None) != (size is None):
            raise ValueError("tutti: rank and size are given together, or not at all")
        given = _spawned() if rank is None and store is None else {}
        rank, size, store = given.get("rank", rank), given.get("size", size), given.get("store", store)
        _interrupt.start()
        options = struct("tutti_world_options")(name=_text(name), rank=rank or 0, rank_count=size or 0, store_url=_text(store),
                                                timeout_ns=_nanoseconds(timeout), settings=_text(settings),
                                                threads=constants["TUTTI_NONE"] if threads == 0 else threads or 0)
        self._handle = _interrupt.aside(lambda given_up: _opened(options, given_up))
        self._group: Optional[Group] = None
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._process = os.getpid()
        if self.size > 1:
            _interrupt.worlds.add(self._handle)

    def _open(self):
        if self._handle is None:
            raise RuntimeError("tutti: the world is closed")
        return self._handle

    rank = property(lambda self: lib.tutti_world_rank(self._open()), doc="This rank, from 0.")
    size = property(lambda self: lib.tutti_world_size(self._open()), doc="How many ranks there are.")
    local_rank = property(lambda self: lib.tutti_world_local_rank(self._open()), doc="Among the ranks of this host.")
    local_size = property(lambda self: lib.tutti_world_local_size(self._open()), doc="How many ranks this host has.")
    launcher = property(lambda self: lib.tutti_world_launcher(self._open()).decode(), doc="How the world was found.")

    @property
    def group(self) -> Any:
        """All ranks. After Group.refill it is the group that is whole."""
        handle = lib.tutti_world_group(self._open())
        if self._group is None or self._group._handle != handle:
            self._group = Group(self, handle, owned=False)  # one object: a batch of it is everybody's
        return self._group

    @property
    def store(self) -> Any:
        """Where the ranks meet; None in a world of one."""
        handle = lib.tutti_world_store(self._open())
        return Store(self, handle) if handle else None

    def new_group(self, ranks: Sequence[int], name: Optional[str] = None, tag: Optional[int] = None, timeout: Optional[float] = None) -> Optional[Group]:
        """A group of these ranks. All ranks of the world call it; None on those that are not in it."""
        options = struct("tutti_group_options")(name=_text(name), tag=_text(tag), timeout_ns=_nanoseconds(timeout))
        handle = ctypes.c_void_p()
        check(_interrupt.call(self._open(), lib.tutti_group_new, self._handle, _ints(ranks), len(ranks), ctypes.byref(options), ctypes.byref(handle)))
        return Group(self, handle.value) if self.rank in ranks else None

    def empty(self, shape: Any, dtype: Any = "f32", huge_pages: Optional[bool] = None) -> Memory:
        """Symmetric memory for an array. Memory.array is the array, Memory.rendezvous maps those of the others."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = 1
        for size in shape:
            count *= size
        choice = {None: 0, False: constants["TUTTI_NO"], True: constants["TUTTI_YES"]}[huge_pages]
        options = struct("tutti_memory_options")(huge_pages=choice)
        handle = ctypes.c_void_p()
        check(lib.tutti_memory_alloc(self._open(), count * dtype_bytes(dtype), ctypes.byref(options), ctypes.byref(handle)))
        return Memory(self, shape, dtype, handle.value)

    def interrupt(self) -> None:
        """Ends the waits of this rank, from any thread, until resume."""
        lib.tutti_world_interrupt(self._open())

    def resume(self) -> None:
        lib.tutti_world_resume(self._open())

    def finish(self, timeout: Optional[float] = None) -> None:
        """Leaves together with all ranks that live."""
        handle, self._handle = self._open(), None
        _interrupt.worlds.discard(handle)
        _interrupt.aside(lambda given_up: self._end(lib.tutti_world_finish(handle, _nanoseconds(timeout))))

    def close(self) -> None:
        """Leaves, and waits for nobody. A second close does nothing. Arrays over symmetric memory stay valid."""
        if self._handle is None or self._process != os.getpid():
            return
        handle, self._handle = self._handle, None
        _interrupt.worlds.discard(handle)
        self._end(lib.tutti_world_close(handle))

    @staticmethod
    def _end(status):
        if status and status != constants["TUTTI_ERROR_STATE"]:  # live handles: Python releases them when their objects go
            raise error_of(status)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Leaves. An exception goes to the other ranks: it ends the groups of this world, and is the reason in their errors."""
        if value is not None and self._handle is not None and not (isinstance(value, SystemExit) and not value.code):
            for group in (self.group, *self._groups):
                lib.tutti_group_abort(group._handle, _reason(kind, value))
        self.close()

    def __repr__(self) -> str:
        return "<tutti.World, closed>" if self._handle is None else f"<tutti.World, rank {self.rank} of {self.size}>"


def _opened(options, given_up):
    """Opens a world; closes it at once where nobody waits for it any more."""
    handle = ctypes.c_void_p()
    check(lib.tutti_world_open(ctypes.byref(options), ctypes.byref(handle)))
    if given_up.is_set():
        lib.tutti_world_close(handle)
    return handle.value


_given: Dict[str, Any] = {}


def _spawned():
    """Rank, size and store that tutti.spawn has given this process."""
    return _given
