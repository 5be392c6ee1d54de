"""Decoding with flash-attn's caches: (B, capacity, H, D) or pages, written in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import readable
from ..positions import rotate
from ._flash import MIN_PAGE, FlashCache, FlashOptions, Result, attend_cache, joined, packed_result

New = tuple[Tensor | None, Tensor | None]  # new keys and values (B, L, Hkv, D)


class FlashRotary(NamedTuple):
    """The arguments of the rotary embedding of new tokens."""

    cos: Tensor  # (max_length, dims / 2)
    sin: Tensor
    start: int | Tensor  # the position of the first new token: of every sample, or (B,)
    interleaved: bool

    def positions(self, x: Tensor, advance: bool = True) -> Tensor:
        """Returns the positions (B, L) of new tokens x (B, L, H, D).

        If `advance` is False, all tokens of a sample have the position of its first new token.
        """
        first = torch.as_tensor(self.start, device=x.device).reshape(-1, 1).expand(len(x), x.shape[1])
        return first + torch.arange(x.shape[1], device=x.device) if advance else first

    def of_sample(self, b: int) -> FlashRotary:
        return self._replace(start=self.start[b : b + 1] if isinstance(self.start, Tensor) else self.start)


def cache_of(
    k: Tensor, v: Tensor, length: int | Tensor | None, leftpad: Tensor | None, table: Tensor | None
) -> FlashCache:
    """Builds a FlashCache. By default (`length=None`), all slots of the cache are in use."""
    full = k.shape[1] * (1 if table is None else table.shape[1])
    return FlashCache(k, v, full if length is None else length, leftpad, table)


def rotary_of(
    cos: Tensor | None, sin: Tensor | None, start: int | Tensor, interleaved: bool
) -> FlashRotary | None:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos, rotary_sin: expected both or neither, got one")
    return None if cos is None or sin is None else FlashRotary(cos, sin, start, interleaved)


def decode(
    q: Tensor, cache: FlashCache, new: New, options: FlashOptions, rotary: FlashRotary | None,
    index: Tensor | None,
) -> Result:  # fmt: skip
    """Rotates q (B, Lq, Hq, D) and the new keys, appends keys and values, and attends to the cache.

    `index` (B,) holds the cache row of each sample. None: sample b has row b.
    """
    if index is None and cache.table is None and len(cache.k) != len(q):
        raise ValueError(f"k_cache: expected B = {len(q)} rows as in q, got {len(cache.k)}")
    if index is not None and cache.table is not None:
        raise ValueError(
            "cache_batch_idx: expected None with a table of pages, which has a row for each sample, got a "
            "tensor; write table[cache_batch_idx]"
        )
    k, v = new
    if (k is None) != (v is None):
        raise ValueError("k, v: expected both or neither, got one")
    _check_room(cache, 0 if k is None else k.shape[1])
    if rotary is not None:
        local = options.causal or max(options.window) >= 0
        q = rotated(q, rotary.cos, rotary.sin, rotary.positions(q, local), rotary.interleaved)
        if k is not None:
            k = rotated(k, rotary.cos, rotary.sin, rotary.positions(k), rotary.interleaved)
    if k is not None and v is not None:
        cache = _append(cache, k, v, index)
    return attend_cache(q, _selected(cache, index), options)


def decode_packed(
    q: Tensor, cache: FlashCache, new: New, options: FlashOptions, rotary: FlashRotary | None,
    index: Tensor | None, cu_q: Tensor, cu_new: Tensor | None,
) -> Result:  # fmt: skip
    """Runs `decode` for each sequence of packed q (total_q, Hq, D).

    With `cu_new` (B + 1,), the new keys and values are packed, too.
    """
    sizes = [1] * len(cu_q[1:]) if cu_new is None else cu_new.diff().tolist()
    tokens = [[None] * len(sizes) if x is None else x.split(sizes) for x in new]
    results = []
    for s, rows in enumerate(q.split(cu_q.diff().tolist())):
        k, v = (x if x is None or cu_new is None else x[None] for x in (tokens[0][s], tokens[1][s]))
        turn = None if rotary is None else rotary.of_sample(s)
        row = None if index is None else index[s : s + 1]
        result = decode(rows[None], cache.of_sample(s, index is not None), (k, v), options, turn, row)
        results.append(packed_result(result))
    return joined(results, (0, 1))


def _check_room(cache: FlashCache, new: int) -> None:
    """Checks that the cache has room for `new` more tokens. Traced lengths count as 0."""
    longest, most = cache.length, cache.capacity - new
    if isinstance(longest, Tensor):
        longest = int(longest.max()) if readable(longest) else 0
    if longest > most:
        room = f"as the cache has room for {cache.capacity} tokens and {new} are new"
        raise ValueError(f"cache_seqlens: expected at most {most}, {room}, got {longest}")


def _append(cache: FlashCache, k: Tensor, v: Tensor, index: Tensor | None) -> FlashCache:
    """Writes k and v (B, L, Hkv, D) behind the keys of each sample, in place.

    `index` (B,) is the row of the cache of each sample. Returns the cache with the new length.
    """
    L = k.shape[1]
    if isinstance(cache.length, int) and cache.table is None and index is None:
        for target, x in ((cache.k, k), (cache.v, v)):
            target[:, cache.length : cache.length + L] = x
        return cache._replace(length=cache.length + L)
    start = torch.as_tensor(cache.length, device=k.device).reshape(-1, 1)
    at = (start + torch.arange(L, device=k.device)).expand(len(k), -1)  # (B, L)
    if cache.table is not None:
        page = cache.k.shape[1]
        slots = cache.table.long().gather(1, at // page), at % page
    else:
        slots = (torch.arange(len(k), device=k.device) if index is None else index.long())[:, None], at
    for target, x in ((cache.k, k), (cache.v, v)):
        target.index_put_(slots, x)
    return cache._replace(length=cache.length + L)


def _selected(cache: FlashCache, index: Tensor | None) -> FlashCache:
    """Returns the rows `index` (B,) of the cache: as pages, without a copy, if possible."""
    if index is None:
        return cache
    capacity = cache.k.shape[1]
    page = capacity & -capacity  # the largest power of two that divides the capacity
    if page < MIN_PAGE or any(x.stride(0) != capacity * x.stride(1) for x in (cache.k, cache.v)):
        return cache._replace(k=cache.k[index.long()], v=cache.v[index.long()])
    n = capacity // page
    k, v = (x.unflatten(1, (n, page)).flatten(0, 1) for x in (cache.k, cache.v))
    table = index.long()[:, None] * n + torch.arange(n, device=index.device)
    return cache._replace(k=k, v=v, table=table)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates x (B, L, H, D) or (L, H, D) at positions (L,) or (B, L).

    cos and sin (max_length, dims / 2) rotate the first `dims` channels.
    """
    positions = positions.long().unsqueeze(-2) if positions.ndim > 1 else positions.long()
    layout = "interleaved" if interleaved else "half"
    cos, sin = (table[positions].to(x.dtype) for table in (cos, sin))
    return rotate(x.transpose(-3, -2), cos, sin, layout=layout).transpose(-3, -2)
