# SPDX-License-Identifier: Apache-2.0
"""Tutti: symmetric memory and collectives, on arrays of NumPy, PyTorch and anything else with the buffer protocol or DLPack.

    import numpy, tutti

    with tutti.World() as world:                 # under `python -m tutti.run -n 4 program.py`
        x = numpy.full(4, world.rank, "f4")
        world.group.all_reduce(x)                # in place; the same bits on every rank
"""
import importlib as _importlib

from . import errors
from ._interface import version as __version__
from .errors import (AbortedError, ArgumentError, DeadError, DeadlineError, Error, FileMissingError, GoneError, InterruptedCallError, MismatchError,
                     NotFoundError, OutOfMemoryError, RangeError, StateError, SystemCallError, TypeMismatchError, UnsupportedError)
from .spawn import spawn
from .memory import Memory, Peers
from .store import Store
from .world import Batch, Event, Group, Received, Work, World, clock

__all__ = ["AbortedError", "ArgumentError", "Batch", "CompiledBackward", "Connectivity", "DeadError", "DeadlineError", "Error", "Event", "FileMissingError",
           "GoneError", "Group", "InterruptedCallError", "Memory", "Mesh", "MismatchError", "NotFoundError", "OutOfMemoryError", "Peers", "RangeError", "Received",
           "StateError", "Store", "SystemCallError", "TypeMismatchError", "UnsupportedError", "Work", "World", "capture", "clock", "compile", "data", "errors", "graph",
           "mesh_shape", "named", "nn", "optim", "parallel", "spawn", "streams", "tensor"]
_MODULES = ("data", "graph", "nn", "optim", "parallel", "streams", "tensor")  # with the tensor library, which is loaded when it is first needed


def __getattr__(name):
    if name in _MODULES:
        return _importlib.import_module("." + name, __name__)
    if name in ("CompiledBackward", "compile", "capture"):
        return getattr(_importlib.import_module(".graph", __name__), name)
    if name == "named":
        return _importlib.import_module(".named", __name__)
    if name in ("Connectivity", "Mesh", "mesh_shape"):
        return getattr(_importlib.import_module(".mesh", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
