"""The last tokens alone, and the first few."""

from __future__ import annotations

import torch
from torch import Tensor

from .._api.merge import merge
from .._call.stored import New, Stored
from .._tools.arguments import count, describe
from ..masks import Mask, MaskKind, Prefix, Window
from ._cache import CAUSAL, Asked, Chunk, Count, Integers, Result, each, kept, look, minus, most, plus, shared
from ._dense import KVCache
from ._rows import Draft


class SlidingCache(KVCache):
    """The last `window` tokens and the first `sinks`, in bounded memory.

    Each query sees what it would see under `Causal() & (Window(window - 1) | Prefix(sinks))`: the last
    `window` tokens, its own included, and the first `sinks` of the sequence (as StreamingLLM keeps them).
    Positions are the true ones, also for `Alibi` and `RelativeBias`, however much has been dropped.

    Rows are [sinks | the last tokens in order | spare]. When the spare rows are used up, the tokens still
    needed move to the front of new storage, once in `spare` tokens.

    Args:
        B, Hkv, D, Dv, dtype, device: as for `KVCache`.
        window: tokens that a query sees, its own included.
        sinks: first tokens that stay.
        rollback: `crop` can always take back so many tokens, counted from the most that there have been.
        spare: rows beyond those needed; default window / 4, at least 16.
    """

    def __init__(
        self,
        B: int,
        Hkv: int,
        D: int,
        Dv: int | None = None,
        *,
        window: int,
        sinks: int = 0,
        rollback: int = 0,
        spare: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.window, self.sinks = count("window", window, 1), count("sinks", sinks)
        self.rollback = count("rollback", rollback)
        self.spare = max(16, window // 4) if spare is None else count("spare", spare, 1)
        rows = self._needed + self.spare
        recent = Window(self.window - 1)
        self._shown: Mask = CAUSAL & (recent | Prefix(self.sinks)) if self.sinks else recent
        self._held: Count = 0  # rows in use; the other tokens, after the sinks, have been dropped
        super().__init__(B, Hkv, D, Dv, capacity=rows, dtype=dtype, device=device)

    def _sizes(self) -> str:
        return f"{super()._sizes()}, window={self.window}, sinks={self.sinks}"

    @property
    def _filled(self) -> Count:
        return self._held

    # Appending

    def _step_on(self) -> None:
        super()._step_on()
        self._held = plus(self._held, 1)

    def _draft(self, new: New, chunk: Chunk) -> Draft:
        parts, held = self._parts, self._held
        if most(plus(held, chunk.new)) > self._rows:
            parts, held = self._compact(parts, held, chunk.new)
        self._write(parts, held, new, chunk)
        return Draft(parts, plus(self._lengths, chunk.new), plus(held, chunk.new), chunk)

    def rows_with(self, L: int) -> int:
        rows = super().rows_with(L)
        return rows if rows <= self._rows else min(rows - L, self._needed) + L

    @property
    def _needed(self) -> int:
        """Rows that the next token may still ask for."""
        return self.sinks + self.window + self.rollback

    def _compact(
        self, parts: tuple[Tensor, ...], held: Count, more: Count
    ) -> tuple[tuple[Tensor, ...], Count]:
        """Copies of what the next token may still ask for, with room for `more`, and how many rows it has."""
        left = shared([min(n, self._needed) for n in each(held, self.B)])
        rows = max(self._needed + self.spare, most(plus(left, more)))
        fresh = self._empty(self.B, rows)
        for to, part in zip(fresh, parts, strict=True):
            for samples, n, m in self._groups(held, left):
                to[samples, :, : self.sinks] = part[samples, :, : self.sinks]
                to[samples, :, self.sinks : m] = part[samples, :, n - m + self.sinks : n]
        return fresh, left

    def _groups(self, held: Count, left: Count) -> list[tuple[slice, int, int]]:
        """Samples that move alike."""
        if isinstance(held, int) and isinstance(left, int):
            return [(slice(None), held, left)]
        pairs = zip(each(held, self.B), each(left, self.B), strict=True)
        return [(slice(b, b + 1), n, m) for b, (n, m) in enumerate(pairs)]

    def _keep(self, draft: Draft) -> None:
        parts, held = draft.parts, draft.rows
        if parts[0].shape[2] != self._rows:  # a chunk larger than the spare rows
            parts, held = self._compact(parts, held, 0)
        self._take(parts)
        self._lengths, self._held = draft.lengths, held

    # Attending

    def _look(self, q: Tensor, draft: Draft, asked: Asked) -> Result:
        _check_relative(asked)
        self._check_reach(q.shape[2], draft)
        dropped = most(minus(draft.lengths, draft.rows)) > 0
        by_distance = asked.bias is not None or asked.mask is not None or asked.window is not None
        if self.sinks and dropped and by_distance:
            return self._look_twice(q, draft, asked)
        stored = self._stored(draft.parts, most(draft.rows))
        return look(q, stored, draft.rows, draft.chunk, asked, self._shown)

    def _look_twice(self, q: Tensor, draft: Draft, asked: Asked) -> Result:
        """Sinks and window apart, each at its own distance from the queries, then merged."""
        k, v = draft.parts
        S, rows = self.sinks, most(draft.rows) - self.sinks
        first = Stored(k[:, :, :S], v[:, :, :S], None, None, None, 0, "float", S, self.D, self.Dv)
        last = first._replace(k=k[:, :, S:], v=v[:, :, S:], length=rows)
        both = asked._replace(return_lse=True)
        found = [
            look(q, first, draft.lengths, draft.chunk, both),
            look(
                q, last, minus(draft.rows, S), draft.chunk, both._replace(sink=None), Window(self.window - 1)
            ),
        ]
        out, lse = merge([out for out, _ in found], [lse for _, lse in found])
        return (out, lse) if asked.return_lse else out

    def _check_reach(self, Lq: int, draft: Draft) -> None:
        """More queries than new tokens look further back than the rows that must be there."""
        if Lq <= draft.chunk.L:
            return
        for length, rows in zip(each(draft.lengths, self.B), each(draft.rows, self.B), strict=True):
            if not self._holds(length - Lq, length, rows):
                raise ValueError(
                    f"q: expected fewer queries than Lq = {Lq}: what the first of them sees has been "
                    "dropped; rollback= keeps more"
                )

    def _holds(self, position: int, length: int, rows: int) -> bool:
        """Whether all that a query at `position` sees before itself is still there."""
        oldest = length - rows + self.sinks  # after the sinks
        return length == rows or position <= self.sinks or position - self.window + 1 >= oldest

    # Changing what is there

    def crop(self, n: Integers) -> None:
        """Keep the first n tokens of each sample, as long as the tokens that the next one sees are held.

        That is so for the last `rollback` tokens, for n up to `sinks`, and as long as nothing was dropped.
        """
        lengths, held = each(self._lengths, self.B), each(self._held, self.B)
        left = kept(n, lengths)
        for m, length, rows in zip(left, lengths, held, strict=True):
            if not self._holds(m, length, rows):
                raise ValueError(
                    f"n: expected to drop at most {self.rollback} of {length} tokens (rollback), "
                    f"got n = {m}: the window before it has been dropped"
                )
        dropped = [a - b for a, b in zip(lengths, held, strict=True)]
        self._lengths = shared(left)
        self._held = shared([m if m <= self.sinks else m - d for m, d in zip(left, dropped, strict=True)])

    def _select(self, chosen: list[int]) -> None:
        self._held = shared([each(self._held, self.B)[b] for b in chosen])
        super()._select(chosen)

    def reset(self) -> None:
        self._lengths = self._held = 0

    # Saving

    def state_dict(self) -> dict[str, Tensor]:
        held = torch.tensor(each(self._held, self.B), device=self.device)
        return super().state_dict() | {"held": held}

    def _counts(self) -> tuple[str, ...]:
        return "lengths", "held"

    def _checked_counts(self, counts: dict[str, list[int]]) -> int:
        super()._checked_counts(counts)
        for length, rows in zip(counts["lengths"], counts["held"], strict=True):
            if not 0 <= rows <= length or not self._holds(length, length, rows):
                raise ValueError(
                    f"state: expected at least the {self.window - 1} tokens before the next and {self.sinks} "
                    f"sinks to be held, got {rows} of {length} tokens"
                )
        return max(counts["held"])

    def _take_counts(self, counts: dict[str, list[int]]) -> None:
        super()._take_counts(counts)
        self._held = shared(counts["held"])


def _check_relative(asked: Asked) -> None:
    """Dropped tokens leave no place in a tensor, so masks and biases must be formulas of the distance."""
    if isinstance(asked.bias, Tensor):
        raise TypeError("bias: expected scores.Alibi or scores.RelativeBias in a SlidingCache, got a tensor")
    if asked.mask is not None and not (
        isinstance(asked.mask, Mask) and asked.mask.kinds == {MaskKind.DISTANCE}
    ):
        raise TypeError(
            "mask: expected one of distances alone in a SlidingCache (Causal, Window, Dilated, combined with "
            f"&, |, ~, PerHead), got {describe(asked.mask)}"
        )
