# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread waits inside the library. A C call does not see Python's signal handlers; so a thread reads the descriptor that Python
writes signals to, and interrupts the worlds in whose calls the main thread is. It does so where Python's own handler is installed, which raises
KeyboardInterrupt: an operation that was interrupted has ended. With another handler calls go on, and the handler runs when they return; waits that can be
taken up again are made in short pieces then, between which it runs."""
import _thread
import os
import select
import signal
import threading
import time
from typing import Any, List, Set

from ._library import constants, lib

_lock = threading.RLock()  # a signal's handler may come while the main thread has it, and call a group
_main = threading.main_thread()
worlds: Set[int] = set()  # those of several ranks that are open; a call of the tensor library may wait for any of them
also: List[Any] = []  # others whose calls the main thread may wait in: inside() is the number of one, interrupt(number) ends it
_inside = None  # the worlds that the main thread waits in
_interrupted = False
_started = 0  # the process that has the thread
_read, _poller = -1, None  # type: int, Any  # where they are read, and what knows whether there are any
_descriptor, _before = -1, -1  # what Python writes signals to, and what it wrote them to before
_TIMEOUT = constants["TUTTI_ERROR_TIMEOUT"]
_PIECE = 100_000_000  # nanoseconds


def _take():
    """Which signals have come since; whoever was told of them before is told. The lock is held."""
    try:
        numbers = os.read(_read, 64)
    except BlockingIOError:
        return b""
    if _before >= 0:
        try:
            os.write(_before, numbers)
        except OSError:  # it is full, and so awake, or closed by now
            pass
    return numbers


def _watch(read):
    """Interrupts the call that the main thread was in before the signal was seen, if it still is: the next one has nothing to do with it."""
    global _interrupted
    poller = select.poll()
    poller.register(read, select.POLLIN)
    while True:
        poller.poll()
        with _lock:
            inside, others = _inside, [(other, other.inside()) for other in also]
            if signal.SIGINT not in _take() or not raises():
                continue
            if _inside is inside:
                for world in inside or ():
                    lib.tutti_world_interrupt(world)
                    _interrupted = True
            for other, number in others:
                other.interrupt(number)


def hear():
    """By the main thread, before it waits: signals that came before are Python's to handle, which has done so, or does before this returns, and end no later call."""
    if _poller is not None and _poller.poll(0):
        with _lock:
            _take()


def raises() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def start():
    """Once per process, by the main thread; elsewhere nothing is done. What was told of signals before is told of them still."""
    global _before, _descriptor, _poller, _read, _started
    if threading.current_thread() is not _main or _started == os.getpid():
        return
    _read, write = os.pipe()
    os.set_blocking(_read, False)
    os.set_blocking(write, False)
    _poller = select.poll()
    _poller.register(_read, select.POLLIN)
    _before, _descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False), write
    _started = os.getpid()
    threading.Thread(target=_watch, args=(_read,), name="tutti signals", daemon=True).start()


def _in_child():
    """A forked child has its parent's descriptor: the child's signals would end the parent's waits. It is told of them where it was before; locks and worlds are the
    parent's, too."""
    global _asker, _lock, _main, _inside, _interrupted, _poller
    _asker, _lock, _main, _inside, _interrupted, _poller = None, threading.RLock(), threading.main_thread(), None, False, None
    worlds.clear()
    if not _started:
        return
    now = signal.set_wakeup_fd(-1)
    try:
        signal.set_wakeup_fd(_before if now == _descriptor else now)
    except (OSError, ValueError):  # closed by now
        pass


os.register_at_fork(after_in_child=_in_child)


def call(world, function, *arguments):
    """Calls a function that may wait in that world, and returns its status. A signal ends it, and raises what its handler raises."""
    return _call((world,) if world is not None else (), function, arguments)


def call_any(function, *arguments):
    """The same with a function that may wait in any world."""
    return _call(tuple(worlds), function, arguments)


def wait(world, attempt, nanoseconds, over=None):
    """The status of a wait that changes nothing, attempt(nanoseconds). over() tells whether what it waits for has come to an end, and so knows more than a
    piece of the wait; without one, nanoseconds is not 0. Where nothing can be interrupted, without a world, it is made in pieces, too."""
    if threading.current_thread() is not _main or (raises() and world is not None):
        return call(world, attempt, nanoseconds)
    end = time.monotonic_ns() + nanoseconds
    while True:
        left = end - time.monotonic_ns() if nanoseconds else _PIECE
        status = attempt(max(1, min(_PIECE, left)))
        if status != _TIMEOUT or (nanoseconds and left <= _PIECE):
            return status
        if over is not None and over():
            return attempt(nanoseconds)


def _call(inside, function, arguments):
    global _inside, _interrupted
    if threading.current_thread() is not _main:
        return function(*arguments)
    hear()
    outer, _inside = _inside, inside
    try:
        return function(*arguments)
    finally:
        with _lock:
            _inside = outer
            if _interrupted:
                _interrupted = False
                for world in inside:
                    lib.tutti_world_resume(world)


def aside(function):
    """Runs a function that waits where nothing can interrupt it, on a thread of its own, so that the main thread hears signals meanwhile. What it returns or
    raises; where a signal's handler raises first, the function gets to know, by the event it is given."""
    given_up = threading.Event()
    if threading.current_thread() is not _main:
        return function(given_up)
    done, answer = threading.Event(), []

    def run():
        try:
            answer.append((function(given_up), None))
        except BaseException as error:
            answer.append((None, error))
        finally:
            done.set()

    try:
        _thread.start_new_thread(run, ())  # in one step, as below
        done.wait()
    except BaseException:
        given_up.set()
        raise
    value, error = answer[0]
    if error is not None:
        raise error
    return value


class _Asker:
    """A thread that asks for the main thread. The two hand each other the word by these locks, which costs less than a thread for each question does."""

    def __init__(self) -> None:
        self.wanted, self.done = threading.Lock(), threading.Lock()
        self.question: Any = None
        self.answer: Any = None
        self.left = False
        self.wanted.acquire()
        self.done.acquire()

    def start(self) -> None:
        _thread.start_new_thread(self._run, ())  # in one step: an interrupt in those of Thread.start leaves a thread that fails

    def _run(self) -> None:
        while True:
            self.wanted.acquire()
            if self.left:  # having answered, or before it was asked
                return
            try:
                self.answer = self.question(), None
            except BaseException as error:
                self.answer = None, error
            self.question = None
            if self.left:
                return
            self.done.release()

    def leave(self) -> None:
        """Nobody waits for the answer any more: when it has come, the thread ends."""
        self.left = True
        try:
            self.wanted.release()
        except RuntimeError:  # it has not begun yet, and will see it
            pass


_asker: Any = None  # nobody's at the moment


def ask(function):
    """Runs a function that seldom waits, and then where nothing can interrupt it; as aside does, by a thread that stays. What it returns or raises."""
    global _asker
    if threading.current_thread() is not _main:
        return function()
    asker = None
    try:  # a signal's handler may raise between any two steps: whoever is ours by then is left
        asker, _asker = _asker, None  # one that asks meanwhile has another
        if asker is None:
            asker = _Asker()
            asker.start()
        asker.question = function
        asker.wanted.release()
        asker.done.acquire()
        (value, error), asker.answer = asker.answer, None
        if _asker is None:
            _asker = asker
        else:  # the handler's has stayed
            asker.leave()
    except BaseException:
        if asker is not None:
            if _asker is asker:
                _asker = None
            asker.leave()
        raise
    if error is not None:
        raise error
    return value
