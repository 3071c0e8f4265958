#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of the CPU under PyTorch's names, beyond the calls of torch_peer.py: operations in compiled programs, tensors of no elements, and what
torch.distributed._symmetric_memory has beside its operations."""
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises  # noqa: E402
from torch_ranks import data, run_all, same  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import tutti.torch.symm_mem as symm_mem  # noqa: E402

warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch is about to change


def calls(size, rows, name):
    """Each operation that has gradients, with the shapes of its two tensors and what follows them."""
    ours = torch.ops.tutti
    found = [(ours.one_shot_all_reduce.default, ((rows, 3),), (op, name)) for op in ("sum", "avg")]
    for shape, dims in (((rows, 4), (0, -1)), ((2, rows, 4), (1,))):
        inner = len(shape) - 1
        found += [(ours.fused_all_gather_matmul.default, (shape, (4 * size if dim % len(shape) == inner else 4, 6)), (dim, name)) for dim in dims]
        wide = (*shape[:-2], rows * size, 4)
        found += [(ours.fused_matmul_reduce_scatter.default, (wide, (4, 6 * size)), (op, dim, name)) for op in ("sum", "avg") for dim in dims]
    return found


def leaves(rank, shapes):
    return [data(rank, shape, torch.float64, 71).to(torch.float64).requires_grad_() for shape in shapes]


# ---- what ranks do ----

def gradients_that_are_compiled(rank, size, gloo):
    """Values and gradients of a compiled program are those of the program, and PyTorch's own checks of operations pass."""
    each = calls(size, 3, dist.group.WORLD.group_name)
    for backend, chosen in (("aot_eager", each), ("inductor", each[:3])):  # the second one writes code, and builds it
        for operation, shapes, rest in chosen:
            def both(*tensors, operation=operation, rest=rest):
                return operation(*tensors, *rest) * 2
            torch._dynamo.reset()
            found = []
            for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
                own = leaves(rank, shapes)
                result = function(*own)
                (result * data(rank, result.shape, torch.float64, 72)).sum().backward()
                found.append([result.detach(), *[leaf.grad for leaf in own]])
            same(*found)
    for operation, shapes, rest in each:
        torch.library.opcheck(operation, (*leaves(rank, shapes), *rest))


def tensors_of_no_elements(rank, size, gloo):
    """In each dimension, with gradients."""
    name, dtype = dist.group.WORLD.group_name, torch.float64
    nothing = symm_mem.empty(0, 3)
    handle = symm_mem.rendezvous(nothing, name)
    assert symm_mem.is_symm_mem_tensor(nothing) and nothing.shape == (0, 3) and handle.get_remote_tensor(1 - rank, (0, 3), torch.float32).shape == (0, 3)
    same(torch.ops.symm_mem.one_shot_all_reduce(nothing, "sum", name), torch.empty(0, 3))
    same(torch.ops.symm_mem.two_shot_all_reduce_(nothing, "sum", name), torch.empty(0, 3))
    same(torch.ops.tutti.one_shot_all_reduce(torch.empty(2, 0), "sum", name), torch.empty(2, 0))
    same(torch.ops.symm_mem._low_contention_all_gather(torch.empty(0, 3), name), torch.empty(0, 3))
    same(torch.ops.symm_mem._low_contention_reduce_scatter(torch.empty(size, 0), "sum", name), torch.empty(1, 0))
    for shape in ((0, 3, 4), (2, 0, 4), (2, size, 0), (2 * size, 3 * size, 4)):
        for columns in (0, 2 * size):
            for dim in (0, 1, 2):
                A, B = torch.ones(shape, dtype=dtype, requires_grad=True), torch.ones(shape[2] * (size if dim == 2 else 1), columns, dtype=dtype, requires_grad=True)
                gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(A.detach(), [B.detach()], dim, name)
                same(gathered, torch.cat([A.detach()] * size, dim))
                same(product, gathered @ B.detach())
                result = torch.ops.tutti.fused_all_gather_matmul(A, B, dim, name)
                same(result, product)
                result.sum().backward()
                same([A.grad, B.grad], [torch.full_like(A, size * columns), torch.full_like(B, shape[0] * shape[1] * (size if dim < 2 else 1))])
                if (*shape[:2], columns)[dim] % size:
                    continue
                A, B = torch.ones(shape, dtype=dtype, requires_grad=True), torch.ones(shape[2], columns, dtype=dtype, requires_grad=True)
                result = torch.ops.tutti.fused_matmul_reduce_scatter(A, B, "sum", dim, name)
                same(result, (size * (A.detach() @ B.detach())).chunk(size, dim)[rank])
                result.sum().backward()
                same([A.grad, B.grad], [torch.full_like(A, columns), torch.full_like(B, shape[0] * shape[1])])


if __name__ == "__main__":
    run_all([("gradients_that_are_compiled", 2), ("tensors_of_no_elements", 2)])
