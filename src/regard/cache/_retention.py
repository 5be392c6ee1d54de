"""Which tokens a cache of rows keeps, and what queries see of them: all, or a window and the first few.

A policy takes the content of a cache and returns that after a change, so that a call which raises leaves
the cache as it was. Both policies have the same methods.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._api.merge import merge
from .._call.spec import Options
from .._tools.arguments import count, describe
from ..masks import Mask, MaskKind, Prefix, Window
from ._attend import CAUSAL, CacheOptions, Result, attend
from ._checks import Chunk, check_saved_lengths
from ._counts import Count, each, minus, most, plus, shared
from ._rows import RowStorage

LEAST_ROWS = 64


class Content(NamedTuple):
    """What a cache of rows holds: `dropped` tokens of each sample were held once and are gone."""

    storage: RowStorage
    held: Count  # rows in use
    dropped: Count

    @property
    def lengths(self) -> Count:
        return self.held if self.dropped == 0 else plus(self.held, self.dropped)


class KeepAll:
    """Keeps every token. Storage grows geometrically (capacity None), or is full at its capacity."""

    visible: Mask | None = None  # what the last token sees; None: all
    counts: tuple[str, ...] = ("lengths",)  # the integers (B,) in a state

    def __init__(self, capacity: int | None, owner: str) -> None:
        self.capacity, self.owner = None if capacity is None else count("capacity", capacity, 1), owner

    def with_room(self, content: Content, new: Count) -> Content:
        """Returns the content with space for `new` tokens after those held."""
        storage, held, _ = content
        needed = most(plus(held, new))
        if needed <= storage.rows:
            return content
        if self.capacity is not None:
            raise ValueError(
                f"{self.owner} is full: {needed} tokens needed, capacity {self.capacity}, of which "
                f"{self.capacity - most(held)} are free; capacity=None lets it grow"
            )
        return Content(storage.copy(most(held), max(needed, 2 * storage.rows, LEAST_ROWS)), held, 0)

    def settled(self, content: Content) -> Content:
        """Returns the content as it is kept between calls."""
        return content

    def rows_with(self, content: Content, L: int) -> int:
        """Returns how many rows queries see in a call that appends L tokens to every sample."""
        return most(content.held) + L

    def attend(self, q: Tensor, content: Content, chunk: Chunk, asked: CacheOptions) -> Result:
        """Attends from the last tokens of the content, to which the chunk has been appended."""
        storage, held, _ = content
        return attend(q, storage.stored(most(held)), held, chunk, asked)

    def cropped(self, content: Content, lengths: list[int]) -> Content:
        """Returns the content with the first lengths[b] tokens of each sample."""
        return Content(content.storage, shared(lengths), 0)

    def restored(self, lengths: list[int]) -> tuple[Count, Count]:
        """Checks the counts of a state. Returns how many tokens are held and dropped."""
        check_saved_lengths(lengths)
        return shared(lengths), 0


class KeepWindow:
    """Keeps the last `window` tokens and the first `sinks`.

    Rows are [sinks | the last tokens in order | spare]. When the spare rows are used up, the tokens that the
    next one sees, and `rollback` more, move to the front of new storage.
    """

    counts = ("lengths", "held")

    def __init__(self, window: int, sinks: int, rollback: int, spare: int) -> None:
        self.window, self.sinks, self.rollback = window, sinks, rollback
        self.needed = sinks + window + rollback
        self.capacity = self.needed + spare
        self.recent = Window(window - 1)
        self.visible: Mask = CAUSAL & (self.recent | Prefix(sinks)) if sinks else self.recent

    def with_room(self, content: Content, new: Count) -> Content:
        if most(plus(content.held, new)) <= content.storage.rows:
            return content
        return self._compacted(content, new)

    def settled(self, content: Content) -> Content:
        # A chunk larger than the spare rows was given more than are kept.
        return content if content.storage.rows == self.capacity else self._compacted(content, 0)

    def _compacted(self, content: Content, new: Count) -> Content:
        """Copies the tokens that the next one may see into storage with room for `new` more."""
        storage, held, _ = content
        B, S = storage.B, self.sinks
        left = shared([min(n, self.needed) for n in each(held, B)])
        fresh = storage.layout.empty(B, max(self.capacity, most(plus(left, new))))
        for name, x in storage.tensors.items():
            to = fresh.tensors[name]
            for samples, n, m in _moves(held, left, B):
                to[samples, :, :S] = x[samples, :, :S]
                to[samples, :, S:m] = x[samples, :, n - m + S : n]
        return Content(fresh, left, minus(content.lengths, left))

    def rows_with(self, content: Content, L: int) -> int:
        held = most(content.held)
        return held + L if held + L <= content.storage.rows else min(held, self.needed) + L

    def attend(self, q: Tensor, content: Content, chunk: Chunk, asked: CacheOptions) -> Result:
        storage, held, dropped = content
        options = asked.options
        _check_relative(options)
        if q.shape[2] > chunk.L:
            self._check_reach(q, content)
        by_distance = options.bias is not None or options.mask is not None or asked.window is not None
        if self.sinks and by_distance and most(dropped) > 0:
            return self._attend_twice(q, content, chunk, asked)
        return attend(q, storage.stored(most(held)), held, chunk, asked, self.visible)

    def _attend_twice(self, q: Tensor, content: Content, chunk: Chunk, asked: CacheOptions) -> Result:
        """Attends to sinks and window apart, each at its own distance from the queries, and merges."""
        S = self.sinks
        stored = content.storage.stored(S)
        first = stored._replace(k=stored.k[:, :, :S], v=stored.v[:, :, :S])
        recent = minus(content.held, S)
        last = stored._replace(k=stored.k[:, :, S:], v=stored.v[:, :, S:], length=most(recent))
        both = asked.options._replace(return_lse=True)
        results = [
            attend(q, first, content.lengths, chunk, asked._replace(options=both)),
            attend(q, last, recent, chunk, asked._replace(options=both._replace(sink=None)), self.recent),
        ]
        out, lse = merge([out for out, _ in results], [lse for _, lse in results])
        return (out, lse) if asked.options.return_lse else out

    def _check_reach(self, q: Tensor, content: Content) -> None:
        """Checks that what the first query sees is held, if there are more queries than new tokens."""
        B, Lq = len(q), q.shape[2]
        for length, rows in zip(each(content.lengths, B), each(content.held, B), strict=True):
            if not self._holds(length - Lq, length, rows):
                raise ValueError(
                    f"q: expected fewer queries than Lq = {Lq}: what the first of them sees has been "
                    "dropped; rollback= keeps more"
                )

    def _holds(self, position: int, length: int, rows: int) -> bool:
        """Returns whether all that a query at `position` sees before itself is held."""
        oldest = length - rows + self.sinks  # after the sinks
        return length == rows or position <= self.sinks or position - self.window + 1 >= oldest

    def cropped(self, content: Content, lengths: list[int]) -> Content:
        B = len(lengths)
        before, held = each(content.lengths, B), each(content.held, B)
        for m, length, rows in zip(lengths, before, held, strict=True):
            if not self._holds(m, length, rows):
                raise ValueError(
                    f"n: expected to drop at most {self.rollback} of {length} tokens (rollback), "
                    f"got n = {m}: the window before it has been dropped"
                )
        gone = [0 if m <= self.sinks else d for m, d in zip(lengths, each(content.dropped, B), strict=True)]
        left = shared([m - d for m, d in zip(lengths, gone, strict=True)])
        return Content(content.storage, left, shared(gone))

    def restored(self, lengths: list[int], held: list[int]) -> tuple[Count, Count]:
        check_saved_lengths(lengths)
        for length, rows in zip(lengths, held, strict=True):
            if not 0 <= rows <= length or not self._holds(length, length, rows):
                raise ValueError(
                    f"state: expected at least the {self.window - 1} tokens before the next and {self.sinks} "
                    f"sinks to be held, got {rows} of {length} tokens"
                )
        if max(held) > self.capacity:
            raise ValueError(f"state: expected at most {self.capacity} tokens to be held, got {max(held)}")
        return shared(held), minus(shared(lengths), shared(held))


Retention = KeepAll | KeepWindow


def _moves(held: Count, left: Count, B: int) -> list[tuple[slice, int, int]]:
    """Groups samples that move alike: (samples, rows before, rows after)."""
    if isinstance(held, int) and isinstance(left, int):
        return [(slice(None), held, left)]
    pairs = zip(each(held, B), each(left, B), strict=True)
    return [(slice(b, b + 1), n, m) for b, (n, m) in enumerate(pairs)]


def _check_relative(options: Options) -> None:
    """Checks that mask and bias are formulas of the distance: dropped tokens have no place in a tensor."""
    if isinstance(options.bias, Tensor):
        raise TypeError("bias: expected scores.Alibi or scores.RelativeBias in a SlidingCache, got a tensor")
    mask = options.mask
    if mask is not None and not (isinstance(mask, Mask) and mask.kinds == {MaskKind.DISTANCE}):
        raise TypeError(
            "mask: expected one of distances alone in a SlidingCache (Causal, Window, Dilated, combined with "
            f"&, |, ~, PerHead), got {describe(mask)}"
        )
