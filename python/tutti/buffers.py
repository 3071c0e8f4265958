# SPDX-License-Identifier: Apache-2.0
"""What a call reads or writes: NumPy arrays, PyTorch tensors, anything with DLPack or the buffer protocol, on the CPU or on a GPU. Nothing is copied: a buffer that
is not dense, or lies where the library cannot go, is an error."""
from __future__ import annotations

import ctypes
import numbers
import struct
import sys
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from ._library import constants

_TYPES = {"f64": ("float64", "d"), "f32": ("float32", "f"), "f16": ("float16", "e"), "bf16": ("bfloat16",), "f8_e4m3": ("float8_e4m3fn",),
          "f8_e5m2": ("float8_e5m2",), "i8": ("int8", "b"), "i16": ("int16", "h"), "i32": ("int32", "i"), "i64": ("int64", "q", "l"),
          "u8": ("uint8", "B", "c"), "u16": ("uint16", "H"), "u32": ("uint32", "I"), "u64": ("uint64", "Q", "L"), "bool": ("bool", "?"),
          "c64": ("complex64", "Zf"), "c128": ("complex128", "Zd")}
_NUMBERS = {name: constants["TUTTI_" + name.upper()] for name in _TYPES}
_BY_NAME = {alias: name for name, aliases in _TYPES.items() for alias in (name, *aliases)}
_SIZES = {name: int("".join(char for char in name.split("_")[0] if char.isdigit())) // 8 for name in _TYPES if name != "bool"}
_SIZES["bool"] = 1
_BY_NUMBER = {number: name for name, number in _NUMBERS.items()}


def dtype_name(dtype: Any) -> str:
    """The library's name of an element type, given as its own name, Python's, NumPy's or PyTorch's."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    if not getattr(dtype, "isnative", True):
        raise TypeError(f"tutti: {dtype!r} has the byte order of other machines")
    text = {"float": "f64", "int": "i64"}.get(text, text).replace("torch.", "")
    if text not in _BY_NAME:
        raise TypeError(f"tutti: {dtype!r} is no element type{_instead(text)}; there are {', '.join(_TYPES)}")
    return _BY_NAME[text]


def _instead(text: str) -> str:
    """What somebody may have meant who comes from NumPy, whose short codes count bytes, or from PyTorch, whose to() takes devices."""
    if text.split(":")[0] in ("cpu", "cuda", "meta"):
        return " but a device, and tensors go there by to_device"
    code = text[:1] + str(8 * int(text[1:])) if text[:1] in tuple("fiuc") and text[1:] in ("2", "4", "8", "16") else ""
    return f"; NumPy's {text!r} is {code!r} here" if code in _TYPES else ""


def dtype_number(dtype: Any) -> int:
    return _NUMBERS[dtype_name(dtype)]


def dtype_named(number: int) -> str:
    """The library's name of an element type, by its number."""
    return _BY_NUMBER[number]


def dtype_bytes(dtype: Any) -> int:
    return _SIZES[dtype_name(dtype)]


class Buffer:
    """Where something lies, and what it is. `owner` keeps it there. On a GPU, whose number `device` is then and 0 on the CPU, `stream` is the one in which its
    library works on it at the moment; `ordered`: that library gives memory out again behind what is in that stream, and not before. `apart`: None, or how the
    elements lie that do not lie one after the other: in blocks of so many, each beginning so many after the last."""
    __slots__ = ("address", "apart", "count", "device", "dtype", "ordered", "owner", "shape", "stream")

    def __init__(self, address: int, shape: Any, dtype: Any, owner: Any, device: int = 0, stream: Optional[int] = None, ordered: bool = True) -> None:
        self.address, self.shape, self.dtype, self.owner, self.device, self.stream, self.ordered = address, tuple(shape), dtype, owner, device, stream, ordered
        self.apart: Optional[Tuple[int, int]] = None
        self.count = 1
        for size in self.shape:
            self.count *= size

    @property
    def number(self) -> Any:
        return _NUMBERS[self.dtype]


def _blocks(shape: Sequence[int], strides: Sequence[int]) -> Optional[Tuple[int, int]]:
    """Blocks that have one length and one distance, which is in elements; None where the elements do not lie in such."""
    runs: List[Tuple[int, int]] = []  # how many, how far from each other; the innermost first, and longer where they go on in the next dimension
    for size, stride in zip(reversed(shape), reversed(strides)):
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * size, runs[-1][1])
        elif size != 1:
            runs.append((size, stride))
    if len(runs) == 1:
        runs.insert(0, (1, 1))  # each element is a block
    if len(runs) != 2 or runs[0][1] != 1 or runs[1][1] < runs[0][0]:
        return None
    return runs[0][0], runs[1][1]


