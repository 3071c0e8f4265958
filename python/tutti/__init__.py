# SPDX-License-Identifier: Apache-2.0
"""Tutti: symmetric memory and collectives, on arrays of NumPy, PyTorch and anything else with the buffer protocol or DLPack.

    import numpy, tutti

    with tutti.World() as world:                 # under `python -m tutti.run -n 4 program.py`
        x = numpy.full(4, world.rank, "f4")
        world.group.all_reduce(x)                # in place; the same bits on every rank
"""
from . import errors
from ._interface import version as __version__
from .errors import (AbortedError, ArgumentError, DeadError, DeadlineError, Error, GoneError, InterruptedCallError, MismatchError, NotFoundError,
                     OutOfMemoryError, TypeMismatchError, UnsupportedError)
from .spawn import spawn
from .world import Batch, Group, Memory, Peers, Store, Work, World

__all__ = ["AbortedError", "ArgumentError", "Batch", "DeadError", "DeadlineError", "Error", "GoneError", "Group", "InterruptedCallError", "Memory",
           "MismatchError", "NotFoundError", "OutOfMemoryError", "Peers", "Store", "TypeMismatchError", "UnsupportedError", "Work", "World", "errors", "spawn"]
