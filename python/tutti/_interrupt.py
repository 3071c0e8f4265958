# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread waits inside the library. A C call does not see Python's signal handlers; so a thread reads the descriptor that Python
writes signals to, and interrupts the worlds in whose calls the main thread is."""
import os
import signal
import threading

from ._library import lib

_lock = threading.Lock()
_main = threading.main_thread()
_inside = None  # the world that the main thread waits in
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
                if _inside is not None:
                    lib.tutti_world_interrupt(_inside)
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
    """Calls a function that may wait, and returns its status. A signal ends it, and raises what its handler raises."""
    global _inside, _interrupted
    if threading.current_thread() is not _main:
        return function(*arguments)
    outer, _inside = _inside, world
    try:
        return function(*arguments)
    finally:
        with _lock:
            _inside = outer
            if _interrupted:
                _interrupted = False
                lib.tutti_world_resume(world)
