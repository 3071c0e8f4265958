# SPDX-License-Identifier: Apache-2.0
#
# The peer of bench/tensor.c: the same cases in PyTorch, one turn at a time. Reads "setup CASE", "run CASE RUNS" and "peak" from its input
# and answers with one number each: seconds of one run, or MiB.
import sys
import time

import gpt
import torch
import torch.nn.functional as F

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
state = {}


def parameter(*shape, scale=1.0):
    p = (torch.randn(*shape) * scale).requires_grad_()
    state["w"].append(p)
    return p


def optimizer():
    return torch.optim.AdamW(state["w"], lr=1e-3, weight_decay=0.01)


# The quickest form of the peer for a step alone.
def adamw_setup():
    state["w"] = []
    for _ in range(8):
        for shape in ((256,), (256, 256), (1024, 256), (1024,), (256, 1024)):
            parameter(*shape)
    for p in state["w"]:
        p.grad = torch.randn_like(p)
    state["o"] = torch.optim.AdamW(state["w"], lr=1e-3, weight_decay=0.01, fused=True)


def adamw():
    state["o"].step()


def train(loss):
    loss.backward()
    state["o"].step()
    state["o"].zero_grad(set_to_none=True)


def matmul_setup():
    state["x"] = [torch.randn(1024, 1024), torch.randn(1024, 1024)]


def matmul():
    state["x"][0] @ state["x"][1]


def softmax_setup():
    state["x"] = torch.randn(4096, 1024)


def softmax():
    F.softmax(state["x"], -1)


def layer_norm_setup():
    state["x"] = torch.randn(4096, 768), torch.ones(768), torch.zeros(768)


def layer_norm():
    x, w, b = state["x"]
    F.layer_norm(x, (768,), w, b, 1e-5)


pointwise_chain_setup = dropout_setup = clone_setup = transpose_copy_setup = cast_to_bf16_setup = softmax_setup


def dropout():
    F.dropout(state["x"], 0.1)


def clone():
    state["x"].clone()


def transpose_copy():
    state["x"].t().contiguous()


def cast_to_bf16():
    state["x"].to(torch.bfloat16)


def cat_setup():
    state["x"] = torch.randn(4096, 512), torch.randn(4096, 512)


def cat():
    torch.cat(state["x"], 1)


def pointwise_chain():
    x = state["x"]
    F.gelu(x * 0.5 + 1) * x + torch.tanh(x)


def gelu_setup():
    state["x"] = torch.randn(1024, 1536).requires_grad_(), torch.ones(1024, 1536)


def gelu():
    x, g = state["x"]
    F.gelu(x).backward(g)
    x.grad = None


def attention_setup():
    state["x"] = [torch.randn(4, 6, 512, 64).requires_grad_() for _ in range(3)], torch.ones(4, 6, 512, 64)


def attention():
    qkv, g = state["x"]
    F.scaled_dot_product_attention(*qkv, is_causal=True).backward(g)
    for x in qkv:
        x.grad = None


def odd_matmul_setup():
    state["x"] = torch.randn(64, 37, 65), torch.randn(64, 65, 43)


def odd_matmul():
    a, b = state["x"]
    for _ in range(10):
        a @ b


def cross_entropy_setup():
    state["x"] = torch.randn(1024, 8192).requires_grad_(), torch.randint(0, 8192, (1024,))


def cross_entropy():
    x, t = state["x"]
    F.cross_entropy(x, t).backward()
    x.grad = None


def tiny_add_setup():
    state["x"] = torch.ones(8), torch.ones(8)


def tiny_add():
    a, b = state["x"]
    for _ in range(10000):
        a + b


def tiny_add_grad_setup():
    state["x"] = torch.ones(8).requires_grad_(), torch.ones(8)


tiny_add_grad = tiny_add


def mlp_step_setup():
    state["w"] = []
    for i, o in ((784, 1024), (1024, 1024), (1024, 10)):
        parameter(o, i, scale=0.03)
        parameter(o, scale=0)
    state["o"] = optimizer()
    state["x"] = torch.randn(256, 784), torch.randint(0, 10, (256,))


def mlp_step():
    w, (h, t) = state["w"], state["x"]
    for i in range(3):
        h = F.linear(h, w[2 * i], w[2 * i + 1])
        if i < 2:
            h = F.relu(h)
    train(F.cross_entropy(h, t))


def gpt_step_setup():
    state["w"] = gpt.parameters()
    state["o"] = optimizer()
    state["x"] = gpt.batch()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def gpt_step():
    train(gpt.loss(state["w"], *state["x"]))


def peak():
    with open("/proc/self/status") as f:
        return next(float(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))


def turn(case, runs, wake):
    if wake:
        case()
    start = time.perf_counter()
    for _ in range(runs):
        case()
    return (time.perf_counter() - start) / runs


print("ready PyTorch", torch.__version__, flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "peak":
        print(peak(), flush=True)
    elif words[0] == "setup":
        globals()[words[1] + "_setup"]()
        print(0, flush=True)
    else:
        print(turn(globals()[words[1]], int(words[2]), words[3] == "1"), flush=True)
