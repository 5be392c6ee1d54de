"""Attention with flash-attn's layout (B, L, H, D) and options, for the modules of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._api.attention import attention
from .._api.stored import attend_stored
from .._call.spec import Options
from .._call.stored import Stored
from .._tools.arguments import describe, readable
from ..masks import Documents, Lengths, Mask, Not, Window
from ..masks._both import both
from ..packing import varlen_attention
from ..scores import Alibi

UNLIMITED = (-1, -1)
MIN_PAGE = 16  # the kernels read pages of a power of two >= 16 in place
Result = Any  # out, or (out, LSE) with return_lse


class FlashOptions(NamedTuple):
    """Options of flash-attn. A negative distance in `window` is unlimited."""

    causal: bool = False
    window: Sequence[int] = UNLIMITED
    scale: float | None = None
    softcap: float = 0.0  # 0 = no softcap
    slopes: Tensor | None = None  # of ALiBi, (Hq,) or (B, Hq)
    dropout: float = 0.0
    seed: Tensor | None = None
    chunk: int = 0  # > 0: only pairs within the same `chunk` positions
    return_lse: bool = False

    def mask(self, Lk: int, device: torch.device) -> Mask | None:
        left, right = (None if reach < 0 else reach for reach in self.window)
        right = 0 if self.causal else right
        local = None if left is None and right is None else Window(left, right)
        if not self.chunk:
            return local
        return both(local, Documents(torch.arange(Lk, device=device) // self.chunk))

    def keywords(self) -> dict[str, Any]:
        """Returns the options as keywords of `attention`, without the mask."""
        return {
            "bias": None if self.slopes is None else Alibi(self.slopes), "scale": self.scale,
            "softcap": self.softcap or None, "dropout": self.dropout, "seed": self.seed,
            "return_lse": self.return_lse,
        }  # fmt: skip

    @property
    def differ_by_sample(self) -> bool:
        return self.slopes is not None and self.slopes.ndim == 2

    def of_sample(self, b: int) -> FlashOptions:
        if self.slopes is None or self.slopes.ndim == 1:
            return self
        return self._replace(slopes=self.slopes[b])


class FlashCache(NamedTuple):
    """Keys and values of B samples, in rows or in pages."""

    k: Tensor  # (B, capacity, Hkv, D), or pages (pages, page, Hkv, D)
    v: Tensor
    length: int | Tensor  # number of keys: of every sample, or (B,)
    leftpad: Tensor | None = None  # (B,): keys before this index are masked
    table: Tensor | None = None  # (B, max_pages): the pages of each sample

    def of_sample(self, b: int, shared: bool = False) -> FlashCache:
        """Returns the cache of sample b. If `shared`, or in pages, k and v are not sliced."""
        shared = shared or self.table is not None
        k, v = (self.k, self.v) if shared else (self.k[b : b + 1], self.v[b : b + 1])
        length = self.length[b : b + 1] if isinstance(self.length, Tensor) else self.length
        leftpad, table = (None if x is None else x[b : b + 1] for x in (self.leftpad, self.table))
        return FlashCache(k, v, length, leftpad, table)

    @property
    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


def attend(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> Result:
    """Returns out (B, Lq, Hq, Dv) and, if requested, the LSE (B, Hq, Lq)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected (B, L, H, D), got {describe(x)}")
    return attend_cache(q, FlashCache(k, v, k.shape[1]), options)


def attend_cache(q: Tensor, cache: FlashCache, options: FlashOptions) -> Result:
    """Computes attention of q (B, Lq, Hq, D) to the keys of a cache.

    The last query of each sample is aligned to the sample's last key.
    """
    if options.differ_by_sample:
        parts = (attend_cache(q[b : b + 1], cache.of_sample(b), options.of_sample(b)) for b in range(len(q)))
        return joined(list(parts))
    length, offset = cache.length, None
    mask: Mask | None = None
    if isinstance(length, Tensor):
        offset = length.long() - q.shape[1]
        mask = None if options.causal or options.window[1] == 0 else Lengths(length)
        length = int(length.max()) if cache.table is not None and readable(length) else cache.capacity
    if cache.leftpad is not None:
        mask = both(mask, Not(Lengths(cache.leftpad)))
    mask, q = both(options.mask(length, q.device), mask), q.transpose(1, 2)
    if cache.table is not None:
        return _tokens_first(_attend_pages(q, cache, length, options, mask, offset))
    k, v = (x[:, :length].transpose(1, 2) for x in (cache.k, cache.v))
    return _tokens_first(attention(q, k, v, mask=mask, offset=offset, **options.keywords()))


