"""Continuous batching: packed sequences of different lengths, with their keys and values in pages.

The cache of Transformers writes the new keys and values into its pages. How attention then reads
keys and values depends on the sequence and on the layer:
- Sequences with one new token share one call, which reads the pages in place through a page table.
- Sequences without cached tokens use the new keys and values and read no page.
- For prefill chunks after cached tokens, the pages are gathered first, because many queries use
  each key.
- In layers whose cache is a ring buffer, the pages of all sequences are gathered first, because
  these layers have few keys.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakIdKeyDictionary

from .._api.attention import attention
from .._api.stored import attend_stored
from .._call.spec import Options
from .._call.stored import Stored
from ..masks import Causal, Mask, Window, from_cu_seqlens
from ..packing import varlen_attention

Qkv = tuple[Tensor, Tensor, Tensor]
CAUSAL = Causal()


class Batch(NamedTuple):
    """The index tensors of a batch of N sequences. All layers of one type share them."""

    cu_seqlens_q: Tensor  # (N + 1,)
    cu_seqlens_k: Tensor  # (N + 1,)
    read: Tensor  # (total_k,), the slot of each key; empty if all keys are new
    write: Tensor  # (total_q,), the slot of each new token


class Sequence(NamedTuple):
    """One sequence of a batch: queries [start, start + Lq) and the pages of its Lk keys."""

    start: int
    Lq: int
    Lk: int
    pages: Tensor


class PagePlan(NamedTuple):
    """How to attend to the pages of a batch.

    The plan has a page table for the n sequences with one new token, and a list of the other
    sequences. All layers of one type share a plan.
    """

    rows: Tensor | None  # (n,), the indices of the n sequences' queries; None if there are no other sequences
    table: Tensor  # (n, pages) int32
    last: Tensor  # (n,), the positions of the n queries
    longest: int  # the largest Lk of the n sequences
    others: list[Sequence]


_plans: Any = WeakIdKeyDictionary()  # keyed by `Batch.read`, which is a new tensor in every step


def attend_paged(layer: int, qkv: Qkv, cache: Any, batch: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Writes the new keys and values to the cache and computes attention.

    q (1, Hq, total_q, D), k and v (1, Hkv, total_q, D) -> out (1, Hq, total_q, D). `cache` and
    `batch` are arguments that continuous batching passes to every layer. `options` are options of
    `attention`.
    """
    allocator = cache.layer_to_allocator[layer]
    window = getattr(allocator, "sliding_window", None)
    indices = Batch(
        batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][allocator.layer_type],
        batch["read_index"][allocator.index], batch["write_index"][allocator.index],
    )  # fmt: skip
    if indices.read.numel() and not _is_readable(allocator, window):
        return _gathered(allocator, layer, qkv, indices, window, options)
    # Empty read indices make the allocator write the new tokens without gathering old ones.
    allocator.update(_tokens(qkv[1]), _tokens(qkv[2]), layer, indices.read[:0], indices.write)
    if not indices.read.numel():
        mask = from_cu_seqlens(indices.cu_seqlens_q) & causal(window)
        out: Tensor = attention(*qkv, mask=mask, offset=0, **options)
        return out
    plan = _plans.get(indices.read)
    if plan is None:
        plan = _plans[indices.read] = _planned(indices, allocator.tokens_per_page)
    return _in_place(allocator, layer, qkv, plan, options)


def causal(window: int | None) -> Mask:
    """Returns a causal mask, restricted to the last `window` tokens unless `window` is None."""
    return CAUSAL if window is None else Window(window - 1, 0)


def _is_readable(allocator: Any, window: int | None) -> bool:
    """Returns whether the kernels can read the pages in place.

    This needs a layer without a window, an allocator that supports block tables, and a page size
    that is a power of two and at least 16.
    """
    page = allocator.tokens_per_page
    return window is None and allocator.supports_block_table and page >= 16 and not page & (page - 1)


