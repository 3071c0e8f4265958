# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: a block of each rank that the others map, and what they do with it."""
from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Any, Optional

from . import _interrupt
from ._arguments import Unique, integer, nanoseconds, release_here, shape_of, wide_integer, wide_unsigned
from ._library import constants, lib, struct
from .buffers import dtype_bytes, dtype_number, host_buffer_of, numpy_dtype
from .errors import check, error_of, of_rank

if TYPE_CHECKING:
    from .world import Group

_Call = struct("tutti_call")


class Peers(Unique):
    """The blocks of all ranks of a group, mapped."""

    def __init__(self, memory: Memory, group: Any, handle: Any) -> None:
        self.group, self._memory, self._handle = group, memory, handle
        self._release = weakref.finalize(self, release_here, os.getpid(), lib.tutti_peers_release, handle)

    def array(self, rank: int, shape: Any = None, dtype: Any = None, offset: int = 0) -> Any:
        """The block of a rank, or a part of it, as a NumPy array over that very memory. offset is in elements."""
        import numpy
        shape = self._memory.shape if shape is None else shape
        shape = shape_of(shape)
        dtype = self._memory.dtype if dtype is None else dtype
        view = struct("tutti_view")()
        status = lib.tutti_peers_get_buffer(self._handle, integer(rank), (ctypes.c_int64 * max(1, len(shape)))(*shape), len(shape), dtype_number(dtype), wide_integer(offset),
                                            ctypes.byref(view))
        if status:
            raise of_rank(error_of(status), rank)
        count = 1
        for size in shape:
            count *= size
        block: Any = (ctypes.c_char * (count * dtype_bytes(dtype))).from_address(view.data or 1) if count else (ctypes.c_char * 0)()
        block._owner = self  # the array keeps the mapping
        return numpy.frombuffer(block, numpy_dtype(dtype)).reshape(shape)

    def put(self, to: int, array: Any, offset: int = 0, timeout: Optional[float] = None) -> Any:
        """Writes an array into a rank's block, offset bytes from its beginning."""
        source = host_buffer_of(array)
        self._call(lib.tutti_peers_put, integer(to), wide_integer(offset), source.address, source.count * dtype_bytes(source.dtype), timeout=timeout)

    def get(self, source: int, array: Any, offset: int = 0, timeout: Optional[float] = None) -> Any:
        """Reads from a rank's block into an array, which is returned."""
        target = host_buffer_of(array, writable=True)
        self._call(lib.tutti_peers_get, integer(source), wide_integer(offset), target.address, target.count * dtype_bytes(target.dtype), timeout=timeout)
        return array

    def signal(self, to: int, channel: int = 0, timeout: Optional[float] = None) -> Any:
        """Tells a rank that waits for it; it sees what was put before."""
        self._call(lib.tutti_peers_signal, integer(to), integer(channel), timeout=timeout)

    def wait_signal(self, source: int, channel: int = 0, timeout: Optional[float] = None) -> Any:
        """Waits for the signal of a rank."""
        self._call(lib.tutti_peers_wait_signal, integer(source), integer(channel), timeout=timeout)

    def test_signal(self, source: int, channel: int = 0) -> bool:
        """Takes the signal of a rank if it is there. Never waits."""
        arrived = ctypes.c_bool()
        check(lib.tutti_peers_test_signal(self._handle, integer(source), integer(channel), ctypes.byref(arrived)))
        return arrived.value

    def put_with_signal(self, to: int, array: Any, word: int, value: int, offset: int = 0, timeout: Optional[float] = None) -> None:
        """Writes an array into a rank's block, then sets a word of its signal pad: who sees the value sees the array."""
        source = host_buffer_of(array)
        self._call(lib.tutti_peers_put_with_signal, integer(to), wide_integer(offset), source.address, source.count * dtype_bytes(source.dtype), wide_integer(word), wide_unsigned(value),
                   timeout=timeout)

    def wait_for_signal(self, word: int, value: int, at_least: bool = False, timeout: Optional[float] = None) -> None:
        """Waits until a word of this rank's own pad is the value, or is at least that, and leaves it as it is."""
        comparison = constants["TUTTI_AT_LEAST" if at_least else "TUTTI_EQUAL"]
        self._call(lib.tutti_peers_wait_for_signal, wide_integer(word), comparison, wide_unsigned(value), timeout=timeout)

    def put_multicast(self, array: Any, offset: int = 0, timeout: Optional[float] = None) -> None:
        """Writes an array into everybody's block at once, where the device has multicast (World.has_multicast) or TUTTI_MULTICAST is "software"."""
        source = host_buffer_of(array)
        self._call(lib.tutti_peers_put_multicast, wide_integer(offset), source.address, source.count * dtype_bytes(source.dtype), timeout=timeout)

    rank = property(lambda self: lib.tutti_peers_rank(self._handle), doc="This rank among them.")
    size = property(lambda self: lib.tutti_peers_size(self._handle), doc="How many blocks there are.")
    channels = property(lambda self: lib.tutti_peers_channels(self._handle), doc="How many channels signals and barriers have.")

    def barrier(self, channel: int = 0, timeout: Optional[float] = None) -> Any:
        """Of all ranks; each sees what the others have put before."""
        self._call(lib.tutti_peers_barrier, integer(channel), timeout=timeout)

    def _call(self, function, *arguments, timeout):
        call = _Call(timeout_ns=nanoseconds(timeout))
        check(_interrupt.call(self.group.world._handle, function, self._handle, *arguments, ctypes.byref(call)))


class Memory(Unique):
    """Symmetric memory: a block of this rank that others can map. Arrays over it keep it alive, also beyond the world."""

    def __init__(self, world: Any, shape: Any, dtype: Any, handle: Any) -> None:
        self.world, self.shape, self.dtype, self._handle = world, shape, dtype, handle
        self._release = weakref.finalize(self, release_here, os.getpid(), lib.tutti_memory_release, handle)

    def rendezvous(self, group: Optional[Group] = None) -> Peers:
        """A collective of the group (default: the world's): maps the blocks of all, which must be equally long."""
        group = group if group is not None else self.world.group
        handle = ctypes.c_void_p()
        check(_interrupt.call(self.world._handle, lib.tutti_memory_rendezvous, self._handle, group._handle, ctypes.byref(handle)))
        return Peers(self, group, handle.value)

    device = property(lambda self: lib.tutti_device_name(lib.tutti_memory_device(self._handle)).decode(), doc="Where it lies.")

    @property
    def array(self) -> Any:
        """The block itself, as a NumPy array over it."""
        import numpy
        block: Any = (ctypes.c_char * lib.tutti_memory_bytes(self._handle)).from_address(lib.tutti_memory_data(self._handle))
        block._owner = self
        dtype = numpy_dtype(self.dtype)
        count = 1
        for size in self.shape:
            count *= size
        return numpy.frombuffer(block, dtype, count).reshape(self.shape)
