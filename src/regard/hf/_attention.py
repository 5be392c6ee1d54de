"""The attention function that Transformers models call with `attn_implementation="regard"`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from .._api.attention import attention, weights
from .._api.stored import attend_stored
from .._call.spec import Options
from .._tools.arguments import describe
from ..masks import Dense, Mask, from_cu_seqlens
from ._paged import attend_paged, causal
from ._sources import only_passes_on
from ._standin import MaskTensor, StoredTensor

NAME = "regard"

# Keywords that attention modules pass, but that do not change the result of attention.
HARMLESS = frozenset({
    "deterministic", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_ids", "seq_idx", "use_cache",
})  # fmt: skip
# Keywords that only continuous batching passes. (Its `block_table` is passed only to GPU kernels.)
CONTINUOUS = frozenset({"logits_indices", "logits_processor_args", "read_index", "write_index"})


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, output_attentions: bool | None = None, cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes attention for a model of Transformers.

    query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> out (B, Lq, Hq, Dv) and
    weights (B, Hq, Lq, Lk). The weights are None unless the model requests them, for example by
    `output_attentions`. A `cache` is passed only by continuous batching, together with packed
    sequences (B = 1), `cu_seq_lens_q` and `cu_seq_lens_k`, and without a mask.
    """
    scores = {"scale": scaling, "softcap": softcap, "sink": None if s_aux is None else s_aux.reshape(-1)}
    if cache is not None:
        refused: dict[str, Any] = {"dropout": dropout or None, "position_bias": position_bias}
        refused["output_attentions"] = output_attentions or None
        _refuse([name for name, x in refused.items() if x is not None])
        _check_others(module, others, HARMLESS | CONTINUOUS)
        cu_seqlens = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        layer: Any = module.layer_idx
        return _heads_last(attend_paged(layer, (query, key, value), cache, others | cu_seqlens, scores)), None
    _check_others(module, others, HARMLESS)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        masking = _without_mask(query.shape[2], causal, sliding_window or None)
    else:
        masking = _from_tensor(attention_mask, query.shape[2], key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        masking = _inside_sequences(masking, cu_seq_lens_q, cu_seq_lens_k)
    bias = _sum(masking.bias, position_bias, query.dtype)
    options: dict[str, Any] = {"mask": masking.mask, "offset": masking.offset, "bias": bias, **scores}
    if dropout:
        # One seed for both calls, so that output and weights have the same dropout pattern.
        options |= {"dropout": dropout, "seed": torch.randint(2**62, (), device=query.device)}
    out = _attend(query, key, value, options)
    p = weights(query, key, value, **options) if _returns_weights(output_attentions) else None
    return _heads_last(out), p


def _heads_last(out: Tensor) -> Tensor:
    """Transposes (B, Hq, Lq, Dv) to a contiguous (B, Lq, Hq, Dv)."""
    return out.transpose(1, 2).contiguous()


class Masking(NamedTuple):
    """The arguments of `attention` that an attention_mask determines."""

    mask: Mask | None = None
    offset: int | None = None
    bias: Tensor | None = None


def _from_tensor(mask: Any, Lq: int, Lk: int) -> Masking:
    """Translates an attention_mask tensor (B, 1 or Hq, Lq or 1, Lk) to arguments of `attention`.

    The mask already includes the sliding window, because Transformers adds it to every mask.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise TypeError(f"attention_mask: expected a tensor (B, 1 or Hq, Lq, Lk), got {describe(mask)}")
    if isinstance(mask, MaskTensor):
        if mask.shape[2] not in (1, Lq) or mask.shape[3] != Lk:
            expected = f"(B, 1, Lq or 1, Lk) with Lq = {Lq}, Lk = {Lk}"
            raise ValueError(f"attention_mask: expected {expected}, got {tuple(mask.shape)}")
        # One row of a mask for all queries has no positions: it becomes dense, (B, 1, 1, Lk).
        return Masking(mask.mask, mask.offset) if mask.shape[2] == Lq else Masking(Dense.borrow(mask.dense()))
    if mask.dtype is torch.bool:
        return Masking(Dense.borrow(mask))
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask: expected bool (True = may attend) or float, got {describe(mask)}")
    return Masking(bias=mask)


def _without_mask(Lq: int, is_causal: bool, window: int | None) -> Masking:
    """Returns the mask and the offset of a call without an attention_mask.

    A causal mask gets offset 0 if there are several queries, because a static cache may have unused
    slots after the last query. With offset 0, the mask excludes these slots. A bidirectional call
    has no window: Transformers passes a mask unless all queries may attend to all keys.
    """
    _check_registered()
    if not is_causal or (Lq == 1 and window is None):
        return Masking()
    return Masking(causal(window), None if Lq == 1 else 0)


def _check_registered() -> None:
    """Raises RuntimeError if Regard's mask function is not registered with Transformers.

    Without it, every attention_mask would be None, and padding would not be masked.
    """
    if NAME not in AttentionMaskInterface._global_mapping:
        raise RuntimeError(
            f"attn_implementation={NAME!r} has no mask function, so masks would be lost; call "
            "regard.hf.register()"
        )


def _inside_sequences(masking: Masking, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Masking:
    """Adds a mask so that tokens attend only within their packed sequence.

    `cu_seqlens_q` and `cu_seqlens_k` are (N + 1,) for N sequences.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: expected both or neither, got one of them")
    if cu_seqlens_q is cu_seqlens_k or torch.equal(cu_seqlens_q, cu_seqlens_k):
        documents: Mask = from_cu_seqlens(cu_seqlens_q)
        return masking._replace(mask=documents if masking.mask is None else documents & masking.mask)
    if masking.mask is not None:
        raise NotImplementedError(
            "cu_seq_lens_q and cu_seq_lens_k that differ, with a mask: its positions do not restart with "
            "each sequence; use regard.packing.varlen_attention"
        )
    return masking._replace(mask=from_cu_seqlens(cu_seqlens_q, cu_seqlens_k))


def _check_others(module: nn.Module, others: dict[str, Any], known: frozenset[str]) -> None:
    if known.issuperset(others):
        return
    present = sorted(name for name, x in others.items() if x is not None and name not in known)
    _refuse([name for name in present if not only_passes_on(type(module), name)])


def _refuse(unknown: list[str]) -> None:
    if unknown:
        raise NotImplementedError(
            f"the attention of this model passes {', '.join(unknown)}, which regard does not know; "
            'use attn_implementation="eager"'
        )


def _returns_weights(output_attentions: bool | None) -> bool:
    """Returns whether the model requests the weights.

    Models that do not pass `output_attentions` request weights through Transformers' collector.
    """
    if output_attentions is not None:
        return output_attentions
    collected: dict[str, Any] | None = _active_collector.get()  # type: ignore[no-untyped-call]
    return any(name.endswith("attentions") for name in collected or ())


def _sum(bias: Tensor | None, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns `bias` + `position_bias`. None counts as 0, and the sum of two Nones is None.

    The result has a dtype that `attention` accepts for queries of dtype `dtype`.
    """
    if bias is not None and position_bias is not None:
        bias = bias + position_bias
    bias = position_bias if bias is None else bias
    return bias if bias is None or bias.dtype in (dtype, torch.float32) else bias.to(dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the output (B, Hq, Lq, Dv) of attention, in the dtype of `query`.

    Keys and values in a cache of Regard are read in place, except with dropout.
    """
    out: Any
    if isinstance(key, StoredTensor) and "dropout" not in options:
        stored = key.stored
        dtype = stored.k.dtype if stored.kind == "float" else query.dtype
        out = attend_stored(query.to(dtype), stored, Options(**options))
    else:
        k, v = (x.clone() if isinstance(x, StoredTensor) else x for x in (key, value))
        out = attention(query, k, v, **options)
    rounded: Tensor = out.to(query.dtype)
    return rounded
