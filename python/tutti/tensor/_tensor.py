# SPDX-License-Identifier: Apache-2.0
"""The class Tensor: what it can be asked, Python's operators, indexing, gradients, and its way to other array libraries."""
from __future__ import annotations

import ctypes
import numbers
import operator
import sys
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from .._arguments import text as text_of
from .._library import lib
from ..buffers import dtype_bytes, dtype_named, is_numpy
from . import _autograd, _calls, _dlpack
from . import _operators as ops
from ._calls import Dtype, Handle, TensorLike

_select = _calls.bind("tt_select", "tensor", "Tiq")
_slice = _calls.bind("tt_slice", "tensor", "Tiqqq")
_item = _calls.bind("tt_item", "double", "T")
_item_int = _calls.bind("tt_item_int", "int", "T")
_read = _calls.bind("tt_read", "done", "TPYz")
_data = _calls.bind("tt_data", "pointer", "T")
_grad = _calls.bind("tt_grad", "tensor", "T")
_require_grad = _calls.bind("tt_require_grad", "tensor", "T?")
_retain_grad = _calls.bind("tt_retain_grad", "done", "T")
_set_grad = _calls.bind("tt_set_grad", "done", "TT")
_format = _calls.bind("tt_format", "int", "TPz")


def _reflected(function: Callable[..., Tensor]) -> Callable[[Tensor, TensorLike], Tensor]:
    def reflected(self, other):
        return function(other, self) if isinstance(other, numbers.Number) else NotImplemented
    return reflected


def _binary(function: Callable[..., Tensor]) -> Callable[[Tensor, TensorLike], Tensor]:
    def binary(self, other):
        kind = type(other)
        if kind is Tensor or kind is float or kind is int or isinstance(other, numbers.Number):
            return function(self, other)
        return NotImplemented
    return binary


def _logical(function: Callable[..., Tensor]) -> Callable[[Tensor, TensorLike], Tensor]:
    def logical(self, other):
        if self.dtype != "bool" or (isinstance(other, Tensor) and other.dtype != "bool") or not isinstance(other, (Tensor, bool)):
            raise TypeError("tutti: & and | are for tensors of bool")
        return function(self, other)
    return logical


