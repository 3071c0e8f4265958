# SPDX-License-Identifier: Apache-2.0
"""Arguments as the C library takes them."""
from __future__ import annotations

import ctypes
import operator
import os
from typing import Any, NoReturn, Optional, Sequence, Tuple

from ._library import lib
from .errors import check


def text(value: Optional[str]) -> Optional[bytes]:
    return name_of(value) if value is not None else None


def name_of(value: str) -> bytes:
    """A text of C, which ends at its first zero byte: one with a zero inside would be another one."""
    return _whole(value.encode(), value)


def path_of(path: Any) -> bytes:
    """The name of a file or folder, likewise: one that is cut off is that of another."""
    return _whole(os.fsencode(path), path)


def _whole(data: bytes, value: Any) -> bytes:
    if b"\0" in data:
        raise ValueError(f"tutti: {value!r} has a zero character inside, and would be cut off there")
    return data


def nanoseconds(seconds: Optional[float]) -> int:
    """Seconds as C takes them; None is 0, the default."""
    if seconds is None:
        return 0
    if seconds < 0:
        raise ValueError(f"tutti: a timeout of {seconds} s is negative; None is the default")
    return max(1, int(min(seconds * 1e9, 2**63 - 1)))  # one that is infinite, too


def integer(value: Any) -> int:
    """An int of C; ctypes alone would cut a larger one."""
    value = operator.index(value)
    if not -2**31 <= value < 2**31:
        raise OverflowError(f"tutti: {value} does not fit into 32 bits")
    return value


def wide_integer(value: Any) -> int:
    """The same of an int64_t."""
    value = operator.index(value)
    if not -2**63 <= value < 2**63:
        raise OverflowError(f"tutti: {value} does not fit into 64 bits")
    return value


def wide_unsigned(value: Any) -> int:
    """The same of a uint64_t; of a negative number its two's complement."""
    value = operator.index(value)
    if not -2**63 <= value < 2**64:
        raise OverflowError(f"tutti: {value} does not fit into 64 bits")
    return value


def shape_of(shape: Any) -> Tuple[int, ...]:
    """A shape, given as one number or several."""
    sizes = tuple(operator.index(size) for size in ((shape,) if hasattr(shape, "__index__") else shape))
    if any(size < 0 for size in sizes):
        raise ValueError(f"tutti: {sizes} is no shape: a size is negative")
    return sizes


def integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*[integer(value) for value in values])


def sizes(values: Sequence[int]) -> Any:
    if any(operator.index(value) < 0 for value in values):
        raise ValueError(f"tutti: counts are not negative, and these are {list(values)}")
    return (ctypes.c_size_t * len(values))(*values)


def device_number(name: str) -> int:
    """The number of a device: "cpu", "cuda", "cuda:1"."""
    number = ctypes.c_int()
    check(lib.tutti_device_parse(name_of(name), ctypes.byref(number)))
    return number.value


def release_here(process: int, function: Any, handle: Any) -> None:
    """A forked child has copies of these objects, and the library's locks as they were at that moment: it touches nothing."""
    if process == os.getpid():
        function(handle)


class Unique:
    """What has a handle of the C library's: a copy of the object would hold it beyond its end, and another process has none."""
    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"tutti: a {type(self).__name__} belongs to this process, and can be neither copied nor pickled")


_c = ctypes.CDLL(None, use_errno=True)
_c.fdopen.restype, _c.fdopen.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]
_c.fclose.argtypes = [ctypes.c_void_p]


class c_stream:
    """A FILE * of C's over what a Python file writes to; until close, or for a block."""

    def __init__(self, file: Any) -> None:
        file.flush()
        descriptor = os.dup(file.fileno())
        self.address: Optional[int] = _c.fdopen(descriptor, b"w")
        if not self.address:
            os.close(descriptor)
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        address, self.address = self.address, None
        if address:
            _c.fclose(address)

    def __enter__(self) -> int:
        return self.address or 0

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.close()
