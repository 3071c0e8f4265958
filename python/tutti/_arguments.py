# SPDX-License-Identifier: Apache-2.0
"""Arguments as the C library takes them."""
from __future__ import annotations

import ctypes
import operator
import os
from typing import Any, Optional, Sequence

from ._library import lib
from .errors import check


def text(value: Optional[str]) -> Optional[bytes]:
    return value.encode() if value is not None else None


def nanoseconds(seconds: Optional[float]) -> int:
    """Seconds as C takes them; None is 0, the default."""
    return 0 if seconds is None else min(2**63 - 1, max(1, int(seconds * 1e9)))


def integer(value: Any) -> int:
    """An int of C; ctypes alone would cut a larger one."""
    value = operator.index(value)
    if not -2**31 <= value < 2**31:
        raise OverflowError(f"tutti: {value} is no rank and no tag: it does not fit into 32 bits")
    return value


def integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*[integer(value) for value in values])


def sizes(values: Sequence[int]) -> Any:
    return (ctypes.c_size_t * len(values))(*values)


def device_number(name: str) -> int:
    """The number of a device: "cpu", "cuda", "cuda:1"."""
    number = ctypes.c_int()
    check(lib.tutti_device_parse(name.encode(), ctypes.byref(number)))
    return number.value


def release_here(process: int, function: Any, handle: Any) -> None:
    """A forked child has copies of these objects, and the library's locks as they were at that moment: it touches nothing."""
    if process == os.getpid():
        function(handle)


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
