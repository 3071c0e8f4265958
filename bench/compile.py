# SPDX-License-Identifier: Apache-2.0
#
# The peer of bench/compile.c: the same cases in PyTorch, one round at a time. Reads "setup CASE", "eager CASE" and "compiled CASE" from its
# input and answers with seconds; 0 where it cannot.
import sys
import time

import gpt
import torch

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
state = {}


def chain_setup():
    state["x"] = torch.randn(16 << 20)


def chain_function(x):
    return torch.relu(torch.tanh(2 * x + 1) - x) * torch.sigmoid(x) + 0.5


def chain(function):
    with torch.no_grad():
        function(state["x"])


def gpt_step_setup():
    state["w"] = gpt.parameters()
    state["o"] = torch.optim.AdamW(state["w"], lr=1e-3, weight_decay=0.01)
    state["x"] = gpt.batch()


def gpt_step_function(tokens, targets, positions):
    return gpt.loss(state["w"], tokens, targets, positions)


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
