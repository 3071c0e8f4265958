# SPDX-License-Identifier: Apache-2.0
"""Tensors with gradients, and collectives on them that can be differentiated:

    from tutti import tensor as tt

    w = tt.randn((3, 3), requires_grad=True)
    loss = (w @ x).square().sum()
    loss.backward()                              # w.grad is there now

Every operator of docs/operators.md is a function here, and a method of Tensor where its first argument is one. Networks are in tutti.nn, optimizers in
tutti.optim, training on several ranks in tutti.parallel; tutti.compile compiles a function of tensors.
"""
from . import _operators
from ._autograd import (Function, FunctionContext, Node, backward, checkpoint, detect_anomaly, enable_grad, grad_enabled, gradients, no_grad,
                        preserve_versions, queue_callback, saved_tensors_hooks)
from ._dlpack import from_dlpack
from ._make import arange, as_tensor, from_bytes, from_numpy, memory_trim, seed, tensor
from ._more import (SymmetricPool, batch_p2p, fused_all_gather_matmul, fused_all_gather_scaled_matmul, fused_workspace_bytes, is_symmetric, load,
                    load_metadata, pending_works, pipelined_all_gather_and_consume, pipelined_produce_and_all_to_all, save, symm_empty, wait_all, waited)
from ._operators import *  # noqa: F401,F403
from ._tensor import Tensor

__all__ = ["Function", "FunctionContext", "Node", "SymmetricPool", "Tensor", "arange", "as_tensor", "backward", "batch_p2p", "checkpoint", "detect_anomaly", "enable_grad",
           "from_bytes", "from_dlpack", "from_numpy", "fused_all_gather_matmul", "fused_all_gather_scaled_matmul", "fused_workspace_bytes", "grad_enabled", "gradients",
           "is_symmetric", "load", "load_metadata", "memory_trim", "no_grad", "pending_works", "pipelined_all_gather_and_consume",
           "pipelined_produce_and_all_to_all", "preserve_versions", "queue_callback", "save", "saved_tensors_hooks", "seed", "symm_empty", "tensor", "wait_all", "waited"]
__all__ += _operators.__all__