class Tensor(ops.Methods, Handle):
    """An array of the tensor library. Made by tensor, zeros, randn and the like, by operators, and by from_dlpack and as_tensor of what other libraries
    have. It owns its memory together with its views; gradients follow it where requires_grad is set."""
    __slots__ = ()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise TypeError("tutti: tensors are made by tutti.tensor.tensor, zeros, as_tensor ...")

    # ---- what it is ----

    @property
    def shape(self) -> Tuple[int, ...]:
        sizes = lib.tt_sizes(self._handle)
        return tuple(sizes.at[:sizes.count])

    @property
    def strides(self) -> Tuple[int, ...]:
        """In elements."""
        strides = lib.tt_strides(self._handle)
        return tuple(strides.at[:strides.count])

    ndim = property(lambda self: lib.tt_dim_count(self._handle), doc="How many dimensions it has.")
    dtype = property(lambda self: dtype_named(lib.tt_dtype(self._handle)), doc="The element type by Tutti's name: 'f32'.")
    device = property(lambda self: lib.tutti_device_name(lib.tt_device_of(self._handle)).decode(), doc="Where it lies: 'cpu', 'cuda:0', 'meta'.")
    size = property(lambda self: lib.tt_numel(self._handle), doc="How many elements it has.")
    nbytes = property(lambda self: self.size * dtype_bytes(self.dtype), doc="Bytes of its elements.")
    is_leaf = property(lambda self: lib.tt_is_leaf(self._handle), doc="It was not computed, or without gradients.")
    is_contiguous = property(lambda self: lib.tt_is_contiguous(self._handle), doc="Elements lie in row-major order without gaps.")
    is_parameter = property(lambda self: lib.tt_is_parameter(self._handle), doc="Whether tutti.tensor.parameter made it.")
    is_async = property(lambda self: lib.tt_is_async(self._handle), doc="Collectives still write it, for all anyone has waited.")
    version = property(lambda self: lib.tt_version(self._handle), doc="How often it or an alias was written in place.")
    storage_bytes = property(lambda self: lib.tt_storage_bytes(self._handle), doc="Bytes of the storage that it shares with its views.")
    T = property(lambda self: self.t() if self.ndim == 2 else self.permute(*reversed(range(self.ndim))), doc="Dimensions in reverse order.")

    @property
    def name(self) -> str:
        """Shown in messages and prints."""
        return lib.tt_name(self._handle).decode()

    @name.setter
    def name(self, text: Optional[str]) -> None:
        lib.tt_set_name(self._handle, text_of(text))

    @property
    def data_ptr(self) -> int:
        """The address of the first element. Waits for collectives."""
        return _calls.answer(_data, self) or 0

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("tutti: a tensor of one number has no length")
        return shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        length = _calls.answer(_format, self, None, 0)
        text = ctypes.create_string_buffer(length + 1)
        _calls.answer(_format, self, text, length + 1)
        return text.value.decode()

    __hash__ = object.__hash__

    # ---- its elements ----

    def item(self) -> Any:
        """The number, of a tensor of one element."""
        dtype = self.dtype
        if dtype == "bool":
            return bool(_calls.answer(_item_int, self))
        if dtype[0] in "iu":
            number = _calls.answer(_item_int, self)
            return number if dtype != "u64" or number >= 0 else number + 2**64
        return self.tolist() if dtype[0] == "c" and self.ndim == 0 else self.reshape(()).tolist() if dtype[0] == "c" else _calls.answer(_item, self)

    def tolist(self) -> Any:
        """Python numbers, in lists."""
        dtype = self.dtype
        wide = {"b": "bool", "i": "i64", "u": "u64", "c": "c128"}.get(dtype[0], "f64")
        if dtype == "bf16":
            wide = "f64"
        kind = {"bool": ctypes.c_bool, "i64": ctypes.c_int64, "u64": ctypes.c_uint64}.get(wide, ctypes.c_double)
        count = self.size
        block = (kind * max(1, count * (2 if wide == "c128" else 1)))()
        _calls.answer(_read, self, block, wide, count)
        flat = [complex(block[2 * i], block[2 * i + 1]) for i in range(count)] if wide == "c128" else list(block[:count])
        return _nest(flat, self.shape)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    # ---- operators ----

    __add__, __radd__, __iadd__ = _binary(ops.add), _reflected(ops.add), _binary(ops.add_)
    __sub__, __rsub__, __isub__ = _binary(ops.sub), _reflected(ops.sub), _binary(ops.sub_)
    __mul__, __rmul__, __imul__ = _binary(ops.mul), _reflected(ops.mul), _binary(ops.mul_)
    __truediv__, __rtruediv__, __itruediv__ = _binary(ops.div), _reflected(ops.div), _binary(ops.div_)
    __pow__, __rpow__, __matmul__ = _binary(ops.pow), _reflected(ops.pow), _binary(ops.matmul)
    __lt__, __le__, __gt__, __ge__ = _binary(ops.lt), _binary(ops.le), _binary(ops.gt), _binary(ops.ge)
    __eq__, __ne__ = _binary(ops.eq), _binary(ops.ne)  # type: ignore[assignment]
    __and__, __or__ = _logical(ops.logical_and), _logical(ops.logical_or)

    def __neg__(self) -> Tensor:
        return ops.neg(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __invert__(self) -> Tensor:
        if self.dtype != "bool":
            raise TypeError("tutti: ~ is for tensors of bool")
        return ops.logical_not(self)

    # ---- indexing ----

    def __getitem__(self, index: Any) -> Tensor:
        """By integers, slices with steps above 0, ..., None, and one list, tensor or NumPy array of integers. All but the last are views."""
        result, dim = self, 0
        entries = index if isinstance(index, tuple) else (index,)
        given = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
        if given > self.ndim:
            raise IndexError(f"tutti: {given} indices for a tensor of {self.ndim} dimensions")
        for entry in entries:
            if entry is None:
                result = result.unsqueeze(dim)
                dim += 1
            elif entry is Ellipsis:
                dim += self.ndim - given
            elif isinstance(entry, slice):
                result = _sliced(result, dim, entry)
                dim += 1
            elif _is_list(entry):
                result, more = _picked(result, dim, entry)
                dim += more
            elif isinstance(entry, bool):
                raise TypeError("tutti: True and False are no indices; masked_fill and where take masks")
            else:
                result = _calls.tensor(_select, result, dim, operator.index(entry))
        return result if result is not self else self.alias()

    def __setitem__(self, index: Any, value: Any) -> None:
        if any(_is_list(entry) for entry in (index if isinstance(index, tuple) else (index,))):
            raise TypeError("tutti: elements cannot be set by lists of indices; index_add, scatter_add and where make new tensors")
        part = self[index]
        if isinstance(value, numbers.Real) and _calls.is_number(value):
            part.fill_(float(value))
        else:
            from ._make import as_tensor
            part.copy_(as_tensor(value))

    # ---- gradients ----

    @property
    def requires_grad(self) -> bool:
        """Whether backwards compute a gradient of it. Leaves alone can be told."""
        return lib.tt_requires_grad(self._handle)

    @requires_grad.setter
    def requires_grad(self, on: bool) -> None:
        _calls.tensor(_require_grad, self, bool(on))

    def requires_grad_(self, on: bool = True) -> Tensor:
        self.requires_grad = on
        return self

    @property
    def grad(self) -> Optional[Tensor]:
        """What backwards have collected; None where nothing is. It can be set, and removed by None."""
        return _calls.tensor(_grad, self)

    @grad.setter
    def grad(self, gradient: Optional[Tensor]) -> None:
        _calls.done(_set_grad, self, gradient)

    @property
    def grad_fn(self) -> Optional[_autograd.Node]:
        """The node that computes its backward, which has a name and takes hooks; None for a leaf."""
        return _autograd.node_of(self)

    def retain_grad(self) -> None:
        """Keeps the gradient of a tensor that is no leaf."""
        _calls.done(_retain_grad, self)

    def backward(self, grad: Optional[Tensor] = None, retain_graph: bool = False, create_graph: bool = False,
                 inputs: Sequence[Tensor] = ()) -> None:
        """Computes the gradients of all leaves that it was computed from. Without grad it must have one element."""
        _autograd.backward([self], [grad] if grad is not None else [], retain_graph, create_graph, inputs)

    def register_hook(self, function: Callable[[Tensor], Optional[Tensor]], opaque: bool = False) -> _autograd.HookHandle:
        """function(gradient) is called when the gradient is complete, and may return another one. opaque: it must run each time, so that a backward which
        would run it is not compiled."""
        return _autograd.tensor_hook(self, function, opaque)

    def register_post_accumulate_grad_hook(self, function: Callable[[Tensor], None], opaque: bool = False) -> _autograd.HookHandle:
        """function(leaf) is called after the gradient of a leaf was updated."""
        return _autograd.accumulate_hook(self, function, opaque)

    # ---- other libraries ----

    def numpy(self) -> Any:
        """A NumPy array over the same memory. Writes are seen on both sides, and counted in no version. Element types that NumPy lacks are refused."""
        return _dlpack.numpy_array(self)

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        array = self.detach().numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"tutti: a tensor of {self.dtype} is no array of {dtype} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None, dl_device: Any = None, copy: Optional[bool] = None) -> Any:
        return _dlpack.capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _dlpack.device_of(self)

    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int) -> memoryview:
            return _dlpack.view(self)

    def cpu(self) -> Tensor:
        """On the CPU; itself where it is there."""
        return self.to_device("cpu")

    def astype(self, dtype: Dtype) -> Tensor:
        """Another name of to, for NumPy's users."""
        return self.to(dtype)

    def __deepcopy__(self, memo: Any) -> Tensor:
        made = self.detach().clone()
        if self.is_leaf and self.requires_grad:
            made.requires_grad = True
        return made

    def __reduce__(self) -> Any:
        block = (ctypes.c_char * max(1, self.nbytes))()
        _calls.answer(_read, self, block, self.dtype, self.size)
        return _unpickle, (bytes(block)[:self.nbytes], self.shape, self.dtype, self.is_leaf and self.requires_grad)


