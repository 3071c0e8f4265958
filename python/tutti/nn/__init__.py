# SPDX-License-Identifier: Apache-2.0
"""Modules on the tensors of tutti.tensor:

    from tutti import nn, tensor as tt

    net = nn.Sequential(nn.Linear(4, 8), tt.relu, nn.Linear(8, 1))
    loss = tt.mse_loss(net(x), y)
    loss.backward()
"""
from ._layers import (Attention, ColumnLinear, Dropout, Embedding, HeadsAttention, Lambda, LayerNorm, Linear, ModuleList, RMSNorm, RowLinear, Sequential,
                      VocabularyEmbedding, sum_gradients)
from ._module import Module, Parameter

__all__ = ["Attention", "ColumnLinear", "Dropout", "Embedding", "HeadsAttention", "Lambda", "LayerNorm", "Linear", "Module", "ModuleList", "Parameter", "RMSNorm",
           "RowLinear", "Sequential", "VocabularyEmbedding", "sum_gradients"]
