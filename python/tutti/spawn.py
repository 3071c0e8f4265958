# SPDX-License-Identifier: Apache-2.0
"""Starting ranks from Python."""
from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
import traceback
import warnings
from typing import Any, Callable, List

from . import world as _world
from ._library import lib, struct
from .errors import AbortedError, DeadError, GoneError, check


_PATIENCE = 2.0  # seconds with ranks that go on when others have failed
_PART = 4000  # bytes of an answer: with what multiprocessing puts before them few enough (PIPE_BUF) for a pipe to take them all or none


def _rank_main(function, arguments, given, results):
    from multiprocessing.reduction import ForkingPickler  # late, as below
    _world._given.update(given)
    try:
        answer = (given["rank"], True, function(*arguments))
    except BaseException as error:  # the parent raises it
        error.__traceback_text__ = traceback.format_exc()
        answer = (given["rank"], False, (error, error.__traceback_text__))
        try:  # one that the parent could not read would hide what happened
            pickle.loads(pickle.dumps(error))
        except Exception:
            answer = (given["rank"], False, (RuntimeError(repr(error)), error.__traceback_text__))
    try:
        data = ForkingPickler.dumps(answer)
    except Exception as cause:  # what cannot be pickled
        text = f"tutti.spawn: rank {given['rank']} returned {answer[2]!r}, which cannot be sent to its parent: {cause}"
        data = ForkingPickler.dumps((given["rank"], False, (RuntimeError(text), traceback.format_exc())))
    results.send_bytes(len(data).to_bytes(8, "little"))
    for begin in range(0, len(data), _PART):
        results.send_bytes(data[begin:begin + _PART])
    results.close()


class _Answer:
    """What a rank sends, part by part: one that is killed in the middle of it leaves no part that has begun, for which the parent would wait as long as a child that
    the rank has forked has the pipe, too."""

    def __init__(self, receiver):
        self._receiver, self._length, self._data = receiver, None, bytearray()

    def take(self):
        """Whether all of it is there. Takes what has come, and waits for nothing."""
        while self._length is None or len(self._data) < self._length:
            if not self._receiver.poll():
                return False
            part = self._receiver.recv_bytes()
            if self._length is None:
                self._length = int.from_bytes(part, "little")
            else:
                self._data += part
        return True

    def value(self):
        return pickle.loads(self._data)


def spawn(function: Callable[..., Any], ranks: int, *arguments: Any) -> List[Any]:
    """Runs function(*arguments) in `ranks` new processes, in which tutti.World() finds the others, and returns what they returned, in the order of the
    ranks. What a rank raises is raised here, when all have ended; one that dies is a DeadError. Ranks that go on when others have failed are waited for,
    and after two seconds a RuntimeWarning says why. As with multiprocessing, the function must be one that can be imported, and the program's own start
    belongs under `if __name__ == "__main__":`."""
    if ranks < 1:
        raise ValueError(f"tutti: spawn starts at least one rank, not {ranks}")
    store = f"unix:@tutti-python-{os.getpid()}-{os.urandom(8).hex()}"
    server = ctypes.c_void_p()  # here, so that any rank may leave first
    check(lib.tutti_store_open_url(store.encode(), ctypes.byref(struct("tutti_tcp_store_options")(server=True, no_wait=True)), ctypes.byref(server)))
    try:
        return _run(function, ranks, arguments, store)
    finally:
        lib.tutti_store_release(server)


def _death(rank, code):
    how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with status {code}"
    return f"rank {rank} {how}"


def _tell_of_the_others(failures, deaths, left):
    """Ranks that go on when others have failed may be right to, having shrunk their group, or be lost in code of their own: whoever waits for them is told."""
    why = _death(*deaths[0]) if deaths else f"a rank has failed: {failures[0][0]!r}"
    warnings.warn(f"tutti.spawn: {why}. Not ended, and waited for: rank {', '.join(map(str, left))}", RuntimeWarning, stacklevel=4)


def _end_of(process):
    """A descriptor that is readable when the process has ended. multiprocessing's own, and the pipe of the answer, stay open as long as a child that the process has
    forked has them."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel
        return os.dup(process.sentinel)


def _run(function, ranks, arguments, store):
    import multiprocessing.connection  # late, since it takes long
    context = multiprocessing.get_context("spawn")
    children, ends, answers = [], [], []
    results, failures, deaths = [None] * ranks, [], []
    waiting, tell_at, told = {}, None, False  # waiting: what is ready when a rank has answered, and what is when it has ended
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, arguments, {"rank": rank, "size": ranks, "store": store}, sender))
            process.start()
            sender.close()
            children.append((process, receiver))
            answers.append(_Answer(receiver))
            ends.append(_end_of(process))
            waiting[receiver] = waiting[ends[-1]] = rank
        while waiting:
            left = None if tell_at is None or told else max(0.0, tell_at - time.monotonic())
            ready = multiprocessing.connection.wait(waiting, left)
            if not ready:
                _tell_of_the_others(failures, deaths, sorted(set(waiting.values())))
                told = True
            for rank in {waiting[each] for each in ready}:
                process, receiver = children[rank]
                try:
                    complete = answers[rank].take()
                    over = complete or ends[rank] in ready
                except (EOFError, OSError):
                    complete, over = False, True
                if not over:
                    continue  # more is to come
                del waiting[receiver], waiting[ends[rank]]
                if complete:
                    _, good, value = answers[rank].value()
                    if good:
                        results[rank] = value
                    else:
                        failures.append(value)
                process.join()
                if not complete:
                    deaths.append((rank, process.exitcode))
            if tell_at is None and (failures or deaths):
                tell_at = time.monotonic() + _PATIENCE
    except BaseException:
        for process, _ in children:
            process.terminate()
        raise
    finally:
        for descriptor in ends:
            os.close(descriptor)
    if deaths:
        raise DeadError("DEAD", _death(*deaths[0]), [deaths[0][0]])
    if failures:
        # A rank that raises leaves its world, and the others hear of that: what they raise then is an echo.
        error, text = next((failure for failure in failures if not isinstance(failure[0], (AbortedError, DeadError, GoneError))), failures[0])
        error.__cause__ = None
        if hasattr(error, "add_note"):
            error.add_note("in a rank:\n" + text)
        raise error
    return results
