"""Reads specs from modules of `regard.nn` and from PyTorch's `MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .. import nn as regard_nn
from .._tools.arguments import describe
from ._layers import AttentionSpec, LatentSpec, LayerSpec
from ._sparse import BigBirdSpec, LinearSpec, LinformerSpec, LongformerSpec, PerformerSpec

SIZES = ("d_model", "heads", "kv_heads", "head_dim", "value_dim")


def from_module(module: nn.Module) -> LayerSpec:
    """Returns the spec of an attention module of `regard.nn` or of `nn.MultiheadAttention`."""
    read = _reader(module)
    if read is None:
        names = ", ".join(sorted({kind.__name__ for kind in READERS}))
        raise TypeError(f"module: expected one of {names}, got {describe(module)}")
    return read(module)


def layers_in(model: nn.Module) -> tuple[LayerSpec, ...]:
    """Returns the specs of all attention layers of a model, in order. Other layers are ignored."""
    specs = tuple(from_module(part) for part in model.modules() if _reader(part) is not None)
    if not specs:
        raise TypeError(f"model: expected a module with attention layers, got {describe(model)}")
    return specs


def _reader(module: nn.Module) -> Callable[[Any], LayerSpec] | None:
    return next((read for kind, read in READERS.items() if isinstance(module, kind)), None)


def _same(m: nn.Module, *names: str) -> dict[str, Any]:
    """Returns a dict of the module's attributes `names`, which are also fields of its spec."""
    return {name: getattr(m, name) for name in names}


def _parameters(*parts: object) -> int:
    """Returns the number of parameters of all modules among `parts`. Other objects are ignored."""
    return sum(p.numel() for part in parts if isinstance(part, nn.Module) for p in part.parameters())


def _heads(m: regard_nn.Attention) -> AttentionSpec:
    others = _parameters(m.q_norm, m.k_norm, m.position) + (0 if m.sink is None else m.heads)
    return AttentionSpec(
        **_same(m, *SIZES, "kv_model", "value_model", "mask"), bias=m.projections[0].bias is not None,
        out=isinstance(m.out, nn.Linear), out_bias=getattr(m.out, "bias", None) is not None,
        gate=m.gate is not None, others=others,
    )  # fmt: skip


def _multihead(m: nn.MultiheadAttention) -> AttentionSpec:
    """Returns the spec of PyTorch's module. Keys and values must have the width `embed_dim`."""
    if not m._qkv_same_embed_dim or m.bias_k is not None or m.add_zero_attn:
        raise ValueError(
            "module: expected kdim = vdim = embed_dim and neither add_bias_kv nor add_zero_attn, "
            f"got kdim = {m.kdim}, vdim = {m.vdim}"
        )
    bias = m.in_proj_bias is not None
    return AttentionSpec(m.embed_dim, m.num_heads, bias=bias, out_bias=bias)


def _latent(m: regard_nn.LatentAttention) -> LatentSpec:
    sizes = _same(m, "d_model", "heads", "rank", "nope_dim", "rope_dim", "value_dim", "q_rank", "mask")
    bias, out_bias = (layer.bias is not None for layer in (m.kv_down, m.out))
    return LatentSpec(**sizes, bias=bias, out_bias=out_bias, normed=_parameters(m.kv_norm) > 0)


def _linear(m: regard_nn.LinearAttention) -> LinearSpec:
    return LinearSpec(
        **_same(m, *SIZES, "normalize"), bias=m.out.bias is not None,
        decay="head" if m.head_decay is not None else "token" if m.token_decay is not None else None,
        delta=m.beta is not None, gate=m.gate is not None, features=m.new_cache(1).D,
        others=_parameters(m.out_norm),
    )  # fmt: skip


def _longformer(m: regard_nn.LongformerAttention) -> LongformerSpec:
    if len(set(m.dilation)) > 1:
        raise ValueError(f"module: expected one dilation for all heads, got {m.dilation}")
    return LongformerSpec(**_projected(m, "window"), dilation=m.dilation[0])


def _projected(m: Any, *names: str) -> dict[str, Any]:
    """Returns a dict of the module's values for the fields of `ProjectedSpec` and for `names`."""
    sizes = _same(m, "d_model", "heads", "head_dim", *names)
    return sizes | {"bias": m.query.bias is not None, "out": isinstance(m.out, nn.Linear)}


READERS: dict[type[nn.Module], Callable[[Any], LayerSpec]] = {
    regard_nn.Attention: _heads,
    nn.MultiheadAttention: _multihead,
    regard_nn.LatentAttention: _latent,
    regard_nn.LongformerAttention: _longformer,
    regard_nn.BigBirdAttention: lambda m: BigBirdSpec(
        **_projected(m, "block", "window", "random", "global_blocks", "seed")
    ),
    regard_nn.LinformerAttention: lambda m: LinformerSpec(
        **_projected(m), **_same(m.projection, "max_length", "rank", "sharing")
    ),
    regard_nn.PerformerAttention: lambda m: PerformerSpec(**_projected(m, "features")),
    regard_nn.LinearAttention: _linear,
}
