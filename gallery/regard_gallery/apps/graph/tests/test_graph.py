"""Cora: the graph attention network against the same layers in plain PyTorch."""

from __future__ import annotations

import torch

from regard.nn import Graph, GraphAttention
from regard_gallery.apps._frame.plain import plain
from support import assert_close

NODES, D = 23, 11


def test_plain_pytorch_gives_the_same_output() -> None:
    edges = torch.randint(0, NODES, (2, 71)).unique(dim=1)
    graph, x = Graph(edges, NODES), torch.randn(NODES, D)
    model = torch.nn.Sequential(GraphAttention(D, 5, 3))
    expected = model[0](x, graph)
    assert_close(plain(model)[0](x, graph), expected, rtol=1e-5, atol=1e-6)
    assert type(model[0]).__name__ == "PlainGraphAttention"
