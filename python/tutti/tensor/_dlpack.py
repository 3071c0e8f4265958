# SPDX-License-Identifier: Apache-2.0
"""Tensors over memory of other array libraries, and theirs over ours, by DLPack (1.x, and the form before it), without copies."""
from __future__ import annotations

import ctypes
import weakref
from typing import Any, Dict, Optional, Tuple

from .._library import constants, struct
from ..buffers import numpy_dtype
from . import _calls

_Managed = struct("tt_dlpack_managed")
_Tensor = struct("tt_dlpack_tensor")
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_export = _calls.bind("tt_dlpack_export", "pointer", "TQ")
_import = _calls.bind("tt_from_dlpack", "tensor", "P")
_NAME, _USED, _OLD_NAME, _OLD_USED = b"dltensor_versioned", b"used_dltensor_versioned", b"dltensor", b"used_dltensor"


class _Legacy(ctypes.Structure):
    """DLManagedTensor, which consumers before DLPack 1.0 read."""
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


def _python(name: str, result: Any, *arguments: Any) -> Any:
    prototype = ctypes.PYFUNCTYPE(result, *arguments)
    return prototype((name, ctypes.pythonapi))


_new = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer_of = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# A capsule that goes is looked at by its address: a reference to it would bring it back.
_was = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer_was = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


def _delete(address: int) -> None:
    deleter = _Managed.from_address(address).deleter
    if deleter:
        _DELETER(deleter)(address)


# ---- ours for others ----

@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop_capsule(capsule):
    """Nobody took what it holds."""
    if _was(capsule, _NAME):
        _delete(_pointer_was(capsule, _NAME))
    elif _was(capsule, _OLD_NAME):
        _end_legacy(_pointer_was(capsule, _OLD_NAME))


_legacies: Dict[int, Tuple[_Legacy, int]] = {}  # those that are out, by address, with the export under each


@_DELETER
def _end_legacy(address):
    _, managed = _legacies.pop(address)
    _delete(managed)


def device_of(tensor: Any) -> Tuple[int, int]:
    kind, _, index = tensor.device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise BufferError(f"tutti: a tensor on {tensor.device} has no memory to share")
    return (constants["TT_DLPACK_CPU"] if kind == "cpu" else constants["TT_DLPACK_CUDA"], int(index or 0))


def _order(device: str, stream: Any) -> None:
    """What comes to a stream of another library (its number there: 1 is the default one, -1 none at all) begins after what the current one here holds."""
    from ..streams import Event, Stream, current_stream  # late: it needs this module
    handle = 0 if stream in (None, 0, 1) else int(stream)
    if handle == -1 or handle == current_stream(device).handle:
        return
    mark = Event(device)
    with Stream(device, handle):
        mark.join()


def capsule(tensor: Any, stream: Any, max_version: Optional[Tuple[int, int]], dl_device: Any, copy: Optional[bool]) -> Any:
    if dl_device is not None and tuple(dl_device) != device_of(tensor):
        raise BufferError(f"tutti: the tensor is on {tensor.device}; move it with to_device")
    shown = tensor.clone() if copy else tensor
    if device_of(tensor)[0] == constants["TT_DLPACK_CUDA"]:
        _order(tensor.device, stream)
    managed = _calls.answer(_export, shown, 0)
    if max_version is not None and max_version[0] >= 1:
        if copy:
            _Managed.from_address(managed).flags |= constants["TT_DLPACK_COPIED"]
        return _new(managed, _NAME, _drop_capsule)
    legacy = _Legacy(tensor=_Managed.from_address(managed).tensor, deleter=ctypes.cast(_end_legacy, ctypes.c_void_p))
    address = ctypes.addressof(legacy)
    _legacies[address] = (legacy, managed)
    return _new(address, _OLD_NAME, _drop_capsule)


