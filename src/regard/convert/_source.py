"""Checks of the inputs of a conversion: the source module and its calibration tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor, nn

from .._tools.arguments import describe
from ..nn import Attention
from ..positions import Rotary


def source(module: nn.Module) -> Attention:
    """Returns the source module as a `regard.nn.Attention`. Raises if it is not self-attention."""
    if isinstance(module, nn.MultiheadAttention):
        return from_multihead(module)
    if not isinstance(module, Attention):
        raise TypeError(
            f"module: expected regard.nn.Attention or a MultiheadAttention, got {type(module).__name__}"
        )
    if not is_convertible(module):
        raise ValueError(
            "module: expected self-attention with the projections qkv and out, got "
            f"kv_model = {module.kv_model}, value_model = {module.value_model}, out = {module.out}"
        )
    return module


def is_convertible(module: Attention) -> bool:
    """Returns whether the module is self-attention with the projections `qkv` and `out`."""
    return hasattr(module, "qkv") and isinstance(module.out, nn.Linear)


def from_multihead(module: nn.MultiheadAttention) -> Attention:
    """Returns a `regard.nn.Attention` with copies of the module's weights.

    The input of the result is (B, L, d_model), even if the module is not `batch_first`.
    """
    if module.in_proj_weight is None:
        raise ValueError(
            f"module: expected keys and values of width embed_dim = {module.embed_dim}, "
            f"got kdim = {module.kdim}, vdim = {module.vdim}"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("module: expected no extra keys, got add_bias_kv or add_zero_attn")
    weight, bias = module.in_proj_weight, module.in_proj_bias
    converted = Attention(
        module.embed_dim, module.num_heads, bias=bias is not None, dropout=module.dropout,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    state = {"qkv.weight": weight, "qkv.bias": bias}
    state |= {f"out.{name}": value for name, value in module.out_proj.named_parameters()}
    converted.load_state_dict({name: value for name, value in state.items() if value is not None})
    return converted.train(module.training)


def widened(module: Attention) -> Attention:
    """Returns the module, or a float32 copy if its weights are 16-bit.

    Rounding to 16 bits would hide errors of the conversion.
    """
    return module if module.out.weight.itemsize >= 4 else copy.deepcopy(module).float()


def refuse(module: Attention, names: Iterable[str], why: str) -> None:
    """Raises ValueError if the module has one of the features `names`.

    The error message ends with the reason `why`.
    """
    has = {name: getattr(module, name) is not None for name in ("gate", "sink", "softcap")}
    has["qk_norm"] = module.q_norm is not None
    has["position other than Rotary"] = not isinstance(module.position, Rotary | None)
    for name in names:
        if has[name]:
            raise ValueError(f"module: expected no {name}{why}")


def tokens(name: str, x: Tensor, module: Attention) -> Tensor:
    """Returns the tokens x (B, L, d_model) in the module's dtype and on its device.

    Raises ValueError if x has another shape.
    """
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != module.d_model or not x.numel():
        raise ValueError(f"{name}: expected tokens (B, L, d_model = {module.d_model}), got {describe(x)}")
    return x.detach().to(module.out.weight)


def split(module: Attention, calibration: Tensor, held_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns calibration tokens and held-out tokens, each (B, L, d_model).

    If `held_out` is None, the last quarter of the calibration samples is held out.
    """
    x = tokens("calibration", calibration, module)
    if held_out is not None:
        return x, tokens("held_out", held_out, module)
    if len(x) < 2:
        raise ValueError(f"calibration: expected 2 samples or more without held_out, got {len(x)}")
    n = len(x) - max(1, len(x) // 4)
    return x[:n], x[n:]
