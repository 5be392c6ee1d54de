"""The explorer's data: tokens, and the facts of every head about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import facts
from .._api.evidence import evidence
from ..masks import Window
from ..see import ROLES, Layer
from ..see._roles import lse
from ..see._tokens import delimiters

TOP = 8
MAX_CELLS = 2**20  # of the finest level of a pyramid

Array = NDArray[Any]


@dataclass(frozen=True)
class Facts:
    """The facts of one layer. All are exact; blocks are sums or maxima of weights."""

    mass: tuple[Array, ...]  # (Hq, nq, nk) each, finest first; every next one has blocks twice as large
    max: tuple[Array, ...]
    column: Array  # (Hq, Lk) what every key receives from all queries
    entropy: Array  # (Hq, Lq) in nats
    normalized: Array  # (Hq, Lq) entropy by that of even weights
    row_max: Array  # (Hq, Lq)
    delimiters: Array  # (Hq, Lq) mass on the first token and on those that carry no text
    distances: Array  # (n,) position of the query minus that of the key
    by_distance: Array  # (Hq, n)
    top_weights: Array  # (Hq, Lq, TOP) falling
    top_keys: Array  # (Hq, Lq, TOP), -1 where fewer keys are allowed


def wanted(Lq: int, Lk: int, keys: Sequence[str]) -> tuple[facts.Fact, ...]:
    """Returns the facts that the explorer needs besides those of head roles."""
    block = finest_block(Lq, Lk)
    return facts.BlockMass(block), facts.BlockMax(block), facts.MassOn(delimiters(keys))


def finest_block(Lq: int, Lk: int) -> int:
    """Returns the tokens on a side of a block: the smallest power of two with at most MAX_CELLS blocks."""
    block = 1
    while -(-Lq // block) * -(-Lk // block) > MAX_CELLS:
        block *= 2
    return block


@dataclass(frozen=True, eq=False)
class Trace:
    """The layers of a `see.Capture`, with q and k kept, for one sample, and tokens as people read them."""

    title: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layers: tuple[Layer, ...]
    sample: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: expected at least one, got none")
        for layer in self.layers:
            if layer.q is None:
                raise ValueError(f'layers: expected those of capture(model, keep="qk"), got {layer!r}')
            if layer.shape[2:] != (len(self.queries), len(self.keys)):
                raise ValueError(
                    f"tokens: expected as many as in {layer!r}, "
                    f"got {len(self.queries)} queries and {len(self.keys)} keys"
                )
            if not 0 <= self.sample < layer.shape[0]:
                raise ValueError(f"sample: expected below {layer.shape[0]}, got {self.sample}")

    @property
    def block(self) -> int:
        return finest_block(len(self.queries), len(self.keys))

    @property
    def offset(self) -> int:
        """The position of query 0 among the keys."""
        return self.layers[0].start(self.sample)

    @cached_property
    def _kept(self) -> dict[int, Facts]:
        return {}

    def facts(self, layer: int) -> Facts:
        """Returns the facts of a layer. They are computed once."""
        if layer not in self._kept:
            self._kept[layer] = self._facts(self.layers[layer])
        return self._kept[layer]

    def _facts(self, layer: Layer) -> Facts:
        own = wanted(len(self.queries), len(self.keys), layer.key_texts(self.sample))
        mass, largest, delimiter = map(layer.fact, own)
        entropy, top = layer.fact(facts.Entropy()), layer.fact(facts.TopK(TOP))
        distance = layer.fact(facts.DistanceHistogram())
        return Facts(
            mass=tuple(map(self._own, mass.levels)), max=tuple(map(self._own, largest.levels)),
            column=self._own(layer.fact(facts.ColumnMass())), entropy=self._own(entropy.nats),
            normalized=self._own(entropy.normalized), row_max=self._own(layer.fact(facts.RowMax()).weights),
            delimiters=self._own(delimiter), distances=distance.distances.cpu().numpy(),
            by_distance=self._own(distance.mass), top_weights=self._own(top.weights),
            top_keys=top.keys[self.sample].cpu().numpy().astype(np.int32),
        )  # fmt: skip

    def _own(self, result: Tensor) -> Array:
        own: Array = result[self.sample].float().cpu().contiguous().numpy()
        return own

    def rows(self, layer: int, head: int, queries: Sequence[int]) -> Array:
        """Returns exact rows of weights (R, Lk)."""
        call, first, last = self.layers[layer], min(queries), max(queries)
        if not _goes_by_position(call):
            rows: Array = self._own(call.rows(list(queries)))[head]
            return rows
        if last - first + 1 > 2 * len(queries):
            return np.concatenate([self.rows(layer, head, [query]) for query in queries])
        # Only this head and these queries are computed.
        return np.take(_weights(*self._part(call, head, first, last + 1)), [i - first for i in queries], 0)

    def tile(self, layer: int, head: int, queries: range, keys: range) -> Array:
        """Returns exact weights (Q, K) of consecutive queries and keys."""
        call = self.layers[layer]
        if not _goes_by_position(call):
            return self.rows(layer, head, queries)[:, keys.start : keys.stop]
        q, k, options = self._part(call, head, queries.start, queries.stop)
        inner = {**options, "offset": options["offset"] - keys.start, "sink": None}
        among = k[:, keys.start : keys.stop]
        # The rows sum to 1 over these keys alone; the two LSEs give their share of the whole row.
        part, everything = lse(q, among, inner), lse(q, k, options)
        share = torch.where(part.isfinite(), (part - everything).exp(), 0.0)
        weights: Array = _weights(q, among, inner) * share[0, :, None].cpu().numpy()
        return weights

    def _part(self, call: Layer, head: int, first: int, end: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Returns q (1, end - first, D) and k (1, Lk, D) of one head, and its options."""
        q, k = self.queries_and_keys(call, head)
        sink = call.options.get("sink")
        own = {"offset": self.offset + first, "sink": None if sink is None else sink[head : head + 1]}
        return q[None, first:end], k[None], {**call.options, **own}

    def queries_and_keys(self, call: Layer, head: int) -> tuple[Tensor, Tensor]:
        """Returns q (Lq, D) and k (Lk, D) of one head."""
        assert call.q is not None  # checked when the trace was made
        assert call.k is not None
        q, k = call.q[self.sample], call.k[self.sample]
        return q[head], k[head // (len(q) // len(k))]

    def roles(self, layer: int) -> list[list[tuple[str, float]]]:
        """Returns for each head the roles whose scores suffice, with the scores."""
        return [
            [(name, roles[name].score) for name, role in ROLES.items() if roles[name].score >= role.least]
            for roles in self.layers[layer].roles(self.sample)
        ]


def _goes_by_position(call: Layer) -> bool:
    """Whether a query is known by its position alone, so that others can be left out."""
    mask = call.options.get("mask")
    return call.options.get("bias") is None and (mask is None or isinstance(mask, Window))


def _weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Array:
    """Returns all weights (Lq, Lk) of one head."""
    (rows,) = evidence(q, k, None, facts.Rows(range(q.shape[1])), **options)
    weights: Array = rows[0].float().cpu().numpy()
    return weights
