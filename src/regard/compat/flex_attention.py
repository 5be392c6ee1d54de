"""PyTorch's `torch.nn.attention.flex_attention`, with gradients on a CPU.

`BlockMask` and the functions that make and combine masks are PyTorch's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from .._api.attention import attention
from .._tools.arguments import describe, readable
from ..masks import Mask, from_flex
from ..scores import Alibi, RelativeBias

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

__all__ = [
    "BlockMask", "Softcap", "and_masks", "create_block_mask", "create_mask", "flex_attention", "noop_mask",
    "or_masks", "softcap",
]  # fmt: skip

_converted: WeakKeyDictionary[BlockMask, tuple[object, Mask]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Softcap:
    """The score_mod `cap * tanh(score / cap)`. PyTorch's flex_attention takes it, too."""

    cap: float

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


def softcap(cap: float) -> Softcap:
    """Returns a score_mod that replaces a score s by `cap * tanh(s / cap)`."""
    return Softcap(cap)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor,
    score_mod: Softcap | Alibi | RelativeBias | Tensor | None = None,
    block_mask: BlockMask | Mask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: object = None, *, return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:  # fmt: skip
    """Computes attention like PyTorch's `flex_attention`.

    Args:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E).
        value: (B, Hkv, S, Ev).
        score_mod: `softcap(cap)`, `scores.Alibi`, `scores.RelativeBias`, or a float tensor
            broadcastable to (B, Hq, L, S) that is added to the scores. Any other function raises
            NotImplementedError.
        block_mask: a BlockMask with any mask_mod, or a mask of `regard.masks`. The mask_mod is
            evaluated once for each BlockMask. In a compiled function, a BlockMask becomes a dense
            mask. To avoid this, convert it with `masks.from_flex` outside the function.
        scale: multiplies the scores. Default 1 / sqrt(E).
        enable_gqa: whether Hkv may be smaller than Hq.
        return_lse: whether to return the LSE, too.
        kernel_options: options of PyTorch's Triton kernels. They have no effect.
        return_aux: an AuxRequest; `max_scores` raises NotImplementedError.

    Returns:
        out (B, Hq, L, Ev). With `return_lse` also the LSE (B, Hq, L), with `return_aux` also an
        AuxOutput.
    """
    _check_request(query, key, enable_gqa, return_lse, return_aux)
    out, lse = attention(
        query, key, value, mask=_mask(block_mask), offset=0, scale=scale, return_lse=True,
        **_scores(score_mod),
    )  # fmt: skip
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check_request(
    query: Tensor, key: Tensor, enable_gqa: bool, return_lse: bool, return_aux: AuxRequest | None
) -> None:
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise ValueError(f"{name}: expected a tensor (B, H, L, E), got {describe(x)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        heads = f"{query.shape[1]} and {key.shape[1]}"
        raise ValueError(f"query, key: expected equal numbers of heads without enable_gqa=True, got {heads}")
    if return_aux is not None and return_lse:
        raise ValueError("return_lse, return_aux: expected at most one of them, got both")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux: max_scores is not computed; see facts.RowMax")


def _scores(score_mod: object) -> dict[str, Any]:
    """Returns the keyword argument of `attention` that modifies the scores like `score_mod`."""
    if score_mod is None:
        return {}
    if isinstance(score_mod, Softcap):
        return {"softcap": score_mod.cap}
    if isinstance(score_mod, Alibi | RelativeBias | Tensor):
        return {"bias": score_mod}
    raise NotImplementedError(
        f"score_mod: a function of the scores has no gradient here, got {describe(score_mod)}; expected "
        "compat.flex_attention.softcap(cap), scores.Alibi(slopes), scores.RelativeBias(table), a tensor that "
        "is added to the scores, or None; masking goes to block_mask; for softcap together with a bias call "
        "regard.attention(softcap=..., bias=...)"
    )


def _mask(block_mask: BlockMask | Mask | None) -> Mask | None:
    """Returns the mask of a call. A BlockMask is converted once.

    It is converted again if its mask_mod was replaced or its tables were changed in place.
    """
    if block_mask is None or isinstance(block_mask, Mask):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: expected a BlockMask, a Mask or None, got {describe(block_mask)}")
    if is_compiling():
        return from_flex(block_mask)
    tables = block_mask.kv_num_blocks, block_mask.kv_indices
    version = block_mask.mask_mod, *(0 if x.is_inference() else x._version for x in tables)
    known = _converted.get(block_mask)
    if known is not None and known[0] == version:
        return known[1]
    with torch.inference_mode(False):  # an inference tensor in a stored mask could not be used in training
        mask = from_flex(block_mask)
    if all(readable(x) for x in mask.lower().tensors):  # the tensors of a fake mode have no values
        _converted[block_mask] = version, mask
    return mask
