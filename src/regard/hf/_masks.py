"""Translates masks of Transformers to values of `regard.masks`.

A model describes its mask by a function of four indices, which is composed of functions of
`masking_utils`. Each of these functions is recognised by its name and becomes a mask atom, so that
no Lq x Lk tensor is computed. Any other function, such as a user's, is evaluated for all pairs and
becomes a `Dense` mask.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as hf

from ..masks import Causal, Dense, Documents, Mask, Window, padding
from ..masks._both import both
from ._standin import MaskTensor

MaskFunction = Callable[..., Any]
_dense: Callable[..., Any] = hf.sdpa_mask  # returns a bool tensor (B, 1, Lq, Lk), or None for no mask
CAUSAL = Causal()


class Frame(NamedTuple):
    """The sizes and offsets of a mask. Query i is token q_offset + i, key j token kv_offset + j."""

    B: int
    Lq: int
    Lk: int
    q_offset: int
    kv_offset: int
    device: torch.device | str
    use_vmap: bool

    @property
    def offset(self) -> int:
        return self.q_offset - self.kv_offset

    def positions(self) -> tuple[Tensor, Tensor]:
        """Returns the token indices of the queries (Lq,) and of the keys (Lk,)."""
        sizes = (self.q_offset, self.Lq), (self.kv_offset, self.Lk)
        q, k = (torch.arange(start, start + size, device=self.device) for start, size in sizes)
        return q, k


def mask_tensor(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = hf.causal_mask_function, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, use_vmap: bool = False,
    device: torch.device | str = "cpu", **options: Any,
) -> Tensor | None:  # fmt: skip
    """Builds a mask (B, 1, Lq, Lk). Transformers calls this for `attn_implementation="regard"`.

    Returns a stand-in, a tensor without memory (see `_standin.py`), or a dense bool tensor while
    compiling. Returns None if nothing is masked and the arguments allow skipping the mask.
    """
    if torch.compiler.is_compiling():
        dense: Tensor | None = _dense(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, device=device,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **options,
        )  # fmt: skip
        return dense
    frame = Frame(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), device, use_vmap)
    mask = both(_translated(mask_function, frame), _real_keys(frame, attention_mask))
    may_skip = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)
    if mask is None and may_skip:
        return None
    shape = (batch_size, 1, q_length, kv_length)
    standin: Tensor = MaskTensor(mask, frame.offset, shape, device)
    return standin


def _real_keys(frame: Frame, padding_mask: Tensor | None) -> Mask | None:
    """Converts a padding mask, bool (B, n) for the n tokens so far, to a Mask. True = real token.

    Keys after the end of the padding mask are masked. Returns None if all keys are real.
    """
    if padding_mask is None:
        return None
    end = frame.kv_offset + frame.Lk
    keep = padding_mask[:, frame.kv_offset : end].to(frame.device)
    if keep.shape[1] < frame.Lk:
        keep = torch.nn.functional.pad(keep, (0, frame.Lk - keep.shape[1]))
    return None if bool(keep.all()) else padding(keep)


# Functions of `masking_utils`


def _translated(function: MaskFunction, frame: Frame) -> Mask | None:
    """Converts a mask function to a Mask, or to None if it allows all pairs of the frame."""
    name = f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else ""
    translate = TRANSLATIONS.get(name.removeprefix(f"{hf.__name__}."))
    return _evaluated(function, frame) if translate is None else translate(frame, **_closure(function))


def _closure(function: MaskFunction) -> dict[str, Any]:
    """Returns a dict from names to values of the variables that a nested function captures."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _evaluated(function: MaskFunction, frame: Frame) -> Mask:
    """Evaluates a mask function for all query-key pairs and returns a `Dense` mask."""
    keep = _dense(
        frame.B, frame.Lq, frame.Lk, frame.q_offset, frame.kv_offset, function, allow_is_causal_skip=False,
        use_vmap=frame.use_vmap, device=frame.device,
    )  # fmt: skip
    return Dense.borrow(keep)


def _all_of(frame: Frame, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
    return functools.reduce(both, (_translated(part, frame) for part in mask_functions))


def _any_of(frame: Frame, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
    parts: list[Any] = [_translated(part, frame) for part in mask_functions]
    return None if None in parts else functools.reduce(operator.or_, parts)


def _causal(frame: Frame) -> Mask | None:
    return None if frame.offset >= frame.Lk - 1 else CAUSAL


def _last_tokens(frame: Frame, sliding_window: int) -> Mask | None:
    """Returns a mask that allows k > q - sliding_window, or None if that allows all pairs.

    q and k are the token indices of query and key.
    """
    if frame.offset + frame.Lq - 1 < sliding_window:
        return None
    # A window of 0 (Qwen2-MoE without a window) allows only later keys.
    return Window(sliding_window - 1, None) if sliding_window > 0 else ~Window(None, -sliding_window)


def _around(frame: Frame, sliding_window: int) -> Mask | None:
    """Returns a mask that allows |q - k| <= sliding_window, for token indices q and k."""
    return Window(sliding_window, sliding_window)


def _chunks(frame: Frame, chunk_size: int, left_padding: Tensor) -> Mask | None:
    first = left_padding[:, None]
    return Documents(*((x - first) // chunk_size for x in frame.positions()))


def _sequences(frame: Frame, packed_sequence_mask: Tensor) -> Mask | None:
    return Documents(*(packed_sequence_mask[:, x] for x in frame.positions()))


def _blocks(frame: Frame, block_sequence_ids: Tensor) -> Mask | None:
    """Returns a mask that allows pairs of tokens with equal block ids.

    Tokens with the id -1 attend to nothing, not even to each other. Therefore their keys get an id
    that no query has.
    """
    q_ids, k_ids = (block_sequence_ids[:, x] for x in frame.positions())
    return Documents(q_ids, torch.where(k_ids < 0, torch.iinfo(torch.int64).min, k_ids.long()))


TRANSLATIONS: dict[str, Callable[..., Mask | None]] = {
    "and_masks.<locals>.and_mask": _all_of,
    "or_masks.<locals>.or_mask": _any_of,
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda frame: None,
    "sliding_window_overlay.<locals>.inner_mask": _last_tokens,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _around,
    "chunked_overlay.<locals>.inner_mask": _chunks,
    "packed_sequence_mask_function.<locals>.inner_mask": _sequences,
    "blockwise_overlay.<locals>.inner_mask": _blocks,
    "padding_mask_function.<locals>.inner_mask": _real_keys,
}
