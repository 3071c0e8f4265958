# SPDX-License-Identifier: Apache-2.0
"""What bench/compile_cuda.c measures, with PyTorch: torch.compile and eager code."""
import statistics
import time

import torch
import torch.nn.functional as F

ROUNDS, CALLS = 7, 50


def chain(x):
    return torch.relu(torch.tanh(x * 2 + 1) - x) * torch.sigmoid(x) + 0.5


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def soft_rows(x):
    return torch.softmax(x * 0.125, -1)


def squares(x, y):
    return torch.mean(torch.square(x - y))


def time_of(function, inputs, waits=False):
    rounds = []
    for turn in range(-1, ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            function(*inputs)
            if waits:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        if turn >= 0:
            rounds.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return statistics.median(rounds)


def measure(name, function, *inputs):
    torch._dynamo.reset()
    begin = time.perf_counter()
    compiled = torch.compile(function)
    compiled(*inputs)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    fast, waited, plain = time_of(compiled, inputs), time_of(compiled, inputs, True), time_of(function, inputs)
    print(f"{name:16} compiled {fast:9.2f} us, waited for {waited:9.2f} us, operators {plain:9.2f} us, first call {first:.3f} s", flush=True)


with torch.no_grad():
    x, y = torch.randn(16 << 20, device="cuda"), torch.randn(16 << 20, device="cuda")
    wide, bias = torch.randn(8192, 3072, device="cuda").bfloat16(), torch.randn(3072, device="cuda").bfloat16()
    measure("chain", chain, x)
    measure("chain_bf16", chain, x.bfloat16())
    measure("bias_gelu_bf16", bias_gelu, wide, bias)
    measure("softmax", soft_rows, x.view(16384, 1024))
    measure("mean_square", squares, x, y)
    measure("tiny", chain, torch.randn(16, device="cuda"))
