# SPDX-License-Identifier: Apache-2.0
#
# The peer of bench/compile.c: the same cases in PyTorch, one round at a time. Reads "setup CASE", "eager CASE" and "compiled CASE" from its
# input and answers with seconds; 0 where it cannot.
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 256, 4, 8192
state = {}


def chain_setup():
    state["x"] = torch.randn(16 << 20)


def chain_function(x):
    return torch.relu(torch.tanh(2 * x + 1) - x) * torch.sigmoid(x) + 0.5


def chain(function):
    with torch.no_grad():
        function(state["x"])


def parameter(*shape, scale=1.0):
    state["w"].append((torch.randn(*shape) * scale).requires_grad_())


def gpt_step_setup():
    state["w"] = []
    parameter(VOCABULARY, WIDTH, scale=0.02)
    parameter(LENGTH, WIDTH, scale=0.02)
    for _ in range(LAYERS):
        parameter(WIDTH), parameter(WIDTH, scale=0)
        parameter(3 * WIDTH, WIDTH, scale=0.02), parameter(3 * WIDTH, scale=0)
        parameter(WIDTH, WIDTH, scale=0.02), parameter(WIDTH, scale=0)
        parameter(WIDTH), parameter(WIDTH, scale=0)
        parameter(4 * WIDTH, WIDTH, scale=0.02), parameter(4 * WIDTH, scale=0)
        parameter(WIDTH, 4 * WIDTH, scale=0.02), parameter(WIDTH, scale=0)
    parameter(WIDTH), parameter(WIDTH, scale=0)
    parameter(VOCABULARY, WIDTH, scale=0.02)
    state["o"] = torch.optim.AdamW(state["w"], lr=1e-3, weight_decay=0.01)
    state["x"] = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)), torch.randint(0, VOCABULARY, (BATCH * LENGTH,)), torch.arange(LENGTH))


def gpt_step_function(tokens, targets, positions):
    w = state["w"]
    x = F.embedding(tokens, w[0]) + F.embedding(positions, w[1])
    for layer in range(LAYERS):
        p = w[2 + 12 * layer:14 + 12 * layer]
        h = F.linear(F.layer_norm(x, (WIDTH,), p[0], p[1]), p[2], p[3])
        q, k, v = (y.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for y in h.chunk(3, 2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(a.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH), p[4], p[5])
        h = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), p[6], p[7]), p[8], p[9]))
        x = x + F.linear(h, p[10], p[11])
    p = w[2 + 12 * LAYERS:]
    logits = F.linear(F.layer_norm(x, (WIDTH,), p[0], p[1]), p[2])
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets)


# The peer's best: what it can compile in one graph is the loss; the optimizer is compiled by itself.
def gpt_step(function):
    function(*state["x"]).backward()
    torch.nn.utils.clip_grad_norm_(state["w"], 1.0)
    state["o"].step()
    state["o"].zero_grad(set_to_none=True)


print("ready PyTorch", torch.__version__, flush=True)
compiled = {}
for line in sys.stdin:
    what, name = line.split()
    start = time.perf_counter()
    try:
        if what == "setup":
            globals()[name + "_setup"]()
        else:
            function = globals()[name + "_function"]
            if what == "compiled":
                function = compiled.setdefault(name, torch.compile(function))
            globals()[name](function)
        print(time.perf_counter() - start, flush=True)
    except Exception as error:
        print(f"{what} {name}: {error}", file=sys.stderr)
        print(0, flush=True)
