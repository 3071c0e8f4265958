# SPDX-License-Identifier: Apache-2.0
"""Failures as exceptions. All are tutti.Error; those that Python has a word for are that, too: `except TimeoutError` catches a deadline."""
from __future__ import annotations

import ctypes
import errno
from typing import Any, Sequence

from ._library import constants, lib, struct


class Error(Exception):
    """A call has failed. status is the name ("DEAD"), str() what the library says, ranks those who are at fault, and group, operation and sequence
    where it happened, as far as that is known."""

    def __init__(self, status: str, message: str, ranks: Sequence[int] = (), group: Any = "", operation: str = "", sequence: int = 0) -> None:
        super().__init__(message)
        self.status, self.ranks, self.group, self.operation, self.sequence = status, tuple(ranks), group, operation, sequence

    def __reduce__(self):
        return type(self), (self.status, str(self), self.ranks, self.group, self.operation, self.sequence)


class ArgumentError(Error, ValueError):
    """An argument that no call could take."""


class RangeError(ArgumentError, IndexError):
    """An index, a rank or a size that lies outside of its range."""


class TypeMismatchError(Error, TypeError):
    """An element type that the operation has no meaning for, or that does not fit."""


class NotFoundError(Error, LookupError):
    """Nothing is there under that name."""


class UnsupportedError(Error, NotImplementedError):
    """What this machine, or this build, cannot do; the text says why."""


class StateError(Error, RuntimeError):
    """The right call at the wrong moment: something is closed or in use, a tensor was freed or changed since it was saved for a gradient, a function that is
    captured did what no graph can repeat."""


class SystemCallError(Error, OSError):
    """A system call failed; errno says how."""


class FileMissingError(SystemCallError, FileNotFoundError):
    """There is no such file."""


class OutOfMemoryError(Error, MemoryError):
    """There was no memory for it."""


class DeadlineError(Error, TimeoutError):
    """A deadline has passed; ranks are those that did not come."""


class DeadError(Error, ConnectionError):
    """A rank has died; ranks tells which."""


class GoneError(Error, ConnectionError):
    """A rank has closed its world, and was still needed."""


class MismatchError(Error, ValueError):
    """Ranks called different things; the text says who called what."""


class AbortedError(Error):
    """A rank has ended the group; the text says who, and why."""


class InterruptedCallError(Error, InterruptedError):
    """World.interrupt ended the wait."""


_CLASSES = {"ARGUMENT": ArgumentError, "RANGE": RangeError, "TYPE": TypeMismatchError, "NOT_FOUND": NotFoundError, "UNSUPPORTED": UnsupportedError,
            "EMPTY": NotFoundError, "SYSTEM": SystemCallError, "MEMORY": OutOfMemoryError, "TIMEOUT": DeadlineError, "DEAD": DeadError, "GONE": GoneError, "MISMATCH": MismatchError,
            "ABORTED": AbortedError, "INTERRUPTED": InterruptedCallError,
            **dict.fromkeys(("STATE", "HANDLE", "SCOPE", "VERSION", "FREED", "GRAPH", "CAPTURE"), StateError)}
_NAMES = {value: name[len("TUTTI_ERROR_"):] for name, value in constants.items() if name.startswith("TUTTI_ERROR_") and name not in
          ("TUTTI_ERROR_MESSAGE", "TUTTI_ERROR_RANKS")}


def status_name(status: int) -> str:
    """The name of a status, without TUTTI_ERROR_: "DEAD"."""
    return _NAMES.get(status, str(status))


def error_of(status: int) -> Error:
    """The exception for a status that a call has just returned to this thread."""
    info = struct("tutti_error_info")()
    lib.tutti_error_detail(ctypes.byref(info))
    name = status_name(status)
    kind = _CLASSES.get(name, Error)
    if kind is SystemCallError and info.system_error == errno.ENOENT:
        kind = FileMissingError
    message = lib.tutti_error_message().decode(errors="replace") or lib.tutti_status_text(status).decode()
    error = kind(name, message, info.at_fault[:info.at_fault_count], info.group.decode(errors="replace"), info.operation.decode(errors="replace"), info.sequence)
    if isinstance(error, SystemCallError):
        error.errno = info.system_error
    return error


def of_rank(error: Error, rank: int) -> Error:
    """The error of a call that wanted to see a rank's memory. One on another host is not mapped: the words say what goes there instead."""
    if error.status != "UNSUPPORTED" or "across nodes" not in str(error):
        return error
    words = f"{error}: rank {rank} is on another host; put, get and signals go there"
    return type(error)(error.status, words, error.ranks, error.group, error.operation, error.sequence)


def check(status: int) -> None:
    if status:
        raise error_of(status)