def _attend_pages(
    q: Tensor, cache: FlashCache, length: int, options: FlashOptions, mask: Mask | None, offset: Tensor | None
) -> Result:
    assert cache.table is not None
    k, v, page = cache.k.transpose(1, 2), cache.v.transpose(1, 2), cache.k.shape[1]
    # Entries beyond a sample's keys may be anything, and a gather would read them.
    table = cache.table.clamp(0, len(k) - 1).int()
    stored = Stored(k, v, None, None, table, page, "float", length, k.shape[-1], v.shape[-1])
    keywords = options.keywords() | {"mask": mask, "offset": offset}
    if page < MIN_PAGE or page & (page - 1) or options.dropout or not readable(q):
        return attention(q, *stored.dense(q.dtype), **keywords)
    return attend_stored(q, stored, Options(**keywords))


def _tokens_first(result: Result) -> Result:
    """Transposes out (B, H, L, D) to (B, L, H, D)."""
    return (result[0].transpose(1, 2), result[1]) if isinstance(result, tuple) else result.transpose(1, 2)


def joined(results: list[Result], dims: tuple[int, ...] = (0, 0, 0)) -> Result:
    """Concatenates results: out along dims[0], the LSE along dims[1], and so on."""
    if not isinstance(results[0], tuple):
        return torch.cat(results, dims[0])
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*results, strict=True), dims, strict=False))


# Packed sequences


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, options: FlashOptions, *,
    used_q: Tensor | None = None, used_k: Tensor | None = None, table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Returns out (total_q, Hq, Dv) and, if requested, the LSE (Hq, total_q).

    `used_q` and `used_k` (N,) are the numbers of queries and keys of each sequence that take part;
    the results of other queries are zeros. With `table` (N, max_pages), k and v are pages.
    """
    special = used_q is not None or used_k is not None or table is not None
    if not (special or options.chunk or options.differ_by_sample):
        mask = options.mask(0, q.device)
        return varlen_attention(
            q, k, v, cu_q, None if cu_k is cu_q else cu_k, mask=mask, **options.keywords()
        )
    if not readable(cu_q):
        raise NotImplementedError(
            "seqused_q, seqused_k, block_table, attention_chunk, alibi_slopes (B, H): expected none of them "
            "for packed sequences under torch.compile, torch.export or vmap: cu_seqlens cannot be read there"
        )
    cu_k = cu_q if cu_k is None else cu_k
    lengths, sizes = cu_k.diff() if used_k is None else used_k, cu_q.diff().tolist()
    if table is not None and used_q is None and len({*sizes}) == 1:
        cache = FlashCache(k, v, lengths, table=table)
        return packed_result(attend_cache(q.unflatten(0, (len(sizes), sizes[0])), cache, options))
    if table is None:
        ks, vs = (x[None].split(cu_k.diff().tolist(), 1) for x in (k, v))
        caches = [FlashCache(*part) for part in zip(ks, vs, lengths.tolist(), strict=True)]
    else:
        caches = [FlashCache(k, v, n, table=table[s : s + 1]) for s, n in enumerate(lengths.tolist())]
    results = []
    for s, (rows, cache) in enumerate(zip(q.split(sizes), caches, strict=True)):
        real = rows if used_q is None else rows[: int(used_q[s])]
        result = attend_cache(real[None], cache, options.of_sample(s))
        results.append(packed_result(result, len(rows) - len(real)))
    return joined(results, (0, 1))


def packed_result(result: Result, unused: int = 0) -> Result:
    """Converts a result (N, L, H, D) to (N * L, H, D), followed by `unused` rows of zeros.

    The LSE (N, H, L) becomes (H, N * L), followed by -inf.
    """
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = pad(out.flatten(0, 1), (0, 0, 0, 0, 0, unused))
    return out if lse is None else (out, pad(lse.transpose(0, 1).flatten(1), (0, unused), value=-torch.inf))
