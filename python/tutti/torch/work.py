# SPDX-License-Identifier: Apache-2.0
"""Works as PyTorch knows them, and their futures."""
import ctypes
import datetime
import functools
import os
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn, Optional, TypeVar

import torch
import torch.distributed as dist

from .._library import lib
from ..errors import error_of, of_rank
from ..world import _drop, let_go, wait_for


def failure(status: int, rank: int = -1) -> Any:
    """The failure of a call that this thread has just made, as PyTorch's users know it. status and ranks are the library's. rank: whose memory was asked for."""
    cause = of_rank(error_of(status), rank)
    error: Any = dist.DistBackendError(str(cause))
    error.status, error.ranks = cause.status, cause.ranks
    error.__cause__ = cause
    return error


def raise_error(status: int, rank: int = -1) -> NoReturn:
    raise failure(status, rank)


def _finished(handle: int) -> bool:
    finished = ctypes.c_bool()
    return not lib.tutti_work_test(handle, ctypes.byref(finished)) and finished.value


def _outcome(handle: int, status: int) -> Any:
    """What a wait has found: whether the operation is over, and its failure or None. A deadline of the wait alone, and an interruption, which ends all waits of
    the world, leave the operation running, and the library writes into its buffers."""
    if not status:
        return True, None
    error = failure(status)
    if not _finished(handle):
        return error.status not in ("TIMEOUT", "INTERRUPTED"), error
    status = lib.tutti_work_wait(handle, 0)  # how it has ended, and not how the wait has
    return True, failure(status) if status else None


_Class = TypeVar("_Class", bound=type)


def not_compiled(kind: _Class) -> _Class:
    """A class whose methods torch.compile leaves alone: those that a program calls, a work's wait, and those that PyTorch calls from C++ while a compiled program runs
    (DDP where it makes its buckets anew). It would compile them, and all that they call. torch.compiler.disable says the same, and takes a second to load."""
    dynamo: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        skipped = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    except AttributeError:  # a PyTorch that has other words for it
        return kind
    for function in vars(kind).values():
        if isinstance(function, types.FunctionType):
            dynamo.set_code_exec_strategy(function.__code__, skipped)
            setattr(function, "_torchdynamo_disable", True)
    return kind


@not_compiled
class Work(dist.Work):
    """An operation that was started. `finish`, if given, runs once, after it has ended well: it copies results to where they belong."""

    def __init__(self, group: Any, place: Any, result: Any, finish: Any = None, alone: bool = False) -> None:
        super().__init__()
        self._group, self._place, self._handle, self._result, self._finish, self._alone = group, place, place.value, result, finish, alone
        self._lock, self._process = threading.RLock(), os.getpid()  # again by a signal's handler that waits for the work that its thread is settling
        self._over, self._error = False, None
        self._future: Any = None
        self._received: Any = None

    def __del__(self) -> None:
        if self._finish is not None and self._process == os.getpid() and not sys.is_finalizing():
            _later(self, functools.partial(_end_dropped, self._place, self._finish))  # results belong somewhere, also when nobody waits
        else:
            _drop(self._process, self._place)  # never waits

    def _settle(self, error: Any) -> None:
        """The operation has ended. The first who notices it does what is left to do."""
        with self._lock:
            if self._over:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as cause:
                    error = cause
            if self._over:  # by such a handler
                return
            if error is None:
                let_go(self._place)
            self._error, self._over, self._finish = error, True, None

    def _wait(self, nanoseconds: int, function: Any) -> None:
        if not self._over:
            over, error = _outcome(self._handle, function(self._handle, nanoseconds))
            if not over:
                raise error
            self._settle(error)
        if self._error is not None:
            raise self._error

    def wait(self, timeout: Optional[datetime.timedelta] = None) -> bool:
        """Waits; a failure is raised. A timeout that runs out ends this wait alone, and the operation goes on."""
        nanoseconds = max(0, int(timeout.total_seconds() * 1e9)) if timeout is not None else 0
        self._wait(nanoseconds, functools.partial(wait_for, self._group._world._handle))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._over and _finished(self._handle):
            self._settle(_outcome(self._handle, lib.tutti_work_wait(self._handle, 0))[1])
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        self.is_completed()
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        return self._received.source if self._received is not None else -1

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future:
        """Completes by itself: a thread of the group's waits for it."""
        if self._future is None:
            raw: Any = torch.futures.Future()

            def value(_):
                if self._error is not None:
                    raise self._error
                return self._result

            self._future = raw.then(value)  # an exception that is set directly is Python's alone
            if self._over:
                raw.set_result(None)
            else:
                _later(self, functools.partial(_complete, self, raw), aside=getattr(_this_thread, "completes", False))
        return self._future


_this_thread = threading.local()  # completes: it completes futures, and so runs what was given to their then()


def _start(name: str, function: Any) -> None:
    def run() -> None:
        _this_thread.completes = True
        function()
    threading.Thread(target=run, name=name, daemon=True).start()


def _later(work: Any, function: Any, aside: bool = False) -> None:
    """Runs what waits for a work on the thread of its group, whose works end in that order. Messages end in any order, those of a group that was destroyed have no
    such thread, and what was given to a future's then() may wait for the future that it asks for (PyTorch's PowerSGD does) while it holds that thread: aside."""
    if aside or work._alone or work._group._handle is None:
        _start("tutti message", function)
    else:
        work._group._completer().put(function)


def _complete(work: Any, raw: Any) -> None:
    while not work._over:
        try:
            work._wait(0, lib.tutti_work_wait)
        except Exception:
            if not work._over:  # Ctrl-C has ended the wait of the main thread, and with it all waits of this world
                time.sleep(0.01)
    raw.set_result(None)  # which calls what was given to then(), whose errors are its future's


def _end_dropped(place: Any, finish: Any) -> None:
    over = False
    while not over:
        over, error = _outcome(place.value, lib.tutti_work_wait(place, 0))
        if not over:
            time.sleep(0.01)
    try:
        if error is None:
            finish()
    finally:
        _drop(os.getpid(), place)


def completer(works: Any) -> None:
    """A thread that runs, one after the other, what waits for the works of a group; None ends it."""
    def complete():
        while (function := works.get()) is not None:
            try:
                function()
            except Exception:
                traceback.print_exc()
            del function

    _start("tutti futures", complete)
