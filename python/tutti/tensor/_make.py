# SPDX-License-Identifier: Apache-2.0
"""Tensors of what Python and other libraries have."""
from __future__ import annotations

import array
import ctypes
import numbers
from typing import Any, List, Optional, Tuple

from .._library import lib
from ..buffers import buffer_of, dtype_bytes, dtype_name, is_jax, is_numpy
from . import _calls, _dlpack
from . import _operators as ops
from ._calls import Device, Dtype
from ._tensor import Tensor

_from = _calls.bind("tt_from", "tensor", "PDYO")
_wrap = _calls.bind("tt_wrap", "tensor", "PDYPP")
_arange = _calls.bind("tt_arange", "tensor", "dddYO")


def _flatten(data: Any, flat: List[Any]) -> Tuple[int, ...]:
    """The shape of nested lists; their numbers go to `flat`."""
    if isinstance(data, Tensor) and data.ndim == 0:
        data = data.item()
    if isinstance(data, numbers.Number):
        flat.append(data)
        return ()
    if not isinstance(data, (list, tuple)):
        raise TypeError(f"tutti: no tensor can be made of a {type(data).__name__}")
    shape: Optional[Tuple[int, ...]] = None
    for entry in data:
        inner = _flatten(entry, flat)
        if shape is not None and inner != shape:
            raise ValueError(f"tutti: lists of different shapes, {shape} and {inner}, are no tensor")
        shape = inner
    return (len(data), *(shape or ()))


def _kind_of(flat: List[Any]) -> str:
    if any(isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real) for value in flat):
        return "c64"
    if any(not isinstance(value, numbers.Integral) for value in flat) or not flat:
        return "f32"
    return "bool" if all(isinstance(value, bool) for value in flat) else "i64"


def from_bytes(data: bytes, shape: Tuple[int, ...], dtype: Dtype, requires_grad: bool = False, device: Optional[Device] = None) -> Tensor:
    """A tensor of row-major elements."""
    count = 1
    for size in shape:
        count *= size
    if len(data) != count * dtype_bytes(dtype):
        raise ValueError(f"tutti: {len(data)} bytes are no tensor of shape {tuple(shape)} and {dtype_name(dtype)}")
    block = (ctypes.c_char * max(1, len(data))).from_buffer_copy(data or b"\0")
    return _calls.tensor(_from, block, shape, dtype, _calls.options(device, requires_grad, None))


def tensor(data: Any, dtype: Optional[Dtype] = None, device: Optional[Device] = None, requires_grad: bool = False) -> Tensor:
    """A new tensor with a copy of numbers, nested lists, or an array of another library. Without a dtype, floats become f32, integers i64 and complex
    numbers c64; arrays keep theirs."""
    if isinstance(data, (numbers.Number, list, tuple)) and not is_numpy(data):
        flat: List[Any] = []
        shape = _flatten(data, flat)
        kind = dtype_name(dtype) if dtype is not None else _kind_of(flat)
        if kind[0] == "c":
            wide, packed = "c128", array.array("d", [part for value in flat for part in (value.real, value.imag)])
        elif kind[0] in "iu" or kind == "bool":
            wide, packed = ("u64", array.array("Q", flat)) if kind == "u64" else ("i64", array.array("q", [int(value) for value in flat]))
        else:
            wide, packed = "f64", array.array("d", flat)
        made = from_bytes(packed.tobytes(), shape, wide, device=device).to(kind)
    else:
        made = as_tensor(data).detach().clone()
        if device is not None:
            made = made.to_device(device)
        if dtype is not None:
            made = made.to(dtype)
    return made.requires_grad_() if requires_grad else made


def as_tensor(data: Any, dtype: Optional[Dtype] = None) -> Tensor:
    """A tensor over the memory of what has DLPack or the buffer protocol (NumPy, PyTorch, array.array, bytearray ...), without a copy unless that memory is
    read-only, as that of JAX's arrays is, or another dtype is asked for; of numbers and lists a new one."""
    if isinstance(data, Tensor):
        made = data
    elif isinstance(data, (numbers.Number, list, tuple)) and not is_numpy(data):
        return tensor(data, dtype)
    elif hasattr(data, "__dlpack__") and not (is_numpy(data) and data.ndim == 0):
        made = _dlpack.from_dlpack(data)
        if is_jax(data):  # never to be written, which the capsules that JAX makes do not say
            made = made.clone()
    else:
        made = _over_buffer(data)
    return made.to(dtype) if dtype is not None else made


def _over_buffer(data: Any) -> Tensor:
    try:
        buffer = buffer_of(data, writable=True)
    except (BufferError, ValueError):  # read-only
        buffer = buffer_of(data)
        return _calls.tensor(_from, ctypes.c_void_p(buffer.address or None), buffer.shape, buffer.dtype, None)
    if not buffer.count:
        return ops.empty(buffer.shape, buffer.dtype)
    held = _calls.kept.add(buffer)
    try:
        return _calls.tensor(_wrap, ctypes.c_void_p(buffer.address), buffer.shape, buffer.dtype, ctypes.cast(_calls.release_kept, ctypes.c_void_p), held)
    except BaseException:
        _calls.kept.drop(held)
        raise


def from_numpy(array_: Any) -> Tensor:
    """A tensor over the memory of a NumPy array."""
    return as_tensor(array_)


def arange(start: float, end: Optional[float] = None, step: float = 1, dtype: Optional[Dtype] = None, device: Optional[Device] = None,
           requires_grad: bool = False) -> Tensor:
    """start, start + step ... as far as end, which is left out; with one number, from 0 to it. Whole numbers give i64, others f32."""
    if end is None:
        start, end = 0, start
    if dtype is None:
        dtype = "i64" if all(isinstance(value, numbers.Integral) for value in (start, end, step)) else "f32"
    return _calls.tensor(_arange, start, end, step, dtype, _calls.options(device, requires_grad, None))


def seed(number: int, rank: int = 0) -> None:
    """Restarts the thread's random numbers. Ranks that are given different numbers draw different streams from one seed."""
    if not 0 <= number < 2**64:
        raise OverflowError(f"tutti: {number} is no seed; it is an integer from 0 to 2**64 - 1")
    lib.tt_seed(number, rank)


def memory_trim() -> None:
    """Gives memory that is kept for reuse back to the system."""
    lib.tt_memory_trim()
