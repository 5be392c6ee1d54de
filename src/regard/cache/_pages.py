"""Storage in pages: their memory, how many sequences use each, which are free."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from .._api.stored import write_stored
from .._call.stored import New
from ._rows import RowLayout


class PagedSequence(NamedTuple):
    """A sequence: its tokens lie in these pages, in order."""

    pages: tuple[int, ...] = ()
    length: int = 0


class PageDraft(NamedTuple):
    """Sequences before and after an append that is not yet kept."""

    before: list[PagedSequence]
    after: list[PagedSequence]
    taken: list[int]  # free pages that the sequences will use
    copies: list[tuple[int, int]]  # shared pages that are replaced, and their copies


class Pages:
    """A pool of pages of `page` rows: tensors (pages, Hkv, page, ...)."""

    def __init__(self, layout: RowLayout, pages: int, page: int) -> None:
        self.storage, self.page = layout.empty(pages, page), page
        self.users = [0] * pages
        self.free = list(range(pages))[::-1]

    # Appending

    def draft(self, before: list[PagedSequence], new: Sequence[int]) -> PageDraft:
        """Plans new[b] tokens more for each sequence. A shared page that is not full becomes a copy."""
        kept = [self._kept(held) if m else held.pages for held, m in zip(before, new, strict=True)]
        lengths = [held.length + m for held, m in zip(before, new, strict=True)]
        missing = [-(-n // self.page) - len(pages) for n, pages in zip(lengths, kept, strict=True)]
        taken = self.next_free(sum(missing))
        rest, after, copies = iter(taken), [], []
        for held, pages, more, n in zip(before, kept, missing, lengths, strict=True):
            after.append(PagedSequence((*pages, *itertools.islice(rest, more)), n))
            if held.pages is not pages:
                copies.append((held.pages[-1], after[-1].pages[len(pages)]))
        return PageDraft(before, after, taken, copies)

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

    def write(self, draft: PageDraft, table: Tensor, counts: Sequence[int], new: New) -> None:
        """Writes new tokens, and copies of pages, where no sequence has tokens yet."""
        for source, target in draft.copies:
            for x in self.storage.tensors.values():
                x[target] = x[source]
        starts = [held.length for held in draft.before]
        write_stored(self.storage.paged(0, table), starts, counts, *new)

    def keep(self, draft: PageDraft) -> None:
        self.take(draft.taken)
        self.release(source for source, _ in draft.copies)

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