def _spread(found: Buffer, strides: Sequence[int], apart: bool, text: str) -> Buffer:
    """A buffer whose elements do not lie one after the other, where that is taken."""
    found.apart = _blocks(found.shape, strides) if apart else None
    if found.apart is None:
        raise ValueError(text if not apart else f"{text}; and its elements do not lie in blocks of one length and one distance")
    return found


class _View(ctypes.Structure):
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int),
                ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
                ("strides", ctypes.POINTER(ctypes.c_ssize_t)), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_View)]
_release_buffer.restype = None


class _Held:
    """A view by the buffer protocol: while it lives the object does not move."""

    def __init__(self, thing: Any, writable: bool) -> None:
        self.view = _View()
        try:
            _get_buffer(thing, ctypes.byref(self.view), 0x18 | 0x04 | (0x01 if writable else 0))  # strides, format, writable
        except BufferError:
            if writable and memoryview(thing).readonly:
                raise ValueError(f"tutti: the {type(thing).__name__} is read-only, and would be written") from None
            raise

    def __del__(self):
        if self.view.buf:
            _release_buffer(ctypes.byref(self.view))


def _of_buffer(thing, writable):
    held = _Held(thing, writable)
    view = held.view
    shape = [view.shape[i] for i in range(view.ndim)]
    if not memoryview(thing).c_contiguous:
        raise ValueError("tutti: the buffer is not contiguous")
    text = (view.format or b"B").decode().lstrip("@=<")
    if text not in _BY_NAME:
        raise TypeError(f"tutti: a buffer of format {text!r} holds no element type of Tutti's")
    if view.itemsize != _SIZES[_BY_NAME[text]]:  # "l" has 8 bytes of its own, and 4 in the sizes that struct calls standard
        raise TypeError(f"tutti: a buffer of format {text!r} with elements of {view.itemsize} bytes holds no element type of Tutti's")
    return Buffer(view.buf or 0, shape, _BY_NAME[text], held)


def _of_numpy(array, writable, apart):
    if writable and not array.flags.writeable:
        raise ValueError("tutti: the array is read-only, and would be written")
    if not array.dtype.isnative:
        raise TypeError(f"tutti: the array's bytes are in the order of other machines ({array.dtype.str}); .astype({array.dtype.name!r}) makes a copy")
    if not isinstance(array, sys.modules["numpy"].ndarray):
        array = sys.modules["numpy"].asarray(array)  # a scalar lies nowhere by itself
    found = Buffer(array.__array_interface__["data"][0], array.shape, dtype_name(array.dtype), array)
    if array.flags.c_contiguous:
        return found
    whole = not any(stride % array.itemsize for stride in array.strides)  # fields of structures may lie between elements
    return _spread(found, [stride // array.itemsize for stride in array.strides], apart and whole,
                   f"tutti: the array of shape {array.shape} is not contiguous; numpy.ascontiguousarray makes a copy that is")


def _of_torch(tensor, apart):
    place = ()
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"tutti: the tensor is sparse ({tensor.layout}); .to_dense() makes one that is not")
    if tensor.is_cuda:
        place = _device(tensor.device.index), sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream or None
    elif not tensor.is_cpu:
        raise TypeError(f"tutti: the tensor is on {tensor.device}; only those of the CPU and of CUDA can be used")
    if tensor.is_conj() or tensor.is_neg():  # its memory has other values than it shows
        raise ValueError("tutti: the tensor is only noted as conjugate or negative; .resolve_conj().resolve_neg() makes one whose memory has its values")
    found = Buffer(tensor.data_ptr(), tensor.shape, dtype_name(tensor.dtype), tensor, *place)
    if tensor.is_contiguous():
        return found
    return _spread(found, tensor.stride(), apart, f"tutti: the tensor of shape {tuple(tensor.shape)} is not contiguous; .contiguous() makes a copy that is")


