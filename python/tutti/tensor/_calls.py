# SPDX-License-Identifier: Apache-2.0
"""How Python calls the tensor library. Each call has a scope of its own: what a function computes on its way goes with it, and its results are kept by the
objects that Python gets, so that nobody meets scopes. An error that the call leaves is raised."""
from __future__ import annotations

import ctypes
import numbers
import operator
import os
import re
import threading
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Union

from .. import _interrupt
from .._arguments import name_of
from .._library import constants, lib, load_tensors, struct
from ..buffers import dtype_number
from ..errors import Error, check, error_of
from ..world import Group, World, reduction_number

if TYPE_CHECKING:
    from ._tensor import Tensor

TensorLike = Union["Tensor", float, int, complex, bool]
Dims = Union[int, Sequence[int]]
Dtype = Any  # Tutti's name, or a type of Python, NumPy or PyTorch
Device = Union[str, int]
AnyGroup = Union[Group, World]

_library = load_tensors()
_close, _keep, _release = lib.tt_scope_close, lib.tt_keep, lib.tt_release
_open_scope = _library["tt_scope_open"]
_open_scope.restype = ctypes.c_uint64  # a struct of that one number comes back like the number, on every machine that we run on, and costs less
_number = lib.tt_number
_byref, _pointer = ctypes.byref, ctypes.c_void_p
MAX_DIMS = 8
DimsStruct, ListStruct, OptionsStruct = struct("tt_dims"), struct("tt_tensor_list"), struct("tt_options")
EXACT = 2**53  # whole numbers up to here are doubles


def _open():
    return ctypes.c_uint64(_open_scope())


# ---- handles ----

_era = [0]  # grows in a forked child, which owns none of the tensors that it was born with
os.register_at_fork(after_in_child=lambda: _era.__setitem__(0, _era[0] + 1))


class Handle:
    """Owns one reference to a tensor."""
    __slots__ = ("_handle", "_born", "__weakref__")
    _handle: ctypes.c_void_p

    def __del__(self, release=_release, era=_era):
        try:
            if self._born == era[0]:
                release(self._handle)
        except AttributeError:  # never had one
            pass


_tensor_class: Any = None  # Tensor, which its module puts here


def wrap(address: Optional[int]) -> Any:
    """The object for a reference that is ours; None for NULL."""
    if address is None:
        return None
    made = _tensor_class.__new__(_tensor_class)
    made._handle, made._born = _pointer(address), _era[0]
    return made


def borrow(address: Optional[int]) -> Any:
    """The object for a tensor that somebody else owns."""
    return wrap(_keep(address)) if address is not None else None


# ---- what functions take ----

def is_number(value: Any) -> bool:
    kind = type(value)
    return kind is float or (kind is int and -EXACT <= value <= EXACT)


def _constant(value: Any) -> ctypes.c_void_p:
    """A tensor of one number, which belongs to the scope that is open."""
    if isinstance(value, numbers.Integral) and abs(operator.index(value)) > EXACT:
        whole = operator.index(value)
        kind, made = ("i64", ctypes.c_int64(whole)) if whole < 2**63 else ("u64", ctypes.c_uint64(whole))
        if not -2**63 <= whole < 2**64:
            raise OverflowError(f"{whole} is beyond the integers of tensors")
        return _pointer(lib.tt_from(_byref(made), DimsStruct(), dtype_number(kind), None))
    if isinstance(value, numbers.Real):
        return _pointer(_number(float(value)))
    parts = (ctypes.c_double * 2)(value.real, value.imag)
    return _pointer(lib.tt_from(parts, DimsStruct(), dtype_number("c128"), None))


class _TensorParam:
    @staticmethod
    def from_param(value):
        if type(value) is _tensor_class:
            return value._handle
        if isinstance(value, numbers.Number):
            return _constant(value)
        if value is None:
            return _pointer()
        raise TypeError(f"a {type(value).__name__} is no tensor; tutti.tensor.tensor and as_tensor make one of it")


def handle_list(tensors: Sequence[Any]) -> Any:
    """A tt_tensor_list, with what it needs."""
    if isinstance(tensors, Handle):
        raise TypeError("a list of tensors is wanted, and this is one tensor")
    addresses = []
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, Handle):
            raise TypeError(f"a {type(tensor).__name__} is no tensor")
        addresses.append(tensor._handle.value if tensor is not None else None)
    made = ListStruct()
    made.count = len(addresses)
    made._array = (_pointer * max(1, len(addresses)))(*addresses)
    made._tensors = list(tensors)
    made.at = ctypes.addressof(made._array)
    return made


class _ListParam:
    @staticmethod
    def from_param(tensors):
        made = handle_list(tensors)
        state.passed.append(made)  # a struct by value is copied, and up to Python 3.9 nobody would keep what it points to
        return made


def dims(values: Optional[Dims]) -> Any:
    made = DimsStruct()
    if values is None:
        made.count = -1
        return made
    if isinstance(values, numbers.Integral):
        values = (operator.index(values),)
    count = len(values)  # type: ignore[arg-type]
    if count > MAX_DIMS:
        raise ValueError(f"{count} dimensions; there are {MAX_DIMS} at most")
    made.count = count
    for i in range(count):
        entry = operator.index(values[i])  # type: ignore[index]
        if not -2**63 <= entry < 2**63:
            raise OverflowError(f"{entry} is no size of a dimension")
        made.at[i] = entry
    return made


