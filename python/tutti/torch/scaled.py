# SPDX-License-Identifier: Apache-2.0
"""The scaled forms (f8) of PyTorch's fused operations on tensors of the CPU, by the tensor library: products of narrow numbers with scales, fused with a gather
before or a scatter behind."""
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist

from ..buffers import dtype_name
from ..errors import Error
from ..tensor import _calls, fused_all_gather_scaled_matmul, fused_scaled_matmul_reduce_scatter
from ..world import Group

_wrap = _calls.bind("tt_wrap", "tensor", "PDYPP")


def _ours(tensor: torch.Tensor) -> Any:
    """A tensor of the library over the memory of one of PyTorch's, or over a copy where that is not dense. It must not outlive it."""
    if tensor is None:
        return None, None
    dense = tensor.detach().contiguous()
    return _calls.tensor(_wrap, dense.data_ptr(), tuple(dense.shape), dense.dtype, None, None), dense


def _theirs(tensor: torch.Tensor, dtype: Optional[torch.dtype]) -> Any:
    """PyTorch's, with a copy of a result."""
    made = torch.empty(tensor.shape, dtype=dtype)
    place, _ = _ours(made)
    place.copy_(tensor)
    return made


# Element types in lists reach Python as the numbers of c10::ScalarType.
_BY_NUMBER = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16, 23: torch.float8_e5m2, 24: torch.float8_e4m3fn}


def _dtype(given: Any, default: Any) -> Any:
    if given is None:
        return default
    if isinstance(given, int) and given not in _BY_NUMBER:
        raise TypeError(f"tutti: a scaled product has no results of PyTorch's element type {given}")
    return _BY_NUMBER[given] if isinstance(given, int) else given


def _lists(tensors: Sequence[torch.Tensor]) -> Any:
    """Ours, and what keeps their memory."""
    pairs = [_ours(tensor) for tensor in tensors]
    return [ours for ours, _ in pairs], [dense for _, dense in pairs]


def _called(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except Error as cause:
        error: Any = dist.DistBackendError(str(cause))
        error.status, error.ranks = cause.status, cause.ranks
        raise error from cause


def all_gather_scaled_matmul(group: Any, A: torch.Tensor, Bs: Sequence[torch.Tensor], A_scale: Any, B_scales: Any, gather_dim: int, biases: Any,
                             result_scales: Any, out_dtypes: Any, use_fast_accum: Any) -> Any:
    """All ranks' A along gather_dim, and its scaled products with each of Bs."""
    (a, scale), _held = _lists([A, A_scale])
    bs, scales, bias, result_scale = _lists(Bs), _lists(B_scales), _lists(biases or []), _lists(result_scales or [])
    dtypes = [_dtype(given, A.dtype) for given in (out_dtypes or [None] * len(Bs))]
    whole, products = _called(fused_all_gather_scaled_matmul, a, bs[0], scale, scales[0], Group(group._world, group._handle, owned=False), gather_dim % A.dim(),
                              bias[0], result_scale[0], [dtype_name(dtype) for dtype in dtypes], use_fast_accum or [], return_gathered=True)
    return _theirs(whole, A.dtype), [_theirs(product, dtype) for product, dtype in zip(products, dtypes)]


def scaled_matmul_reduce_scatter(group: Any, A: torch.Tensor, B: torch.Tensor, A_scale: Any, B_scale: Any, reduce_op: str, orig_scatter_dim: Any,
                                 scatter_dim: int, output_shape: Any, bias: Any, result_scale: Any, out_dtype: Any,
                                 use_fast_accum: Any) -> Any:
    """This rank's part of the sum over the ranks of the scaled product of A and B."""
    (a, b, a_scale, b_scale, added, scaled), _held = _lists([A, B, A_scale, B_scale, bias, result_scale])
    dtype = _dtype(out_dtype, A.dtype)
    shape = list(output_shape) if output_shape is not None else [*A.shape[:-1], B.shape[1]]
    made = _called(fused_scaled_matmul_reduce_scatter, a, b, a_scale, b_scale, orig_scatter_dim, scatter_dim, shape,
                   Group(group._world, group._handle, owned=False), reduce_op, added, scaled, dtype_name(dtype), use_fast_accum)
    return _theirs(made, dtype)
