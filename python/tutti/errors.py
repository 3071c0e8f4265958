# SPDX-License-Identifier: Apache-2.0
"""Failures as exceptions. All are tutti.Error; those that Python has a word for are that, too: `except TimeoutError` catches a deadline."""
import ctypes

from ._library import constants, lib, struct


class Error(Exception):
    """A call has failed. status is the name ("DEAD"), str() what the library says, ranks those who are at fault, and group, operation and sequence
    where it happened, as far as that is known."""

    def __init__(self, status, message, ranks=(), group="", operation="", sequence=0):
        super().__init__(message)
        self.status, self.ranks, self.group, self.operation, self.sequence = status, tuple(ranks), group, operation, sequence

    def __reduce__(self):
        return type(self), (self.status, str(self), self.ranks, self.group, self.operation, self.sequence)


class ArgumentError(Error, ValueError):
    """An argument that no call could take."""


class TypeMismatchError(Error, TypeError):
    """An element type that the operation has no meaning for, or that does not fit."""


class NotFoundError(Error, LookupError):
    """Nothing is there under that name."""


class UnsupportedError(Error, NotImplementedError):
    """What this machine, or this build, cannot do; the text says why."""


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


_CLASSES = {"ARGUMENT": ArgumentError, "RANGE": ArgumentError, "TYPE": TypeMismatchError, "NOT_FOUND": NotFoundError, "UNSUPPORTED": UnsupportedError,
            "MEMORY": OutOfMemoryError, "TIMEOUT": DeadlineError, "DEAD": DeadError, "GONE": GoneError, "MISMATCH": MismatchError,
            "ABORTED": AbortedError, "INTERRUPTED": InterruptedCallError}
_NAMES = {value: name[len("TUTTI_ERROR_"):] for name, value in constants.items() if name.startswith("TUTTI_ERROR_") and name not in
          ("TUTTI_ERROR_MESSAGE", "TUTTI_ERROR_RANKS")}


def error_of(status):
    """The exception for a status that a call has just returned to this thread."""
    info = struct("tutti_error_info")()
    lib.tutti_error_detail(ctypes.byref(info))
    name = _NAMES.get(status, str(status))
    message = lib.tutti_error_message().decode(errors="replace") or lib.tutti_status_text(status).decode()
    return _CLASSES.get(name, Error)(name, message, info.at_fault[:info.at_fault_count], info.group.decode(errors="replace"),
                                     info.operation.decode(errors="replace"), info.sequence)


def check(status):
    if status:
        raise error_of(status)
