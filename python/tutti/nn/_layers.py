# SPDX-License-Identifier: Apache-2.0
"""Layers that the C library has ready-made."""
from __future__ import annotations

import ctypes
from typing import Any, Callable

from .._library import lib, struct
from ..buffers import dtype_number
from ..tensor import _calls
from ..tensor._calls import AnyGroup, Dtype
from ._module import Module, _buffers, _parameter, _parameters

_AttentionOptions, _ParallelOptions = struct("tt_attention_options"), struct("tt_tensor_parallel_options")
_linear = _calls.bind("tt_linear_module", "pointer", "qq?Y")
_embedding = _calls.bind("tt_embedding_module", "pointer", "qqY")
_layer_norm = _calls.bind("tt_layer_norm_module", "pointer", "qdY")
_rms_norm = _calls.bind("tt_rms_norm_module", "pointer", "qdY")
_dropout = _calls.bind("tt_dropout_module", "pointer", "d")
_attention = _calls.bind("tt_attention_module", "pointer", "qP")
_column = _calls.bind("tt_column_linear_module", "pointer", "qq?P")
_row = _calls.bind("tt_row_linear_module", "pointer", "qq?P")
_vocabulary = _calls.bind("tt_vocabulary_embedding_module", "pointer", "qqP")
_heads = _calls.bind("tt_heads_attention_module", "pointer", "qPP")


class Native(Module):
    """A module whose forward is C's. Its children are found by name."""
    _native = True

    def __init__(self, handle: int, *children: str) -> None:
        if type(self).forward is not Module.forward:
            raise TypeError(f"tutti: the forward of {type(self).__name__} is C's; use the layer in a module of your own instead of deriving from it")
        self._own(handle)
        for name, _ in _calls.named(_parameters, handle):
            if "." not in name:
                self._slots[name] = _parameter
        if _calls.named(_buffers, handle):
            raise RuntimeError("tutti: ready-made modules have no buffers")
        for name in children:
            self._children[name] = Native(lib.tt_module_keep(lib.tt_module_child(handle, name.encode())))


class Linear(Native):
    """x weight^T + bias: "weight" (out, in) and "bias" (out), uniform within 1 / sqrt(in)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_linear, inputs, outputs, bias, dtype))
        if not bias:
            self._slots["bias"] = _nothing


class Embedding(Native):
    """Rows of "weight" (count, size), one per index."""

    def __init__(self, count: int, size: int, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_embedding, count, size, dtype))


class LayerNorm(Native):
    """tutti.tensor.layer_norm with "weight" ones and "bias" zeros, of `size`."""

    def __init__(self, size: int, epsilon: float = 1e-5, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_layer_norm, size, epsilon, dtype))


class RMSNorm(Native):
    """tutti.tensor.rms_norm with "weight" ones, of `size`."""

    def __init__(self, size: int, epsilon: float = 1e-5, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_rms_norm, size, epsilon, dtype))


class Dropout(Native):
    """Zeroes a share of the elements while it is trained; its input itself else."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(_calls.answer(_dropout, p))


def _attention_options(heads: int, sees_all: bool, bias: bool, rope_base: float, dropout: float, dtype: Dtype) -> Any:
    return _AttentionOptions(heads=heads, sees_all=sees_all, bias=bias, rope_base=rope_base, dropout=dropout, dtype=dtype_number(dtype))


class Attention(Native):
    """Attention of x (..., length, width) to itself, with several heads: children "qkv" (width to 3 width), "out" (width to width) and "dropout". A position
    sees itself and those before it, or all."""

    def __init__(self, width: int, heads: int = 1, sees_all: bool = False, bias: bool = False, rope_base: float = 0.0, dropout: float = 0.0,
                 dtype: Dtype = "f32") -> None:
        options = _attention_options(heads, sees_all, bias, rope_base, dropout, dtype)
        super().__init__(_calls.answer(_attention, width, ctypes.byref(options)), "qkv", "out", "dropout")


class Sequential(Module):
    """Modules and functions of one tensor, one after the other; named "0", "1" ..."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            self.add_module(str(i), module if isinstance(module, Module) else Lambda(module))

    def forward(self, x: Any) -> Any:
        for module in self._children.values():
            x = module(x)
        return x

    def __len__(self) -> int:
        return len(self._children)

    def __getitem__(self, index: int) -> Module:
        return list(self._children.values())[index]


class ModuleList(Module):
    """Modules in a list; named "0", "1" ..."""

    def __init__(self, modules: Any = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        self.add_module(str(len(self._children)), module)

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Any:
        return iter(self._children.values())

    def __getitem__(self, index: int) -> Module:
        return list(self._children.values())[index]


class Lambda(Module):
    """A function as a module: Lambda(tutti.tensor.gelu)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def _nothing(handle: Any, name: bytes) -> None:
    """The slot of a layer that was made without it."""


# ---- tensor parallel: every rank has a part of each layer ----

def _parallel(group: AnyGroup, dtype: Dtype, sequence: bool) -> Any:
    return _ParallelOptions(group=_calls.group_handle(group).value, dtype=dtype_number(dtype), sequence=sequence)


class ColumnLinear(Native):
    """Linear of which each rank has rows of "weight" (out / ranks, in) and elements of "bias". Making one is a collective."""

    def __init__(self, inputs: int, outputs: int, group: AnyGroup, bias: bool = True, sequence: bool = False, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_column, inputs, outputs, bias, ctypes.byref(_parallel(group, dtype, sequence))))


class RowLinear(Native):
    """Linear of which each rank has columns of "weight" (out, in / ranks), and the whole "bias". Making one is a collective."""

    def __init__(self, inputs: int, outputs: int, group: AnyGroup, bias: bool = True, sequence: bool = False, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_row, inputs, outputs, bias, ctypes.byref(_parallel(group, dtype, sequence))))


class VocabularyEmbedding(Native):
    """Embedding of which each rank has rows of "weight" (count / ranks, size). Making one is a collective."""

    def __init__(self, count: int, size: int, group: AnyGroup, sequence: bool = False, dtype: Dtype = "f32") -> None:
        super().__init__(_calls.answer(_vocabulary, count, size, ctypes.byref(_parallel(group, dtype, sequence))))


class HeadsAttention(Native):
    """Attention of which each rank has some of the heads. Making one is a collective."""

    def __init__(self, width: int, group: AnyGroup, heads: int = 1, sees_all: bool = False, bias: bool = False, rope_base: float = 0.0, dropout: float = 0.0,
                 sequence: bool = False, dtype: Dtype = "f32") -> None:
        options = _attention_options(heads, sees_all, bias, rope_base, dropout, dtype)
        super().__init__(_calls.answer(_heads, width, ctypes.byref(options), ctypes.byref(_parallel(group, dtype, sequence))))


def sum_gradients(module: Module, group: AnyGroup) -> None:
    """From now on gradients of the module's parameters are summed over the group: for parameters that every rank has, and that see a part of the sequence on
    each."""
    _calls.done(_sum_gradients, module._need(), group)


_sum_gradients = _calls.bind("tt_sum_gradients", "done", "PG")
