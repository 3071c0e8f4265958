#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's torch.distributed on Tutti: DistributedDataParallel fits a small network, every rank on rows of its own.

    PYTHONPATH=build/release/python python3 -m tutti.run -n 2 examples/python_torch.py
    PYTHONPATH=build/release/python torchrun --nproc-per-node 2 examples/python_torch.py

All that is Tutti's are the import and the name of the backend. All ranks end with the same weights."""
import sys

import torch
import torch.distributed as dist

import tutti.torch  # noqa: F401  registers the backend


def main(steps=100):
    dist.init_process_group("tutti")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.02)
    torch.manual_seed(rank + 1)  # other rows on every rank
    for step in range(steps):
        x = 6 * torch.rand(64, 1) - 3
        loss = (parallel(x) - torch.sin(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged meanwhile
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f} on {size} ranks", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    everybody = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everybody, weights)
    same = all(torch.equal(weights, other) for other in everybody)
    print(f"rank {rank} has {'the same weights as all' if same else 'weights of its own'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
