"""Continuous batching: sequences of different lengths in one row of tokens, their keys in pages.

The cache of Transformers writes the new keys and values into its pages. Sequences with one new token then read
all of theirs where they lie, in one call for all of them, by a table of pages. Sequences that have nothing but
new tokens need no page. What is left, prompts that come in parts, and layers whose cache is a ring of the last
tokens, is collected from the pages first; there are many queries to each key then, or few keys.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._attention import attention
from .._decode import attend_stored
from .._stored import Stored
from ..masks import Causal, Mask, Window, from_cu_seqlens
from ..packing import varlen_attention

CAUSAL = Causal()


class Batch(NamedTuple):
    """What continuous batching passes to every layer, of this layer's kind."""

    borders_q: Tensor  # (N + 1,)
    borders_k: Tensor
    read: Tensor  # (total_k,): the row of the cache that holds each key; empty: all keys are new
    write: Tensor  # (total_q,)


class Sequence(NamedTuple):
    """One sequence of a batch: its queries are rows `start` to `start + Lq` of Lk keys."""

    start: int
    Lq: int
    Lk: int
    pages: Tensor


class Plan(NamedTuple):
    """How the sequences of a batch are read, the same for all layers of a kind."""

    rows: Tensor | None  # (n,): queries of sequences with one new token; None: all there are
    table: Tensor  # (n, pages) int32
    last: Tensor  # (n,): the position of these queries
    longest: int
    others: list[Sequence]


_plans: Any = WeakIdKeyDictionary()  # by the batch's `read`, a tensor of its own in every step


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    batch: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """query (1, Hq, total_q, D), key and value (1, Hkv, total_q, D) of the new tokens -> out like query."""
    allocator = cache.layer_to_allocator[module.layer_idx]
    given = Batch(
        batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][allocator.layer_type],
        batch["read_index"][allocator.index], batch["write_index"][allocator.index],
    )  # fmt: skip
    window = getattr(allocator, "sliding_window", None)
    mask: Mask = CAUSAL if window is None else Window(window - 1)
    if not given.read.numel():
        _write(allocator, module.layer_idx, key, value, given)
        inside = from_cu_seqlens(given.borders_q) & mask
        return attention(query, key, value, mask=inside, offset=0, **options)
    if not _is_readable(allocator, window):
        return _gathered(allocator, module.layer_idx, (query, key, value), given, window, options)
    _write(allocator, module.layer_idx, key, value, given)
    plan = _plans.get(given.read)
    if plan is None:
        plan = _plans[given.read] = _planned(given, allocator.tokens_per_page)
    return _in_place(allocator, module.layer_idx, (query, key, value), plan, options)


def _is_readable(allocator: Any, window: int | None) -> bool:
    """Whether the kernels can read the pages."""
    page = allocator.tokens_per_page
    return window is None and allocator.supports_block_table and page >= 16 and not page & (page - 1)


def _write(allocator: Any, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
    """With nothing to read, the allocator only writes."""
    allocator.update(_tokens(key), _tokens(value), layer, batch.read[:0], batch.write)


def _tokens(x: Tensor) -> Tensor:
    """(1, H, tokens, D) -> (tokens, H, D)"""
    return x[0].transpose(0, 1)


# In place


def _planned(batch: Batch, page: int) -> Plan:
    sequences = [
        Sequence(q0, q1 - q0, k1 - k0, batch.read[k0:k1:page] // page)
        for (q0, q1), (k0, k1) in zip(_pairs(batch.borders_q), _pairs(batch.borders_k), strict=True)
        if q1 > q0
    ]
    single = [s for s in sequences if s.Lq == 1]
    table = torch.zeros(len(single), max((len(s.pages) for s in single), default=0), dtype=torch.int32)
    for row, sequence in zip(table, single, strict=True):
        row[: len(sequence.pages)] = sequence.pages
    rows = None if len(single) == len(sequences) else torch.tensor([s.start for s in single], dtype=torch.int64)
    last = torch.tensor([s.Lk - 1 for s in single], dtype=torch.int64)
    longest = max((s.Lk for s in single), default=0)
    return Plan(rows, table, last, longest, [s for s in sequences if s.Lq > 1])


def _pairs(borders: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(borders.tolist()))


def _in_place(
    allocator: Any, layer: int, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, options: dict[str, Any]
) -> Tensor:
    query, key, value = qkv
    k, v = (pages.transpose(1, 2) for pages in allocator.get_cache_for_block_table(layer))
    pages = Stored(k, v, None, None, plan.table, allocator.tokens_per_page, "float", plan.longest, k.shape[3], v.shape[3])  # fmt: skip
    single = query if plan.rows is None else query[:, :, plan.rows]
    out: Any = None
    if single.shape[2]:
        out = attend_stored(single.transpose(0, 2), pages, mask=CAUSAL, offset=plan.last, **options)
        out = out.transpose(0, 2)
    if plan.rows is None:
        return out  # type: ignore[no-any-return]
    whole = query.new_empty(query.shape[0], query.shape[2], query.shape[1], v.shape[3]).transpose(1, 2)
    if out is not None:
        whole[:, :, plan.rows] = out
    for sequence in plan.others:
        place = slice(sequence.start, sequence.start + sequence.Lq)
        whole[:, :, place] = _one(sequence, pages, tuple(x[:, :, place] for x in qkv), options)
    return whole


def _one(sequence: Sequence, pages: Stored, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    if sequence.Lk == sequence.Lq:
        return attention(*qkv, mask=CAUSAL, **options)
    own = pages._replace(table=sequence.pages.int()[None], length=sequence.Lk)
    return attend_stored(qkv[0], own, mask=CAUSAL, **options)


# Collected


def _gathered(
    allocator: Any,
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    batch: Batch,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    query, key, value = (_tokens(x) for x in qkv)
    key, value = allocator.update(key, value, layer, batch.read, batch.write)
    alone = int(batch.borders_q.diff().max()) == 1  # then a query sees all keys of its sequence
    mask = None if alone else CAUSAL if window is None else Window(window - 1)
    out = varlen_attention(query, key, value, batch.borders_q, batch.borders_k, mask=mask, **options)
    return out.transpose(0, 1)[None]
