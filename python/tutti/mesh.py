# SPDX-License-Identifier: Apache-2.0
"""Ranks in a grid of several dimensions, and how far places of a machine are from each other."""
from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _interrupt
from ._arguments import Unique, device_number, integer, integers, name_of, nanoseconds, release_here, text
from ._library import constants, lib, struct
from .errors import check
from .world import Group, World

_Options = struct("tutti_mesh_options")


class Mesh(Unique):
    """The ranks of a world in a grid: `Mesh(world, (2, 4), names=("data", "model"))` has a group for each row and column. All ranks of the world make it. ranks, in
    row-major order, are those of the world where nothing is given."""

    def __init__(self, world: World, shape: Sequence[int], names: Optional[Sequence[str]] = None, ranks: Optional[Sequence[int]] = None, device: str = "cpu",
                 timeout: Optional[float] = None, groups: bool = True) -> None:
        sizes = integers(shape)
        options = _Options(timeout_ns=nanoseconds(timeout), no_groups=not groups)
        if names is not None:
            if len(names) != len(shape):
                raise ValueError(f"tutti: {len(names)} names for {len(shape)} dimensions")
            texts = (ctypes.c_char_p * len(names))(*[name_of(name) for name in names])
            options.names = ctypes.addressof(texts)
        if ranks is not None:
            numbers = integers(ranks)
            options.ranks, options.rank_count = ctypes.addressof(numbers), len(ranks)
        handle = ctypes.c_void_p()
        check(_interrupt.call(world._open(), lib.tutti_mesh_new, world._handle, device_number(device), sizes, len(sizes), ctypes.byref(options), ctypes.byref(handle)))
        self._take(world, handle.value)

    def _take(self, world: World, handle: Optional[int]) -> Mesh:
        self.world, self._handle = world, handle
        self._end = weakref.finalize(self, release_here, os.getpid(), lib.tutti_mesh_release, handle)
        self._end.atexit = False
        return self

    def _number(self, dim: Union[int, str]) -> int:
        if not isinstance(dim, str):
            return integer(dim)
        number = ctypes.c_int()
        check(lib.tutti_mesh_dim(self._handle, name_of(dim), ctypes.byref(number)))
        return number.value

    ndim = property(lambda self: lib.tutti_mesh_dim_count(self._handle), doc="How many dimensions it has.")
    size = property(lambda self: lib.tutti_mesh_size(self._handle, -1), doc="How many ranks it has.")
    device = property(lambda self: lib.tutti_device_name(lib.tutti_mesh_device(self._handle)).decode(), doc="Where its ranks compute.")

    @property
    def shape(self) -> Tuple[int, ...]:
        """Ranks along each dimension."""
        return tuple(lib.tutti_mesh_size(self._handle, dim) for dim in range(self.ndim))

    @property
    def names(self) -> Optional[Tuple[str, ...]]:
        """Of its dimensions; None without."""
        found = [lib.tutti_mesh_dim_name(self._handle, dim) for dim in range(self.ndim)]
        return None if any(name is None for name in found) else tuple(name.decode() for name in found)

    @property
    def ranks(self) -> List[int]:
        """World ranks in row-major order; of a slice those that share this rank's other coordinates."""
        room = (ctypes.c_int * max(1, self.size))()
        lib.tutti_mesh_ranks(self._handle, room)
        return list(room[:self.size])

    @property
    def coordinate(self) -> Optional[Tuple[int, ...]]:
        """This rank's index in each dimension; None where it is not in the mesh."""
        room = (ctypes.c_int * constants["TUTTI_MESH_DIMS"])()
        return tuple(room[:self.ndim]) if lib.tutti_mesh_coordinate(self._handle, room) else None

    def neighbor(self, dim: Union[int, str], distance: int = 1, periodic: bool = True) -> Optional[int]:
        """The world rank so many steps from this one; on a ring, or with periodic=False None beyond the edge."""
        rank = ctypes.c_int()
        check(lib.tutti_mesh_neighbor(self._handle, self._number(dim), integer(distance), bool(periodic), ctypes.byref(rank)))
        return None if rank.value == constants["TUTTI_NOBODY"] else rank.value

    def group(self, dim: Union[int, str] = -1) -> Optional[Group]:
        """This rank's group along a dimension, which need not be named where there is one alone. None for a rank that is not in the mesh."""
        handle = ctypes.c_void_p()
        check(lib.tutti_mesh_group(self._handle, self._number(dim), ctypes.byref(handle)))
        return self.world._group_of(handle.value, owned=True)

    def local_rank(self, dim: Union[int, str] = -1) -> int:
        """This rank in that group; -1 for one that is not in the mesh."""
        rank = ctypes.c_int()
        check(lib.tutti_mesh_local_rank(self._handle, self._number(dim), ctypes.byref(rank)))
        return rank.value

    def __getitem__(self, names: Union[str, Sequence[str]]) -> Mesh:
        """The mesh of some dimensions, named in their order, with the same groups."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        texts = (ctypes.c_char_p * max(1, len(wanted)))(*[name_of(name) for name in wanted])
        return self._derived(lib.tutti_mesh_slice, texts, len(wanted))

    def flatten(self, name: Optional[str] = None) -> Mesh:
        """All dimensions joined to one, with a group of its own, which its ranks make together. It can be sliced out of the whole mesh by its name then."""
        return self._derived(lib.tutti_mesh_flatten, text(name))

    def _derived(self, function: Any, *arguments: Any) -> Mesh:
        handle = ctypes.c_void_p()
        check(_interrupt.call(self.world._open(), function, self._handle, *arguments, ctypes.byref(handle)))
        return Mesh.__new__(Mesh)._take(self.world, handle.value)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Mesh) and lib.tutti_mesh_equal(self._handle, other._handle)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        names = self.names or ("",) * self.ndim
        return f"<tutti.Mesh {' × '.join(f'{name} {size}'.strip() for name, size in zip(names, self.shape))}>"


def mesh_shape(ranks: int, shape: Sequence[int]) -> Tuple[int, ...]:
    """A shape for so many ranks: entries that are 0 are filled in, as equal as can be."""
    sizes = integers(shape)
    check(lib.tutti_mesh_shape(integer(ranks), len(sizes), sizes))
    return tuple(sizes)


class Connectivity(Unique):
    """How far places are from each other: link(a, b) is "self", "core", "cache", "node", "package", "machine", "network" or, of devices with links of their own,
    "direct". Made by of_machine, of_ranks and of_devices."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        weakref.finalize(self, release_here, os.getpid(), lib.tutti_connectivity_release, handle).atexit = False

    @classmethod
    def of_machine(cls, nodes: bool = False) -> Connectivity:
        """Between the processors, or the NUMA nodes, of this host."""
        return cls._made(None, lib.tutti_connectivity_machine, constants["TUTTI_PLACE_NODE" if nodes else "TUTTI_PLACE_PROCESSOR"])

    @classmethod
    def of_ranks(cls, group: Group) -> Connectivity:
        """Between the ranks of a group, which all call it."""
        return cls._made(group.world._open(), lib.tutti_connectivity_ranks, group._handle)

    @classmethod
    def of_devices(cls, world: World, kind: str = "cuda") -> Connectivity:
        """Between the devices that this process sees."""
        return cls._made(world._open(), lib.tutti_connectivity_devices, world._handle, device_number(kind))

    @classmethod
    def _made(cls, world: Any, function: Any, *arguments: Any) -> Connectivity:
        handle = ctypes.c_void_p()
        check(_interrupt.call(world, function, *arguments, ctypes.byref(handle)))
        return cls(handle.value)

    def __len__(self) -> int:
        return lib.tutti_connectivity_size(self._handle)

    def _inside(self, *places: int) -> None:
        for place in places:
            if not 0 <= place < len(self):
                raise IndexError(f"tutti: there is no place {place} among {len(self)}")

    def link(self, a: int, b: int) -> str:
        """What two places share."""
        self._inside(a, b)
        return lib.tutti_link_name(lib.tutti_connectivity_link(self._handle, a, b)).decode()

    def distance(self, a: int, b: int) -> int:
        """Relative latency between their NUMA nodes, as firmware gives it (10 is local); 0 where it gives none."""
        self._inside(a, b)
        return lib.tutti_connectivity_distance(self._handle, a, b)

    def direct(self, a: int, b: int) -> int:
        """How many links of their own two devices have between them."""
        self._inside(a, b)
        return lib.tutti_connectivity_direct(self._handle, a, b)

    def place(self, index: int) -> str:
        """Where it is, in words."""
        self._inside(index)
        return lib.tutti_connectivity_place(self._handle, index).decode()
