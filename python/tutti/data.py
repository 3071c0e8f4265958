# SPDX-License-Identifier: Apache-2.0
"""Tokens from a file, for training, and a line that tells how far it is.

    from tutti import data

    with data.Tokens("text.bin", length=256, batch=8, rank=world.rank, ranks=world.size) as tokens, data.Progress(steps=1000, world=world) as progress:
        for step in range(1000):
            inputs, targets = tokens.batch(step)
            ...
            progress.step(loss.item(), 8 * 256 * world.size)
"""
from __future__ import annotations

import ctypes
import errno
import os
import weakref
from typing import Any, Iterator, Optional, Tuple

from ._arguments import Unique, c_stream, path_of, release_here
from ._library import lib, struct
from .buffers import dtype_number
from .errors import FileMissingError, NotFoundError, StateError
from .tensor import _calls
from .tensor._calls import Dtype
from .tensor._tensor import Tensor

__all__ = ["Progress", "Tokens"]
_TokensOptions, _ProgressOptions = struct("tt_tokens_options"), struct("tt_progress_options")
_open, _begin = _calls.bind("tt_tokens_open", "pointer", "sP"), _calls.bind("tt_progress_new", "pointer", "P")
_batch = _calls.bind("tt_tokens_batch", "done", "PqPP")


class _Closed(Unique):
    """Something of C's that is ended by close, by the end of a block, or when its object goes."""
    _handle: Optional[int]

    def _own(self, handle: Any, function: Any) -> None:
        self._handle = handle
        self._release = weakref.finalize(self, release_here, os.getpid(), function, handle)
        self._release.atexit = False

    def _need(self) -> int:
        if self._handle is None:
            raise StateError("STATE", f"tutti: the {type(self).__name__} is closed")
        return self._handle

    def close(self) -> None:
        """Ends it; a second time does nothing."""
        self._handle = None
        self._release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.close()


class Tokens(_Closed):
    """A file of tokens, one behind the other in the byte order of the machine, mapped into memory: what is not used takes none. dtype is that of a token in the
    file, header_bytes at its start are left out. A row has length tokens, a batch so many rows for each rank. The order of rows is a function of seed, epoch and
    place, the same on every machine, or with in_order that of the file; a run that is resumed needs nothing but its number of steps. The file must not become
    shorter while it is open."""

    def __init__(self, path: Any, length: int = 1024, batch: int = 1, dtype: Dtype = "u16", header_bytes: int = 0, seed: int = 0, in_order: bool = False,
                 rank: int = 0, ranks: int = 1) -> None:
        options = _TokensOptions(dtype=dtype_number(dtype), header_bytes=header_bytes, length=length, batch=batch, seed=seed, in_order=bool(in_order), rank=rank,
                                 rank_count=ranks)
        try:
            handle = _calls.answer(_open, path_of(path), ctypes.byref(options))
        except NotFoundError as error:
            missing = FileMissingError(error.status, str(error))
            missing.errno = errno.ENOENT
            raise missing from None
        self._own(handle, lib.tt_tokens_close)

    count = property(lambda self: lib.tt_tokens_count(self._need()), doc="How many tokens the file holds.")
    batches = property(lambda self: lib.tt_tokens_batches(self._need()), doc="How many batches make an epoch, in which no row comes twice, on no rank.")

    def batch(self, step: int) -> Tuple[Tensor, Tensor]:
        """The batch of a step, counted from 0 over all epochs: inputs and targets (batch, length) of i64, the targets one token further on."""
        inputs, targets = ctypes.c_void_p(), ctypes.c_void_p()

        def read(made: bool) -> Any:
            return (_calls.borrow(inputs.value), _calls.borrow(targets.value)) if made else None
        return _calls.call(read, _batch, self._need(), step, ctypes.byref(inputs), ctypes.byref(targets))

    def __iter__(self) -> Iterator[Tuple[Tensor, Tensor]]:
        """The batches of the first epoch."""
        return (self.batch(step) for step in range(self.batches))


class Progress(_Closed):
    """How far a run is: on a terminal one line that is written over, with step, loss, tokens per second, which share of the time was spent waiting for other
    ranks, and the time left; elsewhere one line at the end. steps are those of the whole run (0: not known), done those that an earlier part of it has made; file
    has a fileno (default: standard error); with a world the share of waiting is told."""

    def __init__(self, steps: int = 0, done: int = 0, file: Any = None, world: Any = None) -> None:
        stream = c_stream(file) if file is not None else None
        options = _ProgressOptions(steps=steps, done=done, file=stream.address if stream is not None else None, world=world._open() if world is not None else None)
        self._world = world

        def end(progress: Optional[int]) -> None:
            lib.tt_progress_end(progress)
            if stream is not None:
                stream.close()
        try:
            self._own(_calls.answer(_begin, ctypes.byref(options)), end)
        except BaseException:
            end(None)
            raise

    def step(self, loss: float, tokens: int = 0) -> None:
        """After a step: its loss, and how many tokens it has seen, on all ranks if that is to be told."""
        lib.tt_progress_step(self._need(), loss, tokens)
