"""Retention policies: which tokens a `RowCache` keeps, and which of them a query attends to.

Methods take the content of a cache and return the new content, so that the cache is unchanged if a
call raises. `KeepAll` and `KeepWindow` have the same methods.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._api.merge import merge
from .._call.spec import Options
from .._tools.arguments import count, describe
from ..masks import Mask, MaskKind, sliding, streaming
from ._attend import CacheOptions, Result, attend
from ._checks import Chunk, check_saved_lengths
from ._counts import Count, largest, minus, per_sample, plus, shared
from ._rows import RowStorage

LEAST_ROWS = 64


class Content(NamedTuple):
    """The storage of a `RowCache`, and the numbers of tokens that it holds and has dropped."""

    storage: RowStorage
    held: Count  # number of slots of each sample in use
    dropped: Count  # number of tokens of each sample that are no longer stored

    @property
    def lengths(self) -> Count:
        return self.held if self.dropped == 0 else plus(self.held, self.dropped)


class KeepAll:
    """A policy that keeps every token. Without a capacity, the storage grows by doubling."""

    visible: Mask | None = None  # the mask for the query of the last token; None: no mask
    counts: tuple[str, ...] = ("lengths",)  # names of the integer tensors (B,) in a state_dict

    def __init__(self, capacity: int | None, owner: str) -> None:
        self.capacity, self.owner = None if capacity is None else count("capacity", capacity, 1), owner

    def with_room(self, content: Content, new: Count) -> Content:
        """Returns the content with free slots for `new` tokens, in new storage if necessary."""
        storage, held, _ = content
        needed = largest(plus(held, new))
        if needed <= storage.rows:
            return content
        if self.capacity is not None:
            raise ValueError(
                f"{self.owner} is full: {needed} tokens needed, capacity {self.capacity}, of which "
                f"{self.capacity - largest(held)} are free; capacity=None lets it grow"
            )
        return Content(storage.copy(largest(held), max(needed, 2 * storage.rows, LEAST_ROWS)), held, 0)

    def settled(self, content: Content) -> Content:
        """Returns the content that the cache keeps after a call."""
        return content

    def rows_with(self, content: Content, L: int) -> int:
        """Returns the number of keys, Lk, in a call that appends L tokens to every sample."""
        return largest(content.held) + L

    def attend(self, q: Tensor, content: Content, chunk: Chunk, settings: CacheOptions) -> Result:
        """Computes attention of q (B, Hq, Lq, D), the queries of the last Lq tokens.

        `content` already includes the tokens of the new chunk.
        """
        storage, held, _ = content
        return attend(q, storage.stored(largest(held)), held, chunk, settings)

    def cropped(self, content: Content, lengths: list[int]) -> Content:
        """Returns the cache's content with only the first lengths[b] tokens of sample b."""
        return Content(content.storage, shared(lengths), 0)

    def restored(self, lengths: list[int]) -> tuple[Count, Count]:
        """Checks the lengths of a saved state.

        Returns for each sample the number of tokens in storage and the number of dropped tokens.
        """
        check_saved_lengths(lengths)
        return shared(lengths), 0


