"""The page pool of `PagedCache`: storage, reference counts and the free list."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from .._api.stored import write_stored
from .._call.stored import New
from ._rows import RowLayout, RowStorage


class PagedSequence(NamedTuple):
    """A sequence of `length` tokens, stored in order in the pages `pages`."""

    pages: tuple[int, ...] = ()
    length: int = 0


class PageDraft(NamedTuple):
    """An append that is not yet committed: the sequences before and after it."""

    before: list[PagedSequence]
    after: list[PagedSequence]
    taken: list[int]  # free pages that the append will use
    copies: list[tuple[int, int]]  # (shared page, its copy)


class Pages:
    """A pool of pages with `page` slots each: tensors (pages, Hkv, page, ...)."""

    def __init__(self, layout: RowLayout, pages: int, page: int) -> None:
        self.__setstate__((layout.empty(pages, page), page))

    def __getstate__(self) -> tuple[RowStorage, int]:
        """Leaves out the reference counts, because a copy of the pool has other users."""
        return self.storage, self.page

    def __setstate__(self, state: tuple[RowStorage, int]) -> None:
        self.storage, self.page = state
        self.users = [0] * self.storage.B  # reference counts
        self.free = list(range(self.storage.B))[::-1]

    # Appending

    def draft(self, before: list[PagedSequence], new: Sequence[int]) -> PageDraft:
        """Plans an append of new[b] tokens to sequence b, without changing the pool.

        If new tokens would be written to a page that other sequences share, the draft replaces the
        page by a copy.
        """
        reused = [self._reused(seq) if m else seq.pages for seq, m in zip(before, new, strict=True)]
        lengths = [sequence.length + m for sequence, m in zip(before, new, strict=True)]
        missing = [-(-n // self.page) - len(pages) for n, pages in zip(lengths, reused, strict=True)]
        taken = self.next_free(sum(missing))
        available, after, copies = iter(taken), [], []
        for sequence, pages, needed, n in zip(before, reused, missing, lengths, strict=True):
            after.append(PagedSequence((*pages, *itertools.islice(available, needed)), n))
            if sequence.pages is not pages:
                copies.append((sequence.pages[-1], after[-1].pages[len(pages)]))
        return PageDraft(before, after, taken, copies)

    def _reused(self, sequence: PagedSequence) -> tuple[int, ...]:
        """Returns the pages of a sequence that it keeps when tokens are appended.

        The last page is left out if it must be copied: it is shared and not full.
        """
        shares_last = sequence.length % self.page != 0 and self.users[sequence.pages[-1]] > 1
        return sequence.pages[:-1] if shares_last else sequence.pages

    def next_free(self, count: int) -> list[int]:
        """Returns the next `count` free pages without taking them.

        Raises ValueError if there are fewer.
        """
        if count > len(self.free):
            raise ValueError(
                f"PagedCache is full: {count} pages of {self.page} tokens needed, {len(self.free)} of "
                f"{len(self.users)} are free"
            )
        return self.free[len(self.free) - count :][::-1]

    def write(self, draft: PageDraft, table: Tensor, counts: Sequence[int], new: New) -> None:
        """Carries out a draft: copies shared pages, then writes the new tokens.

        Writes only to slots that are not in use.
        """
        for source, target in draft.copies:
            for x in self.storage.tensors.values():
                x[target] = x[source]
        starts = [sequence.length for sequence in draft.before]
        write_stored(self.storage.paged(0, table), starts, counts, *new)

    def keep(self, draft: PageDraft) -> None:
        """Commits an append by updating the reference counts."""
        self.take(draft.taken)
        self.release(source for source, _ in draft.copies)

    # Reference counts

    def take(self, pages: list[int]) -> None:
        """Removes `pages`, a result of `next_free`, from the free list. Increments their counts."""
        del self.free[len(self.free) - len(pages) :]
        self.share(pages)

    def claim(self, sequences: Iterable[PagedSequence]) -> None:
        """Increments the reference count of each page of the sequences. The pages may be free."""
        for sequence in sequences:
            self.share(sequence.pages)
        self.free = [number for number in self.free if not self.users[number]]

    def share(self, pages: Iterable[int]) -> None:
        """Increments the reference count of each page."""
        for number in pages:
            self.users[number] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Decrements the reference count of each page. At 0, the page becomes free."""
        for number in pages:
            self.users[number] -= 1
            if not self.users[number]:
                self.free.append(number)
