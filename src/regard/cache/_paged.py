"""Many sequences in one pool of pages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.spec import Bias
from .._call.stored import Stored
from .._tools.arguments import count, describe
from ..masks import Mask
from ._cache import (
    NOTHING,
    Asked,
    Chunk,
    Integers,
    Result,
    check_float,
    check_new,
    check_queries,
    chunk_of,
    each,
    integers,
    kept,
    look,
    most,
    shared,
    shown,
)
from ._pages import Pages
from ._rows import State, check_names, check_saved


class Held(NamedTuple):
    """A sequence: its tokens lie in these pages, in order."""

    pages: tuple[int, ...] = ()
    length: int = 0


class Draft(NamedTuple):
    """The sequences as they will be after a call."""

    after: dict[int, Held]
    fresh: list[int]  # pages to take
    left: list[int]  # pages that are no longer used by one of the sequences
    chunk: Chunk


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
        self,
        pages: int,
        Hkv: int,
        D: int,
        Dv: int | None = None,
        *,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.Hkv, self.D = count("Hkv", Hkv, 1), count("D", D, 1)
        self.Dv = self.D if Dv is None else count("Dv", Dv, 1)
        self.page, self.dtype = count("page", page, 16), check_float(dtype)
        if page & (page - 1):
            raise ValueError(f"page: expected a power of two from 16 on, got {page}")
        where = torch.empty(0, device=device).device
        self._pool = Pages(count("pages", pages, 1), page, self.Hkv, self.D, self.Dv, dtype, where)
        self._next_id = 0
        self._begin({})

    def _begin(self, held: dict[int, Held]) -> None:
        self._held = held
        self._table: tuple[tuple[tuple[int, ...], ...], Tensor] | None = None  # the last one, by its pages
        weakref.finalize(self, _release_all, self._pool, held).atexit = False

    # What it holds

    @property
    def ids(self) -> tuple[int, ...]:
        """The sequences, in the order in which they were added."""
        return tuple(self._held)

    def __len__(self) -> int:
        """The tokens of the longest sequence."""
        return max((held.length for held in self._held.values()), default=0)

    @property
    def lengths(self) -> Tensor:
        """int64, as many as `ids`: the tokens of each sequence."""
        return torch.tensor(
            [held.length for held in self._held.values()], dtype=torch.int64, device=self.device
        )

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self._pool.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, used or not. Forks share it."""
        return self._pool.k.nbytes + self._pool.v.nbytes

    @property
    def pages(self) -> int:
        """How many pages the pool has."""
        return len(self._pool.users)

    @property
    def free_pages(self) -> int:
        """How many of them nobody uses."""
        return len(self._pool.free)

    def positions(self, L: int = 1, *, ids: Integers | None = None) -> Tensor:
        """(B, L) int64: where the next L tokens of each sequence will stand."""
        lengths = [self._held[name].length for name in self._ids(ids)]
        return torch.tensor(lengths, device=self.device)[:, None] + torch.arange(
            count("L", L), device=self.device
        )

    def __repr__(self) -> str:
        lengths = [held.length for held in self._held.values()]
        held = f"{len(lengths)} sequences" + (f" of length {shown(lengths)}" if lengths else "")
        return (
            f"PagedCache(Hkv={self.Hkv}, D={self.D}, Dv={self.Dv}, page={self.page}, {self.dtype}: {held}, "
            f"{self.free_pages} of {self.pages} pages free, {self.nbytes:,} bytes)"
        )

    # Sequences

    def add(self, like: int | None = None, tokens: int | None = None) -> int:
        """A new sequence, empty, or beginning with the first `tokens` (default: all) of sequence `like`."""
        held = Held()
        if like is not None:
            (like,) = self._ids([like])
            held = self._first(self._held[like], tokens)
        elif tokens is not None:
            raise ValueError(f"tokens: expected none without like, got {tokens}")
        name, self._next_id = self._next_id, self._next_id + 1
        self._pool.share(held.pages)
        self._held[name] = held
        return name

    def _first(self, held: Held, tokens: int | None) -> Held:
        n = held.length if tokens is None else count("tokens", tokens)
        if n > held.length:
            raise ValueError(f"tokens: expected at most the {held.length} that the sequence has, got {n}")
        return Held(held.pages[: -(-n // self.page)], n)

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are free when no other uses them."""
        (name,) = self._ids([sequence])
        self._pool.release(self._held.pop(name).pages)

    def _ids(self, ids: Integers | None) -> list[int]:
        """The ids given, which must be different and known."""
        names = list(self._held) if ids is None else integers("ids", ids, None)
        unknown = [name for name in names if name not in self._held]
        if unknown or not names or len(set(names)) != len(names):
            have = list(self._held)
            raise ValueError(f"ids: expected different sequences, at least one, out of {have}, got {names}")
        return names

    # Appending

    def append(
        self, k: Tensor, v: Tensor, *, ids: Integers | None = None, lengths: Integers | None = None
    ) -> None:
        """Add k (B, Hkv, L, D), v (B, Hkv, L, Dv) to the B sequences; of one only lengths[b], if given."""
        names = self._ids(ids)
        self._keep(self._draft(names, k, v, lengths))

    def _draft(self, names: list[int], k: Tensor, v: Tensor, lengths: Integers | None) -> Draft:
        chunk = self._chunk(k, v, lengths, len(names))
        draft = self._planned(names, chunk)
        self._write(draft, names, k, v)
        return draft

    def _planned(self, names: list[int], chunk: Chunk) -> Draft:
        """Which pages the sequences will have. A shared page that is not full is replaced by a copy."""
        before = [self._held[name] for name in names]
        new = each(chunk.new, len(names))
        stay = [self._staying(held) if m else len(held.pages) for held, m in zip(before, new, strict=True)]
        wanted = [-(-(held.length + m) // self.page) for held, m in zip(before, new, strict=True)]
        needed = sum(all_ - own for all_, own in zip(wanted, stay, strict=True))
        if needed > self.free_pages:
            raise ValueError(
                f"PagedCache is full: {needed} pages of {self.page} tokens needed, {self.free_pages} of "
                f"{self.pages} are free"
            )
        fresh = self._pool.next(needed)
        rest, after = iter(fresh), {}
        for name, held, m, own, all_ in zip(names, before, new, stay, wanted, strict=True):
            pages = held.pages[:own] + tuple(next(rest) for _ in range(all_ - own))
            after[name] = Held(pages, held.length + m)
        left = [number for held, own in zip(before, stay, strict=True) for number in held.pages[own:]]
        return Draft(after, fresh, left, chunk)

    def _staying(self, held: Held) -> int:
        """How many of its pages a sequence keeps when it appends."""
        whole = len(held.pages)
        shares_last = held.length % self.page != 0 and self._pool.users[held.pages[-1]] > 1
        return whole - 1 if shares_last else whole

    def _write(self, draft: Draft, names: list[int], k: Tensor, v: Tensor) -> None:
        """New tokens, and copies of pages, into pages and rows that no sequence uses yet."""
        moved = [
            (self._held[name].pages[-1], held.pages[len(self._held[name].pages) - 1])
            for name, held in draft.after.items()
            if self._held[name].pages != held.pages[: len(self._held[name].pages)]
        ]
        self._pool.copy([old for old, _ in moved], [new for _, new in moved])
        starts = [self._held[name].length for name in names]
        write_stored(self._stored(draft, 0), starts, each(draft.chunk.new, len(names)), k, v)

    def _keep(self, draft: Draft) -> None:
        self._pool.take(draft.fresh)
        self._pool.release(draft.left)
        self._held.update(draft.after)

    # Attending

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        lengths: Integers | None = None, mask: Mask | Tensor | None = None, bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: Literal[False] = False, impl: str = "auto",
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        lengths: Integers | None = None, mask: Mask | Tensor | None = None, bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: Literal[True], impl: str = "auto",
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attend(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, ids: Integers | None = None,
        lengths: Integers | None = None, mask: Mask | Tensor | None = None, bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
        return_lse: bool = False, impl: str = "auto",
    ) -> Result: ...  # fmt: skip

    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        ids: Integers | None = None,
        lengths: Integers | None = None,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        window: int | None = None,
        return_lse: bool = False,
        impl: str = "auto",
    ) -> Result:
        """Append k and v to the sequences `ids`, then attend causally, each query in its own sequence.

        All is as in `KVCache.attend`, with B the number of ids; Lk is the longest of these sequences.
        """
        asked = Asked(mask, bias, scale, softcap, sink, window, return_lse, impl)
        names = self._ids(ids)
        if k is not None and v is not None:
            draft = self._draft(names, k, v, lengths)
        elif k is None and v is None and lengths is None:
            draft = Draft({name: self._held[name] for name in names}, [], [], NOTHING)
        else:
            raise ValueError("k, v: expected both, or neither and no lengths")
        rows = shared([held.length for held in draft.after.values()])
        check_queries(q, (len(names), self.D), self.dtype, rows, draft.chunk)
        found = look(q, self._stored(draft, most(rows)), rows, draft.chunk, asked)
        self._keep(draft)
        return found

    def _stored(self, draft: Draft, length: int) -> Stored:
        pages = tuple(held.pages for held in draft.after.values())
        if self._table is None or self._table[0] != pages:
            width = (
                1 << max(map(len, pages)).bit_length()
            )  # seldom another shape, which would be checked anew
            rows = [numbers + (0,) * (width - len(numbers)) for numbers in pages]
            self._table = pages, torch.tensor(rows, dtype=torch.int32, device=self.device)
        table, pool = self._table[1], self._pool
        return Stored(pool.k, pool.v, None, None, table, self.page, "float", length, self.D, self.Dv)

    def _chunk(self, k: Tensor, v: Tensor, lengths: Integers | None, B: int) -> Chunk:
        L = k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else 0
        check_new("k", k, (B, self.Hkv, L, self.D), self.dtype, self.device)
        check_new("v", v, (B, self.Hkv, L, self.Dv), self.dtype, self.device)
        return chunk_of(L, lengths, B)

    # Changing what is there

    def crop(self, n: Integers, *, ids: Integers | None = None) -> None:
        """Keep the first n tokens of each sequence, n one number or (B,); a negative n drops the last -n."""
        names = self._ids(ids)
        left = kept(n, tuple(self._held[name].length for name in names))
        self._become({name: self._first(self._held[name], m) for name, m in zip(names, left, strict=True)})

    def reorder(self, index: Integers, *, ids: Integers | None = None) -> None:
        """Sequence ids[i] becomes what ids[index[i]] was, as beams need it, without copying a token."""
        names = self._ids(ids)
        chosen = integers("index", index, len(names))
        if not 0 <= min(chosen) <= max(chosen) < len(names):
            raise ValueError(f"index: expected rows from 0 to {len(names) - 1}, got {chosen}")
        self._become({name: self._held[names[row]] for name, row in zip(names, chosen, strict=True)})

    def _become(self, after: dict[int, Held]) -> None:
        before = [self._held[name] for name in after]
        for held in after.values():
            self._pool.share(held.pages)
        for held in before:
            self._pool.release(held.pages)
        self._held.update(after)

    def fork(self) -> PagedCache:
        """A cache with the same sequences, in the same pool, that goes its own way from here."""
        twin = object.__new__(PagedCache)
        twin.__dict__.update(self.__dict__)
        for held in self._held.values():
            self._pool.share(held.pages)
        twin._begin(dict(self._held))
        return twin

    def reset(self) -> None:
        """Forget all sequences."""
        _release_all(self._pool, self._held)

    # Saving

    def state_dict(self) -> State:
        """Tensors alone: the pages in use, zeros where they hold no token, and of each sequence its id, its
        length and its row of the table (N, max_pages), which counts these pages; -1 is none.
        """
        used = list(dict.fromkeys(number for held in self._held.values() for number in held.pages))
        place = {number: i for i, number in enumerate(used)}
        widest = max((len(held.pages) for held in self._held.values()), default=0)
        table = [
            [place[number] for number in held.pages] + [-1] * (widest - len(held.pages))
            for held in self._held.values()
        ]
        k, v = self._pool.k[used], self._pool.v[used]
        for number, rows in self._rows_used().items():
            k[place[number], :, rows:] = v[place[number], :, rows:] = 0
        return {
            "k": k,
            "v": v,
            "ids": torch.tensor(self.ids, dtype=torch.int64),
            "lengths": self.lengths,
            "table": torch.tensor(table, dtype=torch.int32).reshape(len(table), widest),
        }

    def _rows_used(self) -> dict[int, int]:
        """How many rows of each page hold tokens of these sequences, for pages that are not full."""
        rows: dict[int, int] = {}
        for pages, length in self._held.values():
            for i, number in enumerate(pages):
                rows[number] = max(rows.get(number, 0), min(self.page, length - i * self.page))
        return {number: count for number, count in rows.items() if count < self.page}

    def load_state_dict(self, state: State) -> None:
        """Take the sequences of a `state_dict` of a cache with the same page, sizes and dtype."""
        check_names(state, {"k", "v", "ids", "lengths", "table"})
        names = integers("ids", state["ids"], None)
        if len(set(names)) != len(names):
            raise ValueError(f"state: expected different ids, got {names}")
        lengths = integers("lengths", state["lengths"], len(names))
        saved = _saved(state["table"], lengths, self.page)
        used = len(state["k"])
        check_saved("k", state["k"], (used, self.Hkv, self.page, self.D), self.dtype)
        check_saved("v", state["v"], (used, self.Hkv, self.page, self.Dv), self.dtype)
        if {number for held in saved for number in held.pages} != set(range(used)):
            raise ValueError(f"state: expected a table that uses all of its {used} pages and no others")
        own = {number for held in self._held.values() for number in held.pages}
        available = self.free_pages + sum(self._only_mine(number) for number in own)
        if used > available:
            raise ValueError(
                f"PagedCache is too small: {used} pages needed, {available} of {self.pages} free"
            )
        k, v = (state[name].to(self.device) for name in "kv")
        self._replace(dict(zip(names, saved, strict=True)), k, v)

    def _replace(self, saved: dict[int, Held], k: Tensor, v: Tensor) -> None:
        """Other sequences instead of those held; their pages are numbered as in k and v."""
        self.reset()
        fresh = self._pool.next(len(k))
        self._pool.k[fresh], self._pool.v[fresh] = k, v
        self._pool.take(fresh)
        for name, held in saved.items():
            self._held[name] = Held(tuple(fresh[number] for number in held.pages), held.length)
            self._pool.share(self._held[name].pages)
        self._pool.release(fresh)  # of the user that `take` counted
        self._next_id = max([self._next_id, *(name + 1 for name in saved)])

    def _only_mine(self, number: int) -> bool:
        mine = sum(number in held.pages for held in self._held.values())
        return self._pool.users[number] == mine


def _saved(table: Tensor, lengths: Sequence[int], page: int) -> list[Held]:
    """The sequences of a saved table."""
    if not isinstance(table, Tensor) or table.dtype is not torch.int32 or table.ndim != 2:
        raise ValueError(f"state: expected table to be int32 of shape (N, max_pages), got {describe(table)}")
    if len(table) != len(lengths) or min(lengths, default=0) < 0:
        raise ValueError(f"state: expected a length for each of {len(table)} sequences, got {shown(lengths)}")
    return [Held(tuple(row[: -(-n // page)]), n) for row, n in zip(table.tolist(), lengths, strict=True)]


def _release_all(pool: Pages, held: dict[int, Held]) -> None:
    while held:
        pool.release(held.popitem()[1].pages)
