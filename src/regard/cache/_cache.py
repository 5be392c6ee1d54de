"""What all caches share: how many tokens a sample holds, what a call appends, what its queries may see.

A call has three steps. The new tokens are *drafted*: checked and written where nothing is read yet, in memory
beyond the last token or in memory just allocated. The queries look at the draft. Then it is kept: nothing but
assignments. So whatever raises before that leaves the cache as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from .._api.stored import attend_stored
from .._call.spec import DTYPES, Bias, Options
from .._call.stored import Stored
from .._tools.arguments import as_int, count, describe, holds_integers, is_integer, tensor_of
from ..masks import Causal, Dense, Mask, Window

Count = int | tuple[int, ...]  # one number for all samples, or one for each
Integers = int | Sequence[int] | Tensor
Result = Tensor | tuple[Tensor, Tensor]  # out, or (out, LSE)

CAUSAL = Causal()


class Chunk(NamedTuple):
    """What a call appends: L tokens for each sample, of which the first `new` are real."""

    L: int
    new: Count  # an int only when it is L


NOTHING = Chunk(0, 0)


class Asked(NamedTuple):
    """The options of `attend`."""

    mask: Mask | Tensor | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    window: int | None
    return_lse: bool
    impl: str


# Counts


def each(n: Count, B: int) -> tuple[int, ...]:
    return (n,) * B if isinstance(n, int) else n


def shared(counts: Sequence[int]) -> Count:
    """One number if all are equal."""
    return counts[0] if len(set(counts)) == 1 else tuple(counts)


def plus(a: Count, b: Count) -> Count:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    B = len(a) if isinstance(a, tuple) else len(b)  # type: ignore[arg-type]
    return shared([x + y for x, y in zip(each(a, B), each(b, B), strict=True)])


def minus(a: Count, b: Count) -> Count:
    return plus(a, -b if isinstance(b, int) else tuple(-x for x in b))


def most(n: Count) -> int:
    return n if isinstance(n, int) else max(n)


def as_tensor(n: Count, B: int, device: torch.device) -> Tensor:
    """(B,) int64"""
    return torch.tensor(each(n, B), device=device)


def integers(name: str, given: Integers, B: int | None) -> list[int]:
    """The numbers given for each of B samples (any number of them if B is None)."""
    x = tensor_of(name, given)
    if not holds_integers(x) or x.ndim != 1 or B not in (None, len(x)):
        shape = "(B,)" if B is None else f"(B,) = ({B},)"
        raise ValueError(f"{name}: expected integers of shape {shape}, got {describe(x)}")
    numbers: list[int] = x.tolist()
    return numbers


def kept(n: Integers, lengths: tuple[int, ...]) -> list[int]:
    """How many tokens `crop(n)` leaves of each sample. A negative n counts from the end."""
    wanted = [as_int(n)] * len(lengths) if is_integer(n) else integers("n", n, len(lengths))
    left = [m if m >= 0 else m + held for m, held in zip(wanted, lengths, strict=True)]
    if any(not 0 <= m <= held for m, held in zip(left, lengths, strict=True)):
        raise ValueError(
            f"n: expected at most as many tokens as the samples hold, {shown(lengths)}, got {shown(wanted)}"
        )
    return left


def shown(counts: Sequence[int]) -> str:
    """Counts as messages and reprs show them."""
    if len(set(counts)) == 1:
        return str(counts[0])
    return str(list(counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"


# What is appended


def chunk_of(L: int, lengths: Integers | None, B: int) -> Chunk:
    if lengths is None:
        return Chunk(L, L)
    new = integers("lengths", lengths, B)
    if new and not 0 <= min(new) <= max(new) <= L:
        raise ValueError(f"lengths: expected from 0 to the {L} new tokens, got {shown(new)}")
    return Chunk(L, L) if set(new) == {L} else Chunk(L, tuple(new))


def check_new(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if isinstance(x, Tensor) and x.shape == shape and x.dtype is dtype and x.device == device:
        check_no_grad(name, x)
        return
    if not isinstance(x, Tensor) or x.dtype is not dtype:
        raise TypeError(f"{name}: expected a tensor of {dtype}, as the cache holds, got {describe(x)}")
    if x.device != device:
        raise ValueError(f"{name}: expected the cache's device {device}, got {x.device}")
    raise ValueError(f"{name}: expected shape {shape} as the cache holds, got {tuple(x.shape)}")


def check_no_grad(name: str, x: Tensor) -> None:
    if x.requires_grad and is_grad_enabled():
        raise RuntimeError(
            f"{name} requires grad, but a cache keeps no gradient; call it under torch.no_grad(), "
            f"or pass {name}.detach()"
        )


def check_float(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected float64, float32, bfloat16 or float16, got {describe(dtype)}")
    return dtype


# What queries see


def look(
    q: Tensor, stored: Stored, rows: Count, chunk: Chunk, asked: Asked, base: Mask | None = None
) -> Result:
    """q (B, Hq, Lq, D), the last Lq of `rows` tokens, sees those that `base` allows, by default causally.

    After a chunk with padding q is lined up with it, and rows of padding give zeros.
    """
    Lq = q.shape[2]
    offset = _offset(rows, stored.length, chunk, Lq, q.device)
    if base is None and (Lq > 1 or offset is not None):
        base = CAUSAL
    found = attend_stored(
        q, stored,
        Options(
            _visible(asked, base), offset, asked.bias, asked.scale, asked.softcap, asked.sink,
            return_lse=asked.return_lse,
        ),
        asked.impl,
    )  # fmt: skip
    return found if isinstance(chunk.new, int) else _without_padding(found, chunk)


def _offset(rows: Count, Lk: int, chunk: Chunk, Lq: int, device: torch.device) -> int | Tensor | None:
    """Where query 0 stands; None if the last query meets the last key, as `attention` takes it by default."""
    if isinstance(rows, int) and isinstance(chunk.new, int):
        return None if rows == Lk else rows - Lq
    last = Lq if isinstance(chunk.new, int) else chunk.new
    B = len(rows) if isinstance(rows, tuple) else len(chunk.new)  # type: ignore[arg-type]
    return as_tensor(minus(rows, last), B, device)


def _without_padding(found: Result, chunk: Chunk) -> Result:
    out, lse = found if isinstance(found, tuple) else (found, None)
    real = torch.tensor(chunk.new, device=out.device)
    padding = (torch.arange(chunk.L, device=out.device) >= real[:, None])[:, None]  # (B, 1, L)
    out = out.masked_fill(padding[..., None], 0)
    return out if lse is None else (out, lse.masked_fill(padding, -torch.inf))


def _visible(asked: Asked, mask: Mask | None) -> Mask | None:
    """The mask and what the options add to it."""
    if asked.window is not None:
        window = _window(asked.window)
        mask = window if mask is None or mask is CAUSAL else mask & window
    if asked.mask is None:
        return mask
    return _as_mask(asked.mask) if mask is None else mask & _as_mask(asked.mask)


def _as_mask(given: Any) -> Mask:
    if isinstance(given, Mask):
        return given
    if not isinstance(given, Tensor) or given.dtype is not torch.bool:
        raise TypeError(f"mask: expected a Mask or a bool tensor, True = may attend, got {describe(given)}")
    return Dense(torch.atleast_2d(given))


@functools.lru_cache(maxsize=64)
def _window(window: int) -> Mask:
    """The last `window` keys, the query's own included."""
    return Window(count("window", window, 1) - 1)


def check_queries(q: Any, shape: tuple[int, int], dtype: torch.dtype, rows: Count, chunk: Chunk) -> None:
    """q (B, Hq, Lq, D) for shape (B, D); all else `attention` checks."""
    if not isinstance(q, Tensor) or q.dtype is not dtype:
        raise TypeError(f"q: expected a tensor of {dtype}, as the cache holds, got {describe(q)}")
    B, D = shape
    if q.ndim != 4 or q.shape[0] != B or q.shape[3] != D:
        raise ValueError(f"q: expected (B, Hq, Lq, D) = ({B}, Hq, Lq, {D}), got {tuple(q.shape)}")
    Lq = q.shape[2]
    if not isinstance(chunk.new, int) and Lq != chunk.L:
        raise ValueError(f"q: expected a query for each of the {chunk.L} tokens of the chunk, got Lq = {Lq}")
    held = rows if isinstance(rows, int) else min(rows)
    if isinstance(chunk.new, int) and Lq > held:
        raise ValueError(f"q: expected at most {held} queries, the tokens held with the new, got Lq = {Lq}")
