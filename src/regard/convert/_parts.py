"""An attention module as matrices by head, and back. A bias is one more column; tokens have a 1 for it."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._tools.arguments import describe
from ..nn import Attention


class Parts(NamedTuple):
    """Float64. d is d_model, and one more for the bias."""

    q: Tensor  # (Hq, D, d)
    k: Tensor  # (Hkv, D, d)
    v: Tensor  # (Hkv, Dv, d)
    out: Tensor  # (Hq, d_model, Dv)


def source(module: nn.Module) -> Attention:
    """The module that is converted: self-attention, as `regard.nn.Attention`."""
    if isinstance(module, nn.MultiheadAttention):
        return from_multihead(module)
    if not isinstance(module, Attention):
        raise TypeError(
            f"module: expected regard.nn.Attention or a MultiheadAttention, got {type(module).__name__}"
        )
    if module.kv_model is not None:
        raise ValueError(
            f"module: expected self-attention, got cross-attention with kv_model = {module.kv_model}"
        )
    return module


def from_multihead(module: nn.MultiheadAttention) -> Attention:
    """`regard.nn.Attention` with copies of the weights: (B, L, d_model) -> the same, without weights."""
    if module.in_proj_weight is None:
        raise ValueError(
            f"module: expected keys and values of width embed_dim = {module.embed_dim}, "
            f"got kdim = {module.kdim}, vdim = {module.vdim}"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("module: expected no extra keys, got add_bias_kv or add_zero_attn")
    weight, bias = module.in_proj_weight, module.in_proj_bias
    own = Attention(
        module.embed_dim, module.num_heads, bias=bias is not None, dropout=module.dropout,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    state = {"qkv.weight": weight, "qkv.bias": bias}
    state |= {f"out.{name}": value for name, value in module.out_proj.named_parameters()}
    own.load_state_dict({name: value for name, value in state.items() if value is not None})
    return own.train(module.training)


def widened(module: Attention) -> Attention:
    """The module, or its copy in float32 if it has 16 bits: a proof should not be blurred by rounding."""
    return module if module.out.weight.itemsize >= 4 else copy.deepcopy(module).float()


def parts_of(module: Attention) -> Parts:
    asked, held = module.heads * module.head_dim, module.kv_heads * module.head_dim
    q, k, v = affine(module.qkv).split((asked, held, module.kv_heads * module.value_dim))
    out = module.out.weight.detach().double().cpu().unflatten(1, (module.heads, -1)).transpose(0, 1)
    return Parts(
        _by_head(q, module.heads), _by_head(k, module.kv_heads), _by_head(v, module.kv_heads), out
    )  # fmt: skip


def regrouped(module: Attention, parts: Parts) -> Attention:
    """A copy of the module with these matrices; what else it has stays."""
    made = copy.deepcopy(module)
    made.kv_heads = len(parts.k)
    made.qkv = linear(torch.cat([x.flatten(0, 1) for x in parts[:3]]), module.qkv)
    with torch.no_grad():
        made.out.weight.copy_(parts.out.transpose(0, 1).flatten(1))
    return made


def affine(layer: nn.Linear) -> Tensor:
    """Matrix and bias (0 if there is none) side by side, (out, in + 1), in float64 on the CPU."""
    weight = layer.weight.detach().double().cpu()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().cpu()
    return torch.cat((weight, bias[:, None]), 1)


def linear(matrix: Tensor, like: nn.Linear) -> nn.Linear:
    """The inverse of `affine`, with a bias, dtype and device as another layer has."""
    rows, columns = matrix.shape
    has_bias = like.bias is not None
    made = nn.Linear(columns - 1, rows, has_bias, device=like.weight.device, dtype=like.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(matrix[:, :-1])
        if has_bias:
            made.bias.copy_(matrix[:, -1])
    return made.requires_grad_(like.weight.requires_grad)


def tokens(name: str, x: Tensor, module: Attention) -> Tensor:
    """Calibration data, checked: (B, L, d_model)."""
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != module.d_model or not x.numel():
        raise ValueError(f"{name}: expected tokens (B, L, d_model = {module.d_model}), got {describe(x)}")
    return x.detach().to(module.out.weight)


def root_moment(x: Tensor) -> Tensor:
    """R (d, d) in float64 with R R^T = E[t t^T] over tokens (B, L, d_model) with their channel of ones.

    So E[(a t)(b t)^T] = (a R)(b R)^T for matrices a and b. A trace of the identity in R decides between
    directions that these tokens never take.
    """
    rows = x.detach().double().cpu().flatten(0, 1)
    rows = torch.cat((rows, rows.new_ones(len(rows), 1)), 1)
    values, Q = torch.linalg.eigh(rows.T @ rows / len(rows))
    root: Tensor = Q * (values.clamp_min(0) + 1e-9 * values.mean()).sqrt()
    return root


def _by_head(x: Tensor, heads: int) -> Tensor:
    split: Tensor = x.unflatten(0, (heads, -1))
    return split
