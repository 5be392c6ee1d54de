"""Checks of the arguments of caches. They run before a call changes the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from .._call.spec import DTYPES, MAX_OFFSET
from .._tools.arguments import as_int, describe, holds_integers, is_integer, tensor_of
from ._counts import Count, formatted

Integers = int | Sequence[int] | Tensor
Lengths = Integers | None
State = dict[str, Tensor]


class Chunk(NamedTuple):
    """The L tokens that a call passes for each sample: first `new` real tokens, then padding."""

    L: int
    new: Count  # L if all tokens are real, else a tuple with the number for each sample


NO_CHUNK = Chunk(0, 0)


def integers(name: str, values: Integers, B: int | None) -> list[int]:
    """Converts B integers to a list. If B is None, any number of integers is accepted."""
    x = tensor_of(name, values)
    if not holds_integers(x) or x.ndim != 1 or B not in (None, len(x)):
        shape = "(B,)" if B is None else f"(B,) = ({B},)"
        raise ValueError(f"{name}: expected integers of shape {shape}, got {describe(x)}")
    listed: list[int] = x.tolist()
    return listed


def sample_indices(index: Integers, B: int, count: int | None = None) -> list[int]:
    """Checks the argument of `reorder(index)` and returns the selected samples.

    If `count` is given, checks that `index` has `count` entries.
    """
    samples = integers("index", index, count)
    if not samples or not 0 <= min(samples) <= max(samples) < B:
        raise ValueError(f"index: expected samples from 0 to {B - 1}, at least one, got {samples}")
    return samples


def cropped_lengths(n: Integers, lengths: tuple[int, ...]) -> list[int]:
    """Returns the length of each sample after `crop(n)`. A negative n drops the last -n tokens."""
    wanted = [as_int(n)] * len(lengths) if is_integer(n) else integers("n", n, len(lengths))
    cropped = [m if m >= 0 else m + held for m, held in zip(wanted, lengths, strict=True)]
    if any(not 0 <= m <= held for m, held in zip(cropped, lengths, strict=True)):
        raise ValueError(
            f"n: expected at most the lengths of the samples, {formatted(lengths)}, got {formatted(wanted)}"
        )
    return cropped


# New tokens


def chunk_of(L: int, lengths: Lengths, B: int) -> Chunk:
    """Returns the Chunk of an append of L tokens, of which lengths[b] are real in sample b."""
    if lengths is None:
        return Chunk(L, L)
    new = integers("lengths", lengths, B)
    if new and not 0 <= min(new) <= max(new) <= L:
        raise ValueError(f"lengths: expected 0 to L = {L} new tokens, got {formatted(new)}")
    return Chunk(L, L) if set(new) == {L} else Chunk(L, tuple(new))


def pair_of(k: Tensor | None, v: Tensor | None, lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    """Returns the new keys and values, or None if both are None. Raises if only one is given."""
    if k is not None and v is not None:
        return k, v
    if k is None and v is None and lengths is None:
        return None
    raise ValueError("k, v: expected both, or neither of them and no lengths")


def check_new(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if isinstance(x, Tensor) and x.shape == shape and x.dtype is dtype and x.device == device:
        check_no_grad(name, x)
        return
    if not isinstance(x, Tensor) or x.dtype is not dtype:
        raise TypeError(f"{name}: expected a tensor of {dtype}, the dtype of the cache, got {describe(x)}")
    if x.device != device:
        raise ValueError(f"{name}: expected the cache's device {device}, got {x.device}")
    got = tuple(x.shape)
    raise ValueError(f"{name}: expected shape {shape} for this cache, got {got}{_shape_hint(got, shape)}")


def _shape_hint(got: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Returns what to do about new tokens of another shape than the cache: transpose, or another cache."""
    if len(got) != len(shape):
        return ""
    if len(shape) == 4 and got[2] == shape[1] != got[1]:
        return "; is this (B, L, H, D)? transpose(1, 2)"
    counts = {"B": 0, "Hkv": 1} if len(shape) == 4 else {"B": 0}
    sizes = [f"{name} = {got[dim]}" for name, dim in counts.items() if got[dim] != shape[dim]]
    return f"; use a cache with {', '.join(sizes)}" if sizes else ""


def check_no_grad(name: str, x: Tensor) -> None:
    if x.requires_grad and is_grad_enabled():
        raise RuntimeError(
            f"{name}: expected requires_grad=False, because a cache keeps no gradient, got True; "
            f"use torch.no_grad() or {name}.detach()"
        )


def check_float(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected float64, float32, bfloat16 or float16, got {describe(dtype)}")
    return dtype


# Queries


def check_queries(q: Any, B: int, D: int, dtype: torch.dtype, held: Count, chunk: Chunk) -> None:
    """Checks dtype and shape of q (B, Hq, Lq, D).

    If the new tokens (`chunk`) include padding, Lq must equal their number. Otherwise Lq must be at
    most the number of tokens of the shortest sample in the cache.
    """
    if not isinstance(q, Tensor) or q.dtype is not dtype:
        raise TypeError(f"q: expected a tensor of {dtype}, the dtype of the cache, got {describe(q)}")
    if q.ndim != 4 or q.shape[0] != B or q.shape[3] != D:
        raise ValueError(f"q: expected (B, Hq, Lq, D) = ({B}, Hq, Lq, {D}), got {tuple(q.shape)}")
    Lq = q.shape[2]
    if not isinstance(chunk.new, int) and Lq != chunk.L:
        raise ValueError(f"q: expected a query for each of the {chunk.L} tokens of the chunk, got Lq = {Lq}")
    least = held if isinstance(held, int) else min(held)
    if isinstance(chunk.new, int) and Lq > least:
        raise ValueError(f"q: expected at most {least} queries, the tokens in the cache, got Lq = {Lq}")


# States


def checked_state(state: State, expected: set[str], device: torch.device) -> State:
    """Returns the tensors of a state on the cache's device, without gradients.

    Checks their names, and that they are dense tensors with data (not nested, sparse or meta).
    """
    if not isinstance(state, Mapping) or set(state) != expected:
        names = sorted(map(str, state)) if isinstance(state, Mapping) else describe(state)
        raise ValueError(f"state: expected the tensors {sorted(expected)}, got {names}")
    for name, x in state.items():
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or x.is_meta:
            kind = "a nested, sparse or meta tensor" if isinstance(x, Tensor) else describe(x)
            raise ValueError(f"state: expected {name} to be a dense tensor, got {kind}")
    return {name: x.detach().to(device) for name, x in state.items()}


def check_saved(name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype is not dtype:
        raise ValueError(f"state: expected {name} to be {dtype} of shape {shape}, got {describe(x)}")


def check_saved_lengths(lengths: list[int]) -> None:
    if not 0 <= min(lengths) <= max(lengths) <= MAX_OFFSET:
        raise ValueError(f"lengths: expected integers from 0 to 2^48, got {formatted(lengths)}")
