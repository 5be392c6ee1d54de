"""Attention along the edges of a graph (GAT), at the cost of the edges: never nodes x nodes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._tools.arguments import count, describe, holds_integers, number, probability, tensor_of
from ._module import CheckedModule
from ._sizes import join_heads, split_heads


class SortedEdges(NamedTuple):
    """The edges of all heads in one row, (H * E,): head h owns the nodes from h * n on."""

    source: Tensor  # (H * E,), sorted by target
    starts: Tensor  # (H * n + 1,): where the edges of each target begin
    target: Tensor  # (H * E,)
    by_source: Tensor  # (H * E,): the order that sorts the edges by source
    source_starts: Tensor  # (H * n + 1,)


class Graph:
    """Edges (2, E), from row 0 to row 1, sorted once for all layers and steps.

    Args:
        edges: a tensor of integers or lists, below `nodes`. An edge that is there twice counts twice.
        nodes: how many there are.
        self_loops: let every node attend to itself too, once; loops among `edges` are dropped.
    """

    def __init__(self, edges: Any, nodes: int, *, self_loops: bool = True) -> None:
        self.nodes = count("nodes", nodes, 1)
        edges = _checked(edges, self.nodes)
        if self_loops:
            own = torch.arange(nodes, device=edges.device).expand(2, -1)
            edges = torch.cat([edges[:, edges[0] != edges[1]], own], 1)
        self.edges = edges[:, edges[1].argsort(stable=True)]
        self._rows: dict[int, SortedEdges] = {}

    def rows(self, heads: int) -> SortedEdges:
        """Returns the sorted edges of so many heads. They are computed once and kept."""
        if heads not in self._rows:
            self._rows[heads] = self._make_rows(heads)
        return self._rows[heads]

    def _make_rows(self, heads: int) -> SortedEdges:
        first = self.nodes * torch.arange(heads, device=self.edges.device)[:, None]
        source, target = ((end + first).flatten() for end in self.edges)
        starts, source_starts = self._starts(target, heads), self._starts(source, heads)
        return SortedEdges(source, starts, target, source.argsort(stable=True), source_starts)

    def _starts(self, ends: Tensor, heads: int) -> Tensor:
        return F.pad(ends.bincount(minlength=heads * self.nodes).cumsum(0), (1, 0))

    def __repr__(self) -> str:
        return f"Graph(nodes={self.nodes}, edges={self.edges.shape[1]})"


def _checked(given: Any, nodes: int) -> Tensor:
    edges = tensor_of("edges", given)
    if edges.dim() != 2 or len(edges) != 2 or not holds_integers(edges):
        raise ValueError(f"edges: expected integers (2, E), got {describe(edges)}")
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        raise ValueError(f"edges: expected nodes from 0 to {nodes - 1}, got {edges.min()} to {edges.max()}")
    return edges.long()


class EdgeSoftmax(torch.autograd.Function):
    """The softmax of scores (H * E,) among the edges of each target."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, starts: Tensor, target: Tensor) -> Tensor:
        largest = torch.segment_reduce(scores, "max", offsets=starts)
        w = (scores - largest.index_select(0, target)).exp_()
        w /= _sums(w, starts).index_select(0, target)
        ctx.save_for_backward(w, starts, target)
        return w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        w, starts, target = ctx.saved_tensors
        dw = w * grads[0]
        return dw - w * _sums(dw, starts).index_select(0, target), None, None


