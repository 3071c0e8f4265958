# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread waits inside the library. A C call does not see Python's signal handlers; so a thread reads the descriptor that Python
writes signals to, and interrupts the worlds in whose calls the main thread is. A call that can only be ended is interrupted where Python's own handler is
installed, which raises KeyboardInterrupt: with another one it goes on, and the handler runs when it returns. A wait that can be taken up again is interrupted
for every handler, and goes on where that raises nothing."""
import os
import signal
import threading

from ._library import constants, lib

_lock = threading.Lock()
_main = threading.main_thread()
worlds = set()  # those of several ranks that are open; a call of the tensor library may wait for any of them
_inside = None  # the worlds that the main thread waits in
_resumable = False  # it can wait there again
_interrupted = False
_started = 0  # the process that has the thread
_INTERRUPTED = constants["TUTTI_ERROR_INTERRUPTED"]


def _watch(read, forward):
    global _interrupted
    while True:
        numbers = os.read(read, 64)
        if not numbers:
            return
        if forward >= 0:
            os.write(forward, numbers)
        if signal.SIGINT in numbers:
            with _lock:
                if _resumable or signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    for world in _inside or ():
                        lib.tutti_world_interrupt(world)
                        _interrupted = True


def start():
    """Once per process, by the main thread; elsewhere nothing is done. What was told of signals before is told of them still."""
    global _started
    if threading.current_thread() is not _main or _started == os.getpid():
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _started = os.getpid()
    threading.Thread(target=_watch, args=(read, before), name="tutti signals", daemon=True).start()


def call(world, function, *arguments):
    """Calls a function that may wait in that world, and returns its status. A signal ends it, and raises what its handler raises."""
    return _call((world,) if world is not None else (), False, function, arguments)[0]


def call_any(function, *arguments):
    """The same with a function that may wait in any world."""
    return _call(tuple(worlds), False, function, arguments)[0]


def wait(world, function, *arguments):
    """The same with a wait that changes nothing: where the handler of the signal raises nothing, it waits again."""
    while True:
        status, interrupted = _call((world,), True, function, arguments)
        if status != _INTERRUPTED or not interrupted:
            return status


def _call(inside, resumable, function, arguments):
    """What the function returns, and whether a signal has interrupted it."""
    global _inside, _interrupted, _resumable
    if threading.current_thread() is not _main:
        return function(*arguments), False
    outer, _inside, _resumable = (_inside, _resumable), inside, resumable
    interrupted = False
    try:
        status = function(*arguments)
    finally:
        with _lock:
            _inside, _resumable = outer
            interrupted, _interrupted = _interrupted, False
            if interrupted:
                for world in inside:
                    lib.tutti_world_resume(world)
    return status, interrupted


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
    threading.Thread(target=run, name="tutti opening", daemon=True).start()
    try:
        done.wait()
    except BaseException:
        given_up.set()
        raise
    value, error = answer[0]
    if error is not None:
        raise error
    return value
