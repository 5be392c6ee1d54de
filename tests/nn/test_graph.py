"""Tests of attention along the edges of a graph."""

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


def random_graph(nodes: int = N, edges: int = E, **options: bool) -> Graph:
    """Returns a random graph without duplicate edges. Node 0 has no incoming edge."""
    pairs = torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(5)).unique(dim=1)
    return Graph(pairs[:, pairs[1] != 0], nodes, **options)


def dense_layer(layer: GraphAttention, x: Tensor, random_graph: Graph) -> Tensor:
    """Computes the layer with a dense (nodes, nodes) weight matrix. Duplicate edges count once."""
    h = layer.project(x).unflatten(-1, (layer.heads, -1)).transpose(0, 1)  # (H, n, C)
    a, b = (h @ vector[:, :, None] for vector in (layer.source, layer.target))
    scores = F.leaky_relu(b + a.mT, layer.slope)  # (H, target, source)
    keep = torch.zeros(random_graph.nodes, random_graph.nodes, dtype=torch.bool)
    keep[random_graph.edges[1], random_graph.edges[0]] = True
    w = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = (w @ h).transpose(0, 1)
    return (out.mean(1) if layer.mean else out.flatten(1)) + layer.bias


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_layer_matches_the_dense_formula(mean: bool, loops: bool) -> None:
    graph = random_graph(self_loops=loops)
    layer = GraphAttention(D, 5, 3, mean=mean).double()
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    out, expected = layer(x, graph), dense_layer(layer, x, graph)
    assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    for grad, expected_grad in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        assert_close(grad, expected_grad, rtol=1e-10, atol=1e-10)
    assert_close(layer(x.detach().to_sparse(), graph), out, rtol=1e-12, atol=1e-12)


def test_a_node_without_edges_gets_the_bias() -> None:
    layer = GraphAttention(D, 5, 2)
    torch.nn.init.normal_(layer.bias)
    assert torch.equal(layer(torch.randn(N, D), random_graph(self_loops=False))[0], layer.bias)


def test_duplicate_edges_count_twice() -> None:
    layer = GraphAttention(D, 4)
    x = torch.randn(3, D)
    with torch.no_grad():
        layer.source.zero_()
        layer.target.zero_()
    weights = layer.weights(x, Graph(torch.tensor([[1, 1, 2], [0, 0, 0]]), 3, self_loops=False))
    assert_close(weights, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("mean", [False, True])
def test_layer_matches_pytorch_geometric(mean: bool) -> None:
    pytest.importorskip("pyarrow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peers = pytest.importorskip("torch_geometric.nn")
    layer, graph = GraphAttention(D, 5, 3, mean=mean), random_graph(self_loops=False)
    peer = peers.GATConv(D, 5, heads=3, concat=not mean)
    with torch.no_grad():
        peer.lin.weight.copy_(layer.project.weight)
        peer.att_src.copy_(layer.source[None])
        peer.att_dst.copy_(layer.target[None])
    x = torch.randn(N, D, requires_grad=True)
    out, expected = layer(x, Graph(graph.edges, N)), peer(x, graph.edges)
    assert_close(out, expected, rtol=1e-5, atol=2e-6)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, [x, layer.project.weight, layer.source, layer.target], dout)
    expected_grads = torch.autograd.grad(expected, [x, peer.lin.weight, peer.att_src, peer.att_dst], dout)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad.view_as(grad), rtol=1e-4, atol=1e-5)


def test_dropout_applies_to_weights_in_training_only() -> None:
    layer, graph, x = GraphAttention(D, 5, dropout=1.0, bias=False), random_graph(), torch.randn(N, D)
    assert not layer(x, graph).any()
    assert layer.eval()(x, graph).any()


def test_memory_grows_with_the_edges() -> None:
    """With 20,000 nodes, a dense weight matrix of one head would take 1.6 GB."""
    nodes = 20_000
    graph = random_graph(nodes, 60_000)
    layer, x = GraphAttention(16, 8, 4), torch.randn(nodes, 16)
    peak = peak_memory(lambda: layer(x, graph).sum().backward())
    if peak is None:
        pytest.skip("the system does not report the peak of a process")
    assert peak < 200e6


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
        GraphAttention(D, 5)(torch.randn(N + 1, D), random_graph())