def _sums(values: Tensor, starts: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", offsets=starts)


class Gather(torch.autograd.Function):
    """Weights (H * E,) and values (H * n, C) -> each target's weighted sum (H * n, C).

    No tensor of edges x channels: forward and the values' gradient sum in place, the weights' gradient takes
    the edges piece by piece.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, h: Tensor, rows: SortedEdges) -> Tensor:
        ctx.save_for_backward(w, h)
        ctx.rows = rows
        return _weighted(w, h, rows.source, rows.starts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (w, h), rows, d = ctx.saved_tensors, ctx.rows, grads[0].contiguous()
        dw = torch.empty_like(w)
        piece = max(1, PIECE // h.shape[1])
        for at in (slice(i, i + piece) for i in range(0, len(w), piece)):
            pairs = d.index_select(0, rows.target[at]) * h.index_select(0, rows.source[at])
            torch.sum(pairs, -1, out=dw[at])
        back = rows.by_source
        return dw, _weighted(w[back], d, rows.target[back], rows.source_starts), None


PIECE = 2**18  # numbers in a chunk: they fit into a core's cache


def _weighted(w: Tensor, h: Tensor, source: Tensor, starts: Tensor) -> Tensor:
    return F.embedding_bag(source, h, starts, mode="sum", per_sample_weights=w, include_last_offset=True)


class GraphAttention(CheckedModule):
    """A graph attention layer (Velickovic et al., 2018): each node attends to those with an edge to it.

    h = W x;  score of the edge j -> i = leaky_relu(a_source . h_j + a_target . h_i), softmax over the edges
    into i;  out_i = sum_j weight_ij h_j + bias. A node without edges gets the bias.

    Args:
        d_in: the width of the nodes.
        d_head: the width of a head's result.
        heads: how many; their results stand side by side, (n, heads * d_head), or
        mean: are averaged, (n, d_head).
        slope: of the leaky ReLU below 0.
        dropout: of the weights, in training.
        bias: whether one is added.

    Example:
        >>> attend = regard.nn.GraphAttention(16, 8, heads=4)
        >>> attend(torch.randn(5, 16), regard.nn.Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), 5)).shape
        torch.Size([5, 32])
    """

    _shown = ("heads", "d_head", "mean", "dropout")

    def __init__(
        self, d_in: int, d_head: int, heads: int = 1, *, mean: bool = False, slope: float = 0.2,
        dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.d_in, self.d_head = count("d_in", d_in, 1), count("d_head", d_head, 1)
        self.heads, self.mean, self.slope = count("heads", heads, 1), mean, number("slope", slope)
        if not math.isfinite(self.slope):
            raise ValueError(f"slope: expected a finite number, got {slope}")
        self.dropout = probability("dropout", dropout)
        self.project = nn.Linear(d_in, heads * d_head, bias=False)
        self.source, self.target = (nn.Parameter(torch.empty(heads, d_head)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(d_head if mean else heads * d_head)) if bias else None
        for weight in (self.project.weight, self.source, self.target):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """x (n, d_in), dense or sparse -> (n, heads * d_head), or (n, d_head) with `mean`."""
        h = self._projected(x, graph)
        w = F.dropout(self._weights(h, graph), self.dropout, self.training)
        found = Gather.apply(w.flatten(), h.flatten(0, 1), graph.rows(self.heads)).view_as(h)  # type: ignore[no-untyped-call]
        out: Tensor = found.mean(0) if self.mean else join_heads(found)
        return out if self.bias is None else out + self.bias

    def weights(self, x: Tensor, graph: Graph) -> Tensor:
        """Returns the weight of each edge of `graph.edges` in each head, (H, E)."""
        return self._weights(self._projected(x, graph), graph)

    def _projected(self, x: Tensor, graph: Graph) -> Tensor:
        """Projects x to (H, n, d_head)."""
        if x.dim() != 2 or x.shape != (graph.nodes, self.d_in):
            raise ValueError(f"x: expected ({graph.nodes}, d_in = {self.d_in}), got {describe(x)}")
        h: Tensor = torch.sparse.mm(x, self.project.weight.T) if x.is_sparse else self.project(x)
        return split_heads(h, self.heads).contiguous()

    def _weights(self, h: Tensor, graph: Graph) -> Tensor:
        """Returns the softmax weights (H, E)."""
        rows = graph.rows(self.heads)
        a, b = ((h @ part[:, :, None]).flatten() for part in (self.source, self.target))  # (H * n,)
        scores = F.leaky_relu(a.index_select(0, rows.source) + b.index_select(0, rows.target), self.slope)
        w: Tensor = EdgeSoftmax.apply(scores, rows.starts, rows.target)  # type: ignore[no-untyped-call]
        return w.view(self.heads, -1)
