"""Graph attention (GAT) in time and memory linear in the number of edges."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._api.projection import Linear
from .._tools.arguments import count, describe, holds_integers, number, probability, tensor_of
from ._module import CheckedModule
from ._sizes import join_heads, split_heads


class SortedEdges(NamedTuple):
    """The edges of H copies of a graph, one copy per head, sorted by target.

    The graph has n nodes and E edges. Node i of head h has the index h * n + i.
    """

    source: Tensor  # (H * E,): the source node of each edge
    starts: Tensor  # (H * n + 1,): index of the first edge into each target
    target: Tensor  # (H * E,): the target node of each edge
    by_source: Tensor  # (H * E,): the permutation that sorts the edges by source
    source_starts: Tensor  # (H * n + 1,): index of the first edge from each source, after sorting by source


class Graph:
    """The edges of a graph, sorted once for all layers and training steps.

    Args:
        edges: integers (2, E) from 0 to nodes - 1, a tensor or lists: sources in row 0, targets in
            row 1. An edge that occurs twice counts twice in the softmax.
        nodes: number of nodes.
        self_loops: if True, every node gets exactly one edge to itself. Self-loops in `edges` are
            replaced.

    Example:
        >>> regard.nn.Graph([[0, 1, 2], [1, 2, 0]], nodes=5)
        Graph(nodes=5, edges=8)
    """

    def __init__(self, edges: Any, nodes: int, *, self_loops: bool = True) -> None:
        self.nodes = count("nodes", nodes, 1)
        edges = _checked(edges, self.nodes)
        if self_loops:
            loops = torch.arange(nodes, device=edges.device).expand(2, -1)
            edges = torch.cat([edges[:, edges[0] != edges[1]], loops], 1)
        self.edges = edges[:, edges[1].argsort(stable=True)]
        self._rows: dict[int, SortedEdges] = {}

    def rows(self, heads: int) -> SortedEdges:
        """Returns the sorted edges of `heads` copies of the graph. The result is cached."""
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


def _checked(edges: Any, nodes: int) -> Tensor:
    x = tensor_of("edges", edges)
    if x.dim() != 2 or len(x) != 2 or not holds_integers(x):
        raise ValueError(f"edges: expected integers (2, E), got {describe(x)}")
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < nodes:
        raise ValueError(f"edges: expected nodes from 0 to {nodes - 1}, got {x.min()} to {x.max()}")
    return x.long()


class EdgeSoftmax(torch.autograd.Function):
    """Softmax of edge scores over the edges into each node: (H * E,) -> (H * E,)."""

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
    """For each target node, sums the values of its source nodes, weighted by the edges' weights.

    Weights (H * E,), values (H * n, C) -> (H * n, C). No tensor (H * E, C) is allocated: forward
    and the gradient of the values use a fused sum, and the gradient of the weights is computed in
    chunks of edges.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, h: Tensor, rows: SortedEdges) -> Tensor:
        ctx.save_for_backward(w, h)
        ctx.rows = rows
        return _weighted_sum(w, h, rows.source, rows.starts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (w, h), rows, d = ctx.saved_tensors, ctx.rows, grads[0].contiguous()
        dw = torch.empty_like(w)
        size = max(1, CHUNK_ELEMENTS // h.shape[1])
        for chunk in (slice(i, i + size) for i in range(0, len(w), size)):
            products = d.index_select(0, rows.target[chunk]) * h.index_select(0, rows.source[chunk])
            torch.sum(products, -1, out=dw[chunk])
        order = rows.by_source
        return dw, _weighted_sum(w[order], d, rows.target[order], rows.source_starts), None


CHUNK_ELEMENTS = 2**18  # elements in a chunk; a chunk fits into the cache of a CPU core


def _weighted_sum(w: Tensor, h: Tensor, source: Tensor, starts: Tensor) -> Tensor:
    return F.embedding_bag(source, h, starts, mode="sum", per_sample_weights=w, include_last_offset=True)


class GraphAttention(CheckedModule):
    """Graph attention (GAT, Velickovic et al., 2018): (n, d_in) -> (n, heads * d_head).

    n is the number of nodes. Each node attends to the sources of its incoming edges. With h = W x,
    edge j -> i has the score leaky_relu(a_source . h_j + a_target . h_i). Softmax over the edges
    into i yields the weights, and out_i = sum_j weight_ij h_j + bias. The output of a node without
    incoming edges is the bias.

    Args:
        d_in: width of the input.
        d_head: width of a head.
        heads: number of heads H.
        mean: if True, the heads' outputs are averaged to (n, d_head) instead of concatenated.
        slope: negative slope of the leaky ReLU.
        dropout: dropout probability of the attention weights in training.
        bias: if True, a bias is added to the output.

    Example:
        >>> attend = regard.nn.GraphAttention(16, 8, heads=4)
        >>> graph = regard.nn.Graph([[0, 1, 2], [1, 2, 0]], nodes=5)
        >>> attend(torch.randn(5, 16), graph).shape
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
        self.project = Linear(d_in, heads * d_head, bias=False)
        self.source, self.target = (nn.Parameter(torch.empty(heads, d_head)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(d_head if mean else heads * d_head)) if bias else None
        for weight in (self.project.weight, self.source, self.target):
            nn.init.xavier_uniform_(weight)

    def forward(
        self, x: Tensor, graph: Graph, *, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes attention along the edges of `graph`.

        x (n, d_in) -> (n, heads * d_head), or (n, d_head) with `mean`. x is dense or sparse. With
        `return_weights`, returns (output, weights (heads, E)), in the order of `graph.edges`.
        """
        h = self._projected(x, graph)
        heads = self.attend(h, graph)
        out: Tensor = heads.mean(0) if self.mean else join_heads(heads)
        out = out if self.bias is None else out + self.bias
        return (out, self._weights(h, graph)) if return_weights else out

    def attend(self, h: Tensor, graph: Graph) -> Tensor:
        """Computes attention without projection and bias: h (H, n, d_head) -> (H, n, d_head).

        Subclasses may override this method.
        """
        w = F.dropout(self._weights(h, graph), self.dropout, self.training)
        return Gather.apply(w.flatten(), h.flatten(0, 1), graph.rows(self.heads)).view_as(h)  # type: ignore[no-untyped-call, no-any-return]

    def weights(self, x: Tensor, graph: Graph) -> Tensor:
        """Returns the attention weights (H, E), in the order of `graph.edges`."""
        return self._weights(self._projected(x, graph), graph)

    def _projected(self, x: Tensor, graph: Graph) -> Tensor:
        """Projects x to (H, n, d_head)."""
        if x.dim() != 2 or x.shape != (graph.nodes, self.d_in):
            raise ValueError(f"x: expected ({graph.nodes}, d_in = {self.d_in}), got {describe(x)}")
        h: Tensor = torch.sparse.mm(x, self.project.weight.T) if x.is_sparse else self.project(x)
        return split_heads(h, self.heads).contiguous()

    def _weights(self, h: Tensor, graph: Graph) -> Tensor:
        """Returns the softmax weights (H, E) of projected nodes h (H, n, d_head)."""
        rows = graph.rows(self.heads)
        a, b = ((h @ vector[:, :, None]).flatten() for vector in (self.source, self.target))  # (H * n,)
        scores = F.leaky_relu(a.index_select(0, rows.source) + b.index_select(0, rows.target), self.slope)
        w: Tensor = EdgeSoftmax.apply(scores, rows.starts, rows.target)  # type: ignore[no-untyped-call]
        return w.view(self.heads, -1)
