#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of the CPU under PyTorch's names, beyond the calls of torch_peer.py: operations in compiled programs, tensors of no elements, and what
torch.distributed._symmetric_memory has beside its operations."""
import ctypes
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


def matrices(rank, size, shape, dtype, salt):
    """A symmetric matrix, and those of all ranks."""
    everybody = [data(other, shape, dtype, salt) for other in range(size)]
    return symm_mem.empty(*shape, dtype=dtype).copy_(everybody[rank]), everybody


def tiles(rank, size, gloo):
    """Parts of matrices that are reduced where they lie, for one rank or several."""
    name = dist.group.WORLD.group_name
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        matrix, everybody = matrices(rank, size, (4, 6), dtype, 81)
        total = torch.stack([each.double() for each in everybody]).sum(0)
        out = torch.zeros(4, 6, dtype=dtype)
        torch.ops.symm_mem.tile_reduce(matrix[1:3, 2:5], out[2:, :3], 1, name)  # rows that lie apart, on both sides
        wanted = torch.zeros_like(out)
        if rank == 1:
            wanted[2:, :3] = total[1:3, 2:5]
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)
        torch.ops.symm_mem.tile_reduce(matrix, out, 0, name, "max")
        same(out, torch.stack(everybody).amax(0) if rank == 0 else wanted)
        out = torch.zeros(2, 3, dtype=dtype)
        torch.ops.symm_mem.multi_root_tile_reduce([matrix[:2, :3], matrix[2:, 3:]], out, [1, 0], name)
        torch.testing.assert_close(out, [total[2:, 3:], total[:2, :3], torch.zeros(2, 3)][min(rank, 2)].to(dtype), rtol=0.02, atol=0.02)
    matrix, everybody = matrices(rank, size, (6, 3 * size), torch.float32, 82)
    total = torch.stack(everybody).sum(0)
    out = torch.empty(6, 3)
    symm_mem.reduce_scatter_offset(matrix, [out], name, dim=1)
    same(out, total.chunk(size, 1)[rank])
    mine = [(0, 1), (4, 6)] if rank == 0 else [(1, 4)] if rank == 1 else []
    outs = [torch.empty(end - begin, 3 * size) for begin, end in mine]
    symm_mem.reduce_scatter_offset(matrix, outs, name, dim=0, offsets=[1, 4, 6], dst_ranks=[0, 1, 0], red_op="avg")
    same(outs, [total[begin:end] / size for begin, end in mine])
    block = torch.empty(0, 3 * size)
    for call in (lambda: symm_mem.reduce_scatter_offset(matrix, [out], name, dim=2), lambda: symm_mem.reduce_scatter_offset(matrix, [out], name, dim=0),
                 lambda: symm_mem.reduce_scatter_offset(matrix, [block, block, block], name, dim=0, offsets=[6]),
                 lambda: symm_mem.reduce_scatter_offset(matrix, [], name, dim=0, offsets=[3, 6], dst_ranks=[0]),
                 lambda: symm_mem.reduce_scatter_offset(matrix[:, :5], [out], name, dim=1),
                 lambda: torch.ops.symm_mem.tile_reduce(matrix[:, ::2], out, 0, name), lambda: torch.ops.symm_mem.tile_reduce(matrix[0], out, 0, name),
                 lambda: torch.ops.symm_mem.tile_reduce(matrix[:1].expand(6, -1), matrix, 0, name), lambda: torch.ops.symm_mem.tile_reduce(matrix, out, rank, name),
                 lambda: torch.ops.symm_mem.multi_root_tile_reduce([matrix, matrix], matrix, [0, 0], name),
                 lambda: torch.ops.symm_mem.multi_root_tile_reduce([matrix], matrix, [0, 1], name)):
        raises(ValueError, call)
    dist.barrier()


def handles(rank, size, gloo):
    """What PyTorch has beside operations: signals that bring data, memory with strides and numbers, layouts, and who provides it."""
    name, before, after = dist.group.WORLD.group_name, (rank - 1) % size, (rank + 1) % size
    tensor = symm_mem.empty(4, 3).zero_()
    part = symm_mem.rendezvous(tensor[2:], name)
    part.barrier()
    for turn in range(3):
        symm_mem.put_signal((torch.arange(6.0).view(2, 3) + 10 * rank + turn).t().contiguous().t(), part, after)
        symm_mem.wait_signal(part, before)
        same(tensor[:2], torch.zeros(2, 3))
        same(tensor[2:], torch.arange(6.0).view(2, 3) + 10 * before + turn)
        part.barrier()  # nobody puts the next before it was looked at
    raises(dist.DistBackendError, symm_mem.put_signal, torch.zeros(7), part, after)  # beyond the block
    raises(TypeError, symm_mem.put_signal, torch.zeros(6, device="meta"), part, after)
    for numbers, address in ((part.buffer_ptrs, part.buffer_ptrs_dev), (part.signal_pad_ptrs, part.signal_pad_ptrs_dev)):
        assert list((ctypes.c_uint64 * size).from_address(address)) == numbers, numbers
    kind = symm_mem.SymmetricMemory
    column = kind.empty_strided_p2p((3, 2), (1, 3), torch.float64, torch.device("cpu"), group_name=name)
    column.copy_(torch.arange(6.0).view(3, 2) + rank)
    assert column.stride() == (1, 3) and kind.is_symm_mem_tensor(column)
    handle = kind.rendezvous(column)
    handle.barrier()
    same(handle.get_remote_tensor(after, (2, 3), torch.float64).t(), torch.arange(6.0, dtype=torch.float64).view(3, 2) + after)
    handle.barrier()
    assert kind.rendezvous(column, name) is handle
    raises(ValueError, kind.rendezvous, tensor)  # which group?
    raises(TypeError, kind.empty_strided_p2p, (2,), (1,), torch.float32, "meta")
    kept = kind.empty_strided_p2p((4,), (1,), torch.int64, "cpu", alloc_id=7).fill_(rank)
    raises(dist.DistBackendError, kind.empty_strided_p2p, (4,), (1,), torch.int64, "cpu", alloc_id=7)  # somebody has it
    address = kept.data_ptr()
    del kept
    again = kind.empty_strided_p2p((4,), (1,), torch.int64, "cpu", alloc_id=7)
    assert again.data_ptr() == address and again.tolist() == [rank] * 4
    shape = (2, 3, 4)
    for dim in (0, 1, 2, -1):
        for restrided in (symm_mem.restride_A_shard_for_fused_all_gather_matmul, symm_mem.restride_A_for_fused_matmul_reduce_scatter):
            value = data(rank, shape, torch.float32)
            found = restrided(value, dim)
            same(found, value)
            assert found.movedim(dim, 0).is_contiguous()
    for each in (symm_mem, kind):
        assert each.get_backend("cpu") == "shm" and each.get_backend(torch.device("cuda", 0)) is None
        each.set_backend("SHM")
        assert "NVSHMEM" in str(raises(ValueError, each.set_backend, "NVSHMEM"))
    assert symm_mem.is_nvshmem_available() is False


def every_name_of_pytorch(rank, size, gloo):
    """Is there, but for those that are about pools of GPU memory."""
    theirs = torch.distributed._symmetric_memory
    public = {*theirs.__all__, "put_signal", "wait_signal", "get_symm_mem_workspace", "restride_A_shard_for_fused_all_gather_matmul",
              "restride_A_for_fused_matmul_reduce_scatter"}
    missing = {each for each in public if hasattr(theirs, each) and not hasattr(symm_mem, each)}
    assert missing <= {"get_mem_pool"}, missing
    handle = symm_mem.rendezvous(symm_mem.empty(1), dist.group.WORLD)
    missing = {each for each in vars(torch._C._distributed_c10d._SymmetricMemory) if not each.startswith("_") and not hasattr(handle, each)}
    assert missing <= {"get_mempool_allocator", "boxed", "set_group_info"}, missing


if __name__ == "__main__":
    run_all([("gradients_that_are_compiled", 2), ("tensors_of_no_elements+tiles+handles+every_name_of_pytorch", 2), ("tiles+handles", 3)])
