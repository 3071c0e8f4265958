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


if __name__ == "__main__":
    run_all([("gradients_that_are_compiled", 2)])
