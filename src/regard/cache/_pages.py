"""Storage in pages: their memory, how many sequences use each, which are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.stored import Stored


class PagedSequence(NamedTuple):
    """A sequence: its tokens lie in these pages, in order."""

    pages: tuple[int, ...] = ()
    length: int = 0


class PageDraft(NamedTuple):
    """Sequences before and after an append that is not yet kept."""

    before: list[PagedSequence]
    after: list[PagedSequence]
    taken: list[int]  # free pages that the sequences will use
    left: list[int]  # pages that one of the sequences will no longer use


class Pages:
    """A pool of pages of `page` rows: k (pages, Hkv, page, D), v (pages, Hkv, page, Dv)."""

    def __init__(
        self, pages: int, page: int, Hkv: int, D: int, Dv: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page = page
        with torch.inference_mode(False):  # otherwise they could not be written to outside of inference mode
            self.k = torch.zeros(pages, Hkv, page, D, dtype=dtype, device=device)
            self.v = torch.zeros(pages, Hkv, page, Dv, dtype=dtype, device=device)
        self.users = [0] * pages
        self.free = list(range(pages))[::-1]

    # Appending

    def draft(self, before: list[PagedSequence], new: Sequence[int]) -> PageDraft:
        """Plans new[b] tokens more for each sequence. A shared page that is not full becomes a copy."""
        kept = [self._kept(held) if m else held.pages for held, m in zip(before, new, strict=True)]
        lengths = [held.length + m for held, m in zip(before, new, strict=True)]
        missing = [-(-n // self.page) - len(pages) for n, pages in zip(lengths, kept, strict=True)]
        taken = self.next_free(sum(missing))
        rest = iter(taken)
        after = [
            PagedSequence((*pages, *(next(rest) for _ in range(more))), n)
            for pages, more, n in zip(kept, missing, lengths, strict=True)
        ]
        left = [i for held, pages in zip(before, kept, strict=True) for i in held.pages[len(pages) :]]
        return PageDraft(before, after, taken, left)

    def _kept(self, held: PagedSequence) -> tuple[int, ...]:
        """Returns the pages that a sequence still uses when it has appended."""
        shares_last = held.length % self.page != 0 and self.users[held.pages[-1]] > 1
        return held.pages[:-1] if shares_last else held.pages

    def next_free(self, count: int) -> list[int]:
        """Returns the pages that `take` would take, which are still free."""
        if count > len(self.free):
            raise ValueError(
                f"PagedCache is full: {count} pages of {self.page} tokens needed, {len(self.free)} of "
                f"{len(self.users)} are free"
            )
        return self.free[len(self.free) - count :][::-1]

    def write(self, draft: PageDraft, table: Tensor, new: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Writes new tokens, and copies of pages, where no sequence has tokens yet."""
        copies = [
            (old.pages[-1], now.pages[len(old.pages) - 1])
            for old, now in zip(draft.before, draft.after, strict=True)
            if old.pages != now.pages[: len(old.pages)]
        ]
        if copies:
            source, target = map(list, zip(*copies, strict=True))
            self.k[target], self.v[target] = self.k[source], self.v[source]
        write_stored(self.stored(table, 0), [held.length for held in draft.before], new, k, v)

    def stored(self, table: Tensor, length: int) -> Stored:
        """Returns the pages of a table (B, max_pages), in place, as kernels read them."""
        D, Dv = self.k.shape[3], self.v.shape[3]
        return Stored(self.k, self.v, None, None, table, self.page, "float", length, D, Dv)

    def keep(self, draft: PageDraft) -> None:
        self.take(draft.taken)
        self.release(draft.left)

    # Users

    def take(self, pages: list[int]) -> None:
        """Gives one user to each of the next free pages."""
        del self.free[len(self.free) - len(pages) :]
        self.share(pages)

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more user of each."""
        for number in pages:
            self.users[number] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Counts one user less of each. Pages without users are free."""
        for number in pages:
            self.users[number] -= 1
            if not self.users[number]:
                self.free.append(number)
