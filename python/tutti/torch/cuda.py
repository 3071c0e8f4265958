# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs. A call is put into PyTorch's current stream and returns; with async_op it runs on a stream of the group's own, behind what is in the
current one by then, and Work.wait orders the stream that is current there after it, as PyTorch's users know it of NCCL. Nothing waits on the host."""
import ctypes
import datetime
import os
import pathlib
import threading
from typing import Any, Optional

import torch
import torch.distributed as dist

from .. import _interrupt
from .._library import constants, lib, struct
from ..world import _drop, hold
from .work import failure, not_compiled, raise_error

_Call = struct("tutti_call")
_FIRST_DEVICE = constants["TUTTI_CUDA"] + 1  # TUTTI_CUDA_AT(0)


def _plugin() -> bool:
    """Whether the CUDA plug-in can be found: it is loaded when a tensor on a GPU is first used."""
    folders = os.environ.get("TUTTI_PLUGIN_PATH", "").split(os.pathsep)
    return any((pathlib.Path(folder) / "libtutti-cuda.so").exists() for folder in folders if folder)


here = torch.version.cuda is not None and _plugin()
what = "tensors of the CPU" + ("" if here else "; those on GPUs need a PyTorch with CUDA and the plug-in libtutti-cuda.so in TUTTI_PLUGIN_PATH")


def first(*things: Any) -> Any:
    """The first tensor in nested lists, where it is on a GPU."""
    for thing in things:
        if isinstance(thing, torch.Tensor):
            return thing if thing.is_cuda else None
        if isinstance(thing, (tuple, list)):
            found = first(*thing)
            if found is not None:
                return found
    return None


def tensors_of(things: Any) -> Any:
    """The tensors in nested lists."""
    for thing in things if isinstance(things, (tuple, list)) else ():
        if isinstance(thing, torch.Tensor):
            yield thing
        else:
            yield from tensors_of(thing)


def _stream(tensor: torch.Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def place(call: Any, tensor: torch.Tensor) -> None:
    """Says where the buffers of a call lie, and after what it comes."""
    call.stream, call.device = _stream(tensor) or None, _FIRST_DEVICE + tensor.device.index


def run(group: Any, function: Any, arguments: Any, tensor: torch.Tensor, nanoseconds: int, waits: bool, result: Any, kept: Any, finish: Any,
        factor: Any = None) -> Any:
    """Enqueues an operation. Without async_op it is part of the current stream when this returns."""
    call = _Call(timeout_ns=nanoseconds, factor=factor.data_ptr() if factor is not None else None)
    place(call, tensor)
    handle: Any = None
    if not waits:
        handle = hold((kept, result, finish))
        call.work = ctypes.addressof(handle)
    try:
        status = _interrupt.call(group._world._handle, function, group._handle, *arguments, ctypes.byref(call))
        if status:
            raise_error(status)
    except BaseException:
        if handle is not None:
            _drop(os.getpid(), handle)
        raise
    if waits:
        if finish is not None:
            finish()  # likewise enqueued
        return None
    return Work(group, handle, tensor.device, result, kept, finish)


@not_compiled
class Work(dist.Work):
    """An operation on a stream of the group's own."""

    def __init__(self, group: Any, place: Any, device: Any, result: Any, kept: Any, finish: Any) -> None:
        super().__init__()
        self._group, self._place, self._handle, self._device, self._result, self._kept, self._finish = group, place, place.value, device, result, kept, finish
        self._lock, self._process = threading.RLock(), os.getpid()  # again by a signal's handler
        self._future: Any = None

    def __del__(self) -> None:
        try:
            if self._finish is not None and self._process == os.getpid():
                self._join()  # results belong somewhere, also when nobody waits
        except Exception:  # there are none: it has failed, which the group's next call says
            pass
        finally:
            _drop(self._process, self._place)

    def _join(self) -> None:
        """Orders the current stream after the operation. What is left to do with its results is put into the first stream that comes."""
        status = lib.tutti_work_join(self._handle, torch.cuda.current_stream(self._device).cuda_stream or None)
        if status:
            raise_error(status)
        with self._lock:
            finish = self._finish
            if finish is not None:
                finish()
                self._finish = None  # by now: a handler that waits meanwhile finds the results in place
                for tensor in tensors_of(self._kept):  # whose memory PyTorch's allocator gives to the stream that they were made for, which may be another
                    tensor.record_stream(torch.cuda.current_stream(self._device))

    def wait(self, timeout: Optional[datetime.timedelta] = None) -> bool:
        """Orders the current stream after the operation; with a timeout the host waits, too."""
        if timeout is not None and timeout.total_seconds() > 0:
            status = _interrupt.call(self._group._world._handle, lib.tutti_work_wait, self._handle, int(timeout.total_seconds() * 1e9))
            if status:
                raise_error(status)
        self._join()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        finished = ctypes.c_bool()
        return lib.tutti_work_test(self._handle, ctypes.byref(finished)) != 0 or finished.value

    def exception(self) -> Any:
        status = lib.tutti_work_wait(self._handle, 0) if self.is_completed() else 0
        return failure(status) if status else None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """Complete at once: who waits for it has its stream ordered after the operation."""
        if self._future is None:
            side = self._group.__dict__.setdefault("_side_streams", {})
            if self._device not in side:
                side[self._device] = torch.cuda.Stream(self._device)
            future: Any = torch.futures.Future(devices=[self._device])
            with torch.cuda.stream(side[self._device]):
                self._join()
                future.set_result(self._result)
            self._future = future
        return self._future
