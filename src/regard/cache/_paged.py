"""Many sequences in one pool of pages."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from .._call.spec import Bias, Options, fast_new
from .._call.stored import New
from .._tools.arguments import count, describe
from ..masks import Mask
from . import _checks as checks
from ._attend import CacheOptions, Result, ScaledKeywords, attend
from ._checks import NOTHING, Chunk, Integers, Lengths, State
from ._counts import each, most, shared, shown
from ._pages import PageDraft, PagedSequence, Pages
from ._rows import layout_of

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


class PagedCache:
    """Sequences of any length in pages of `page` tokens from one pool; equal beginnings are stored once.

    A sequence is added and freed by its id. Calls take `ids`, the sequences that the rows of a batch stand
    for; by default all, in the order in which they were added.

    Pages have users. A sequence that begins like another (`add(like=...)`, `fork`, `reorder`) uses the same
    pages. Before it appends into a page that others use as well, it gets a copy of that page.

    Args:
        pages: how many; all memory is allocated at once.
        Hkv, D, Dv, dtype, device: as for `KVCache`.
        page: tokens of a page, a power of two from 16 on.

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
            raise ValueError(f"page: expected a power of two from 16 on, got {page}")
        self._pool = Pages(layout, count("pages", pages, 1), page)
        self._next_id = 0
        self._begin({})

    def _begin(self, sequences: dict[int, PagedSequence]) -> None:
        self._sequences = sequences
        self._table: tuple[tuple[tuple[int, ...], ...], Tensor] | None = None  # the last one, by its pages
        weakref.finalize(self, _release_all, self._pool, sequences).atexit = False

    # What it holds

    @property
    def ids(self) -> tuple[int, ...]:
        """The sequences, in the order in which they were added."""
        return tuple(self._sequences)

    def __len__(self) -> int:
        """The tokens of the longest sequence."""
        return max(self._lengths(), default=0)

    @property
    def lengths(self) -> Tensor:
        """int64, as many as `ids`: the tokens of each sequence."""
        return torch.tensor(self._lengths(), dtype=torch.int64, device=self.device)

    def _lengths(self) -> list[int]:
        return [sequence.length for sequence in self._sequences.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, used or not. Forks share it."""
        return self._pool.storage.nbytes

    @property
    def pages(self) -> int:
        """The number of pages of the pool."""
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
        held = f"{len(lengths)} sequences" + (f" of length {shown(lengths)}" if lengths else "")
        return (
            f"PagedCache(Hkv={self.Hkv}, D={self.D}, Dv={self.Dv}, page={self.page}, {self.dtype}: {held}, "
            f"{self.free_pages} of {self.pages} pages free, {self.nbytes:,} bytes)"
        )

    # Sequences

    def add(self, like: int | None = None, tokens: int | None = None) -> int:
        """Adds a sequence and returns its id. It is empty, or the first `tokens` (default: all) of `like`."""
        held = PagedSequence()
        if like is not None:
            (like,) = self._ids([like])
            held = self._first(self._sequences[like], tokens)
        elif tokens is not None:
            raise ValueError(f"tokens: expected none without like, got {tokens}")
        name, self._next_id = self._next_id, self._next_id + 1
        self._pool.share(held.pages)
        self._sequences[name] = held
        return name

    def _first(self, held: PagedSequence, tokens: int | None) -> PagedSequence:
        n = held.length if tokens is None else count("tokens", tokens)
        if n > held.length:
            raise ValueError(f"tokens: expected at most the {held.length} that the sequence has, got {n}")
        return PagedSequence(held.pages[: -(-n // self.page)], n)

    def free(self, sequence: int) -> None:
        """Forgets a sequence; its pages are free when no other sequence uses them."""
        (name,) = self._ids([sequence])
        self._pool.release(self._sequences.pop(name).pages)

    def _ids(self, ids: Integers | None) -> list[int]:
        """Checks that the ids are different and known. The default is all of them."""
        names = list(self._sequences) if ids is None else checks.integers("ids", ids, None)
        unknown = [name for name in names if name not in self._sequences]
        if unknown or not names or len(set(names)) != len(names):
            have = list(self._sequences)
            raise ValueError(f"ids: expected different sequences, at least one, out of {have}, got {names}")
        return names

    # Appending and attending

    def append(self, k: Tensor, v: Tensor, *, ids: Integers | None = None, lengths: Lengths = None) -> None:
        """Appends k (B, Hkv, L, D), v (B, Hkv, L, Dv) to B sequences; of one only lengths[b], if given."""
        names = self._ids(ids)
        self._keep(names, self._appended(names, (k, v), lengths)[0])

    def _appended(self, names: list[int], new: New, lengths: Lengths) -> tuple[PageDraft, Chunk]:
        """Writes new tokens where no sequence has any. Returns the sequences with them, not yet kept."""
        chunk = self._pool.storage.layout.chunk(new, lengths, len(names))
        counts = each(chunk.new, len(names))
        draft = self._pool.draft([self._sequences[name] for name in names], counts)
        self._pool.write(draft, self._table_of(draft.after), counts, new)
        return draft, chunk

    def _keep(self, names: list[int], draft: PageDraft) -> None:
        self._pool.keep(draft)
        self._sequences.update(zip(names, draft.after, strict=True))

    def _table_of(self, sequences: list[PagedSequence]) -> Tensor:
        """Returns the page table (B, max_pages) in int32, the last one if the pages are the same."""
        pages = tuple(held.pages for held in sequences)
        if self._table is None or self._table[0] != pages:
            width = 1 << max(map(len, pages)).bit_length()  # seldom a new shape, which would be checked anew
            rows = [numbers + (0,) * (width - len(numbers)) for numbers in pages]
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

    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        lengths: Lengths = None, mask: Mask | Tensor | None = None, bias: Bias | None = None,
        scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
        window: int | None = None, return_lse: bool = False, impl: str = "auto",
    ) -> Result:  # fmt: skip
        """Appends k and v to the sequences `ids`, then attends causally, each query in its own sequence.

        All is as in `KVCache.attend`, with B the number of ids; Lk is the longest of these sequences.
        """
        options = fast_new(Options, (mask, None, bias, scale, softcap, sink, 0.0, None, return_lse))
        names = self._ids(ids)
        new = checks.pair_of(k, v, lengths)
        if new is None:
            before = [self._sequences[name] for name in names]
            draft, chunk = PageDraft(before, before, [], []), NOTHING
        else:
            draft, chunk = self._appended(names, new, lengths)
        held = shared([sequence.length for sequence in draft.after])
        checks.check_queries(q, len(names), self.D, self.dtype, held, chunk)
        stored = self._pool.storage.paged(most(held), self._table_of(draft.after))
        result = attend(q, stored, held, chunk, CacheOptions(options, window, impl))
        self._keep(names, draft)
        return result

    # Changing what is there

    def crop(self, n: Integers, *, ids: Integers | None = None) -> None:
        """Keeps the first n tokens of each sequence, n one number or (B,); a negative n drops the last -n."""
        names = self._ids(ids)
        before = [self._sequences[name] for name in names]
        lengths = checks.cropped_lengths(n, tuple(held.length for held in before))
        self._become(names, [self._first(held, m) for held, m in zip(before, lengths, strict=True)])

    def reorder(self, index: Integers, *, ids: Integers | None = None) -> None:
        """Makes sequence ids[i] what ids[index[i]] was, as beams need it, without copying a token."""
        names = self._ids(ids)
        rows = checks.sample_indices(index, len(names), len(names))
        self._become(names, [self._sequences[names[row]] for row in rows])

    def _become(self, names: list[int], after: list[PagedSequence]) -> None:
        """Replaces sequences by others whose pages are in use."""
        for held in after:
            self._pool.share(held.pages)
        for name, held in zip(names, after, strict=True):
            self._pool.release(self._sequences[name].pages)
            self._sequences[name] = held

    def fork(self) -> PagedCache:
        """Returns a cache with the same sequences, in the same pool, that goes its own way from here."""
        twin = copy.copy(self)
        for held in self._sequences.values():
            self._pool.share(held.pages)
        twin._begin(dict(self._sequences))
        return twin

    def reset(self) -> None:
        """Forgets all sequences."""
        _release_all(self._pool, self._sequences)

    # Saving

    def state_dict(self) -> State:
        """Returns tensors alone: the pages in use; ids, lengths and page table of the sequences.

        Pages are zero where they hold no token. The table (N, max_pages) numbers the saved pages; -1 is none.
        """
        filled, sequences = self._filled_rows(), self._sequences.values()
        place = {number: i for i, number in enumerate(filled)}
        widest = max((len(held.pages) for held in sequences), default=0)
        table = [[place[i] for i in pages] + [-1] * (widest - len(pages)) for pages, _ in sequences]
        saved = {name: x[[*filled]] for name, x in self._pool.storage.tensors.items()}
        for number, rows in filled.items():
            for x in saved.values() if rows < self.page else ():
                x[place[number], :, rows:] = 0
        return saved | {
            "ids": torch.tensor(self.ids, dtype=torch.int64),
            "lengths": self.lengths,
            "table": torch.tensor(table, dtype=torch.int32).reshape(len(table), widest),
        }

    def _filled_rows(self) -> dict[int, int]:
        """Maps each page in use to the number of its rows that hold tokens of these sequences."""
        filled: dict[int, int] = {}
        for pages, length in self._sequences.values():
            for i, number in enumerate(pages):
                filled[number] = max(filled.get(number, 0), min(self.page, length - i * self.page))
        return filled

    def load_state_dict(self, state: State) -> None:
        """Takes the sequences of a `state_dict` of a cache with the same page, sizes and dtype."""
        checks.check_names(state, {*self._pool.storage.tensors, "ids", "lengths", "table"})
        names = checks.integers("ids", state["ids"], None)
        if len(set(names)) != len(names):
            raise ValueError(f"state: expected different ids, got {names}")
        lengths = checks.integers("lengths", state["lengths"], len(names))
        saved = _saved(state["table"], lengths, self.page)
        used = len(state["k"])
        self._pool.storage.layout.check_state(state, used, self.page)
        if {number for held in saved for number in held.pages} != set(range(used)):
            raise ValueError(f"state: expected a table that uses all of its {used} pages and no others")
        own = Counter(number for held in self._sequences.values() for number in held.pages)
        available = self.free_pages + sum(self._pool.users[number] == n for number, n in own.items())
        if used > available:
            raise ValueError(
                f"PagedCache is too small: {used} pages needed, {available} of {self.pages} free"
            )
        self._replace(dict(zip(names, saved, strict=True)), state)

    def _replace(self, saved: dict[int, PagedSequence], state: State) -> None:
        """Replaces all sequences. Pages of the saved ones are numbered as in the state."""
        self.reset()
        fresh = self._pool.next_free(len(state["k"]))
        for name, x in self._pool.storage.tensors.items():
            x[fresh] = state[name].to(self.device)
        self._pool.take(fresh)
        for sequence, (pages, length) in saved.items():
            self._sequences[sequence] = PagedSequence(tuple(fresh[number] for number in pages), length)
            self._pool.share(self._sequences[sequence].pages)
        self._pool.release(fresh)  # of the user that `take` counted
        self._next_id = max([self._next_id, *(sequence + 1 for sequence in saved)])


def _saved(table: Tensor, lengths: Sequence[int], page: int) -> list[PagedSequence]:
    """Reads sequences from a saved table."""
    if not isinstance(table, Tensor) or table.dtype is not torch.int32 or table.ndim != 2:
        raise ValueError(f"state: expected table to be int32 of shape (N, max_pages), got {describe(table)}")
    if len(table) != len(lengths) or min(lengths, default=0) < 0:
        raise ValueError(f"state: expected a length for each of {len(table)} sequences, got {shown(lengths)}")
    rows = zip(table.tolist(), lengths, strict=True)
    return [PagedSequence(tuple(row[: -(-n // page)]), n) for row, n in rows]


def _release_all(pool: Pages, sequences: dict[int, PagedSequence]) -> None:
    while sequences:
        pool.release(sequences.popitem()[1].pages)