# ---- GPUs ----

def _device(index: int) -> int:
    return constants["TUTTI_CUDA"] + 1 + index  # TUTTI_CUDA_AT(index)


def _stream_of(thing: Any, index: int) -> Optional[int]:
    """The stream in which the library of an array works at the moment; None: the default one, also where nobody says."""
    library = type(thing).__module__.partition(".")[0]
    if library == "cupy":
        with sys.modules["cupy"].cuda.Device(index):
            return sys.modules["cupy"].cuda.get_current_stream().ptr or None
    if library == "tutti":
        from .streams import current_stream  # late: it needs tensors
        return current_stream(f"cuda:{index}").handle or None
    return None


def _all(kept: Any) -> Iterator[Buffer]:
    """The buffers in nested tuples."""
    if type(kept) is tuple:
        for each in kept:
            yield from _all(each)
    elif type(kept) is Buffer:
        yield kept


def place(call: Any, kept: Any) -> bool:
    """Says in a call where its buffers lie, which is one device for all, and behind what in its stream it comes. Whether they must be held until it is over."""
    buffers = list(_all(kept))
    for each in buffers[1:]:
        same_place(each.device, each.stream, buffers[0].device, buffers[0].stream)
    if not buffers or not buffers[0].device:
        return False
    call.device, call.stream = buffers[0].device, buffers[0].stream
    return not all(each.ordered for each in buffers)


def same_place(device: int, stream: Optional[int], other: int, others: Optional[int]) -> None:
    """One call runs on one device, in one stream."""
    if device != other:
        raise TypeError("tutti: arrays on different devices cannot be mixed in one call")
    if (stream or None) != (others or None):
        raise TypeError("tutti: arrays whose libraries work in different streams at the moment cannot be mixed in one call; make one stream current in both")


# ---- DLPack ----