class KeepWindow:
    """A policy that keeps the last `window` tokens and the first `sinks` tokens.

    The storage holds the sinks, then the last tokens in order, then spare slots. When the spare
    slots are used up, the sinks and the last window + rollback tokens move to new storage. The
    additional `rollback` tokens let `crop` remove that many tokens.
    """

    counts = ("lengths", "held")

    def __init__(self, window: int, sinks: int, rollback: int, spare: int) -> None:
        self.window, self.sinks, self.rollback = window, sinks, rollback
        self.needed = sinks + window + rollback
        self.capacity = self.needed + spare
        self.recent = sliding(window)
        self.visible = streaming(window, sinks) if sinks else self.recent

    def with_room(self, content: Content, new: Count) -> Content:
        if largest(plus(content.held, new)) <= content.storage.rows:
            return content
        return self._compacted(content, new)

    def settled(self, content: Content) -> Content:
        # If the chunk was larger than the spare slots, the storage was enlarged: shrink it again.
        return content if content.storage.rows == self.capacity else self._compacted(content, 0)

    def _compacted(self, content: Content, new: Count) -> Content:
        """Copies the tokens to keep into new storage that has free slots for `new` tokens."""
        storage, held, _ = content
        B, S = storage.B, self.sinks
        remaining = shared([min(n, self.needed) for n in per_sample(held, B)])
        fresh = storage.layout.empty(B, max(self.capacity, largest(plus(remaining, new))))
        for name, x in storage.tensors.items():
            target = fresh.tensors[name]
            for samples, n, m in _moves(held, remaining, B):
                target[samples, :, :S] = x[samples, :, :S]
                target[samples, :, S:m] = x[samples, :, n - m + S : n]
        return Content(fresh, remaining, minus(content.lengths, remaining))

    def rows_with(self, content: Content, L: int) -> int:
        held = largest(content.held)
        return held + L if held + L <= content.storage.rows else min(held, self.needed) + L

    def attend(self, q: Tensor, content: Content, chunk: Chunk, settings: CacheOptions) -> Result:
        storage, held, dropped = content
        options = settings.options
        _check_relative(options)
        if q.shape[2] > chunk.L:
            self._check_reach(q, content)
        uses_distance = options.bias is not None or options.mask is not None or settings.window is not None
        if self.sinks and uses_distance and largest(dropped) > 0:
            return self._attend_twice(q, content, chunk, settings)
        return attend(q, storage.stored(largest(held)), held, chunk, settings, self.visible)

    def _attend_twice(self, q: Tensor, content: Content, chunk: Chunk, settings: CacheOptions) -> Result:
        """Attends to the sinks and to the window in two calls, and merges the results.

        The two calls need different offsets, because tokens between sinks and window were dropped.
        """
        S, stored = self.sinks, content.storage.stored(self.sinks)
        first = stored._replace(k=stored.k[:, :, :S], v=stored.v[:, :, :S])
        recent = minus(content.held, S)
        last = stored._replace(k=stored.k[:, :, S:], v=stored.v[:, :, S:], length=largest(recent))
        with_lse = settings.options._replace(return_lse=True)
        without_sink = with_lse._replace(sink=None)  # the sink logit must count only once
        results = [
            attend(q, first, content.lengths, chunk, settings._replace(options=with_lse)),
            attend(q, last, recent, chunk, settings._replace(options=without_sink), self.recent),
        ]
        out, lse = merge([out for out, _ in results], [lse for _, lse in results])
        return (out, lse) if settings.options.return_lse else out

    def _check_reach(self, q: Tensor, content: Content) -> None:
        """Raises ValueError if a key that the first query attends to has been dropped."""
        B, Lq = len(q), q.shape[2]
        for length, rows in zip(per_sample(content.lengths, B), per_sample(content.held, B), strict=True):
            if not self._holds(length - Lq, length, rows):
                raise ValueError(
                    f"q: expected fewer queries, got Lq = {Lq}: keys of the first query have been dropped; "
                    "a larger rollback= keeps more tokens"
                )

    def _holds(self, position: int, length: int, rows: int) -> bool:
        """Returns whether the cache holds every earlier key that a query at `position` attends to.

        The sample has `length` tokens, of which `rows` are stored.
        """
        oldest = length - rows + self.sinks  # the first position held after the sinks
        return length == rows or position <= self.sinks or position - self.window + 1 >= oldest

    def cropped(self, content: Content, lengths: list[int]) -> Content:
        B = len(lengths)
        before, held, dropped = (per_sample(n, B) for n in (content.lengths, content.held, content.dropped))
        for m, length, rows in zip(lengths, before, held, strict=True):
            if not self._holds(m, length, rows):
                raise ValueError(
                    f"n: expected to drop at most {self.rollback} of {length} tokens (rollback), "
                    f"got n = {m}; the window before position {m} has been dropped"
                )
        dropped = tuple(0 if m <= self.sinks else d for m, d in zip(lengths, dropped, strict=True))
        remaining = shared([m - d for m, d in zip(lengths, dropped, strict=True)])
        return Content(content.storage, remaining, shared(dropped))

    def restored(self, lengths: list[int], held: list[int]) -> tuple[Count, Count]:
        check_saved_lengths(lengths)
        for length, rows in zip(lengths, held, strict=True):
            if not min(length, self.sinks + self.window - 1) <= rows <= length:
                raise ValueError(
                    f"state: expected the last {self.window - 1} tokens and {self.sinks} sinks to be held, "
                    f"got {rows} of {length} tokens"
                )
        if max(held) > self.capacity:
            raise ValueError(f"state: expected at most {self.capacity} tokens to be held, got {max(held)}")
        return shared(held), minus(shared(lengths), shared(held))


Retention = KeepAll | KeepWindow


def _moves(held: Count, remaining: Count, B: int) -> list[tuple[slice, int, int]]:
    """Returns tuples (samples, held, remaining), one for each copy operation.

    `held` and `remaining` are a sample's numbers of tokens before and after. If all samples have
    the same two numbers, there is one tuple for all samples, otherwise one for each sample.
    """
    if isinstance(held, int) and isinstance(remaining, int):
        return [(slice(None), held, remaining)]
    pairs = zip(per_sample(held, B), per_sample(remaining, B), strict=True)
    return [(slice(b, b + 1), n, m) for b, (n, m) in enumerate(pairs)]


def _check_relative(options: Options) -> None:
    """Raises TypeError if the mask or the bias depends on anything but the distance."""
    if isinstance(options.bias, Tensor):
        raise TypeError("bias: expected scores.Alibi or scores.RelativeBias in a SlidingCache, got a tensor")
    mask = options.mask
    if mask is not None and not (isinstance(mask, Mask) and mask.kinds == {MaskKind.DISTANCE}):
        raise TypeError(
            "mask: expected a mask of distances in a SlidingCache (Causal, Window, Dilated, combined with "
            f"&, |, ~, PerHead), got {describe(mask)}"
        )
