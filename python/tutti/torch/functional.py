# SPDX-License-Identifier: Apache-2.0
"""Functional collectives that PyTorch asks of a backend in C++ alone, for groups in Python. Every other group has PyTorch's own, as before."""
from typing import Any, List

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import cuda

_libraries: List[Any] = []  # what is registered goes with them


def _resolved(group: Any) -> Any:
    return group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(group)


def _gather_out(group: Any, input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor) -> torch.Tensor:
    c10d._register_work(out, group.all_gather_single(out, input))
    return out


def _messages(group: Any, op_list: Any, peer_list: Any, tag_list: Any, tensors: Any, group_name: Any) -> Any:
    functions = {"isend": torch.ops._c10d_functional.isend, "irecv": torch.ops._c10d_functional.irecv}
    return [functions[op](tensor, peer, tag, group_name) for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors)]


def _register(library: Any, kind: Any, name: str, function: Any, place: int, device: str) -> None:
    """`function` for groups of this kind, whose name is the argument in that place; what PyTorch has for others."""
    otherwise = torch.library.get_kernel(f"_c10d_functional::{name}", device)

    def run(keys, *arguments, **named):
        group = _resolved(arguments[place])
        return function(group, *arguments, **named) if isinstance(group, kind) else otherwise.call_boxed(keys, *arguments, **named)
    library.impl(name, run, device, with_keyset=True)


def register(kind: Any) -> None:
    """Once, when the first group of the kind is made: a process without any keeps PyTorch's alone."""
    if _libraries or not hasattr(torch.library, "get_kernel"):
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(library)
    for device in ("CPU", "CUDA") if cuda.here else ("CPU",):
        _register(library, kind, "all_gather_into_tensor_out", _gather_out, 2, device)
        if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
            _register(library, kind, "batch_p2p_ops", _messages, 4, device)
