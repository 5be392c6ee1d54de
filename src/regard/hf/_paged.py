"""Continuous batching: packed sequences of different lengths, with their keys and values in pages.

The cache of Transformers writes the new keys and values into its pages. Sequences with one new token are
decoded in place by one call with a page table. Sequences that have only new tokens need no page. Chunked
prompts, and layers whose cache is a ring buffer, are gathered from the pages first: either many queries use
each key, or there are few keys.
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
    """The indices of continuous batching for one kind of layer."""

    cu_seqlens_q: Tensor  # (N + 1,), cumulative lengths
    cu_seqlens_k: Tensor
    read: Tensor  # (total_k,): the cache row of each key; empty: all keys are new
    write: Tensor  # (total_q,)


class Sequence(NamedTuple):
    """One sequence of a batch: queries `start` to `start + Lq`, and the pages of its Lk keys."""

    start: int
    Lq: int
    Lk: int
    pages: Tensor


class PagePlan(NamedTuple):
    """How the sequences of a batch are read. All layers of a kind share it."""

    rows: Tensor | None  # (n,): queries of sequences with one new token; None: all there are
    table: Tensor  # (n, pages) int32
    last: Tensor  # (n,): the position of these queries
    longest: int
    others: list[Sequence]


_plans: Any = WeakIdKeyDictionary()  # by the batch's `read`, a tensor of its own in every step


def attend_paged(layer: int, qkv: Qkv, cache: Any, batch: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Writes k and v to the cache and computes attention.

    q (1, Hq, total_q, D), k and v (1, Hkv, total_q, D) of the new tokens -> out (1, Hq, total_q, D).
    `cache` and `batch` are what continuous batching passes to every layer; `options` go to `attention`.
    """
    allocator = cache.layer_to_allocator[layer]
    window = getattr(allocator, "sliding_window", None)
    own = Batch(
        batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][allocator.layer_type],
        batch["read_index"][allocator.index], batch["write_index"][allocator.index],
    )  # fmt: skip
    if own.read.numel() and not _is_readable(allocator, window):
        return _gathered(allocator, layer, qkv, own, window, options)
    # With nothing to read, the allocator only writes.
    allocator.update(_tokens(qkv[1]), _tokens(qkv[2]), layer, own.read[:0], own.write)
    if not own.read.numel():
        inside = from_cu_seqlens(own.cu_seqlens_q) & causal(window)
        out: Tensor = attention(*qkv, mask=inside, offset=0, **options)
        return out
    plan = _plans.get(own.read)
    if plan is None:
        plan = _plans[own.read] = _planned(own, allocator.tokens_per_page)
    return _in_place(allocator, layer, qkv, plan, options)


def causal(window: int | None) -> Mask:
    """Returns a causal mask, or one of the last `window` tokens."""
    return CAUSAL if window is None else Window(window - 1)


def _is_readable(allocator: Any, window: int | None) -> bool:
    """Returns whether the kernels can read the pages in place."""
    page = allocator.tokens_per_page
    return window is None and allocator.supports_block_table and page >= 16 and not page & (page - 1)


def _tokens(x: Tensor) -> Tensor:
    """(1, H, tokens, D) -> (tokens, H, D)"""
    return x[0].transpose(0, 1)


# In place


def _planned(batch: Batch, page: int) -> PagePlan:
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
        place = slice(sequence.start, sequence.start + sequence.Lq)
        out[:, :, place] = _one(sequence, pages, tuple(x[:, :, place] for x in qkv), options)
    return out


def _last(q: Tensor, pages: Stored, plan: PagePlan, options: dict[str, Any]) -> Tensor:
    """Computes attention of q (1, Hq, n, D), the last tokens of n sequences, as a batch of n."""
    out: Any = attend_stored(q.transpose(0, 2), pages, Options(CAUSAL, plan.last, **options))
    joined: Tensor = out.transpose(0, 2)
    return joined


def _one(sequence: Sequence, pages: Stored, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    if sequence.Lk == sequence.Lq:
        return attention(*qkv, mask=CAUSAL, **options)
    own = pages._replace(table=sequence.pages.int()[None], length=sequence.Lk)
    return attend_stored(qkv[0], own, Options(CAUSAL, **options))


# Collected


def _gathered(
    allocator: Any, layer: int, qkv: Qkv, batch: Batch, window: int | None, options: dict[str, Any]
) -> Tensor:
    q, k, v = (_tokens(x) for x in qkv)
    k, v = allocator.update(k, v, layer, batch.read, batch.write)
    alone = int(batch.cu_seqlens_q.diff().max()) == 1  # then a query sees all keys of its sequence
    mask = None if alone else causal(window)
    out: Tensor = varlen_attention(q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, mask=mask, **options)
    return out.transpose(0, 1)[None]