def _tokens(x: Tensor) -> Tensor:
    """Transposes (1, H, tokens, D) to (tokens, H, D)."""
    return x[0].transpose(0, 1)


# Reading pages in place


def _planned(batch: Batch, page: int) -> PagePlan:
    """Returns the `PagePlan` of a batch whose pages hold `page` tokens."""
    sequences = [
        Sequence(q0, q1 - q0, k1 - k0, batch.read[k0:k1:page] // page)
        for (q0, q1), (k0, k1) in zip(
            *(pairwise(cu_seqlens.tolist()) for cu_seqlens in (batch.cu_seqlens_q, batch.cu_seqlens_k)),
            strict=True,
        )
        if q1 > q0
    ]
    single = [s for s in sequences if s.Lq == 1]
    integers = partial(torch.tensor, dtype=torch.int64, device=batch.read.device)
    return PagePlan(
        rows=None if len(single) == len(sequences) else integers([s.start for s in single]),
        table=pad_sequence([s.pages.int() for s in single], batch_first=True) if single else integers([]),
        last=integers([s.Lk - 1 for s in single]),
        longest=max((s.Lk for s in single), default=0),
        others=[s for s in sequences if s.Lq > 1],
    )


def _in_place(allocator: Any, layer: int, qkv: Qkv, plan: PagePlan, options: dict[str, Any]) -> Tensor:
    """Computes attention over the pages as `plan` says. Returns (1, Hq, total_q, Dv)."""
    k, v = (pages.transpose(1, 2) for pages in allocator.get_cache_for_block_table(layer))
    page, sizes = allocator.tokens_per_page, (k.shape[3], v.shape[3])
    pages = Stored(k, v, None, None, plan.table, page, "float", plan.longest, *sizes)
    if plan.rows is None:
        return _last(qkv[0], pages, plan, options)
    q = qkv[0]
    out = q.new_empty(1, q.shape[2], q.shape[1], sizes[1]).transpose(1, 2)
    if len(plan.rows):
        out[:, :, plan.rows] = _last(q[:, :, plan.rows], pages, plan, options)
    for sequence in plan.others:
        queries = slice(sequence.start, sequence.start + sequence.Lq)
        out[:, :, queries] = _one(sequence, pages, tuple(x[:, :, queries] for x in qkv), options)
    return out


def _last(q: Tensor, pages: Stored, plan: PagePlan, options: dict[str, Any]) -> Tensor:
    """Computes attention of n sequences with one new token each, in one call.

    q (1, Hq, n, D) are the queries of the new tokens. Returns (1, Hq, n, Dv).
    """
    out: Any = attend_stored(q.transpose(0, 2), pages, Options(CAUSAL, plan.last, **options))
    packed: Tensor = out.transpose(0, 2)
    return packed


def _one(sequence: Sequence, pages: Stored, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    """Computes attention of one sequence with several new tokens. Returns (1, Hq, Lq, Dv)."""
    if sequence.Lk == sequence.Lq:
        return attention(*qkv, mask=CAUSAL, **options)
    stored = pages._replace(table=sequence.pages.int()[None], length=sequence.Lk)
    return attend_stored(qkv[0], stored, Options(CAUSAL, **options))


# Gathering pages


def _gathered(
    allocator: Any, layer: int, qkv: Qkv, batch: Batch, window: int | None, options: dict[str, Any]
) -> Tensor:
    """Gathers keys and values from the pages and computes attention.

    Returns (1, Hq, total_q, Dv).
    """
    q, k, v = (_tokens(x) for x in qkv)
    k, v = allocator.update(k, v, layer, batch.read, batch.write)
    decodes = int(batch.cu_seqlens_q.diff().max()) == 1  # one query per sequence, which sees all its keys
    mask = None if decodes else causal(window)
    out: Tensor = varlen_attention(q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, mask=mask, **options)
    return out.transpose(0, 1)[None]
