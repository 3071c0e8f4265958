# SPDX-License-Identifier: Apache-2.0
"""Keys and values that several processes see."""
from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, List, Mapping, Optional, Sequence, Union

from . import _interrupt
from ._arguments import Unique, integer, name_of, nanoseconds, path_of, release_here, wide_integer
from ._library import lib, struct
from .errors import StateError, check

_Tcp, _File = struct("tutti_tcp_store_options"), struct("tutti_file_store_options")
Value = Union[str, bytes, bytearray, memoryview]


def _bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(memoryview(value))  # bytes(5) would be five zeros


def _names(keys: Sequence[str]) -> Any:
    return (ctypes.c_char_p * max(1, len(keys)))(*[name_of(key) for key in keys])


class _Owned:
    """A handle. Calls are given this object, and so have it until they return, also where another thread closes the store meanwhile."""

    def __init__(self, handle: Optional[int]) -> None:
        self._as_parameter_ = ctypes.c_void_p(handle)
        weakref.finalize(self, release_here, os.getpid(), lib.tutti_store_release, handle).atexit = False


class Store(Unique):
    """Keys and values that several processes see: world.store, or one of one's own, made by memory, file, tcp or open. Values are bytes; texts are written
    as UTF-8. timeout is in seconds. Calls of several threads take turns, and one that waits holds up the others; clone() gives another handle. What Ctrl-C ends
    may still reach the store later."""

    def __init__(self, handle: Optional[int], world: Any = None) -> None:
        """Lent by a world; or owned."""
        self._world = world
        self._store: Any = handle if world is not None else _Owned(handle)

    # ---- making ----

    @classmethod
    def _made(cls, function: Any, *arguments: Any) -> Store:
        def make(given_up: Any) -> Optional[int]:
            handle = ctypes.c_void_p()
            check(function(*arguments, ctypes.byref(handle)))
            if given_up.is_set():
                lib.tutti_store_release(handle)
            return handle.value
        return cls(_interrupt.aside(make))

    @classmethod
    def memory(cls) -> Store:
        """Of this process alone."""
        return cls._made(lib.tutti_store_open_memory)

    @classmethod
    def file(cls, path: Any, timeout: Optional[float] = None, workers: int = 0) -> Store:
        """A file that all can open and lock. With workers, it is removed when so many handles were closed."""
        options = _File(timeout_ns=nanoseconds(timeout), workers=integer(workers))
        return cls._made(lib.tutti_store_open_file, path_of(path), ctypes.byref(options))

    @classmethod
    def tcp(cls, host: str, port: int, server: bool = False, timeout: Optional[float] = None, workers: int = 0, secret: Optional[bytes] = None,
            trust_network: bool = False) -> Store:
        """A client of a server on the network, which with server this process is (port 0: any that is free). host may be "unix:@name". With a secret of 16 to 64
        bytes only clients that prove it are served; a server without one on an address other than loopback needs trust_network."""
        return cls._made(lib.tutti_store_open_tcp, name_of(host), integer(port), ctypes.byref(_tcp_options(server, timeout, workers, secret, trust_network)))

    @classmethod
    def open(cls, url: str, timeout: Optional[float] = None, secret: Optional[bytes] = None) -> Store:
        """From "unix:@name", "tcp://host:port" or "file:///path", the form of TUTTI_STORE."""
        return cls._made(lib.tutti_store_open_url, name_of(url), ctypes.byref(_tcp_options(False, timeout, 0, secret, False)))

    def prefix(self, text: str) -> Store:
        """A store whose keys all get the text and "/" in front, on this one."""
        return self._made(lib.tutti_store_open_prefix, name_of(text), self._handle)

    def clone(self) -> Store:
        """An independent handle to the same data, safe for another thread."""
        return self._made(lib.tutti_store_clone, self._handle)

    def close(self) -> None:
        """Ends the handle; the keys live as long as the store does. That of a world goes with it."""
        if self._world is None:
            self._store = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.close()

    @property
    def _handle(self) -> Any:
        if self._world is not None:
            self._world._open()  # the store goes with it
        if self._store is None:
            raise StateError("STATE", "tutti: the store is closed")
        return self._store

    def _call(self, function: Any, *arguments: Any) -> None:
        """A question, whose answer is owed at once. A server that owes it longer, having been stopped or cut off, is waited for, and Ctrl-C ends that."""
        handle = self._handle
        _interrupt.ask(lambda: check(function(handle, *arguments)))

    def _wait(self, attempt: Any, timeout: Optional[float]) -> None:
        """attempt(nanoseconds), which may be made again."""
        if self._world is not None:
            limit = nanoseconds(timeout) or lib.tutti_group_timeout(lib.tutti_world_group(self._world._open()))
            check(_interrupt.wait(self._world._handle, attempt, limit))
        else:
            check(_interrupt.wait(None, attempt, nanoseconds(timeout) or lib.tutti_store_timeout(self._handle)))

    # ---- values ----

    def set(self, key: str, value: Value) -> None:
        """Sets a key, whether or not it exists."""
        data = _bytes(value)
        self._call(lib.tutti_store_set, name_of(key), data, len(data))

    def get(self, key: str, timeout: Optional[float] = None) -> bytes:
        """The value; waits until it is there."""
        value, length = ctypes.c_void_p(), ctypes.c_size_t()
        self._wait(lambda limit: lib.tutti_store_get(self._handle, name_of(key), limit, ctypes.byref(value), ctypes.byref(length)), timeout)
        return _taken(value.value, length.value)

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, and returns the sum."""
        total = ctypes.c_int64()
        self._call(lib.tutti_store_add, name_of(key), wide_integer(amount), ctypes.byref(total))
        return total.value

    def append(self, key: str, value: Value) -> None:
        """Adds bytes to the end of a value; a missing key counts as empty."""
        data = _bytes(value)
        self._call(lib.tutti_store_append, name_of(key), data, len(data))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Sets a key that has the expected value, or that is missing where b"" is expected. What it is then; a missing key gives back what was expected."""
        before, after, value, length = _bytes(expected), _bytes(desired), ctypes.c_void_p(), ctypes.c_size_t()
        self._call(lib.tutti_store_compare_set, name_of(key), before, len(before), after, len(after), ctypes.byref(value), ctypes.byref(length))
        return _taken(value.value, length.value)

    def wait(self, *keys: str, timeout: Optional[float] = None) -> None:
        """Until all keys are there."""
        names = _names(keys)
        self._wait(lambda limit: lib.tutti_store_wait(self._handle, names, len(keys), limit), timeout)

    def check(self, *keys: str) -> bool:
        """Whether all these keys are there. Never waits."""
        present = ctypes.c_bool()
        self._call(lib.tutti_store_check, _names(keys), len(keys), ctypes.byref(present))
        return present.value

    __contains__ = check

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        existed = ctypes.c_bool()
        self._call(lib.tutti_store_delete, name_of(key), ctypes.byref(existed))
        return existed.value

    def keys(self) -> List[str]:
        """All keys, in no order."""
        found, count = ctypes.c_void_p(), ctypes.c_size_t()
        self._call(lib.tutti_store_list_keys, ctypes.byref(found), ctypes.byref(count))
        texts = ctypes.cast(found, ctypes.POINTER(ctypes.c_char_p))
        names = [(texts[i] or b"").decode(errors="surrogateescape") for i in range(count.value)]
        lib.tutti_free(found)
        return names

    def __len__(self) -> int:
        count = ctypes.c_int64()
        self._call(lib.tutti_store_num_keys, ctypes.byref(count))
        return count.value

    def __bool__(self) -> bool:
        return True

    def get_many(self, keys: Sequence[str], timeout: Optional[float] = None) -> List[bytes]:
        """The values of several keys, in one trip; waits until all are there."""
        names, values, lengths = _names(keys), (ctypes.c_void_p * max(1, len(keys)))(), (ctypes.c_size_t * max(1, len(keys)))()
        self._wait(lambda limit: lib.tutti_store_multi_get(self._handle, names, len(keys), limit, values, lengths), timeout)
        return [_taken(values[i], lengths[i]) for i in range(len(keys))]

    def set_many(self, values: Mapping[str, Value]) -> None:
        """Sets several keys, in one trip."""
        data = [_bytes(value) for value in values.values()]
        texts, lengths = (ctypes.c_char_p * max(1, len(data)))(*data), (ctypes.c_size_t * max(1, len(data)))(*[len(value) for value in data])
        self._call(lib.tutti_store_multi_set, _names(list(values)), len(data), texts, lengths)

    # ---- queues, and meeting ----

    def push(self, queue: str, value: Value) -> None:
        """Adds a value to the end of a queue. Queues have names of their own, beside the keys."""
        data = _bytes(value)
        self._call(lib.tutti_store_queue_push, name_of(queue), data, len(data))

    def pop(self, queue: str, wait: bool = True, timeout: Optional[float] = None) -> bytes:
        """Takes the first value of a queue. Without wait, an empty one raises tutti.NotFoundError."""
        value, length = ctypes.c_void_p(), ctypes.c_size_t()

        def attempt(limit: int) -> int:
            return lib.tutti_store_queue_pop(self._handle, name_of(queue), bool(wait), limit, ctypes.byref(value), ctypes.byref(length))
        if wait:
            self._wait(attempt, timeout)
        else:
            check(attempt(0))
        return _taken(value.value, length.value)

    def queue_length(self, queue: str) -> int:
        """How many values a queue holds."""
        length = ctypes.c_int64()
        self._call(lib.tutti_store_queue_length, name_of(queue), ctypes.byref(length))
        return length.value

    def barrier(self, key: str, count: int, timeout: Optional[float] = None) -> None:
        """Returns when `count` callers have come. One use per key."""
        limit = nanoseconds(timeout)
        if self._world is not None:
            check(_interrupt.call(self._world._handle, lib.tutti_store_barrier, self._handle, name_of(key), wide_integer(count), limit))
        else:  # which is not to be made again, and so waits on a thread; on a handle of its own, since this one may be closed before it is over
            other = self.clone()
            _interrupt.aside(lambda given_up: check(lib.tutti_store_barrier(other._handle, name_of(key), wide_integer(count), limit)))

    # ---- what it is ----

    @property
    def timeout(self) -> float:
        """Seconds that a call waits where it is told nothing else."""
        return lib.tutti_store_timeout(self._handle) * 1e-9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        check(lib.tutti_store_set_timeout(self._handle, nanoseconds(seconds)))

    kind = property(lambda self: lib.tutti_store_kind(self._handle).decode(), doc='"memory", "file", "tcp" or "prefix".')
    port = property(lambda self: lib.tutti_store_port(self._handle), doc="Of a tcp store: the port in use; -1 for other kinds and Unix sockets.")
    address = property(lambda self: lib.tutti_store_address(self._handle).decode(), doc="Of a tcp store: what Store.open takes.")

    def __repr__(self) -> str:
        return f"<tutti.Store {self.kind} {self.address}>" if self._store is not None else "<tutti.Store, closed>"


def _tcp_options(server: bool, timeout: Optional[float], workers: int, secret: Optional[bytes], trust_network: bool) -> Any:
    options = _Tcp(server=bool(server), timeout_ns=nanoseconds(timeout), workers=integer(workers), trust_network=bool(trust_network))
    if secret is not None:
        options._secret = ctypes.create_string_buffer(bytes(secret), len(secret))
        options.secret, options.secret_bytes = ctypes.addressof(options._secret), len(secret)
    return options


def _taken(address: Optional[int], length: int) -> bytes:
    """Bytes that C has handed over."""
    found = ctypes.string_at(address, length) if address else b""
    lib.tutti_free(address)
    return found
