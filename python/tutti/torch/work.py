# SPDX-License-Identifier: Apache-2.0
"""Works as PyTorch knows them, and their futures."""
import ctypes
import os
import queue
import threading

import torch
import torch.distributed as dist

from .. import _interrupt
from .._library import lib
from ..errors import error_of
from ..world import _drop


def raise_error(status):
    """The failure of a call that this thread has just made, as PyTorch's users know it. status and ranks are the library's."""
    cause = error_of(status)
    error = dist.DistBackendError(str(cause))
    error.status, error.ranks = cause.status, cause.ranks
    raise error from cause


class Work(dist.Work):
    """An operation that was started. `finish`, if given, runs once, after it has ended well: it copies results to where they belong."""

    def __init__(self, group, handle, result, kept, finish=None, alone=False):
        super().__init__()
        self._group, self._handle, self._result, self._kept, self._finish, self._alone = group, handle, result, kept, finish, alone
        self._lock = threading.Lock()
        self._over, self._error, self._future, self._received = False, None, None, None

    def __del__(self):
        if self._handle is not None:
            _drop(os.getpid(), self._handle, self._kept)  # never waits

    def _settle(self, status):
        """The operation has ended. The first who notices it does what is left to do."""
        with self._lock:
            if self._over:
                return
            if status:
                try:
                    raise_error(status)
                except dist.DistBackendError as error:
                    self._error = error
            elif self._finish is not None:
                self._finish()
            self._over, self._finish, self._kept = True, None, None

    def _wait(self, nanoseconds, function):
        if not self._over:
            status = function(self._handle, nanoseconds)
            if status and nanoseconds:  # whose time is over: this wait's, or the operation's?
                finished = ctypes.c_bool()
                if not lib.tutti_work_test(self._handle, ctypes.byref(finished)) and not finished.value:
                    lib.tutti_work_wait(self._handle, 1)  # the message again
                    raise_error(status)
            self._settle(status)
        if self._error is not None:
            raise self._error

    def wait(self, timeout=None):
        """Waits; a failure is raised. A timeout that runs out ends this wait alone, and the operation goes on."""
        nanoseconds = max(0, int(timeout.total_seconds() * 1e9)) if timeout is not None else 0
        self._wait(nanoseconds, lambda handle, limit: _interrupt.call(self._group._world._handle, lib.tutti_work_wait, handle, limit))
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        if not self._over:
            finished = ctypes.c_bool()
            if lib.tutti_work_test(self._handle, ctypes.byref(finished)) or not finished.value:
                return False
            self._settle(lib.tutti_work_wait(self._handle, 0))
        return True

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        self.is_completed()
        return self._error

    def result(self):
        self.wait()
        return self._result

    def _source_rank(self):
        return self._received.source if self._received is not None else -1

    source_rank = _source_rank

    def get_future(self):
        """Completes by itself: a thread of the group's waits for it."""
        if self._future is None:
            raw = torch.futures.Future()

            def value(_):
                if self._error is not None:
                    raise self._error
                return self._result

            self._future = raw.then(value)  # an exception that is set directly is Python's alone
            if self._over:
                raw.set_result(None)
            elif self._alone:
                threading.Thread(target=_complete, args=(self, raw), name="tutti message", daemon=True).start()
            else:
                self._group._completer().put((self, raw))
        return self._future


def _complete(work, raw):
    try:
        work._wait(0, lib.tutti_work_wait)
    except dist.DistBackendError:
        pass  # the future raises it
    raw.set_result(None)


def completer():
    """A queue, and a thread that completes the futures of the works in it, which end in that order."""
    works = queue.SimpleQueue()

    def complete():
        while (entry := works.get()) is not None:
            _complete(*entry)
            del entry

    threading.Thread(target=complete, name="tutti futures", daemon=True).start()
    return works
