"""Attention along the edges of a graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cost import peak_memory
from regard.nn import Graph, GraphAttention
from support import assert_close

N, E, D = 23, 71, 11


def graph(nodes: int = N, edges: int = E, **options: bool) -> Graph:
    """Node 0 has no edge into it, and no edge is there twice."""
    drawn = torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(5)).unique(dim=1)
    return Graph(drawn[:, drawn[1] != 0], nodes, **options)


def dense(layer: GraphAttention, x: Tensor, given: Graph) -> Tensor:
    """The formula with nodes x nodes weights; each edge counts once."""
    h = layer.project(x).unflatten(-1, (layer.heads, -1)).transpose(0, 1)  # (H, n, C)
    a, b = (h @ part[:, :, None] for part in (layer.source, layer.target))
    scores = F.leaky_relu(b + a.mT, layer.slope)  # (H, target, source)
    keep = torch.zeros(given.nodes, given.nodes, dtype=torch.bool)
    keep[given.edges[1], given.edges[0]] = True
    w = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = (w @ h).transpose(0, 1)
    return (out.mean(1) if layer.mean else out.flatten(1)) + layer.bias


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_it_is_the_dense_formula(mean: bool, loops: bool) -> None:
    given = graph(self_loops=loops)
    layer = GraphAttention(D, 5, 3, mean=mean).double()
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    own, other = layer(x, given), dense(layer, x, given)
    assert_close(own, other, rtol=1e-12, atol=1e-12)
    seen = torch.randn_like(own)
    for ours, theirs in zip(
        torch.autograd.grad(own, leaves, seen), torch.autograd.grad(other, leaves, seen), strict=True
    ):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert_close(layer(x.detach().to_sparse(), given), own, rtol=1e-12, atol=1e-12)


def test_a_node_without_edges_gets_the_bias() -> None:
    layer = GraphAttention(D, 5, 2)
    torch.nn.init.normal_(layer.bias)
    assert torch.equal(layer(torch.randn(N, D), graph(self_loops=False))[0], layer.bias)


def test_an_edge_that_is_there_twice_counts_twice() -> None:
    layer = GraphAttention(D, 4)
    x = torch.randn(3, D)
    with torch.no_grad():
        layer.source.zero_()
        layer.target.zero_()
    once = layer.weights(x, Graph(torch.tensor([[1, 1, 2], [0, 0, 0]]), 3, self_loops=False))
    assert_close(once, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("mean", [False, True])
def test_it_is_the_layer_of_pytorch_geometric(mean: bool) -> None:
    pytest.importorskip("pyarrow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peers = pytest.importorskip("torch_geometric.nn")
    layer, given = GraphAttention(D, 5, 3, mean=mean), graph(self_loops=False)
    peer = peers.GATConv(D, 5, heads=3, concat=not mean)
    with torch.no_grad():
        peer.lin.weight.copy_(layer.project.weight)
        peer.att_src.copy_(layer.source[None])
        peer.att_dst.copy_(layer.target[None])
    x = torch.randn(N, D, requires_grad=True)
    own, other = layer(x, Graph(given.edges, N)), peer(x, given.edges)
    assert_close(own, other, rtol=1e-5, atol=2e-6)
    seen = torch.randn_like(own)
    mine = torch.autograd.grad(own, [x, layer.project.weight, layer.source, layer.target], seen)
    theirs = torch.autograd.grad(other, [x, peer.lin.weight, peer.att_src, peer.att_dst], seen)
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b.view_as(a), rtol=1e-4, atol=1e-5)


def test_dropout_is_of_weights_and_in_training_only() -> None:
    layer, given, x = GraphAttention(D, 5, dropout=1.0, bias=False), graph(), torch.randn(N, D)
    assert not layer(x, given).any()
    assert layer.eval()(x, given).any()


def test_memory_is_that_of_the_edges() -> None:
    """20,000 nodes: nodes x nodes weights of one head would be 1.6 GB."""
    nodes = 20_000
    given = graph(nodes, 60_000)
    layer, x = GraphAttention(16, 8, 4), torch.randn(nodes, 16)
    used = peak_memory(lambda: layer(x, given).sum().backward())
    if used is None:
        pytest.skip("the system does not report the peak of a process")
    assert used < 200e6


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.long), r"edges: expected integers \(2, E\), got int64 tensor"),
        (torch.zeros(2, 3), r"edges: expected integers \(2, E\), got float32 tensor"),
        (torch.tensor([[0], [4]]), "edges: expected nodes from 0 to 3, got 0 to 4"),
        (torch.tensor([[-1], [2]]), "edges: expected nodes from 0 to 3, got -1 to 2"),
    ],
)
def test_wrong_edges(edges: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(edges, 4)


def test_edges_may_be_lists() -> None:
    assert torch.equal(Graph([[0, 1], [1, 2]], 3).edges, Graph(torch.tensor([[0, 1], [1, 2]]), 3).edges)
    with pytest.raises(TypeError, match="edges: expected a tensor or a list, got str 'ab'"):
        Graph("ab", 3)


@pytest.mark.parametrize(("slope", "kind"), [("x", TypeError), (float("nan"), ValueError)])
def test_wrong_slopes(slope: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="slope: expected a"):
        GraphAttention(4, 2, slope=slope)


def test_wrong_nodes() -> None:
    with pytest.raises(ValueError, match=rf"x: expected \({N}, d_in = {D}\), got float32 tensor"):
        GraphAttention(D, 5)(torch.randn(N + 1, D), graph())
