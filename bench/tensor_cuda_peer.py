# SPDX-License-Identifier: Apache-2.0
"""What bench/tensor_cuda.c measures, with PyTorch: microseconds of each operator on a GPU."""
import time

import torch
import torch.nn.functional as F


def measure(name, count, call, host=False):
    rounds = []
    for round in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        rounds.append(1e6 * ((enqueued if host else time.perf_counter()) - begin) / count)
    print(f"{name:<24} {sorted(rounds[1:])[5]:10.2f} us", flush=True)


torch.set_grad_enabled(False)
on = dict(device="cuda")
tiny, other, few = torch.randn(16, **on), torch.randn(16, **on), torch.randn(4, 4, **on)
x, y = torch.randn(16 << 20, **on), torch.randn(16 << 20, **on)
for _ in range(100):  # a GPU that had nothing to do is slow at first
    x.view(4096, 4096) @ x.view(4096, 4096)
# Few at a time: a stream that is full makes the host wait for the GPU.
measure("host add [16]", 200, lambda: tiny + other, host=True)
measure("host mul by 2 [16]", 200, lambda: tiny * 2, host=True)
measure("host relu [16]", 200, lambda: torch.relu(tiny), host=True)
measure("host sum [16]", 200, lambda: tiny.sum(), host=True)
measure("host softmax [4, 4]", 200, lambda: torch.softmax(few, 1), host=True)
measure("host matmul [4, 4]", 200, lambda: few @ few, host=True)
with torch.enable_grad():
    leaf = tiny.clone().requires_grad_()
    measure("host add [16], recorded", 200, lambda: leaf + other, host=True)
narrow = x.bfloat16()
measure("add f32 16M", 50, lambda: x + y)
measure("gelu bf16 16M", 50, lambda: F.gelu(narrow))
measure("chain f32 16M", 20, lambda: torch.tanh((x + y) * torch.sigmoid(y)))
measure("sum f32 16M", 50, lambda: x.sum())
square = x.view(4096, 4096)
measure("sum columns f32 4096", 50, lambda: square.sum(0))
measure("transpose f32 4096", 50, lambda: square.t().contiguous())
measure("f32 to bf16 16M", 50, lambda: x.bfloat16())
rows = x.view(16384, 1024)
measure("softmax f32 16384x1024", 50, lambda: torch.softmax(rows, 1))
weight = torch.randn(1024, **on)
measure("layer_norm 16384x1024", 50, lambda: F.layer_norm(rows, (1024,), weight, weight))
a, b = torch.randn(4096, 4096, dtype=torch.bfloat16, **on), torch.randn(4096, 4096, dtype=torch.bfloat16, **on)
measure("matmul bf16 4096", 20, lambda: a @ b)
measure("matmul^T bf16 4096", 20, lambda: a @ b.t())
measure("matmul f32 4096", 5, lambda: square @ square)
table, index = torch.randn(50257, 768, **on), torch.randint(0, 50257, (8192,), **on)
measure("embedding 8192x768", 50, lambda: F.embedding(index, table))
grad = torch.randn(8192, 768, **on)
measure("index_add 8192x768", 5, lambda: torch.index_add(table, 0, index, grad))
logits, targets = torch.randn(8192, 8192, **on), torch.randint(0, 8192, (8192,), **on)
measure("cross_entropy 8192x8192", 20, lambda: F.cross_entropy(logits, targets))
parameter = torch.nn.Parameter(x)
parameter.grad = y
optimizer = torch.optim.AdamW([parameter], fused=True)
measure("adamw f32 16M", 20, optimizer.step)
measure("randn f32 16M", 20, lambda: torch.randn(16 << 20, **on))