class _Dlpack(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_DLPACK_CODES = {0: "i", 1: "u", 2: "f", 4: "bf", 5: "c", 6: "bool"}


_CPU, _CUDA, _PINNED, _MANAGED = 1, 2, 3, 13  # DLPack's numbers
_ORDERED = ("cupy", "tutti")  # libraries whose current stream is known


def _capsule_of(thing: Any) -> Tuple[Any, int, Optional[int]]:
    """What an array shows of itself, the number of its device, and the stream in which it can be used."""
    if not hasattr(thing, "__dlpack_device__"):
        raise TypeError(f"tutti: a {type(thing).__name__} does not say by __dlpack_device__ where it lies")
    kind, index = thing.__dlpack_device__()
    if int(kind) in (_CUDA, _MANAGED):
        stream = _stream_of(thing, index)
        return thing.__dlpack__(stream=stream or 1), _device(index), stream  # 1 is the default one there
    if int(kind) not in (_CPU, _PINNED):
        raise TypeError(f"tutti: the array is on a device (DLPack's type {int(kind)}) that is neither the CPU nor one of CUDA")
    return thing.__dlpack__(), 0, None


def _of_dlpack(thing):
    capsule, device, stream = _capsule_of(thing)
    tensor = _Dlpack.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    step = 1
    for i in reversed(range(tensor.ndim)):
        if tensor.strides and 0 not in shape and shape[i] > 1 and tensor.strides[i] != step:
            raise ValueError("tutti: the array is not contiguous")
        step *= shape[i]
    code = _DLPACK_CODES.get(tensor.code)
    name = "bool" if code == "bool" else f"{code}{tensor.bits}"
    if name not in _NUMBERS or tensor.lanes != 1:
        raise TypeError(f"tutti: DLPack's type {tensor.code} of {tensor.bits} bits is none of Tutti's")
    return Buffer((tensor.data or 0) + tensor.byte_offset, shape, name, (thing, capsule), device, stream,
                  type(thing).__module__.partition(".")[0] in _ORDERED)


def is_numpy(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, (numpy.ndarray, numpy.generic))


def is_torch(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def is_jax(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] in ("jax", "jaxlib")


def buffer_of(thing: Any, writable: bool = False, apart: bool = False) -> Buffer:
    """Where an object lies. writable: it will be written. apart: elements of NumPy's and PyTorch's may lie apart, as those of a column do."""
    if isinstance(thing, Buffer):
        return thing
    if is_numpy(thing):
        return _of_numpy(thing, writable, apart)
    if is_torch(thing):
        return _of_torch(thing, apart)
    if is_jax(thing):
        if writable:
            raise TypeError("tutti: arrays of JAX never change; give the call another array to write to: out=numpy.empty(...)")
        return _of_dlpack(thing)
    try:
        memoryview(thing)
    except TypeError:
        if hasattr(thing, "__dlpack__"):
            return _of_dlpack(thing)
        raise TypeError(f"tutti: a {type(thing).__name__} has neither the buffer protocol nor DLPack") from None
    return _of_buffer(thing, writable)


def host_buffer_of(thing: Any, writable: bool = False) -> Buffer:
    """The same of an array that must be the CPU's."""
    found = buffer_of(thing, writable)
    if found.device:
        raise TypeError("tutti: the array is on a GPU, and what it is copied from or to is memory of the CPU; tensors of tutti.tensor.symm_empty are on GPUs")
    return found


def new_like(thing: Any, shape: Any, who: Any) -> Any:
    """An array of the same library and element type."""
    if is_numpy(thing):
        return sys.modules["numpy"].empty(shape, thing.dtype)
    if is_torch(thing):
        return thing.new_empty(shape)
    if is_jax(thing):  # which cannot be written: NumPy's, or on a GPU a tensor of ours, both of which JAX can read where they lie
        kind, index = thing.__dlpack_device__()
        if int(kind) == _CPU:
            return sys.modules["numpy"].empty(shape, thing.dtype)
        from . import tensor  # late: it needs the tensor library
        return tensor.empty(shape, dtype_name(thing.dtype), device=f"cuda:{index}")
    library = type(thing).__module__.partition(".")[0]
    if library == "cupy":
        with thing.device:
            return sys.modules["cupy"].empty(shape, thing.dtype)
    if library == "tutti" and hasattr(thing, "requires_grad"):
        return sys.modules["tutti.tensor"].empty(shape, thing.dtype, device=thing.device)
    raise TypeError(f"{who}: out must be given where the input is no array of NumPy or CuPy and no tensor")


def element(value: Any, dtype: str) -> Any:
    """One element of a type, of its real part where it is complex, as C reads it: from a number, or an array of one element of that type."""
    dtype = {"c64": "f32", "c128": "f64"}.get(dtype, dtype)
    if not isinstance(value, numbers.Real):
        found = host_buffer_of(value)
        if found.dtype != dtype or found.count != 1:
            raise TypeError(f"tutti: {found.count} elements of {found.dtype} stand where one of {dtype} is wanted")
        return ctypes.create_string_buffer(ctypes.string_at(found.address, _SIZES[dtype]), _SIZES[dtype])
    number = float(value)
    if dtype in ("f64", "f32", "f16"):
        data = struct.pack({"f64": "=d", "f32": "=f", "f16": "=e"}[dtype], number)
    elif dtype == "bf16":
        bits, = struct.unpack("=I", struct.pack("=f", number))
        half = 0x7FC0 if number != number else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to the nearest, and of two the even one
        data = struct.pack("=H", half)
    else:
        raise TypeError(f"tutti: {value!r} is not made an element of {dtype}; give an array of one element of that type")
    return ctypes.create_string_buffer(data, len(data))


def numpy_dtype(dtype: Any) -> Any:
    """NumPy's type, of which bf16 and f8 are those of ml_dtypes."""
    import numpy
    name = _TYPES[dtype_name(dtype)][0]
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        try:
            import ml_dtypes  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            raise TypeError(f"tutti: NumPy has no {dtype_name(dtype)} by itself; install ml_dtypes, or convert first: .to('f32')") from None
        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)
