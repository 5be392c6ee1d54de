"""A graph attention network: nodes of a graph are classified by their own features and their neighbours'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import Graph, GraphAttention

DROPOUT = 0.6


class GAT(nn.Module):
    """Two layers of graph attention, as in Velickovic et al. (2018): 8 heads of 8, then one of classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GraphAttention(features, 8, 8, dropout=DROPOUT)
        self.second = GraphAttention(64, classes, mean=True, dropout=DROPOUT)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """Features (n, d), dense or sparse -> scores of the classes (n, classes)."""
        x = F.elu(self.first(drop(x, self.training), graph))
        out: Tensor = self.second(drop(x, self.training), graph)
        return out


def drop(x: Tensor, training: bool) -> Tensor:
    """Dropout, of the stored entries alone if x is sparse: the others are 0 anyway."""
    if not x.is_sparse:
        return F.dropout(x, DROPOUT, training)
    kept = F.dropout(x.values(), DROPOUT, training)
    return torch.sparse_coo_tensor(x.indices(), kept, x.shape, is_coalesced=True, check_invariants=False)
