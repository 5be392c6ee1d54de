"""The projection matrices of an attention module, split by head.

The last column of a matrix is the bias, so a 1 is appended to each token before the product.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..nn import Attention, Linear
from ..positions import Rotary


class Parts(NamedTuple):
    """The float64 projection matrices of each head.

    In the shapes, d = d_model + 1: the last column is the bias. `out` has no bias.
    """

    q: Tensor  # (Hq, D, d)
    k: Tensor  # (Hkv, D, d)
    v: Tensor  # (Hkv, Dv, d)
    out: Tensor  # (Hq, d_model, Dv)


def parts_of(module: Attention) -> Parts:
    """Returns the module's matrices, split by head."""
    queries, keys = module.heads * module.head_dim, module.kv_heads * module.head_dim
    rows = affine(module.qkv).split((queries, keys, module.kv_heads * module.value_dim))
    heads = (module.heads, module.kv_heads, module.kv_heads)
    out = module.out.weight.detach().double().cpu().unflatten(1, (module.heads, -1)).transpose(0, 1)
    q, k, v = (x.unflatten(0, (n, -1)) for x, n in zip(rows, heads, strict=True))
    return Parts(q, k, v, out)


def regrouped(module: Attention, parts: Parts) -> Attention:
    """Returns a copy of the module with the matrices `parts`.

    `parts` may have fewer key heads than the module.
    """
    converted = copy.deepcopy(module)
    converted.kv_heads = len(parts.k)
    converted.qkv = linear(torch.cat([x.flatten(0, 1) for x in parts[:3]]), module.qkv)
    with torch.no_grad():
        converted.out.weight.copy_(parts.out.transpose(0, 1).flatten(1))
    return converted


def affine(layer: nn.Linear) -> Tensor:
    """Returns weight and bias as one matrix (out, in + 1), in float64 on the CPU.

    Without a bias, the last column is 0.
    """
    weight = layer.weight.detach().double().cpu()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().cpu()
    return torch.cat((weight, bias[:, None]), 1)


def linear(matrix: Tensor, like: nn.Linear) -> Linear:
    """Returns a layer with weight and bias from `matrix` (out, in + 1).

    Dtype, device and requires_grad are taken from `like`. The layer has a bias if `like` has one.
    """
    rows, columns = matrix.shape
    has_bias = like.bias is not None
    layer = Linear(columns - 1, rows, has_bias, device=like.weight.device, dtype=like.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(matrix[:, :-1])
        if has_bias:
            layer.bias.copy_(matrix[:, -1])
    return layer.requires_grad_(like.weight.requires_grad)


def root_moment(x: Tensor) -> Tensor:
    """Returns a float64 matrix R (d, d) with R R^T = E[t t^T] over the tokens t of x.

    x is (B, L, d_model). A 1 is appended to each token t, so d = d_model + 1. For matrices a and b,
    E[(a t)(b t)^T] = (a R)(b R)^T. A small ridge keeps R invertible if the tokens do not span all
    directions.
    """
    rows = x.detach().double().cpu().flatten(0, 1)
    rows = torch.cat((rows, rows.new_ones(len(rows), 1)), 1)
    values, Q = torch.linalg.eigh(rows.T @ rows / len(rows))
    root: Tensor = Q * (values.clamp_min(0) + 1e-9 * values.mean()).sqrt()
    return root


# Rotary pairs of channels as complex numbers


class Channels(NamedTuple):
    """The indices of a head's channels: rotary pairs (first, second) and unrotated channels."""

    first: Tensor  # (pairs,)
    second: Tensor  # (pairs,)
    unrotated: Tensor  # (D - 2 * pairs,)
    frequencies: Tensor  # (pairs,): radians per position

    def complex(self, x: Tensor) -> Tensor:
        """Returns each rotary pair of rows as one complex row: (..., D, n) -> (..., pairs, n)."""
        return torch.complex(x[..., self.first, :], x[..., self.second, :])


def channels(module: Attention) -> Channels:
    """Returns the indices of the rotary pairs and unrotated channels of a query or key head."""
    rule = module.position
    if not isinstance(rule, Rotary):
        return unrotated_channels(module.head_dim)
    pairs = torch.arange(rule.dims)
    first, second = pairs.view(2, -1) if rule.layout == "half" else pairs.view(-1, 2).T
    return Channels(first, second, torch.arange(rule.dims, module.head_dim), rule.inv_freq.double().cpu())


def unrotated_channels(n: int) -> Channels:
    """Returns the `Channels` of a head of n channels without rotary pairs, such as a value head."""
    empty = torch.arange(0)
    return Channels(empty, empty, torch.arange(n), empty.double())
