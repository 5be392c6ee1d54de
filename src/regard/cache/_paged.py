"""The paged cache: many sequences in one pool of pages."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Unpack, overload

import torch
from torch import Tensor

from .._call.spec import Bias, Options, fast_new
from .._call.stored import New
from .._tools.arguments import count, describe
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask
from . import _checks as checks
from ._attend import CacheOptions, Result, ScaledKeywords, attend
from ._checks import NO_CHUNK, Chunk, Integers, Lengths, State
from ._counts import formatted, largest, per_sample, shared
from ._pages import PageDraft, PagedSequence, Pages
from ._rows import layout_of


class PagedCache:
    """A paged KV cache: sequences of any length in pages of `page` tokens, from one pool.

    Sequences have ids. Methods take `ids` (B,): sample b of the batch belongs to sequence ids[b].
    The default is all sequences in the order in which they were added.

    Sequences with a common prefix (`add(like=...)`, `fork`, `reorder`) share the pages of the
    prefix. Pages are copied on write: appending to a shared page first copies that page.

    Args:
        pages: number of pages. All memory is allocated by the constructor.
        Hkv, D, Dv, dtype, device: as in `KVCache`.
        page: tokens per page, a power of two >= 16.

    Example:
        >>> cache = PagedCache(1024, 8, 64)
        >>> prompt = cache.add()
        >>> cache.append(k, v)                          # (1, 8, L, 64)
        >>> twins = [prompt, cache.add(like=prompt)]    # no copy
        >>> out = cache.attend(q, k2, v2, ids=twins)    # (2, Hq, 1, 64)
    """

    def __init__(
        self, pages: int, Hkv: int, D: int, Dv: int | None = None, *, page: int = 16,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        layout = layout_of(Hkv, D, Dv, "float", dtype, device)
        self.Hkv, self.D, self.Dv, _, self.dtype, self.device = layout
        self.page = count("page", page, 16)
        if page & (page - 1):
            raise ValueError(f"page: expected a power of two >= 16, got {page}")
        self._pool = Pages(layout, count("pages", pages, 1), page)
        self._next_id = 0
        self._begin({})

    def _begin(self, sequences: dict[int, PagedSequence]) -> None:
        self._sequences = sequences
        self._table: tuple[tuple[tuple[int, ...], ...], Tensor] | None = None  # (page numbers, page table)
        weakref.finalize(self, _release_all, self._pool, sequences).atexit = False

    # Content

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the sequences, in the order in which they were added."""
        return tuple(self._sequences)

    def __len__(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(self._lengths(), default=0)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence, (len(ids),) int64."""
        return torch.tensor(self._lengths(), dtype=torch.int64, device=self.device)

    def _lengths(self) -> list[int]:
        return [sequence.length for sequence in self._sequences.values()]

    @property
    def nbytes(self) -> int:
        """The size of the pool in bytes. Forks share the pool."""
        return self._pool.storage.nbytes

    @property
    def pages(self) -> int:
        """The number of pages in the pool."""
        return len(self._pool.users)

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        return len(self._pool.free)

    def positions(self, L: int = 1, *, ids: Integers | None = None) -> Tensor:
        """Returns the positions of the next L tokens of each sequence, (B, L) int64."""
        starts = torch.tensor([self._sequences[name].length for name in self._ids(ids)], device=self.device)
        return starts[:, None] + torch.arange(count("L", L), device=self.device)

    def __repr__(self) -> str:
        lengths = self._lengths()
        held = f"{len(lengths)} sequences" + (f" of length {formatted(lengths)}" if lengths else "")
        return (
            f"PagedCache(Hkv={self.Hkv}, D={self.D}, Dv={self.Dv}, page={self.page}, {self.dtype}: {held}, "
            f"{self.free_pages} of {self.pages} pages free, {self.nbytes:,} bytes)"
        )

    # Sequences

    def add(self, like: int | None = None, tokens: int | None = None) -> int:
        """Adds a sequence and returns its id.

        Args:
            like: the id of a sequence whose first tokens the new sequence shares. Default: the new
                sequence is empty.
            tokens: how many tokens of `like` to share. Default: all.
        """
        sequence = PagedSequence()
        if like is not None:
            (like,) = self._ids([like])
            sequence = self._first(self._sequences[like], tokens)
        elif tokens is not None:
            raise ValueError(f"tokens: expected None without like, got {tokens}")
        name = count("ids", self._next_id)
        self._next_id += 1
        self._pool.share(sequence.pages)
        self._sequences[name] = sequence
        return name

    def _first(self, sequence: PagedSequence, tokens: int | None) -> PagedSequence:
        """Returns a sequence that consists of the first `tokens` tokens of `sequence`.

        The two sequences share pages. `tokens` defaults to all tokens.
        """
        n = sequence.length if tokens is None else count("tokens", tokens)
        if n > sequence.length:
            raise ValueError(f"tokens: expected at most the {sequence.length} of the sequence, got {n}")
        return PagedSequence(sequence.pages[: -(-n // self.page)], n)

    def free(self, sequence: int) -> None:
        """Removes a sequence. Its pages become free unless another sequence uses them."""
        (name,) = self._ids([sequence])
        self._pool.release(self._sequences.pop(name).pages)

    def _ids(self, ids: Integers | None) -> list[int]:
        """Returns the ids as a list. Raises ValueError if an id is unknown or repeated."""
        names = list(self._sequences) if ids is None else checks.integers("ids", ids, None)
        unknown = [name for name in names if name not in self._sequences]
        if unknown or not names or len(set(names)) != len(names):
            known = list(self._sequences)
            raise ValueError(f"ids: expected at least one of {known}, without repeats, got {names}")
        return names

    # Appending and attending

    def append(self, k: Tensor, v: Tensor, *, ids: Integers | None = None, lengths: Lengths = None) -> None:
        """Appends k (B, Hkv, L, D) and v (B, Hkv, L, Dv) to the B sequences `ids`.

        With `lengths`, appends only the first lengths[b] tokens of sample b.
        """
        names = self._ids(ids)
        self._keep(names, self._appended(names, (k, v), lengths)[0])

    def _appended(self, names: list[int], new: New, lengths: Lengths) -> tuple[PageDraft, Chunk]:
        """Writes new tokens to unused slots.

        Returns the draft of the append, which `_keep` commits, and the Chunk of the new tokens.
        """
        chunk = self._pool.storage.layout.chunk(new, lengths, len(names))
        counts = per_sample(chunk.new, len(names))
        draft = self._pool.draft([self._sequences[name] for name in names], counts)
        self._pool.write(draft, self._table_of(draft.after), counts, new)
        return draft, chunk

    def _keep(self, names: list[int], draft: PageDraft) -> None:
        self._pool.keep(draft)
        self._sequences.update(zip(names, draft.after, strict=True))

    def _table_of(self, sequences: list[PagedSequence]) -> Tensor:
        """Returns the page table (B, max_pages) int32 of B sequences. Caches the last table."""
        pages = tuple(sequence.pages for sequence in sequences)
        if self._table is None or self._table[0] != pages:
            # The width is a power of two, so that the shape seldom changes: a new shape is checked again.
            width = 1 << max(map(len, pages)).bit_length()
            rows = [row + (0,) * (width - len(row)) for row in pages]
            self._table = pages, torch.tensor(rows, dtype=torch.int32, device=self.device)
        return self._table[1]

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        return_lse: Literal[False] = False, **options: Unpack[ScaledKeywords],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        return_lse: Literal[True], **options: Unpack[ScaledKeywords],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        return_lse: bool = False, **options: Unpack[ScaledKeywords],
    ) -> Result: ...  # fmt: skip

    @hide_unknown
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        lengths: Lengths = None, mask: Mask | Tensor | None = None, bias: Bias | None = None,
        scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
        window: int | None = None, return_lse: bool = False, impl: str = "auto", **unknown: NoReturn,
    ) -> Result:  # fmt: skip
        """Appends k and v to the sequences `ids`, then attends causally within each sequence.

        The arguments are as in `KVCache.attend`, where B is the number of ids and Lk the length of
        the longest of these sequences after the append. If the call raises, the cache is unchanged.
        """
        if unknown:
            raise unknown_keyword(PagedCache.attend, unknown)
        options = fast_new(Options, (mask, None, bias, scale, softcap, sink, 0.0, None, return_lse))
        names = self._ids(ids)
        new = checks.pair_of(k, v, lengths)
        if new is None:
            before = [self._sequences[name] for name in names]
            draft, chunk = PageDraft(before, before, [], []), NO_CHUNK
        else:
            draft, chunk = self._appended(names, new, lengths)
        held = shared([sequence.length for sequence in draft.after])
        checks.check_queries(q, len(names), self.D, self.dtype, held, chunk)
        stored = self._pool.storage.paged(largest(held), self._table_of(draft.after))
        result = attend(q, stored, held, chunk, CacheOptions(options, window, impl))
        self._keep(names, draft)
        return result

    # Editing

    def crop(self, n: Integers, *, ids: Integers | None = None) -> None:
        """Keeps the first n tokens of each sequence, or drops the last -n if n < 0.

        n is an int for all sequences, or integers (B,).
        """
        names = self._ids(ids)
        before = [self._sequences[name] for name in names]
        lengths = checks.cropped_lengths(n, tuple(sequence.length for sequence in before))
        self._assign(names, [self._first(*pair) for pair in zip(before, lengths, strict=True)])

    def reorder(self, index: Integers, *, ids: Integers | None = None) -> None:
        """Replaces sequence ids[i] by ids[index[i]], for beam search. Tokens are not copied."""
        names = self._ids(ids)
        rows = checks.sample_indices(index, len(names), len(names))
        self._assign(names, [self._sequences[names[row]] for row in rows])

    def _assign(self, names: list[int], after: list[PagedSequence]) -> None:
        """Replaces the sequences with the ids `names` by the sequences `after`.

        Increments the reference counts of the new pages before it decrements those of the old ones,
        so that a page that is both old and new does not become free in between.
        """
        for sequence in after:
            self._pool.share(sequence.pages)
        for name, sequence in zip(names, after, strict=True):
            self._pool.release(self._sequences[name].pages)
            self._sequences[name] = sequence

    def fork(self) -> PagedCache:
        """Returns an independent copy of the cache that shares the pool. Does not copy tokens.

        `copy.copy` does the same. `copy.deepcopy` and `pickle` copy the pool, too.
        """
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        for sequence in self._sequences.values():
            self._pool.share(sequence.pages)
        twin._begin(dict(self._sequences))
        return twin

    __copy__ = fork

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied or unpickled cache and increments the reference counts of its pages."""
        self.__dict__.update(state)
        self._pool.claim(self._sequences.values())
        self._begin(self._sequences)

    def reset(self) -> None:
        """Removes all sequences."""
        _release_all(self._pool, self._sequences)

    # Saving

    def state_dict(self) -> State:
        """Returns the pages in use and the ids, lengths and page table of the N sequences.

        Unused slots of the pages are zero. The table (N, max_pages) holds indices of the saved
        pages, padded with -1.
        """
        filled, sequences = self._filled_rows(), self._sequences.values()
        saved_index = {number: i for i, number in enumerate(filled)}
        width = max((len(sequence.pages) for sequence in sequences), default=0)
        table = [[saved_index[i] for i in pages] + [-1] * (width - len(pages)) for pages, _ in sequences]
        saved = {name: x[[*filled]] for name, x in self._pool.storage.tensors.items()}
        for number, rows in filled.items():
            for x in saved.values() if rows < self.page else ():
                x[saved_index[number], :, rows:] = 0
        return saved | {
            "ids": torch.tensor(self.ids, dtype=torch.int64),
            "lengths": self.lengths,
            "table": torch.tensor(table, dtype=torch.int32).reshape(len(table), width),
        }

    def _filled_rows(self) -> dict[int, int]:
        """Maps each page in use to its number of used slots."""
        filled: dict[int, int] = {}
        for pages, length in self._sequences.values():
            for i, number in enumerate(pages):
                filled[number] = max(filled.get(number, 0), min(self.page, length - i * self.page))
        return filled

    def load_state_dict(self, state: State) -> None:
        """Loads a `state_dict` of a cache with the same page size, sizes and dtype."""
        expected = {*self._pool.storage.tensors, "ids", "lengths", "table"}
        state = checks.checked_state(state, expected, self.device)
        names = [count("ids", name) for name in checks.integers("ids", state["ids"], None)]
        if len(set(names)) != len(names):
            raise ValueError(f"state: expected ids without repeats, got {names}")
        lengths = checks.integers("lengths", state["lengths"], len(names))
        saved = _saved(state["table"], lengths, self.page)
        numbers = {number for sequence in saved for number in sequence.pages}
        used = len(numbers)
        if numbers and not 0 == min(numbers) <= max(numbers) == used - 1:
            raise ValueError(f"state: expected a table of exactly the pages 0 to {used - 1}, got others")
        self._pool.storage.layout.check_state(state, used, self.page)
        uses = Counter(number for sequence in self._sequences.values() for number in sequence.pages)
        available = self.free_pages + sum(self._pool.users[number] == n for number, n in uses.items())
        if used > available:
            raise ValueError(
                f"PagedCache is too small: {used} pages needed, {available} of {self.pages} free"
            )
        self._replace(dict(zip(names, saved, strict=True)), state)

    def _replace(self, saved: dict[int, PagedSequence], state: State) -> None:
        """Replaces all sequences by the sequences `saved` (id -> sequence).

        The pages of a saved sequence are indices into the tensors of `state`. They are copied to
        free pages of the pool.
        """
        self.reset()
        fresh = self._pool.next_free(len(state["k"]))
        for name, x in self._pool.storage.tensors.items():
            x[fresh] = state[name]
        for sequence, (pages, length) in saved.items():
            self._sequences[sequence] = PagedSequence(tuple(fresh[number] for number in pages), length)
        self._pool.claim(self._sequences.values())
        self._next_id = max([self._next_id, *(sequence + 1 for sequence in saved)])


def _saved(table: Tensor, lengths: Sequence[int], page: int) -> list[PagedSequence]:
    """Returns the N sequences that a saved table of page indices (N, max_pages) describes."""
    if table.dtype is not torch.int32 or table.ndim != 2 or len(table) != len(lengths):
        N = len(lengths)
        raise ValueError(f"state: expected an int32 table (N, max_pages), N = {N}, got {describe(table)}")
    most = table.shape[1] * page
    if lengths and not 0 <= min(lengths) <= max(lengths) <= most:
        raise ValueError(f"lengths: expected 0 to {most}, the tokens in the table, got {formatted(lengths)}")
    rows = zip(table.tolist(), lengths, strict=True)
    return [PagedSequence(tuple(row[: -(-n // page)]), n) for row, n in rows]


def _release_all(pool: Pages, sequences: dict[int, PagedSequence]) -> None:
    while sequences:
        pool.release(sequences.popitem()[1].pages)
