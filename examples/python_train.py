#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT to write the alphabet, with tensors of Tutti, on one rank or on several:

    PYTHONPATH=build/release/python python3 examples/python_train.py
    PYTHONPATH=build/release/python python3 -m tutti.run -n 2 examples/python_train.py

Every rank has a part of each batch; gradients are averaged while the backward runs. The step is compiled. All ranks end with the same weights."""
import sys

import tutti
from tutti import nn, optim, parallel, tensor as tt

WIDTH, LENGTH, BATCH, LETTERS = 32, 16, 8, 26


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), nn.Attention(WIDTH, heads=4, rope_base=10000.0)
        self.after, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.narrow(self.wide(self.after(x)).gelu())


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.letters(tokens))))


def batch():
    """Rows of the alphabet that begin anywhere, and what follows each letter."""
    start = tt.randint(0, LETTERS, (BATCH, 1)).tolist()
    rows = [[(first[0] + i) % LETTERS for i in range(LENGTH + 1)] for first in start]
    tokens = tt.tensor(rows)
    return tokens[:, :-1], tokens[:, 1:]


def main(steps=100):
    with tutti.World() as world:
        tt.seed(1)
        net = Gpt()
        together = parallel.DataParallel(net, world)
        optimizer = optim.AdamW(net, learning_rate=3e-3)
        schedule = optim.Schedule("cosine", warm_up=10, steps=steps, last=0.1)
        tt.seed(2, world.rank)  # other rows on every rank

        @tutti.compile
        def loss_of(inputs, targets):
            return tt.cross_entropy(net(inputs).reshape(-1, LETTERS), targets.reshape(-1))

        for step in range(steps):
            schedule.apply(optimizer)
            loss = loss_of(*batch())
            loss.backward()
            optim.clip_grad_norm(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0 and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
        with tt.no_grad():
            text = [2]
            while len(text) < LENGTH:
                text.append(net(tt.tensor([text]))[0, -1].argmax().item())
        print(f"rank {world.rank} writes {''.join(chr(ord('a') + letter) for letter in text)}", flush=True)
        together.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
