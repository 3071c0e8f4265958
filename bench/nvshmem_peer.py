# SPDX-License-Identifier: Apache-2.0
"""PyTorch's symmetric memory on NVSHMEM, in the ranks of one job: what a rendezvous and a look at a peer cost there.

    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 tutti run -n 2 python3 bench/nvshmem_peer.py     (two ranks on one GPU: under MPS)
"""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
dist.init_process_group("gloo")
symmetric.set_backend("NVSHMEM")
name = dist.group.WORLD.group_name
symmetric.enable_symm_mem_for_group(name)
begin = time.perf_counter()
block = symmetric.empty(1 << 20, dtype=torch.float32, device="cuda").fill_(rank + 1)
first = time.perf_counter()
handle = symmetric.rendezvous(block, group=name)
met = time.perf_counter()
torch.cuda.synchronize()
dist.barrier()
peer = handle.get_buffer((rank + 1) % size, (1 << 20,), torch.float32)
seen, wanted = float(peer[5]), (rank + 1) % size + 1
dist.barrier()
if seen != wanted:
    raise SystemExit(f"rank {rank}: a peer's memory holds {seen}, not {wanted}")
if rank == 0:
    print(f"PyTorch's NVSHMEM, {size} ranks: first allocation {(first - begin) * 1e3:.1f} ms, rendezvous {(met - first) * 1e3:.1f} ms, peers right", flush=True)
os._exit(0)
