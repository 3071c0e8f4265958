# SPDX-License-Identifier: Apache-2.0
"""Worlds, groups and what they do together."""
from __future__ import annotations

import collections
import ctypes
import os
import threading
import traceback
import weakref
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _interrupt
from ._arguments import (Unique, device_number, integer as _int, integers as _ints, nanoseconds as _nanoseconds, path_of, release_here as _release_here,
                         shape_of, sizes as _sizes, text as _text, wide_unsigned)
from ._library import constants, lib, struct
from .buffers import buffer_of, dtype_bytes, element, new_like, place, same_place
from .errors import StateError, check, error_of, status_name
from .memory import Memory
from .store import Store

_Call = struct("tutti_call")
_REDUCTIONS = {name: constants["TUTTI_" + name.upper()] for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")}
_ALGORITHMS = {name: constants["TUTTI_ALGORITHM_" + name.upper()] for name in ("auto", "inline", "one_shot", "two_shot", "pipelined", "tree")}
_ORDERS = {name: constants["TUTTI_ORDER_" + name.upper()] for name in ("rank", "any")}


def reduction_number(name: Optional[str]) -> int:
    return _one_of(_REDUCTIONS, name, "reduction")


def _one_of(known, name, what):
    if name not in known:
        raise ValueError(f"tutti: {name!r} is no {what}; there are {', '.join(known)}")
    return known[name]


def _reduction(op, factor, order, dtype):
    """The number of a reduction of a group's, and what else the call says of it."""
    given = None if order is None else {"order": _one_of(_ORDERS, order, "order of a reduction")}
    if factor is None and op != "premul_sum":
        return reduction_number(op), given
    if factor is None or op != "premul_sum":
        raise ValueError(f"tutti: factor belongs to op='premul_sum', which needs one; here are op={op!r} and factor={factor!r}")
    return constants["TUTTI_PREMUL_SUM"], {"factor": element(factor, dtype), **(given or {})}


def _alike(who, source, target):
    if source.dtype != target.dtype:
        raise TypeError(f"{who}: the input is {source.dtype} and out is {target.dtype}")


def _strided(**buffers):
    """What a call says of those whose elements lie apart."""
    return {field: struct("tutti_strided")(block=each.apart[0], stride=each.apart[1]) for field, each in buffers.items() if each.apart is not None}


def _lists(lists):
    """Lists of ranks as C takes them: rows, their lengths, and what must be kept."""
    kept = [_ints(list(ranks)) for ranks in lists]
    return (ctypes.c_void_p * max(1, len(kept)))(*[ctypes.addressof(row) for row in kept]), _ints([len(row) for row in kept] or [0]), kept


def _options(name, tag, description, timeout, **fields):
    return struct("tutti_group_options")(name=_text(name), tag=_text(tag), description=_text(description), timeout_ns=_nanoseconds(timeout), **fields)


# Works that were started, or are about to be, with their buffers, which the library uses until they end. Ctrl-C raises between any two steps of Python: so a work is
# here before it is started, and what an interrupt leaves here stays too long, and is never freed too early.
_running: Dict[int, Tuple[Any, Any]] = {}
_left: Deque[Any] = collections.deque()  # places of those that nobody waits for any more
_sweeping = threading.RLock()  # a signal's handler may sweep in the middle of a sweep


def _in_child():
    global _sweeping
    _sweeping = threading.RLock()
    _left.clear()


os.register_at_fork(after_in_child=_in_child)


def hold(kept: Any) -> Any:
    """A place for the handle of a work that is about to be started, and holds its buffers."""
    place = ctypes.c_void_p()
    _running[id(place)] = (place, kept)
    return place


def let_go(place: Any) -> None:
    """The work has ended: its buffers may go, and its handle stays."""
    _running[id(place)] = (place, None)


def _drop(process, place):
    """Nobody has the work any more. Its buffers go when it has finished; at once where it was not started."""
    if process == os.getpid():
        _left.append(place)
        _sweep()


def _sweep():
    """Each stays in its place until nothing is left to do for it, so that one at which an interrupt comes is there for the next sweep."""
    if not _left:
        return
    with _sweeping:
        for _ in range(len(_left)):
            if not _left:  # a handler has swept
                return
            place = _left[0]
            if place.value is not None and not finished(place):
                _left.rotate(-1)
                continue
            release, handle = lib.tutti_work_release, place.value
            place.value = None  # whoever comes between these steps does not release it again
            release(handle)
            _running.pop(id(place), None)
            if _left and _left[0] is place:
                _left.popleft()


def _fails(value):
    """Whether what leaves a block is a failure, which others hear of; a program that ends well is none."""
    return value is not None and not (isinstance(value, SystemExit) and not value.code)


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


class Work(Unique):
    """A call that was started with wait=False. Wait for it, or await it; its buffers stay alive until it has finished."""

    def __init__(self, world: Any, place: Any, result: Any) -> None:
        _sweep()
        self._world, self._place, self._handle, self.result = world, place, place.value, result
        self._release = weakref.finalize(self, _drop, os.getpid(), place)
        self._release.atexit = False

    def done(self) -> bool:
        """Whether it has finished, well or not."""
        finished = ctypes.c_bool()
        check(lib.tutti_work_test(self._handle, ctypes.byref(finished)))
        return finished.value

    def wait(self, timeout: Optional[float] = None) -> Any:
        """Waits, and returns what the call would have returned."""
        check(wait_for(self._world, self._handle, _nanoseconds(timeout)))
        let_go(self._place)
        return self.result

    def join(self, stream: int = 0) -> None:
        """Of arrays on a GPU: what comes to this stream (its handle as a number; 0: the default one) from now on begins after the call, and the host does not
        wait. Hold the work until the stream has passed it."""
        check(lib.tutti_work_join(self._handle, stream or None))

    def __await__(self) -> Any:
        import asyncio  # late, since it takes long
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if finished(self._handle):
            self._tell(future)
        else:  # not by the loop's executor, whose threads asyncio.run waits for when it is interrupted
            _awaited.add(self, loop, future)
        return future.__await__()

    def _tell(self, future: Any) -> None:
        """Ends what was awaited, unless it was given up."""
        if future.done():
            return
        try:
            future.set_result(self.wait())  # which does not wait any more
        except Exception as cause:
            future.set_exception(cause)


class _Awaited:
    """The works that are awaited, of all loops. One thread waits for them, while there are any: for the oldest, and every millisecond it looks at the others."""

    def __init__(self) -> None:
        self._lock, self._pending, self._process = threading.Lock(), [], 0  # type: Any, List[Tuple[Work, Any, Any]], int

    def add(self, work: Work, loop: Any, future: Any) -> None:
        if self._process != os.getpid():  # a forked child has none of its parent's threads
            self._lock, self._pending, self._process = threading.Lock(), [], os.getpid()
        with self._lock:
            if not self._pending:  # before it is noted: without a thread nothing is, and the next one tries again
                threading.Thread(target=self._run, name="tutti await", daemon=True).start()
            self._pending.append((work, loop, future))

    def _run(self) -> None:
        while True:
            with self._lock:
                pending = list(self._pending)
            if not pending:  # an interrupt came in between
                return
            lib.tutti_work_wait(pending[0][0]._handle, 1_000_000)
            over = [entry for entry in pending if entry[2].done() or finished(entry[0]._handle)]
            for work, loop, future in over:
                try:
                    loop.call_soon_threadsafe(work._tell, future)
                except RuntimeError:  # the loop was closed meanwhile
                    pass
            with self._lock:
                self._pending = [entry for entry in self._pending if not any(entry is each for each in over)]
                if not self._pending:
                    return


_awaited = _Awaited()


class Received(Unique):
    """What a receive with status=True has got: the array, and who sent how much of it. Known when the receive is complete: before, and where nobody sent anything,
    source and tag are None."""

    def __init__(self, array: Any) -> None:
        self.array, self._raw = array, struct("tutti_received")(source=constants["TUTTI_NOBODY"], tag=constants["TUTTI_ANY_TAG"])

    source = property(lambda self: self._raw.source if self._raw.source >= 0 else None, doc="The rank that sent it.")
    tag = property(lambda self: self._raw.tag if self._raw.tag >= 0 else None, doc="With which tag.")
    count = property(lambda self: self._raw.count, doc="How many elements came: at most those of the array.")

    def __repr__(self) -> str:
        return f"<tutti.Received, {self.count} elements from rank {self.source} with tag {self.tag}>"


class Group(Unique):
    """Ranks that do something together. Collectives are called by all of them, in the same order. Arrays may be NumPy's, PyTorch's, or anything with the
    buffer protocol or DLPack; they are read and written where they lie. With wait=False a call returns a Work. timeout is in seconds.

    algorithm forces how a call moves its data ("inline", "one_shot", "two_shot", "pipelined", "tree"), executor who runs it ("shm", "cuda" …); ran tells what the
    last call was run by. order="any" lets a reduction between hosts add in whichever order is quickest; all ranks still get the same bits. All three are the same on
    all ranks. op="premul_sum" multiplies each rank's array by its own factor first, a number or an array of one element.

    Of arrays on a GPU (PyTorch's, CuPy's, tutti.tensor's, with the CUDA plug-in) a call is put into the stream that is current in their library, and returns.
    What goes wrong on the device ends the group: the next call says so, or check, and results that were read before are not valid."""

    def __init__(self, world: Any, handle: Any, owned: bool = True) -> None:
        self.world, self._handle, self._batch = world, handle, None
        if owned:
            world._groups.add(self)
            self._release = weakref.finalize(self, _release_here, os.getpid(), lib.tutti_group_release, handle)

    rank = property(lambda self: lib.tutti_group_rank(self._open()), doc="This rank in the group.")
    size = property(lambda self: lib.tutti_group_size(self._open()), doc="How many ranks it has.")
    name = property(lambda self: lib.tutti_group_name(self._open()).decode(), doc="Its name.")
    description = property(lambda self: lib.tutti_group_description(self._open()).decode(), doc="For people.")
    tag = property(lambda self: lib.tutti_group_tag(self._open()).decode(), doc="That with which World.find_group finds it.")
    sequence = property(lambda self: lib.tutti_group_sequence(self._open()), doc="The number of the last operation that this rank began; 0: none yet.")
    completed = property(lambda self: lib.tutti_group_completed(self._open()), doc="The number of the last operation that this rank completed; 0: none yet.")
    settled = property(lambda self: lib.tutti_group_settled(self._open()),
                       doc="Of a group that came from shrink: the last operation that all its members had completed in the old one; else 0.")

    @property
    def ranks(self) -> List[int]:
        """Its ranks, as numbers of the world."""
        ranks = ctypes.cast(lib.tutti_group_ranks(self._open()), ctypes.POINTER(ctypes.c_int))
        return [ranks[i] for i in range(self.size)]

    @property
    def timeout(self) -> Any:
        """Seconds that a call may take."""
        return lib.tutti_group_timeout(self._open()) * 1e-9

    @timeout.setter
    def timeout(self, seconds: float) -> Any:
        check(lib.tutti_group_set_timeout(self._open(), _nanoseconds(seconds)))

    def rank_of(self, world_rank: int) -> int:
        """From a rank of the world to that of the group."""
        return self._asked(lib.tutti_group_rank_of, world_rank)

    def world_rank(self, rank: int) -> int:
        """From a rank of the group to that of the world."""
        return self._asked(lib.tutti_group_world_rank, rank)

    def _asked(self, function, rank):
        found = ctypes.c_int()
        check(function(self._open(), _int(rank), ctypes.byref(found)))
        return found.value

    def _open(self):
        if self._handle is None:
            raise StateError("STATE", "tutti: the group is closed")
        return self._handle

    def __repr__(self) -> str:
        return "<tutti.Group, closed>" if self._handle is None else f"<tutti.Group {self.name!r}, rank {self.rank} of {self.size}>"

    def close(self) -> None:
        """Gives the group back. That of the whole world stays until the world is closed."""
        if "_release" in self.__dict__:
            self.world._groups.discard(self)
            self._release()
            self._handle = None

    def destroy(self) -> None:
        """Takes the group out of its world: its name and tag are free again, and further operations on it are errors."""
        check(lib.tutti_group_destroy(self._open()))
        self.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Gives it back. An exception ends it on all ranks, and is the reason in their errors."""
        if _fails(value) and self._handle is not None:
            lib.tutti_group_abort(self._handle, _reason(kind, value))
        self.close()

    # ---- making calls ----

    def _run(self, function, arguments, result, kept, wait, timeout, algorithm=None, executor=None, given=None):
        """given: further fields of the call, structs and the like by themselves."""
        if self._handle is None:
            self._open()
        call = _Call(timeout_ns=_nanoseconds(timeout))
        if algorithm is not None:
            call.algorithm = _one_of(_ALGORITHMS, algorithm, "algorithm")
        if executor is not None:
            call.executor = _text(executor)
        if given:
            for field, value in given.items():
                setattr(call, field, value if isinstance(value, int) else ctypes.addressof(value))
        if given or executor is not None:
            kept = (kept, call, given)
        held = place(call, kept)
        if self._batch is not None:
            call.batch = self._batch._handle
            self._batch._note(call, kept, result, held)
            check(function(self._handle, *arguments, ctypes.byref(call)))
            return result
        if not wait:
            return Work(self.world._handle, self._start(function, (self._handle, *arguments), call, (kept, result)), result)
        if held:
            self._run_held(function, (self._handle, *arguments), call, (kept, result))
            return result
        status = _interrupt.call(self.world._handle, function, self._handle, *arguments, ctypes.byref(call))
        if status:
            raise error_of(status)
        return result

    def _start(self, function, arguments, call, kept):
        """The work of a call, as C gives it. Where an interrupt comes after it has started, its buffers stay until it has ended."""
        work = hold(kept)
        call.work = ctypes.addressof(work)
        try:
            check(_interrupt.call(self.world._handle, function, *arguments, ctypes.byref(call)))
        except BaseException:
            _drop(os.getpid(), work)
            raise
        return work

    def _run_held(self, function, arguments, call, kept):
        """Puts a call into its stream and holds the arrays until it is over, since their library may give their memory out again before."""
        work = self._start(function, arguments, call, kept)
        try:
            check(lib.tutti_work_join(work, call.stream))
        finally:
            _drop(os.getpid(), work)

    def _pair(self, who, array, out, shape):
        """Input and output, which is made where none is given."""
        source = buffer_of(array)
        out = new_like(array, shape, who) if out is None else out
        target = buffer_of(out, writable=True)
        _alike(who, source, target)
        return source, target, out

    def _length(self, who, target, count):
        if target.count != count:
            raise ValueError(f"{who}: out has {target.count} elements and needs {count}")

    def barrier(self, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                executor: Optional[str] = None) -> Any:
        """Returns when all ranks have called it."""
        return self._run(lib.tutti_barrier, (), None, None, wait, timeout, algorithm, executor)

    def all_reduce(self, array: Any, op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None, *,
                   order: Optional[str] = None, factor: Any = None, algorithm: Optional[str] = None, executor: Optional[str] = None) -> Any:
        """The sum (or avg, product, min, max, band, bor, bxor, premul_sum) over all ranks, in place or into out, which is returned. Added in the order of the ranks:
        the same bits on every rank, every time."""
        out = array if out is None else out
        source, target, out = self._pair("all_reduce", array, out, None)
        self._length("all_reduce", target, source.count)
        number, given = _reduction(op, factor, order, source.dtype)
        return self._run(lib.tutti_all_reduce, (source.address, target.address, source.count, source.number, number), out, (source, target),
                         wait, timeout, algorithm, executor, given)

    def reduce(self, array: Any, root: int = 0, op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None, *,
               order: Optional[str] = None, factor: Any = None, algorithm: Optional[str] = None, executor: Optional[str] = None) -> Any:
        """all_reduce whose result the root alone gets; elsewhere out is not touched."""
        out = array if out is None else out
        source, target, out = self._pair("reduce", array, out, None)
        self._length("reduce", target, source.count)
        number, given = _reduction(op, factor, order, source.dtype)
        return self._run(lib.tutti_reduce, (source.address, target.address, source.count, source.number, number, _int(root)), out, (source, target),
                         wait, timeout, algorithm, executor, given)

    def broadcast(self, array: Any, root: int = 0, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                  executor: Optional[str] = None) -> Any:
        """The root's array, in everybody's."""
        target = buffer_of(array, writable=True)
        return self._run(lib.tutti_broadcast, (target.address, target.address, target.count, target.number, _int(root)), array, target,
                         wait, timeout, algorithm, executor)

    def all_gather(self, array: Any, out: Any = None, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                   executor: Optional[str] = None) -> Any:
        """The arrays of all ranks, one after the other: shape (size, *shape) where out is not given."""
        source = buffer_of(array)
        source, target, out = self._pair("all_gather", array, out, (self.size, *source.shape))
        self._length("all_gather", target, source.count * self.size)
        return self._run(lib.tutti_all_gather, (source.address, target.address, source.count, source.number), out, (source, target), wait, timeout, algorithm, executor)

    def all_gather_v(self, array: Any, counts: Sequence[int], out: Any, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                     executor: Optional[str] = None) -> Any:
        """all_gather of arrays of counts[rank] elements, one after the other in out."""
        source, target, out = self._pair("all_gather_v", array, out, None)
        if len(counts) != self.size or counts[self.rank] != source.count:
            raise ValueError(f"all_gather_v: counts are {list(counts)}, for {self.size} ranks and {source.count} elements of rank {self.rank}")
        self._length("all_gather_v", target, sum(counts))
        kept = _sizes(counts)
        return self._run(lib.tutti_all_gather_v, (source.address, target.address, kept, None, source.number), out, (source, target, kept),
                         wait, timeout, algorithm, executor)

    def reduce_scatter(self, array: Any, op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None, *,
                       order: Optional[str] = None, factor: Any = None, algorithm: Optional[str] = None, executor: Optional[str] = None) -> Any:
        """This rank's part of the sum: the first dimension is cut by the number of ranks."""
        source = buffer_of(array)
        if source.count % self.size:
            raise ValueError(f"reduce_scatter: {source.count} elements cannot be cut into {self.size} parts")
        first = source.shape[0] if source.shape else 1
        shape = (first // self.size, *source.shape[1:]) if first % self.size == 0 else (source.count // self.size,)
        source, target, out = self._pair("reduce_scatter", array, out, shape)
        self._length("reduce_scatter", target, source.count // self.size)
        number, given = _reduction(op, factor, order, source.dtype)
        return self._run(lib.tutti_reduce_scatter, (source.address, target.address, target.count, source.number, number), out, (source, target),
                         wait, timeout, algorithm, executor, given)

    def reduce_scatter_v(self, array: Any, counts: Sequence[int], op: str = "sum", out: Any = None, wait: bool = True, timeout: Optional[float] = None, *,
                         order: Optional[str] = None, factor: Any = None, algorithm: Optional[str] = None, executor: Optional[str] = None) -> Any:
        """reduce_scatter in parts of counts[rank] elements, one after the other in the array."""
        if len(counts) != self.size:
            raise ValueError(f"reduce_scatter_v: counts are {list(counts)}, for {self.size} ranks")
        source, target, out = self._pair("reduce_scatter_v", array, out, (counts[self.rank],))
        self._length("reduce_scatter_v", target, counts[self.rank])
        if source.count != sum(counts):
            raise ValueError(f"reduce_scatter_v: counts are {list(counts)}, and the array has {source.count} elements")
        kept = _sizes(counts)
        number, given = _reduction(op, factor, order, source.dtype)
        return self._run(lib.tutti_reduce_scatter_v, (source.address, target.address, kept, source.number, number), out, (source, target, kept),
                         wait, timeout, algorithm, executor, given)

    def gather(self, array: Any, root: int = 0, out: Any = None, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
               executor: Optional[str] = None) -> Any:
        """all_gather whose result the root alone gets; None elsewhere."""
        source = buffer_of(array)
        if self.rank != root:
            return self._run(lib.tutti_gather, (source.address, None, source.count, source.number, _int(root)), None, source, wait, timeout, algorithm, executor)
        source, target, out = self._pair("gather", array, out, (self.size, *source.shape))
        self._length("gather", target, source.count * self.size)
        return self._run(lib.tutti_gather, (source.address, target.address, source.count, source.number, _int(root)), out, (source, target),
                         wait, timeout, algorithm, executor)

    def scatter(self, array: Any, out: Any, root: int = 0, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                executor: Optional[str] = None) -> Any:
        """Parts of the root's array, one to each rank's out; elsewhere array is None."""
        target = buffer_of(out, writable=True)
        source = buffer_of(array) if self.rank == root else None
        if source is not None and (source.count != target.count * self.size or source.dtype != target.dtype):
            raise ValueError(f"scatter: {source.count} elements of {source.dtype} cannot be cut into {self.size} parts of {target.count} {target.dtype}")
        return self._run(lib.tutti_scatter, (source.address if source else None, target.address, target.count, target.number, _int(root)), out, (source, target),
                         wait, timeout, algorithm, executor)

    def all_to_all(self, array: Any, out: Any = None, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                   executor: Optional[str] = None) -> Any:
        """Part r of the array goes to rank r; out has what came, in the order of the ranks."""
        source = buffer_of(array)
        source, target, out = self._pair("all_to_all", array, out, source.shape)
        if source.count % self.size:
            raise ValueError(f"all_to_all: {source.count} elements cannot be cut into {self.size} parts")
        self._length("all_to_all", target, source.count)
        return self._run(lib.tutti_all_to_all, (source.address, target.address, source.count // self.size, source.number), out, (source, target),
                         wait, timeout, algorithm, executor)

    def all_to_all_v(self, array: Any, counts: Sequence[int], out: Any, out_counts: Sequence[int], wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                     executor: Optional[str] = None) -> Any:
        """all_to_all of parts of different lengths: counts[r] elements go to rank r, out_counts[r] come from it, one after the other."""
        source, target, out = self._pair("all_to_all_v", array, out, None)
        self._length("all_to_all_v", target, sum(out_counts))
        if len(counts) != self.size or len(out_counts) != self.size or sum(counts) != source.count:
            raise ValueError(f"all_to_all_v: counts are {list(counts)} and {list(out_counts)}, for {self.size} ranks and {source.count} elements")
        sent, received = _sizes(counts), _sizes(out_counts)
        return self._run(lib.tutti_all_to_all_v, (source.address, sent, None, target.address, received, None, source.number), out,
                         (source, target, sent, received), wait, timeout, algorithm, executor)

    def permute(self, array: Any, to: Sequence[int], out: Any = None, wait: bool = True, timeout: Optional[float] = None, *, algorithm: Optional[str] = None,
                executor: Optional[str] = None) -> Any:
        """The array goes to rank to[rank]; out has what came."""
        source = buffer_of(array)
        source, target, out = self._pair("permute", array, out, source.shape)
        self._length("permute", target, source.count)
        if len(to) != self.size:
            raise ValueError(f"permute: to has {len(to)} entries, and there are {self.size} ranks")
        kept = _ints(to)
        return self._run(lib.tutti_permute, (source.address, target.address, source.count, source.number, kept), out, (source, target, kept),
                         wait, timeout, algorithm, executor)

    def send(self, array: Any, to: int, tag: Optional[int] = 0, wait: bool = True, timeout: Optional[float] = None, *, executor: Optional[str] = None) -> Any:
        """To one rank, which receives it. A column, or some columns, of an array of NumPy's or PyTorch's go from where they lie."""
        source = buffer_of(array, apart=True)
        return self._run(lib.tutti_send, (source.address, source.count, source.number, _int(to), _int(tag)), None, source, wait, timeout, None, executor,
                         None if source.apart is None else _strided(strided_in=source))

    def recv(self, array: Any, source: Optional[int] = None, tag: Optional[int] = None, wait: bool = True, timeout: Optional[float] = None, *, status: bool = False,
             executor: Optional[str] = None) -> Any:
        """From one rank (None: any), with that tag (None: any), into the array, which is returned; with status a Received, which tells who sent how much. Columns are
        taken as send does, whatever lay how on the other side."""
        target = buffer_of(array, writable=True, apart=True)
        given, result = {} if target.apart is None else _strided(strided_out=target), array
        if status:
            result = Received(array)
            given["received"] = result._raw
        return self._run(lib.tutti_recv, (target.address, target.count, target.number, constants["TUTTI_ANY_SOURCE"] if source is None else _int(source),
                                          constants["TUTTI_ANY_TAG"] if tag is None else _int(tag)), result, target, wait, timeout, None, executor, given)

    def send_recv(self, array: Any, to: Optional[int], out: Any, source: Optional[int], tag: int = 0, wait: bool = True, timeout: Optional[float] = None, *,
                  status: bool = False, executor: Optional[str] = None) -> Any:
        """A send and a receive side by side, so that ranks which all call it wait for nobody in a circle. None is nobody: nothing goes, or nothing comes. status and
        columns as those of recv."""
        sent, target = buffer_of(array, apart=True), buffer_of(out, writable=True, apart=True)
        _alike("send_recv", sent, target)
        nobody, given, result = constants["TUTTI_NOBODY"], _strided(strided_in=sent, strided_out=target), out
        if status:
            result = Received(out)
            given["received"] = result._raw
        return self._run(lib.tutti_send_recv, (sent.address, sent.count, nobody if to is None else _int(to), target.address, target.count,
                                               nobody if source is None else _int(source), sent.number, _int(tag)), result, (sent, target), wait, timeout, None, executor,
                         given)

    def prepare(self, timeout: Optional[float] = None) -> None:
        """Sets up what the first collective would, so that later calls need no memory. All ranks call it."""
        return self._run(lib.tutti_group_prepare, (), None, None, True, timeout)

    def backend_team(self, name: str, timeout: Optional[float] = None) -> int:
        """The library's own object for this group: a team of NVSHMEM. All ranks of the group call it."""
        team, call = ctypes.c_int32(), _Call(timeout_ns=_nanoseconds(timeout))
        check(_interrupt.call(self.world._handle, lib.tutti_backend_team, self._open(), _text(name), ctypes.byref(call), ctypes.byref(team)))
        return team.value

    def lend_communicator(self, name: str, communicator: int) -> None:
        """Lends a communicator of the program's own (an ncclComm_t, as a number), which must be non-blocking, to this group's calls by that backend."""
        check(lib.tutti_backend_communicator(self._open(), _text(name), communicator))

    def batch(self) -> Batch:
        """Sends, receives and collectives inside of `with group.batch():` run as one."""
        return Batch(self)

    # ---- groups of groups, and their end ----

    def subgroups(self, size: int, description: Optional[str] = None, timeout: Optional[float] = None) -> Group:
        """Its ranks in blocks of so many, each a group: this rank's. All ranks of this group call it."""
        options, handle = _options(None, None, description, timeout), ctypes.c_void_p()
        check(_interrupt.call(self.world._handle, lib.tutti_group_new_subgroups, self._open(), _int(size), ctypes.byref(options), None, ctypes.byref(handle)))
        return Group(self.world, handle.value)

    def split(self, lists: Sequence[Sequence[int]], description: Optional[str] = None, timeout: Optional[float] = None) -> Optional[Group]:
        """One group per list of this group's ranks: this rank's, or None where it is in no list. All ranks of this group call it."""
        options, handle, (rows, counts, _kept) = _options(None, None, description, timeout), ctypes.c_void_p(), _lists(lists)
        check(_interrupt.call(self.world._handle, lib.tutti_group_split, self._open(), rows, counts, len(lists), ctypes.byref(options), ctypes.byref(handle)))
        return self.world._group_of(handle.value, owned=True)

    def shrink(self, exclude: Sequence[int] = (), timeout: Optional[float] = None) -> Group:
        """The ranks that live, without those excluded, as a new group. Every one of them calls it, also after this group has ended."""
        numbers = _ints(list(exclude))
        options = struct("tutti_shrink_options")(exclude=ctypes.addressof(numbers) if exclude else None, exclude_count=len(numbers),
                                                 timeout_ns=_nanoseconds(timeout))
        return self._new(lib.tutti_group_shrink, self._open(), ctypes.byref(options))

    def refill(self, timeout: Optional[float] = None) -> Group:
        """Whole again, with newcomers in the places of the dead (`tutti run --refill`)."""
        return self._new(lib.tutti_group_refill, self._open(), _nanoseconds(timeout))

    def _new(self, function, *arguments):
        handle = ctypes.c_void_p()
        check(_interrupt.call(self.world._handle, function, *arguments, ctypes.byref(handle)))
        return Group(self.world, handle.value)

    def agree(self, mine: bool) -> bool:
        """Whether `mine` was true on every rank that came. Deaths do not disturb it."""
        every = ctypes.c_bool()
        check(_interrupt.call(self.world._handle, lib.tutti_group_agree, self._open(), bool(mine), ctypes.byref(every)))
        return every.value

    def check(self) -> None:
        """Raises what has ended the group, if anything has."""
        check(lib.tutti_group_check(self._open()))

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks, with this reason in their errors."""
        check(lib.tutti_group_abort(self._open(), _text(reason)))

    def ran(self) -> Dict[str, str]:
        """What the last call was run by: operation, algorithm, executor, and why."""
        ran = struct("tutti_ran")()
        check(lib.tutti_group_ran(self._open(), ctypes.byref(ran)))
        return {"operation": ran.operation.decode(), "algorithm": lib.tutti_algorithm_name(ran.algorithm).decode(), "executor": ran.executor.decode(),
                "why": ran.why.decode()}


class Batch(Unique):
    """See Group.batch."""

    def __init__(self, group: Any) -> None:
        self._group, self._handle, self._kept, self._call, self._held = group, None, [], _Call(), False  # type: Any, Any, List[Any], Any, bool

    def _note(self, call: Any, kept: Any, result: Any, held: bool) -> None:
        """A call of it: all lie on one device, and run in one stream."""
        if self._kept:
            same_place(call.device, call.stream, self._call.device, self._call.stream)
        self._kept.append((kept, result))
        self._call.device, self._call.stream, self._held = call.device, call.stream, self._held or held

    def __enter__(self) -> Batch:
        if self._group._batch is not None:
            raise StateError("STATE", "tutti: a batch of this group is open already")
        handle = ctypes.c_void_p()
        check(lib.tutti_batch_begin(self._group._open(), ctypes.byref(handle)))
        self._handle, self._group._batch = handle.value, self
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._group._batch = None
        if kind is not None:
            lib.tutti_batch_cancel(self._handle)
            return
        if self._held:
            self._group._run_held(lib.tutti_batch_end, (self._handle,), self._call, self._kept)
        else:
            check(_interrupt.call(self._group.world._handle, lib.tutti_batch_end, self._handle, ctypes.byref(self._call)))
        self._kept = []


class Event(NamedTuple):
    """What World.next_event tells: kind is "death", "close" or "group_ended"; rank the world rank that died, closed or ended the group; text the same in words."""
    kind: str
    status: str
    rank: int
    group: str
    text: str


_EVENTS = {constants[f"TUTTI_EVENT_{kind.upper()}"]: kind for kind in ("death", "close", "group_ended")}


def clock() -> float:
    """Seconds since some moment in the past, the same for all ranks of one host; never goes back."""
    return lib.tutti_clock() * 1e-9


class World(Unique):
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
        options = struct("tutti_world_options")(name=_text(name), rank=_int(rank or 0), rank_count=_int(size or 0), store_url=_text(store),
                                                timeout_ns=_nanoseconds(timeout), settings=_text(settings),
                                                threads=constants["TUTTI_NONE"] if threads == 0 else _int(threads or 0))
        self._begin(_interrupt.aside(lambda given_up: _opened(options, given_up)))

    def _begin(self, handle):
        self._handle: Optional[int] = handle
        self._group: Optional[Group] = None
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._process = os.getpid()
        if self.size > 1:
            _interrupt.worlds.add(self._handle)

    @classmethod
    def fake(cls, rank: int, size: int, fail: bool = False) -> World:
        """A world in which this process pretends to be one rank of many: nothing moves, every call succeeds at once (with fail: fails), and arguments are checked as
        in a real one."""
        options, handle = struct("tutti_fake_options")(error_on_collective=bool(fail)), ctypes.c_void_p()
        check(lib.tutti_world_open_fake(_int(rank), _int(size), ctypes.byref(options), ctypes.byref(handle)))
        made = cls.__new__(cls)
        made._begin(handle.value)
        return made

    def _open(self):
        if self._handle is None:
            raise StateError("STATE", "tutti: the world is closed")
        return self._handle

    rank = property(lambda self: lib.tutti_world_rank(self._open()), doc="This rank, from 0.")
    size = property(lambda self: lib.tutti_world_size(self._open()), doc="How many ranks there are.")
    local_rank = property(lambda self: lib.tutti_world_local_rank(self._open()), doc="Among the ranks of this host.")
    local_size = property(lambda self: lib.tutti_world_local_size(self._open()), doc="How many ranks this host has.")
    launcher = property(lambda self: lib.tutti_world_launcher(self._open()).decode(), doc="How the world was found.")
    name = property(lambda self: lib.tutti_world_name(self._open()).decode(), doc="Its name.")
    address = property(lambda self: lib.tutti_world_address(self._open()).decode(), doc="This host's address on the route to the others; '' without a network.")

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
        return Store(handle, self) if handle else None

    def new_group(self, ranks: Sequence[int], name: Optional[str] = None, tag: Optional[str] = None, timeout: Optional[float] = None,
                  description: Optional[str] = None, keep_order: bool = False, local: bool = False) -> Optional[Group]:
        """A group of these ranks, sorted unless keep_order is set. All ranks of the world call it, or with local its members alone; None on those that are not in it.
        Where a group of that tag and those ranks exists, it is that one."""
        options = _options(name, tag, description, timeout, keep_order=bool(keep_order), local_synchronization=bool(local))
        handle = ctypes.c_void_p()
        check(_interrupt.call(self._open(), lib.tutti_group_new, self._handle, _ints(ranks), len(ranks), ctypes.byref(options), ctypes.byref(handle)))
        return self._group_of(handle.value, owned=True)

    def new_groups(self, lists: Sequence[Sequence[int]], description: Optional[str] = None, timeout: Optional[float] = None) -> Optional[Group]:
        """One group per list of ranks: this rank's, or None where it is in no list. All ranks of the world call it."""
        options, handle, (rows, counts, _kept) = _options(None, None, description, timeout), ctypes.c_void_p(), _lists(lists)
        check(_interrupt.call(self._open(), lib.tutti_group_new_subgroups_by_enumeration, self._handle, rows, counts, len(lists), ctypes.byref(options), None,
                              ctypes.byref(handle)))
        return self._group_of(handle.value, owned=True)

    def _group_of(self, handle: Optional[int], owned: bool = False) -> Optional[Group]:
        """The object for a group: None for one that this rank is no member of."""
        if not handle or lib.tutti_group_rank(handle) < 0:
            return None
        if handle == lib.tutti_world_group(self._open()):
            if owned:
                lib.tutti_group_release(handle)
            return self.group
        return Group(self, handle if owned else lib.tutti_group_keep(handle))

    def group_named(self, name: str) -> Optional[Group]:
        """The living group of that name; None where there is none."""
        return self._group_of(lib.tutti_group_by_name(self._open(), _text(name)))

    def find_group(self, ranks: Sequence[int], tag: str = "") -> Optional[Group]:
        """The oldest group of that tag with exactly these ranks, in any order; None where there is none."""
        return self._group_of(lib.tutti_group_find(self._open(), _text(tag), _ints(ranks), len(ranks)))

    def groups(self) -> List[Group]:
        """Every living group of this rank, in the order of creation."""
        count = lib.tutti_group_enumerate(self._open(), None, 0)
        room = (ctypes.c_void_p * max(1, count))()
        count = min(count, lib.tutti_group_enumerate(self._handle, room, count))
        return [group for group in (self._group_of(room[i]) for i in range(count)) if group is not None]

    def empty(self, shape: Any, dtype: Any = "f32", huge_pages: Optional[bool] = None, alignment: int = 0, signal_pad_bytes: int = 0,
              persistent_id: Optional[int] = None) -> Memory:
        """Symmetric memory for an array, zeroed. Memory.array is the array, Memory.rendezvous maps those of the others. alignment is a power of two up to 2 MiB (0:
        128). A persistent id names memory that keeps its address and contents as long as the world lives: one that was given back is found again."""
        shape = shape_of(shape)
        count = 1
        for size in shape:
            count *= size
        if count * dtype_bytes(dtype) >= 2**63:
            raise OverflowError(f"tutti: an array of shape {shape} is longer than any memory")
        choice = {None: 0, False: constants["TUTTI_NO"], True: constants["TUTTI_YES"]}[huge_pages]
        options = struct("tutti_memory_options")(huge_pages=choice, alignment=wide_unsigned(alignment), signal_pad_bytes=wide_unsigned(signal_pad_bytes), persistent=persistent_id is not None,
                                                 persistent_id=wide_unsigned(persistent_id or 0))
        handle = ctypes.c_void_p()
        check(lib.tutti_memory_alloc(self._open(), count * dtype_bytes(dtype), ctypes.byref(options), ctypes.byref(handle)))
        return Memory(self, shape, dtype, handle.value)

    # ---- backends ----

    def open_backend(self, name: str, timeout: Optional[float] = None) -> None:
        """Opens a backend on all ranks, which all call it: "nvshmem" and "nccl" need that before their first use."""
        self._call(lib.tutti_backend_open, _text(name), timeout=timeout)

    def grow_backend(self, name: str, bytes: int, timeout: Optional[float] = None) -> None:
        """Gives an open backend whose memory is reserved so many more bytes on every rank. All ranks call it."""
        self._call(lib.tutti_backend_grow, _text(name), wide_unsigned(bytes), timeout=timeout)

    def backend_module(self, name: str, module: int) -> None:
        """Makes a module of the program's own kernels (a CUmodule, as a number) ready for the device functions of an open backend."""
        check(lib.tutti_backend_module(self._open(), _text(name), module))

    def _call(self, function, *arguments, timeout):
        call = _Call(timeout_ns=_nanoseconds(timeout))
        check(_interrupt.call(self._open(), function, self._handle, *arguments, ctypes.byref(call)))

    def memory_backend(self, device: str = "cpu") -> str:
        """Which backend serves the symmetric memory of a device."""
        name = ctypes.c_char_p()
        check(lib.tutti_memory_backend(self._open(), device_number(device), ctypes.byref(name)))
        return (name.value or b"").decode()

    def set_memory_backend(self, device: str, name: str) -> None:
        """Chooses it, before the first allocation on that device."""
        check(lib.tutti_memory_set_backend(self._open(), device_number(device), _text(name)))

    def has_multicast(self, device: str = "cuda") -> bool:
        """Whether the device can write to all its peers at once."""
        return lib.tutti_memory_has_multicast_support(self._open(), device_number(device))

    # ---- what happened ----

    def next_event(self, timeout: Optional[float] = None) -> Event:
        """A death, a close or the end of a group, each told once; waits for one until the timeout."""
        event = struct("tutti_event")()
        check(_interrupt.wait(self._open(), lambda limit: lib.tutti_world_next_event(self._handle, limit, ctypes.byref(event)),
                              _nanoseconds(timeout) or lib.tutti_group_timeout(lib.tutti_world_group(self._handle))))
        return Event(_EVENTS[event.kind], status_name(event.status), event.rank, event.group.decode(errors="replace"), event.text.decode(errors="replace"))

    @property
    def event_fd(self) -> int:
        """A descriptor that is readable while an event has not been taken, for select and event loops. It ends with the world."""
        descriptor = ctypes.c_int()
        check(lib.tutti_world_event_fd(self._open(), ctypes.byref(descriptor)))
        return descriptor.value

    def counters(self, operation: str) -> Dict[str, Any]:
        """What this rank has done so far by one operation ("all_reduce"): calls, failures, bytes, seconds spent in them."""
        counters = struct("tutti_counters")()
        check(lib.tutti_trace_counters(self._open(), _text(operation), ctypes.byref(counters)))
        return {"calls": counters.calls, "failures": counters.failures, "bytes": counters.bytes, "seconds": counters.time_ns * 1e-9}

    def trace(self) -> str:
        """This rank's flight recorder, as JSON."""
        text = ctypes.c_void_p()
        check(lib.tutti_trace_text(self._open(), ctypes.byref(text)))
        found = ctypes.string_at(text).decode(errors="replace")
        lib.tutti_free(text)
        return found

    def write_trace(self, folder: Any) -> None:
        """Writes it into a folder, for `tutti trace folder`."""
        check(lib.tutti_trace_write(self._open(), path_of(folder)))

    def inject_fault(self, faults: str) -> None:
        """Faults on purpose, for tests of one's own programs: "rank=2,op=all_reduce,at=17,do=kill"."""
        check(lib.tutti_fault_inject(self._open(), _text(faults)))

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
        if _fails(value) and self._handle is not None:
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
