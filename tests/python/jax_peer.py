#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX on the CPU: the collectives read them where they lie, tensors look at their memory by DLPack and JAX at that of tensors, without copies."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip, with_pytorch  # noqa: E402

with_pytorch()
import tutti  # noqa: E402

try:
    import jax
    import numpy
except ImportError:
    skip("JAX is not installed (make test-peers installs it)")
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp  # noqa: E402
from tutti import tensor as tt  # noqa: E402


def tensors_and_arrays_share_memory():
    x = jnp.arange(12, dtype="float32").reshape(3, 4)
    ours = tt.from_dlpack(x)
    assert ours.shape == (3, 4) and ours.dtype == "f32" and ours.tolist() == x.tolist() and ours.data_ptr == x.unsafe_buffer_pointer()
    assert (ours * 2).sum().item() == float(2 * x.sum())
    mine = tt.arange(8, dtype="f32").reshape(2, 4)
    theirs = jnp.from_dlpack(mine)
    assert theirs.shape == (2, 4) and theirs.tolist() == mine.tolist() and theirs.unsafe_buffer_pointer() == mine.data_ptr  # the very memory
    del mine
    assert float(theirs.sum()) == 28  # which lives as long as somebody looks
    for dtype in ("f32", "f16", "bf16", "i8", "i16", "i32", "u8", "u16", "u32", "bool"):
        mine = tt.tensor([1, 0, 1], dtype=dtype)
        theirs = jnp.from_dlpack(mine)
        back = tt.from_dlpack(theirs)
        assert back.dtype == dtype and back.tolist() == mine.tolist(), dtype


def what_jax_may_not_see_is_told():
    raises(tutti.Error, jnp.from_dlpack, tt.ones(2, requires_grad=True))
    raises(Exception, jnp.from_dlpack, tt.ones(2, device="meta"))


def an_array_is_never_written():
    """JAX's arrays do not change: as_tensor copies them, and collectives refuse to write them."""
    x = jnp.ones(4)
    ours = tt.as_tensor(x)
    ours += 1
    assert x.tolist() == [1.0] * 4 and ours.tolist() == [2.0] * 4
    with tutti.World() as world:
        for call in (world.group.all_reduce, world.group.broadcast):
            assert "JAX" in str(raises(TypeError, call, x))
        assert x.tolist() == [1.0] * 4


def together():
    with tutti.World() as world:
        x = jnp.full((3,), float(world.rank + 1))
        total = numpy.zeros(3, "f4")
        world.group.all_reduce(x, out=total)
        assert total.tolist() == [3.0] * 3
        for dtype in ("float32", "bfloat16"):
            rows = world.group.all_gather(x.astype(dtype))
            assert rows.dtype == dtype and jnp.asarray(rows).tolist() == [[1.0] * 3, [2.0] * 3]
        summed = jnp.from_dlpack(tt.all_reduce(tt.as_tensor(x), world).wait())
        assert summed.tolist() == [3.0] * 3


def ranks_reduce_arrays():
    tutti.spawn(together, 2)


if __name__ == "__main__":
    run((tensors_and_arrays_share_memory, what_jax_may_not_see_is_told, an_array_is_never_written, ranks_reduce_arrays))
