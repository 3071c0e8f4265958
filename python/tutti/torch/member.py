# SPDX-License-Identifier: Apache-2.0
"""This rank as a member of a group: how the ranks meet, and how they leave. What calls the group does with tensors is group.py's, or the C++ part's (shim)."""
from __future__ import annotations

import ctypes
import datetime
import os
import secrets
import socket
import time
import weakref
from typing import Any, MutableMapping, NoReturn, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _interrupt
from .._library import lib, struct
from ..errors import Error, check
from ..world import World, _ints, _nanoseconds, _release_here, _text
from .work import not_compiled, raise_error

_Call = struct("tutti_call")
worlds: MutableMapping[int, World] = weakref.WeakValueDictionary()  # of default groups, by process: sub-groups are groups of theirs


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.stat('/proc/self/ns/net').st_ino} {os.stat('/proc/self/ns/pid').st_ino}"


def _present(store: Any, turn: int, size: int, key: str, seconds: float) -> bytes:
    """Waits until a key is there. PyTorch's own wait cannot be interrupted, and does not know who is missing."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not store.check([key]):
        if time.monotonic() > deadline:
            missing = tuple(other for other in range(size) if not store.check([f"tutti/{turn}/host/{other}"]))
            who = f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} did not come" if missing else "rank 0 has not said where to meet"
            error: Any = dist.DistBackendError(f"tutti: opening a process group of {size} ranks took longer than {seconds:g} s: {who}")
            error.status, error.ranks = "TIMEOUT", missing or (0,)
            raise error
        time.sleep(pause)
        pause = min(0.02, 1.5 * pause)
    return store.get(key)


def _open_world(options: Any) -> World:
    """A world of the group's ranks. Rank 0 says through PyTorch's store where they meet: a socket of its own where all are on one host, else the store that the
    launcher has named to all. A store may outlive its groups, as torchrun's does: each rank counts how often it has come with this one."""
    store, rank, size, seconds = options.store, options.group_rank, options.group_size, options.timeout.total_seconds()
    turn = store.add(f"tutti/turns/{rank}", 1)
    store.set(f"tutti/{turn}/host/{rank}", _host())
    if rank == 0:
        hosts = {_present(store, turn, size, f"tutti/{turn}/host/{other}", seconds) for other in range(size)}
        token = secrets.token_hex(8)
        launched = os.environ.get("TUTTI_STORE") is not None and os.environ.get("TUTTI_SIZE") == str(size)
        url = "" if launched or len(hosts) > 1 else f"unix:@tutti-torch-{os.getpid()}-{token}"
        store.set(f"tutti/{turn}/meet", f"{token} {url}")
    token, url = _present(store, turn, size, f"tutti/{turn}/meet", seconds).decode().split(" ")
    try:
        return World(rank=rank, size=size, store=url or None, name=f"torch-{token}", timeout=seconds)
    except Error as cause:
        error: Any = dist.DistBackendError(str(cause))
        error.status, error.ranks = cause.status, cause.ranks
        raise error from cause


def _end_group(handle: int) -> None:
    """Takes it out of its world, which would keep it and its thread, and gives it back."""
    lib.tutti_group_destroy(handle)  # of a world that was closed: nothing is left to do
    lib.tutti_group_release(handle)


def destroyed() -> NoReturn:
    raise dist.DistBackendError("tutti: this process group was destroyed")


