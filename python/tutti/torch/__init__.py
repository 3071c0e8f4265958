# SPDX-License-Identifier: Apache-2.0
"""PyTorch's torch.distributed on Tutti.

    import torch.distributed as dist
    import tutti.torch                            # registers the backend

    dist.init_process_group("tutti")              # instead of "gloo"

Collectives, point-to-point messages, sub-groups, functional collectives, DeviceMesh, DTensor, DDP, FSDP2 and torch.compile use it from then on. Tensors are the
CPU's or, where PyTorch has CUDA and the plug-in libtutti-cuda.so is there, a GPU's. What fails is a torch.distributed.DistBackendError with the library's words, and with `status` and `ranks`, those who are at fault.
"""
import torch.distributed as _distributed

from . import cuda as _cuda
from .group import ProcessGroup
from .group import create as _create
from .member import monitored_barrier

if not hasattr(_distributed.Backend, "TUTTI"):
    _distributed.Backend.register_backend("tutti", _create, extended_api=True, devices=["cpu", "cuda"] if _cuda.here else ["cpu"])

__all__ = ["ProcessGroup", "monitored_barrier"]
