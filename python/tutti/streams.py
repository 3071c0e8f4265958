# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs: the streams that operators go to, marks in them, steps that are run again as CUDA graphs, and the memory of a device.

    from tutti import streams, tensor as tt

    x = tt.randn((1024, 1024), "bf16", device="cuda")
    made = streams.Event()
    with streams.Stream():                       # the thread's operators go here until the end of the block
        made.join()                              # a stream waits for no other but behind a mark: x was made in another
        y = x @ x
        mark = streams.Event()
    mark.join()                                  # what comes to the stream of before begins after the mark
    print(y.sum().item())                        # reading waits

A device is "cuda" or "cuda:1". Without the plug-in, a driver or a GPU, calls raise tutti.UnsupportedError, which says what is missing."""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any, Dict, List, Optional

from ._arguments import Unique
from ._library import constants, lib, struct
from .errors import Error, StateError
from .tensor import _calls
from .tensor._autograd import _Mode
from .tensor._calls import Device, device_number
from .tensor._operators import copy_async_, device_available, empty_pinned, synchronize

__all__ = ["Event", "Replay", "Stream", "copy_async_", "current_stream", "default_device", "device_available", "empty_pinned", "memory", "memory_limit",
           "memory_trim", "set_default_device", "synchronize", "tf32"]
_Memory = struct("tt_device_memory")
_current, _set = _calls.bind("tt_stream", "pointer", "V"), _calls.bind("tt_stream_set", "done", "VP")
_new = _calls.bind("tt_stream_new", "pointer", "V")
_record, _join = _calls.bind("tt_event_record", "pointer", "V"), _calls.bind("tt_event_join", "done", "P")
_wait, _done = _calls.bind("tt_event_wait", "done", "P"), _calls.bind("tt_event_done", "done", "P")
_begin, _end, _run = _calls.bind("tt_replay_begin", "done", "V"), _calls.bind("tt_replay_end", "pointer", "V"), _calls.bind("tt_replay_run", "done", "P")
_set_device = _calls.bind("tt_default_device_set", "done", "V")
_memory_of, _limit = _calls.bind("tt_device_memory_get", "status", "VP"), _calls.bind("tt_device_memory_limit", "status", "Vz")


def _release(process: int, function: Any, *arguments: Any) -> None:
    if process == os.getpid():
        function(*arguments)


def _owned(owner: Any, function: Any, *arguments: Any) -> None:
    """Ends what C has made when its object goes, in the process that made it."""
    weakref.finalize(owner, _release, os.getpid(), function, *arguments).atexit = False


# ---- streams and marks ----

class Stream(Unique):
    """A stream of a GPU: a new one, which waits for no other, or with handle (a CUstream, a cudaStream_t as a number; 0 is the default one) one that
    somebody else has made and ends. `with stream:` makes it the thread's current one for a block."""

    def __init__(self, device: Device = "cuda", handle: Optional[int] = None) -> None:
        self.device, self._before = device, {}  # type: Device, Dict[int, List[Optional[int]]]
        self.handle: int = (_calls.answer(_new, device) if handle is None else handle) or 0
        if handle is None:
            _owned(self, lib.tt_stream_release, device_number(device), self.handle)

    def __enter__(self) -> Stream:
        before = self._before.setdefault(threading.get_ident(), [])  # threads may use one at a time, each in blocks of its own
        before.append(_calls.answer(_current, self.device))
        _calls.done(_set, self.device, self.handle)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        _calls.done(_set, self.device, self._before[threading.get_ident()].pop())

    def synchronize(self) -> None:
        """Waits until it has done what it holds."""
        with self:
            synchronize(self.device)

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x} of {self.device}>"


def current_stream(device: Device = "cuda") -> Stream:
    """That of the calling thread, to which operators go."""
    return Stream(device, _calls.answer(_current, device) or 0)


class Event(Unique):
    """A mark behind what the current stream of the device holds."""

    def __init__(self, device: Device = "cuda") -> None:
        self._handle = _calls.answer(_record, device)
        _owned(self, lib.tt_event_release, self._handle)

    def join(self) -> None:
        """Work that comes to the current stream from now on begins after the mark; the host does not wait."""
        _calls.done(_join, self._handle)

    def wait(self) -> None:
        """The host waits for it."""
        _calls.done(_wait, self._handle)

    def done(self) -> bool:
        """Whether it was passed; never waits."""
        return _calls.answer(_done, self._handle)


# ---- steps that are run again ----

class Replay(Unique):
    """A step that is noted once, as a CUDA graph, and run again as a whole, for the cost of one launch:

        with streams.Stream():                   # not the default one
            step()                               # once as it is: memory, plans, rendezvous
            with streams.Replay() as replay:
                step()                           # is noted, and does not run
            for batch in batches:
                inputs.copy_(batch)
                replay()

    It works on the very memory that was used while it was noted: tensors that were made before must be kept as long as the replay is used, and those that
    were made inside hold what the last run wrote. Random numbers and what optimizers count are new at each run; every other number is what it was. What
    would wait on the host (item, numpy, printing) is an error inside. Whatever the block raises drops what was noted."""

    def __init__(self, device: Device = "cuda") -> None:
        self._device, self._handle = device, None  # type: Device, Optional[int]

    def __enter__(self) -> Replay:
        if self._handle is not None:
            raise StateError("STATE", "tutti: this replay has noted a step already")
        _calls.done(_begin, self._device)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if value is not None:
            try:
                _calls.answer(_dropped, self._device)
            except Error:
                pass  # what the block raised says more
            return
        self._handle = _calls.answer(_end, self._device)
        _owned(self, lib.tt_replay_release, self._handle)

    def __call__(self) -> None:
        """Runs it on the current stream; the host does not wait."""
        if self._handle is None:
            raise StateError("STATE", "tutti: nothing was noted yet: call the step inside of `with replay:`")
        _calls.done(_run, self._handle)


def _dropped(device: Device) -> Any:
    """Ends a replay with an error pending, so that what was noted goes."""
    lib.tt_error_set(constants["TUTTI_ERROR_STATE"], b"the step was left by an exception")
    return _end(device)


# ---- devices ----

def default_device() -> str:
    """Where this thread makes tensors that no device is named for, and parameters of modules: 'cpu' at first."""
    return lib.tutti_device_name(lib.tt_default_device()).decode()


def set_default_device(device: Device) -> None:
    """Changes that, in this thread. Numbers, files and arrays of other libraries stay where they are."""
    _calls.done(_set_device, device)


def tf32(on: bool = True) -> _Mode:
    """`with tf32():` or `@tf32()`: products of f32 on a GPU may round their elements to ten binary digits behind the point; faster, with errors near 3e-4."""
    return _Mode(lib.tt_tf32_mode, bool(on))


def memory(device: Device = "cuda") -> Dict[str, int]:
    """The memory of tensors on a device: bytes allocated and reserved, now and at most, the limit, and how often it was given out and taken of the driver."""
    counts = _Memory()
    _calls.checked(_memory_of, device, ctypes.byref(counts))
    return {name: getattr(counts, name) for name, *_ in counts._fields_[1:]}


def memory_limit(bytes: int, device: Device = "cuda") -> None:
    """The most that may be reserved; 0: no limit but the device's. A tensor that does not fit raises tutti.OutOfMemoryError."""
    _calls.checked(_limit, device, bytes)


def memory_trim(device: Device = "cuda") -> None:
    """Gives what is spare back to the driver."""
    lib.tt_device_memory_trim(device_number(device))