class Options(c10d.Backend.Options):
    """With what a group was made, as PyTorch's own backends have it in their `options`."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: datetime.timedelta) -> None:
        super().__init__("tutti", timeout)
        fields: Any = self
        fields.group_name, fields.global_ranks_in_group = name, list(ranks)

    def __deepcopy__(self, memo: Any) -> Any:  # dist.split_group gives it to the new group, changed
        return Options(self.group_name, self.global_ranks_in_group, self._timeout)


@not_compiled
class Member:
    """This rank in a group."""

    def __init__(self, options: Any) -> None:
        self._store, self._name = options.store, options.group_id
        self._rank, self._size = options.group_rank, options.group_size
        self._workspace: Optional[torch.Tensor] = None  # symm_mem's
        ranks = list(options.global_ranks_in_group)
        self.options = Options(self._name, ranks or range(self._size), options.timeout)
        parent = worlds.get(os.getpid())
        self._handle: Optional[int]
        if parent is None or not ranks or parent._handle is None:
            self._world = _open_world(options)
            self._handle = self._world.group._handle
            self._owns = True
            if not ranks:
                worlds[os.getpid()] = self._world
            return
        self._world, self._owns = parent, False
        settings = struct("tutti_group_options")(name=_text(f"torch {self._name}"), timeout_ns=_nanoseconds(options.timeout.total_seconds()), keep_order=True,
                                                 local_synchronization=True)
        handle = ctypes.c_void_p()
        status = _interrupt.call(parent._handle, lib.tutti_group_new, parent._handle, _ints(ranks), len(ranks), ctypes.byref(settings), ctypes.byref(handle))
        if status:
            raise_error(status)
        self._handle = handle.value
        self._release = weakref.finalize(self, _release_here, os.getpid(), _end_group, self._handle)
        self._release.atexit = False

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        check(lib.tutti_group_set_timeout(self._handle, _nanoseconds(timeout.total_seconds())))
        self.options._timeout = timeout

    def part(self, ranks: Sequence[int], name: str, timeout: datetime.timedelta) -> Any:
        """With what the group of some of this group's ranks is made; None where this rank is not one of them. They alone come to it."""
        if self._rank not in ranks:
            return None
        options: Any = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.timeout, options.group_id = dist.PrefixStore(f"{name}/", self._store), timeout, name
        options.group_rank, options.group_size = list(ranks).index(self._rank), len(ranks)
        options.global_ranks_in_group = [self.options.global_ranks_in_group[rank] for rank in ranks]
        return options

    def shutdown(self) -> None:
        """Leaves. Others may go on without this rank as long as they do not need it."""
        if self._handle is None:
            return
        self._handle = self._workspace = None
        if self._owns:
            if worlds.get(os.getpid()) is self._world:
                del worlds[os.getpid()]
            self._world.close()
        else:
            self._release()

    def abort(self) -> None:
        """Ends what runs, and what comes, on all ranks of the group."""
        if self._handle is not None:
            lib.tutti_group_abort(self._handle, b"the process group was aborted by PyTorch")

    def monitored_barrier(self, timeout: Optional[datetime.timedelta] = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose failure names those who did not come. The library's names all of them, in every collective."""
        if self._handle is None:
            destroyed()
        call = _Call(timeout_ns=_nanoseconds(seconds_of(timeout)))
        status = _interrupt.call(self._world._handle, lib.tutti_barrier, self._handle, ctypes.byref(call))
        if status:
            raise_error(status)


def seconds_of(timeout: Optional[datetime.timedelta]) -> Optional[float]:
    """Of an option that may be unset, which PyTorch says by a negative one."""
    seconds = timeout.total_seconds() if timeout is not None else 0
    return seconds if seconds > 0 else None


def member_of(group: Any) -> Optional[Member]:
    """This rank in a process group of the backend tutti; None for another's."""
    if isinstance(group, Member):
        return group
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return None
    while hasattr(backend, "wrapped_pg"):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    found = getattr(backend, "member", None)
    return found if isinstance(found, Member) else None


def monitored_barrier(group: Optional[dist.ProcessGroup] = None, timeout: Optional[datetime.timedelta] = None, wait_all_ranks: bool = False) -> None:
    """torch.distributed.monitored_barrier, which PyTorch allows for gloo alone: a barrier that fails on every rank, naming those who did not come: all of them,
    whatever wait_all_ranks is."""
    member = member_of(group if group is not None else dist.group.WORLD)
    if member is None:
        raise ValueError("tutti: monitored_barrier is for process groups of the backend tutti")
    member.monitored_barrier(timeout, wait_all_ranks)
