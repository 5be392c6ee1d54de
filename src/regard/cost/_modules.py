"""Layers from the modules of `regard.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .. import nn as own
from .._tools.arguments import describe
from ..nn.linear import Decay
from ._layers import Heads, Latent, Layer
from ._sparse import BigBird, Linear, Linformer, Longformer, Performer


def from_module(module: nn.Module) -> Layer:
    """The layer that an attention module of `regard.nn` or PyTorch's `MultiheadAttention` is."""
    read = _reader(module)
    if read is None:
        names = ", ".join(sorted({kind.__name__ for kind in READERS}))
        raise TypeError(f"module: expected one of {names}, got {describe(module)}")
    return read(module)


def layers_in(model: nn.Module) -> tuple[Layer, ...]:
    """All attention layers of a model, in order; what lies between them is not counted."""
    found = tuple(from_module(part) for part in model.modules() if _reader(part) is not None)
    if not found:
        raise TypeError(f"model: expected one with attention modules, got {describe(model)}")
    return found


def _reader(module: nn.Module) -> Callable[[Any], Layer] | None:
    return next((read for kind, read in READERS.items() if isinstance(module, kind)), None)


def _heads(m: own.Attention) -> Heads:
    first = m.qkv if m.kv_model is None else m.q
    parts = (m.q_norm, m.k_norm, m.position)
    learned = [p for part in parts if isinstance(part, nn.Module) for p in part.parameters()]
    others = sum(p.numel() for p in learned) + (0 if m.sink is None else m.heads)
    return Heads(
        m.d_model, m.heads, m.kv_heads, m.head_dim, m.value_dim, m.kv_model, bias=first.bias is not None,
        out_bias=m.out.bias is not None, gate=m.gate is not None, mask=m.mask, others=others,
    )  # fmt: skip


def _multihead(m: nn.MultiheadAttention) -> Heads:
    """PyTorch's module; keys and values of other widths than `embed_dim` are not known here."""
    if not m._qkv_same_embed_dim or m.bias_k is not None or m.add_zero_attn:
        raise ValueError(
            "module: expected kdim = vdim = embed_dim and neither add_bias_kv nor add_zero_attn, "
            f"got kdim = {m.kdim}, vdim = {m.vdim}"
        )
    bias = m.in_proj_bias is not None
    return Heads(m.embed_dim, m.num_heads, bias=bias, out_bias=bias)


def _latent(m: own.LatentAttention) -> Latent:
    first = m.q if m.q_rank is None else m.q_down
    normed = any(True for _ in m.kv_norm.parameters())
    return Latent(
        m.d_model, m.heads, m.rank, m.nope_dim, m.rope_dim, m.value_dim, m.q_rank,
        bias=first.bias is not None, out_bias=m.out.bias is not None, normed=normed, mask=m.mask,
    )  # fmt: skip


def _projected(m: Any) -> dict[str, Any]:
    sizes = {"d_model": m.d_model, "heads": m.heads, "head_dim": m.head_dim}
    return sizes | {"bias": m.query.bias is not None, "out": isinstance(m.out, nn.Linear)}


def _longformer(m: own.LongformerAttention) -> Longformer:
    if len(set(m.dilation)) > 1:
        raise ValueError(f"module: expected one dilation for all heads, got {m.dilation}")
    return Longformer(**_projected(m), window=m.window, dilation=m.dilation[0])


def _bigbird(m: own.BigBirdAttention) -> BigBird:
    return BigBird(
        **_projected(m), block=m.block, window=m.window, random=m.random, global_blocks=m.global_blocks,
        seed=m.seed,
    )  # fmt: skip


def _linformer(m: own.LinformerAttention) -> Linformer:
    E = m.projection
    return Linformer(**_projected(m), max_length=E.max_length, rank=E.rank, sharing=E.sharing)


def _performer(m: own.PerformerAttention) -> Performer:
    return Performer(**_projected(m), features=m.features)


def _linear(m: own.LinearAttention) -> Linear:
    by_token: Decay | None = None if m.token_decay is None else "token"
    others = 0 if m.out_norm is None else sum(p.numel() for p in m.out_norm.parameters())
    return Linear(
        m.d_model, m.heads, m.kv_heads, m.head_dim, m.value_dim, bias=m.out.bias is not None,
        normalize=m.normalize, decay=by_token if m.head_decay is None else "head",
        delta=m.beta is not None, gate=m.gate is not None, features=m.new_cache(1).D, others=others,
    )  # fmt: skip


READERS: dict[type[nn.Module], Callable[[Any], Layer]] = {
    own.Attention: _heads,
    nn.MultiheadAttention: _multihead,
    own.LatentAttention: _latent,
    own.LongformerAttention: _longformer,
    own.BigBirdAttention: _bigbird,
    own.LinformerAttention: _linformer,
    own.PerformerAttention: _performer,
    own.LinearAttention: _linear,
}
