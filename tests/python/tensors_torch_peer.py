#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors from Python beside PyTorch: memory goes both ways without copies, and a small GPT computes the same losses and gradients."""
import gc
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip, with_pytorch  # noqa: E402

with_pytorch()
try:
    import torch
except ImportError:
    skip("PyTorch is not installed (make test-peers installs it)")
import torch.nn.functional as functional  # noqa: E402

import tutti  # noqa: E402
from tutti import nn, optim, tensor as tt  # noqa: E402

torch.set_num_threads(1)  # beside other tests


def both_ways():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
                  torch.complex64):
        theirs = torch.arange(6).reshape(2, 3).to(dtype)
        ours = tt.as_tensor(theirs)
        assert ours.data_ptr == theirs.data_ptr() and ours.shape == (2, 3)
        back = torch.from_dlpack(ours)
        assert back.data_ptr() == theirs.data_ptr() and back.dtype == dtype and torch.equal(back, theirs)
    theirs = torch.zeros(4, 4)
    ours = tt.as_tensor(theirs.t()[1:])
    ours[0] = 5
    assert theirs[0, 1] == 5 and ours.strides == (1, 4)
    back = torch.utils.dlpack.from_dlpack(ours)
    del ours, theirs
    gc.collect()
    back += 1
    assert back[0, 0] == 6
    raises((tutti.Error, BufferError, RuntimeError), tt.as_tensor, torch.ones(1, requires_grad=True))
    raises((tutti.Error, RuntimeError), torch.from_dlpack, tt.ones(1, requires_grad=True))
    assert tt.tensor(torch.ones(2)).tolist() == [1, 1]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), nn.Attention(width, heads=2)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.narrow(self.wide(x).gelu())


class Gpt(nn.Module):
    def __init__(self, letters, width):
        super().__init__()
        self.table, self.blocks, self.head = nn.Embedding(letters, width), nn.Sequential(Block(width), Block(width)), nn.Linear(width, letters)

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)))


def torch_forward(state, tokens, width):
    x = functional.embedding(tokens, state["table.weight"])
    for block in ("blocks.0.", "blocks.1."):
        y = functional.layer_norm(x, (width,), state[block + "before.weight"], state[block + "before.bias"])
        q, k, v = (part.unflatten(-1, (2, width // 2)).transpose(1, 2) for part in functional.linear(y, state[block + "attention.qkv.weight"]).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + functional.linear(y, state[block + "attention.out.weight"])
        y = functional.gelu(functional.linear(x, state[block + "wide.weight"], state[block + "wide.bias"]))
        x = x + functional.linear(y, state[block + "narrow.weight"], state[block + "narrow.bias"])
    return functional.linear(x, state["head.weight"], state["head.bias"])


def a_gpt_trains_alike():
    tt.seed(4)
    net, width = Gpt(11, 16), 16
    state = {name: torch.from_dlpack(tensor.clone()).requires_grad_() for name, tensor in net.state_dict().items()}
    ours, theirs = optim.AdamW(net, learning_rate=0.01), torch.optim.AdamW(state.values(), lr=0.01, weight_decay=0.01)
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step = tutti.compile(lambda x, y: tt.cross_entropy(net(x).reshape(-1, 11), y.reshape(-1)), full=True)
    for _ in range(5):
        expected = functional.cross_entropy(torch_forward(state, inputs, width).reshape(-1, 11), targets.reshape(-1))
        theirs.zero_grad()
        expected.backward()
        loss = step(tt.as_tensor(inputs), tt.as_tensor(targets))
        ours.zero_grad()
        loss.backward()
        assert abs(loss.item() - expected.item()) < 1e-4, (loss.item(), expected.item())
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(torch.from_dlpack(parameter.grad), state[name].grad, rtol=1e-3, atol=1e-5)
        theirs.step()
        ours.step()


def collectives_refuse_tensors_whose_memory_says_something_else():
    with tutti.World() as world:
        values = torch.tensor([1 + 2j, 3 - 1j])
        for view in (values.conj(), torch._neg_view(torch.ones(2))):
            assert "resolve_conj" in str(raises(ValueError, world.group.all_reduce, view))
        assert "to_dense" in str(raises(TypeError, world.group.all_reduce, torch.eye(2).to_sparse()))
        raises(TypeError, world.group.all_reduce, torch.ones(2, device="meta"))
        assert world.group.all_gather(values.conj().resolve_conj())[0].tolist() == [1 - 2j, 3 + 1j]


def messages_take_columns_and_reductions_take_factors():
    with tutti.World() as world:
        group, matrix, out = world.group, torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
        for part in ((slice(None), 1), (slice(None), slice(1, 3)), (slice(None, None, 2),)):
            work = group.recv(out[part], source=0, wait=False)
            group.send(matrix[part], to=0)
            work.wait()
            assert torch.equal(out[part], matrix[part]) and out.count_nonzero() == matrix[part].count_nonzero(), part
            out.zero_()
        assert "not contiguous" in str(raises(ValueError, group.send, matrix.t(), 0))
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
            real = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
            for factor in (1.5, torch.tensor(1.5, dtype=real)):
                assert group.all_reduce(torch.full((3,), 2, dtype=dtype), "premul_sum", factor=factor).tolist() == [3] * 3, dtype
        raises(TypeError, group.all_reduce, torch.ones(2, dtype=torch.float64), "premul_sum", factor=torch.tensor(1.5))


if __name__ == "__main__":
    run((both_ways, a_gpt_trains_alike, collectives_refuse_tensors_whose_memory_says_something_else,
         messages_take_columns_and_reductions_take_factors))
