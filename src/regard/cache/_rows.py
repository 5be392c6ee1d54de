"""Tokens in rows: one tensor (B, Hkv, rows, ...) for each thing kept, row j for the token at position j."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled

from .._api.stored import attend_stored, write_stored
from .._call.spec import Options, fast_new
from .._call.stored import New, Stored
from .._tools.arguments import count, describe
from ..masks import Mask
from ._cache import (
    NOTHING,
    Asked,
    Chunk,
    Count,
    Integers,
    Result,
    as_tensor,
    check_float,
    check_queries,
    each,
    integers,
    kept,
    look,
    most,
    plus,
    shared,
    shown,
)

LEAST_ROWS = 64
State = dict[str, Tensor]
R = TypeVar("R", bound="Rows")


class Part(NamedTuple):
    """One of the tensors that make up the storage: (B, Hkv, rows, *tail)."""

    name: str
    tail: tuple[int, ...]
    dtype: torch.dtype


class Draft(NamedTuple):
    """The cache as it will be after a call."""

    parts: tuple[Tensor, ...]
    lengths: Count
    rows: Count  # how many rows of each sample are filled
    chunk: Chunk


class Rows:
    """Storage in rows, preallocated (`capacity`) or growing geometrically (None)."""

    D: int

    def __init__(
        self,
        B: int,
        Hkv: int,
        layout: tuple[Part, ...],
        capacity: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        self.B, self.Hkv = count("B", B, 1), count("Hkv", Hkv, 1)
        self.dtype, self.layout = check_float(dtype), layout
        self.capacity = None if capacity is None else count("capacity", capacity, 1)
        self._lengths: Count = 0
        self.device = torch.empty(0, device=device).device
        self._take(self._empty(self.B, self.capacity or 0))
        self._checked: tuple[Any, ...] | None = None  # what a step was like that passed all checks

    # What it holds

    def __len__(self) -> int:
        """The tokens of the longest sample."""
        return most(self._lengths)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: the tokens of each sample."""
        return as_tensor(self._lengths, self.B, self.device)

    @property
    def start(self) -> int | None:
        """Where the next token will stand, if that is the same place for all samples."""
        return self._lengths if isinstance(self._lengths, int) else None

    @property
    def nbytes(self) -> int:
        """Bytes of storage, filled or not."""
        return sum(part.nbytes for part in self._parts)

    def positions(self, L: int = 1) -> Tensor:
        """(B, L) int64: where the next L tokens will stand, for rotary and learned embeddings."""
        return self.lengths[:, None] + torch.arange(count("L", L), device=self.device)

    def __repr__(self) -> str:
        rows = f"{self._rows} rows" if self.capacity is not None else f"{self._rows} rows, grows"
        return (
            f"{type(self).__name__}(B={self.B}, Hkv={self.Hkv}, {self._sizes()}, {self.dtype}: "
            f"length {shown(each(self._lengths, self.B))}, {rows}, {self.nbytes:,} bytes)"
        )

    def _sizes(self) -> str:
        raise NotImplementedError

    @property
    def _rows(self) -> int:
        return self._parts[0].shape[2]

    # Appending

    def _draft(self, new: New, chunk: Chunk) -> Draft:
        """The parts with the new tokens behind the others, where nobody looks before `_keep`."""
        before = self._lengths
        after = plus(before, chunk.new)
        parts = self._room(most(after))
        self._write(parts, before, new, chunk)
        return Draft(parts, after, after, chunk)

    def _room(self, rows: int) -> tuple[Tensor, ...]:
        """The parts, or larger copies of them if they have too few rows."""
        if rows <= self._rows:
            return self._parts
        if self.capacity is not None:
            raise ValueError(
                f"{type(self).__name__} is full: {rows} tokens needed, capacity {self.capacity}, of which "
                f"{self.capacity - len(self)} are free; capacity=None lets it grow"
            )
        return self._copies(max(rows, 2 * self._rows, LEAST_ROWS))

    def _write(self, parts: tuple[Tensor, ...], at: Count, new: New, chunk: Chunk) -> None:
        """New tokens into the parts, from row `at` on."""
        write_stored(self._stored(parts, 0), each(at, self.B), each(chunk.new, self.B), *new)

    def _keep(self, draft: Draft) -> None:
        self._lengths = draft.lengths
        if draft.parts is not self._parts:
            self._take(draft.parts)

    def _take(self, parts: tuple[Tensor, ...]) -> None:
        """Storage from now on."""
        self._parts = parts

    # Attending

    def _attend(self, q: Tensor, new: New | None, chunk: Chunk, asked: Asked) -> Result:
        if new is None:
            draft = Draft(self._parts, self._lengths, self._filled, NOTHING)
        else:
            draft = self._draft(new, chunk)
        check_queries(q, (self.B, self.D), self.dtype, draft.rows, draft.chunk)
        found = self._look(q, draft, asked)
        self._keep(draft)
        if new is not None and chunk.L == q.shape[2] == 1:
            self._checked = signature(q, new)
        return found

    # The case that must be quick: one more token, as one that was checked

    _shown: Mask | None = None  # which of its rows the last token sees; None: all

    def _row_of_step(self, q: Tensor, new: New) -> int | None:
        """Where the token goes, if samples have one length and there is room."""
        row, (k, v) = self._filled, new
        if self._checked is None or self._checked != signature(q, new):
            return None
        if not isinstance(row, int) or row >= self._rows:
            return None
        needs_grad = is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad))
        return None if needs_grad else row

    def _step(
        self,
        row: int,
        q: Tensor,
        new: New,
        scale: float | None,
        softcap: float | None,
        sink: Tensor | None,
        return_lse: bool,
        impl: str,
    ) -> Result:
        """What `_attend` does, for a query that sees all that its cache shows."""
        options = fast_new(Options, (self._shown, None, None, scale, softcap, sink, 0.0, None, return_lse))
        found = attend_stored(q, self._stored(self._parts, row + 1), options, impl, new)
        self._step_on()
        return found

    def _step_on(self) -> None:
        self._lengths = plus(self._lengths, 1)

    def _look(self, q: Tensor, draft: Draft, asked: Asked) -> Result:
        return look(q, self._stored(draft.parts, most(draft.rows)), draft.rows, draft.chunk, asked)

    def _stored(self, parts: tuple[Tensor, ...], length: int) -> Stored:
        raise NotImplementedError

    @property
    def _filled(self) -> Count:
        """Rows in use of each sample."""
        return self._lengths

    # Changing what is there

    def crop(self, n: Integers) -> None:
        """Keep the first n tokens of each sample, n one number or (B,); a negative n drops the last -n."""
        self._lengths = shared(kept(n, each(self._lengths, self.B)))

    def reorder(self, index: Integers) -> None:
        """Sample i becomes what sample index[i] was, as beams need it; there may be more or fewer than B."""
        chosen = checked_index(index, self.B)
        if chosen == list(range(self.B)):
            return
        parts = self._copies(self._rows, chosen)
        self._select(chosen)
        self.B, self._checked = len(chosen), None
        self._take(parts)

    def _select(self, chosen: list[int]) -> None:
        """The counts of the chosen samples."""
        self._lengths = shared([each(self._lengths, self.B)[b] for b in chosen])

    def fork(self: R) -> R:
        """A cache with the same content that goes its own way from here."""
        twin = copy.copy(self)
        twin._take(self._copies(self._rows))
        return twin

    def reset(self) -> None:
        """Forget all tokens; the storage stays."""
        self._lengths = 0

    # Storage

    def _empty(self, B: int, rows: int) -> tuple[Tensor, ...]:
        """Zeros: a NaN in a row that nobody has written would send kernels to their slow path."""
        with torch.inference_mode(False):  # or it could not be written to outside
            return tuple(
                torch.zeros((B, self.Hkv, rows, *part.tail), dtype=part.dtype, device=self.device)
                for part in self.layout
            )

    def _copies(self, rows: int, chosen: list[int] | None = None) -> tuple[Tensor, ...]:
        """What is filled, of all or of the chosen samples, in new storage of so many rows."""
        fresh = self._empty(self.B if chosen is None else len(chosen), rows)
        filled = most(self._filled)
        for to, part in zip(fresh, self._parts, strict=True):
            source = part[:, :, :filled]
            to[:, :, :filled] = source if chosen is None else source[chosen]
        return fresh

    # Saving

    def state_dict(self) -> State:
        """Tensors alone: what is filled, behind shorter samples zeros, and the lengths (B,)."""
        parts = zip(self.layout, self._parts, strict=True)
        return {part.name: self._filled_part(x) for part, x in parts} | {"lengths": self.lengths}

    def _filled_part(self, part: Tensor) -> Tensor:
        saved = part[:, :, : most(self._filled)].clone(memory_format=torch.contiguous_format)
        if not isinstance(self._filled, int):
            for sample, rows in zip(saved, self._filled, strict=True):
                sample[:, rows:] = 0
        return saved

    def load_state_dict(self, state: State) -> None:
        """Take the content of a `state_dict` of a cache with the same B, sizes and dtype."""
        check_names(state, {part.name for part in self.layout} | set(self._counts()))
        counts = {name: integers(name, state[name], self.B) for name in self._counts()}
        filled = self._checked_counts(counts)
        for part in self.layout:
            check_saved(part.name, state[part.name], (self.B, self.Hkv, filled, *part.tail), part.dtype)
        parts = self._parts if filled <= self._rows else self._room(filled)
        for part, x in zip(self.layout, parts, strict=True):
            x[:, :, :filled] = state[part.name]
        self._take(parts)
        self._take_counts(counts)

    def _counts(self) -> tuple[str, ...]:
        """The names of the (B,) integers in a state."""
        return ("lengths",)

    def _checked_counts(self, counts: dict[str, list[int]]) -> int:
        """How many rows a state with these counts fills."""
        if min(counts["lengths"]) < 0:
            raise ValueError(f"lengths: expected numbers from 0 on, got {shown(counts['lengths'])}")
        return max(counts["lengths"])

    def _take_counts(self, counts: dict[str, list[int]]) -> None:
        self._lengths = shared(counts["lengths"])


def signature(q: Any, new: tuple[Any, Any]) -> tuple[Any, ...] | None:
    """What tells whether a step is like one before; None if it must be checked."""
    k, v = new
    if type(q) is not Tensor or type(k) is not Tensor or type(v) not in (Tensor, NoneType):
        return None
    values = None if v is None else (v.shape, v.dtype, v.device)
    return q.shape, q.dtype, k.shape, k.dtype, k.device, values


def check_names(state: State, expected: set[str]) -> None:
    if set(state) != expected:
        raise ValueError(f"state: expected the tensors {sorted(expected)}, got {sorted(state)}")


def check_saved(name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype is not dtype:
        raise ValueError(f"state: expected {name} to be {dtype} of shape {shape}, got {describe(x)}")


def checked_index(index: Integers, B: int) -> list[int]:
    chosen = integers("index", index, None)
    if not chosen or not 0 <= min(chosen) <= max(chosen) < B:
        raise ValueError(f"index: expected samples from 0 to {B - 1}, at least one, got {chosen}")
    return chosen