class _DimsParam:
    from_param = staticmethod(dims)


class _DtypeParam:
    @classmethod
    def from_param(cls, value):
        return ctypes.c_int(dtype_number(value) if value is not None else 0)


class _ReductionParam:
    @classmethod
    def from_param(cls, value):
        return ctypes.c_int(reduction_number(value))


def group_handle(group: Optional[AnyGroup]) -> ctypes.c_void_p:
    if isinstance(group, World):
        group = group.group
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"a {type(group).__name__} is no group; a tutti.Group or a tutti.World is wanted")
    return _pointer(group._handle if group is not None else None)


class _GroupParam:
    from_param = staticmethod(group_handle)


def device_number(device: Optional[Device]) -> int:
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    number = ctypes.c_int()
    check(lib.tutti_device_parse(name_of(str(device)), _byref(number)))
    return number.value


class _DeviceParam:
    @classmethod
    def from_param(cls, value):
        return ctypes.c_int(device_number(value))


def _whole(kind: Any, low: int, high: int) -> Any:
    """Integers that fit: ctypes alone would cut them."""
    class Whole:
        @classmethod
        def from_param(cls, value):
            value = operator.index(value)
            if not low <= value < high:
                raise OverflowError(f"{value} does not fit")
            return kind(value)
    return Whole


_PARAMETERS = {"T": _TensorParam, "L": _ListParam, "D": _DimsParam, "Y": _DtypeParam, "R": _ReductionParam, "G": _GroupParam, "V": _DeviceParam,
               "i": _whole(ctypes.c_int, -2**31, 2**31), "q": _whole(ctypes.c_int64, -2**63, 2**63), "Q": _whole(ctypes.c_uint64, 0, 2**64),
               "z": _whole(ctypes.c_size_t, 0, 2**64), "d": ctypes.c_double, "?": ctypes.c_bool, "O": _pointer, "A": _pointer, "a": _pointer, "P": _pointer,
               "s": ctypes.c_char_p}
_RESULTS = {"tensor": _pointer, "tensors": ListStruct, "done": ctypes.c_bool, "double": ctypes.c_double, "int": ctypes.c_int64, "pointer": _pointer,
            "status": ctypes.c_int}


def bind(name: str, result: str, letters: str, names: str = "") -> Any:
    """A C function that takes Python's objects. Errors call its arguments by those names, since Python may have them in another order."""
    function: Any = _library[name]
    function.restype, function.argtypes, function.names = _RESULTS[result], [_PARAMETERS[letter] for letter in letters], names
    return function


def options(device: Optional[Device], requires_grad: bool, name: Optional[str]) -> Any:
    if device is None and not requires_grad and name is None:
        return None
    made = OptionsStruct(device=device_number(device), requires_grad=bool(requires_grad))
    if name is not None:
        made._name = made.name = name_of(name)
    return _byref(made)


def _array(kind, values, low, high, what):
    entries = [operator.index(value) for value in values]
    for entry in entries:
        if not low <= entry < high:
            raise OverflowError(f"tutti: {what} has {entry}, which does not fit")
    return (kind * max(1, len(entries)))(*entries)


def counted_int64(values: Sequence[int]) -> Any:
    return len(values), _array(ctypes.c_int64, values, -2**63, 2**63, "the list")


def counted_int(values: Sequence[int]) -> Any:
    return len(values), _array(ctypes.c_int, values, -2**31, 2**31, "the list")


def _each(kind, values, group, name, low, high):
    if values is None:
        return None
    size = group.size if group is not None else len(values)
    if len(values) != size:
        raise ValueError(f"tutti: {name} has {len(values)} entries, and there are {size} ranks")
    return _array(kind, values, low, high, name)


def each_int64(values: Optional[Sequence[int]], group: Optional[AnyGroup], name: str) -> Any:
    """One number for each rank."""
    return _each(ctypes.c_int64, values, group, name, -2**63, 2**63)


def each_int(values: Optional[Sequence[int]], group: Optional[AnyGroup], name: str) -> Any:
    return _each(ctypes.c_int, values, group, name, -2**31, 2**31)


def spread(values: Sequence[Any]) -> Any:
    """A shape that was given as one sequence, or as several numbers."""
    return values[0] if len(values) == 1 and not isinstance(values[0], numbers.Integral) else values


# ---- calling ----

class _State(threading.local):
    """What a thread's callbacks leave for the call that made them."""

    def __init__(self):
        self.raised: Optional[BaseException] = None  # what a callback raised
        self.kept: List[List[Any]] = []  # what callbacks returned, one list for each call that is under way
        self.passed: List[Any] = []  # lists of tensors that calls under way were given


state = _State()


def failure(status: int) -> BaseException:
    """What to raise for a status that a scope has just told: what a callback raised, if it was that."""
    raised, state.raised = state.raised, None
    return raised if raised is not None else error_of(status)


