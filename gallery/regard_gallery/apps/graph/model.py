"""A graph attention network, which classifies the nodes of a graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import Graph, GraphAttention

DROPOUT = 0.6


class GAT(nn.Module):
    """Two graph attention layers (Velickovic et al., 2018).

    The first has 8 heads of 8 channels, the second one head with a channel per class.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GraphAttention(features, 8, 8, dropout=DROPOUT)
        self.second = GraphAttention(64, classes, mean=True, dropout=DROPOUT)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """Maps the nodes' features (n, features), dense or sparse, to logits (n, classes)."""
        x = F.elu(self.first(drop(x, self.training), graph))
        out: Tensor = self.second(drop(x, self.training), graph)
        return out


def drop(x: Tensor, training: bool) -> Tensor:
    """Applies dropout to x, or to the stored entries of a sparse x."""
    if not x.is_sparse:
        return F.dropout(x, DROPOUT, training)
    values = F.dropout(x.values(), DROPOUT, training)
    return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)
