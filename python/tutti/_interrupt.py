# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread waits inside the library. A C call does not see Python's signal handlers; so a thread reads the descriptor that Python
writes signals to, and interrupts the worlds in whose calls the main thread is."""
import os
import signal
import threading

from ._library import lib

_lock = threading.Lock()
_main = threading.main_thread()
worlds = set()  # those of several ranks that are open; a call of the tensor library may wait for any of them
_inside = None  # the worlds that the main thread waits in
_interrupted = False
_started = 0  # the process that has the thread


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
    return _call((world,) if world is not None else (), function, arguments)


def call_any(function, *arguments):
    """The same with a function that may wait in any world."""
    return _call(tuple(worlds), function, arguments)


def _call(inside, function, arguments):
    global _inside, _interrupted
    if threading.current_thread() is not _main:
        return function(*arguments)
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