def call(read: Any, function: Any, *arguments: Any) -> Any:
    """Calls a function inside a scope, and returns what `read` makes of its result there."""
    passed = state.passed
    before, scope = len(passed), ctypes.c_uint64(_open_scope())
    try:
        if _interrupt.worlds:
            made = read(_interrupt.call_any(function, *arguments))
        else:
            made = read(function(*arguments))
    except ctypes.ArgumentError as error:
        _close(_byref(scope))
        raise _words(function, error) from None
    except BaseException:
        _close(_byref(scope))
        raise
    finally:
        if len(passed) > before:
            del passed[before:]
    status = _close(_byref(scope))
    if status:
        raise failure(status)
    if state.raised is not None:
        state.raised = None
    return made


def _words(function, error):
    """ctypes says `argument 2: TypeError: a str is no tensor`, or, up to Python 3.10, `argument 2: <class 'TypeError'>: …`."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", str(error), count=1)
    names = getattr(function, "names", "").split()
    if names:
        text = re.sub(r"^argument (\d+)", lambda match: f"argument {names[int(match[1]) - 1]!r}", text)
    kinds = {"OverflowError": OverflowError, "ValueError": ValueError, "ArgumentError": ValueError}
    kind = next((kinds[name] for name in kinds if f": {name}: " in text), TypeError)
    text = re.sub(r": \w+Error: (tutti: )?", ": ", text, count=1)  # the kind is the exception's own
    return kind(f"tutti: {function.__name__[3:]}: {text}")


def tensor(function: Any, *arguments: Any) -> Any:
    return wrap(call(_keep, function, *arguments))


def in_place(function: Any, x: Any, *arguments: Any) -> Any:
    call(_nothing, function, x, *arguments)
    return x


def _nothing(made):
    return None


def _same(made):
    return made


def _kept_list(made):
    pointers = ctypes.cast(made.at, ctypes.POINTER(_pointer))
    return [_keep(pointers[i]) if pointers[i] is not None else None for i in range(made.count)]


def tensors(function: Any, *arguments: Any) -> Any:
    return [wrap(address) for address in call(_kept_list, function, *arguments)]


def done(function: Any, *arguments: Any) -> None:
    call(_nothing, function, *arguments)


def answer(function: Any, *arguments: Any) -> Any:
    return call(_same, function, *arguments)


def _well(status):
    if status:
        raise failure(status)


def checked(function: Any, *arguments: Any) -> None:
    """Of a function that returns a status."""
    call(_well, function, *arguments)


def _named(made):
    names = ctypes.cast(made.names, ctypes.POINTER(ctypes.c_char_p))
    return [(names[i].decode(), address) for i, address in enumerate(_kept_list(made))]


def named(function: Any, *arguments: Any) -> Any:
    """Names and tensors."""
    return [(name, wrap(address)) for name, address in call(_named, function, *arguments)]


class Calls:
    """Surrounds a call that runs Python functions: what they return lives until the call has taken it."""

    def __enter__(self):
        state.kept.append([])

    def __exit__(self, kind, value, trace):
        state.kept.pop()


def give(tensor: Any) -> Optional[int]:
    """A tensor that a callback returns: its address, which stays valid until the call that made the callback returns."""
    if tensor is None:
        return None
    if not isinstance(tensor, Handle):
        if not isinstance(tensor, numbers.Number):
            raise TypeError(f"tutti: a function returned a {type(tensor).__name__} where a tensor is wanted")
        tensor = tensors_of_numbers(tensor)
    if state.kept:
        state.kept[-1].append(tensor)
    return tensor._handle.value


def tensors_of_numbers(value: Any) -> Any:
    scope = _open()
    made = wrap(_keep(_constant(value).value))
    check(_close(_byref(scope)))
    return made


def callback(failed: Any) -> Any:
    """A decorator for functions that C calls. What they raise is raised by the Python call that led to them; `failed` is returned meanwhile."""
    def decorate(function):
        def guarded(*arguments):
            try:
                return function(*arguments)
            except BaseException as error:  # the caller raises it, when C has returned
                state.raised = error
                number = constants.get(f"TUTTI_ERROR_{error.status}") if isinstance(error, Error) else None
                text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
                lib.tt_error_set(number or constants["TUTTI_ERROR_STATE"], text.encode(errors="replace"))
                return failed
        return guarded
    return decorate


def list_of(made: Any) -> List[Any]:
    """The tensors of a list that C lends to a callback."""
    pointers = ctypes.cast(made.at, ctypes.POINTER(_pointer))
    return [borrow(pointers[i]) for i in range(made.count)]


class Kept:
    """Python objects that C holds by a number: callbacks get the number as their `user`."""

    def __init__(self):
        self._next, self._objects, self._lock = 1, {}, threading.Lock()

    def add(self, thing: Any) -> int:
        with self._lock:
            number, self._next = self._next, self._next + 1
        self._objects[number] = thing
        return number

    def get(self, number: int) -> Any:
        return self._objects[number]

    def drop(self, number: Optional[int]) -> None:
        self._objects.pop(number, None)


kept = Kept()
release_kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kept.drop)