def _block(tensor: Any) -> Any:
    """The bytes under a tensor, from its first element to its last, as something with the buffer protocol that holds them."""
    managed = _calls.answer(_export, tensor, 0)
    inner = _Managed.from_address(managed).tensor
    itemsize, span = inner.dtype.bits // 8, 0
    if tensor.size:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides))
    block = (ctypes.c_char * max(1, span * itemsize)).from_address((inner.data or 0) + inner.byte_offset) if span else ctypes.create_string_buffer(1)
    weakref.finalize(block, _delete, managed).atexit = False
    return block, itemsize


def _on_cpu(tensor: Any) -> None:
    if tensor.device != "cpu":
        raise TypeError(f"tutti: the tensor is on {tensor.device}; cpu() makes a copy that NumPy can see")


def numpy_array(tensor: Any) -> Any:
    import numpy
    _on_cpu(tensor)
    dtype = numpy_dtype(tensor.dtype)
    block, itemsize = _block(tensor)
    return numpy.ndarray(tensor.shape, dtype, block, strides=[stride * itemsize for stride in tensor.strides])


_FORMATS = {"f64": "d", "f32": "f", "f16": "e", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "bool": "?"}


def view(tensor: Any) -> memoryview:
    """What the buffer protocol shows of a contiguous tensor."""
    _on_cpu(tensor)
    if not tensor.is_contiguous or tensor.dtype not in _FORMATS or not tensor.size:
        raise BufferError(f"tutti: the buffer protocol shows contiguous tensors of plain numbers; this one has strides {tensor.strides} and {tensor.dtype}")
    block, itemsize = _block(tensor)
    flat, letter = memoryview(block).cast("B"), _FORMATS[tensor.dtype]  # type: Any, Any
    return flat.cast(letter, tensor.shape) if tensor.ndim else flat.cast(letter)


# ---- others' for us ----

_guests: Dict[int, Tuple[Any, int]] = {}  # old handles that we have wrapped into new ones, by the address of the new


@_DELETER
def _end_guest(address):
    _, old = _guests.pop(address)
    deleter = _Legacy.from_address(old).deleter
    if deleter:
        _DELETER(deleter)(old)


def _here(thing: Any) -> Dict[str, int]:
    """The stream that an array on a GPU is wanted in, as its library is told: the current one, of which 1 is the default one."""
    kind, index = thing.__dlpack_device__() if hasattr(thing, "__dlpack_device__") else (constants["TT_DLPACK_CPU"], 0)
    if int(kind) != constants["TT_DLPACK_CUDA"]:
        return {}
    from ..streams import current_stream  # late: it needs this module
    return {"stream": current_stream(f"cuda:{index}").handle or 1}


def from_dlpack(thing: Any) -> Any:
    """A tensor over the memory of an array of another library (NumPy, PyTorch, JAX, CuPy ...), or of a capsule that one made. Memory that is marked
    read-only is copied. JAX marks nothing, though its arrays must not change: do not write to a tensor over one (as_tensor makes a copy)."""
    made = thing
    if hasattr(thing, "__dlpack__"):
        behind = _here(thing)
        try:
            made = thing.__dlpack__(max_version=(1, 1), **behind)
        except TypeError:  # from before that argument, and so without a mark for what is read-only
            fixed = getattr(getattr(thing, "flags", None), "writeable", True) is False
            made = (thing.copy() if fixed else thing).__dlpack__(**behind)
    if _is(made, _NAME):
        tensor = _calls.tensor(_import, _pointer_of(made, _NAME))
        _rename(made, _USED)
        return tensor
    if not _is(made, _OLD_NAME):
        raise TypeError(f"tutti: a {type(thing).__name__} has no DLPack, or its capsule was used already")
    old = _pointer_of(made, _OLD_NAME)
    managed = _Managed(major=1, minor=0, tensor=_Legacy.from_address(old).tensor, deleter=ctypes.cast(_end_guest, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _guests[address] = (managed, old)
    try:
        tensor = _calls.tensor(_import, address)
    except BaseException:
        del _guests[address]
        raise
    _rename(made, _OLD_USED)
    return tensor
