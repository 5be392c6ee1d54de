"""An attention module as matrices by head, and back. A bias is one more column; tokens have a 1 for it."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..nn import Attention
from ..positions import Rotary


class Parts(NamedTuple):
    """Float64. d is d_model, and one more for the bias."""

    q: Tensor  # (Hq, D, d)
    k: Tensor  # (Hkv, D, d)
    v: Tensor  # (Hkv, Dv, d)
    out: Tensor  # (Hq, d_model, Dv)


def parts_of(module: Attention) -> Parts:
    """Splits the module's matrices by head."""
    asked, held = module.heads * module.head_dim, module.kv_heads * module.head_dim
    rows = affine(module.qkv).split((asked, held, module.kv_heads * module.value_dim))
    heads = (module.heads, module.kv_heads, module.kv_heads)
    out = module.out.weight.detach().double().cpu().unflatten(1, (module.heads, -1)).transpose(0, 1)
    q, k, v = (x.unflatten(0, (n, -1)) for x, n in zip(rows, heads, strict=True))
    return Parts(q, k, v, out)


def regrouped(module: Attention, parts: Parts) -> Attention:
    """Returns a copy of the module with these matrices and all else as it is."""
    made = copy.deepcopy(module)
    made.kv_heads = len(parts.k)
    made.qkv = linear(torch.cat([x.flatten(0, 1) for x in parts[:3]]), module.qkv)
    with torch.no_grad():
        made.out.weight.copy_(parts.out.transpose(0, 1).flatten(1))
    return made


def affine(layer: nn.Linear) -> Tensor:
    """Joins matrix and bias (0 if there is none) into (out, in + 1), in float64 on the CPU."""
    weight = layer.weight.detach().double().cpu()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().cpu()
    return torch.cat((weight, bias[:, None]), 1)


def linear(matrix: Tensor, like: nn.Linear) -> nn.Linear:
    """Makes a layer of such a matrix, with a bias, dtype and device as another layer has."""
    rows, columns = matrix.shape
    has_bias = like.bias is not None
    made = nn.Linear(columns - 1, rows, has_bias, device=like.weight.device, dtype=like.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(matrix[:, :-1])
        if has_bias:
            made.bias.copy_(matrix[:, -1])
    return made.requires_grad_(like.weight.requires_grad)


def root_moment(x: Tensor) -> Tensor:
    """Returns R (d, d) in float64 with R R^T = E[t t^T] over tokens (B, L, d_model) with a channel of ones.

    So E[(a t)(b t)^T] = (a R)(b R)^T for matrices a and b. A trace of the identity in R decides between
    directions that these tokens never take.
    """
    rows = x.detach().double().cpu().flatten(0, 1)
    rows = torch.cat((rows, rows.new_ones(len(rows), 1)), 1)
    values, Q = torch.linalg.eigh(rows.T @ rows / len(rows))
    root: Tensor = Q * (values.clamp_min(0) + 1e-9 * values.mean()).sqrt()
    return root


# The channels that rotary embeddings turn, in pairs, as complex numbers


class Channels(NamedTuple):
    """The channels of a head: the first and second of each turning pair, and those that stay."""

    first: Tensor  # (pairs,)
    second: Tensor  # (pairs,)
    still: Tensor
    turns: Tensor  # (pairs,): radians for each step of position

    def complex(self, x: Tensor) -> Tensor:
        """(..., D, d) -> (..., pairs, d)"""
        return torch.complex(x[..., self.first, :], x[..., self.second, :])


def channels(module: Attention) -> Channels:
    """Returns the channels of a head's queries and keys."""
    rule = module.position
    if not isinstance(rule, Rotary):
        return unturned(module.head_dim)
    pairs = torch.arange(rule.dims)
    first, second = pairs.view(2, -1) if rule.layout == "half" else pairs.view(-1, 2).T
    return Channels(first, second, torch.arange(rule.dims, module.head_dim), rule.inv_freq.double().cpu())


def unturned(n: int) -> Channels:
    """Returns n channels that no position turns, as those of values."""
    none = torch.arange(0)
    return Channels(none, none, torch.arange(n), none.double())