def _unpickle(data: bytes, shape: Tuple[int, ...], dtype: str, requires_grad: bool) -> Tensor:
    from ._make import from_bytes
    return from_bytes(data, shape, dtype, requires_grad)


def _nest(flat: List[Any], shape: Tuple[int, ...]) -> Any:
    if not shape:
        return flat[0]
    for size in reversed(shape[1:]):
        flat = [flat[i:i + size] for i in range(0, len(flat), size)] if size else [[] for _ in range(_product(shape[:-1]))]
    return flat


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _sliced(x: Tensor, dim: int, entry: slice) -> Tensor:
    step = 1 if entry.step is None else operator.index(entry.step)
    if step < 1:
        raise ValueError("tutti: slices of tensors have steps above 0")
    if entry.start is None and entry.stop is None and step == 1:
        return x
    start, stop, _ = slice(entry.start, entry.stop, step).indices(x.shape[dim])
    return _calls.tensor(_slice, x, dim, start, max(start, stop), step)


def _is_list(index: Any) -> bool:
    """Whether it is a list of indices, or a mask; a tensor or array of one integer is that integer."""
    if isinstance(index, Tensor):
        return index.ndim > 0 or index.dtype[0] not in "iu"
    return isinstance(index, list) or (is_numpy(index) and (index.ndim > 0 or index.dtype.kind == "b"))


def _picked(x: Tensor, dim: int, index: Any) -> Tuple[Tensor, int]:
    """Entries by a list of indices, and how many dimensions the list has."""
    from ._make import tensor
    index = index if isinstance(index, Tensor) else tensor(index, dtype="i64" if isinstance(index, list) and not index else None)
    if index.dtype[0] not in "iu":
        raise TypeError(f"tutti: a tensor of {index.dtype} is no list of indices; masked_fill and where take masks")
    if index.ndim == 1:
        return x.index_select(dim, index), 1
    shape = x.shape
    return x.index_select(dim, index.reshape(-1)).reshape((*shape[:dim], *index.shape, *shape[dim + 1:])), index.ndim


_calls._tensor_class = Tensor
