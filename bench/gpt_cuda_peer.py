# SPDX-License-Identifier: Apache-2.0
"""What bench/gpt_cuda.c measures, with PyTorch: a training step of a GPT of 124 million parameters, and its parts."""
import sys
import time

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 12, 768, 12, 1024, 8, 50257


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = [h.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for h in self.qkv(self.first(x)).chunk(3, 2)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.norm(self.blocks(x))).view(-1, VOCABULARY)


def step_of(dtype, compiled):
    torch.manual_seed(1)
    model = Gpt().cuda().to(dtype)
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")
    targets = torch.randint(0, VOCABULARY, (BATCH * LENGTH,), device="cuda")
    taken = []
    for i in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        F.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() >> 20
    print(f"gpt {str(dtype)[6:]:<8} {'compiled' if compiled else 'eager'} step {sorted(taken[3:])[3]:8.2f} ms   peak {peak} MiB", flush=True)


def part(name, dtype, leaf, call):
    there, back = [], []
    for i in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        y = call()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        y.backward(None if y.dim() == 0 else y.detach())
        torch.cuda.synchronize()
        there.append(middle - begin)
        back.append(time.perf_counter() - middle)
        leaf.grad = None
    print(f"{name:<28} {str(dtype)[6:]:<8} forward {1e6 * sorted(there[2:])[3]:9.1f} us   backward {1e6 * sorted(back[2:])[3]:9.1f} us", flush=True)


def parts(dtype):
    def leaf(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    tokens_count = BATCH * LENGTH
    x, wide, gain, bias = leaf(tokens_count, WIDTH), leaf(tokens_count, 4 * WIDTH), leaf(WIDTH), leaf(WIDTH)
    up, up_bias, head, logits = leaf(4 * WIDTH, WIDTH), leaf(4 * WIDTH), leaf(VOCABULARY, WIDTH), leaf(tokens_count, VOCABULARY)
    tokens = torch.randint(0, VOCABULARY, (tokens_count,), device="cuda")
    heads = [leaf(BATCH, HEADS, LENGTH, WIDTH // HEADS) for _ in range(3)]
    part("layer_norm 8192x768", dtype, x, lambda: F.layer_norm(x, (WIDTH,), gain, bias))
    part("linear 768 to 3072", dtype, x, lambda: F.linear(x, up, up_bias))
    part("linear 768 to 50257", dtype, x, lambda: F.linear(x, head))
    part("gelu 8192x3072", dtype, wide, lambda: F.gelu(wide))
    part("add 8192x768", dtype, x, lambda: x + x)
    part("embedding 8192x768", dtype, head, lambda: F.embedding(tokens, head))
    part("attention 8x12x1024x64", dtype, heads[0], lambda: F.scaled_dot_product_attention(*heads, is_causal=True))
    part("cross_entropy 8192x50257", dtype, logits, lambda: F.cross_entropy(logits, tokens))


what = sys.argv[1] if len(sys.argv) > 1 else "bf16"
if what == "parts":
    parts(torch.bfloat16)
    parts(torch.float32)
else:
    step_of(torch.float32 if what == "f32" else torch.bfloat16, len(sys.argv) > 2)
