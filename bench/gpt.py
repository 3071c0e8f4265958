# SPDX-License-Identifier: Apache-2.0
#
# The small GPT of bench/gpt.h in PyTorch: its parameters, a batch, and the loss.
import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 256, 4, 8192


def parameters():
    made = []

    def parameter(*shape, scale=1.0):
        made.append((torch.randn(*shape) * scale).requires_grad_())

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
    return made


def batch():
    """Tokens, targets and positions."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH)), torch.randint(0, VOCABULARY, (BATCH * LENGTH,)), torch.arange(LENGTH)


def loss(w, tokens, targets, positions):
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
