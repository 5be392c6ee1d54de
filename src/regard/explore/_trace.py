"""`Trace`, the data that the explorer shows: tokens, and the facts of every head."""

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
MAX_CELLS = 2**20  # the largest number of blocks in the finest level of a pyramid

Array = NDArray[Any]


@dataclass(frozen=True)
class Facts:
    """The exact facts of one layer, for one sample."""

    mass: tuple[Array, ...]  # per level (Hq, nq, nk): block sums; each level doubles the block size
    max: tuple[Array, ...]  # per level (Hq, nq, nk): block maxima
    column: Array  # (Hq, Lk), the total attention that each key receives
    entropy: Array  # (Hq, Lq), in nats
    normalized: Array  # (Hq, Lq), entropy divided by the entropy of equal weights
    row_max: Array  # (Hq, Lq), the largest weight
    delimiters: Array  # (Hq, Lq), mass on the first token, special tokens and punctuation
    distances: Array  # (n,), query position - key position
    by_distance: Array  # (Hq, n), mass at each distance
    top_weights: Array  # (Hq, Lq, TOP), the largest weights, descending
    top_keys: Array  # (Hq, Lq, TOP), their keys; -1 if fewer than TOP keys are allowed


def wanted(Lq: int, Lk: int, keys: Sequence[str]) -> tuple[facts.Fact, ...]:
    """Returns the facts that the explorer needs and that `see.capture` does not always record."""
    block = finest_block(Lq, Lk)
    return facts.BlockMass(block), facts.BlockMax(block), facts.MassOn(delimiters(keys))


def finest_block(Lq: int, Lk: int) -> int:
    """Returns the smallest block size, a power of two, with at most MAX_CELLS blocks per head."""
    block = 1
    while -(-Lq // block) * -(-Lk // block) > MAX_CELLS:
        block *= 2
    return block


@dataclass(frozen=True, eq=False)
class Trace:
    """One sample of a recording of `see.capture(model, keep="qk")`, with readable tokens."""

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
                raise ValueError(f'layers: expected layers of capture(model, keep="qk"), got {layer!r}')
            if layer.shape[2:] != (len(self.queries), len(self.keys)):
                raise ValueError(
                    f"tokens: expected as many as in {layer!r}, "
                    f"got {len(self.queries)} queries and {len(self.keys)} keys"
                )
            if not 0 <= self.sample < layer.shape[0]:
                raise ValueError(f"sample: expected an index below {layer.shape[0]}, got {self.sample}")
            if 0 in layer.shape:
                raise ValueError(f"layers: expected at least one head, query and key, got {layer!r}")
            if layer.fact(facts.RowMax()).weights[self.sample].isnan().any():
                raise ValueError(f"layers: expected weights without NaN, got NaN in {layer!r}")

    @property
    def block(self) -> int:
        return finest_block(len(self.queries), len(self.keys))

    @property
    def offset(self) -> int:
        """The position of query 0."""
        return self.layers[0].start(self.sample)

    @cached_property
    def _facts_cache(self) -> dict[int, Facts]:
        return {}

    def facts(self, layer: int) -> Facts:
        """Returns the facts of a layer. They are computed once and cached."""
        if layer not in self._facts_cache:
            self._facts_cache[layer] = self._facts(self.layers[layer])
        return self._facts_cache[layer]

    def _facts(self, layer: Layer) -> Facts:
        explorer_facts = wanted(len(self.queries), len(self.keys), layer.key_texts(self.sample))
        mass, largest, delimiter = map(layer.fact, explorer_facts)
        entropy, top = layer.fact(facts.Entropy()), layer.fact(facts.TopK(TOP))
        distance = layer.fact(facts.DistanceHistogram())
        return Facts(
            mass=tuple(map(self._array, mass.levels)), max=tuple(map(self._array, largest.levels)),
            column=self._array(layer.fact(facts.ColumnMass())), entropy=self._array(entropy.nats),
            normalized=self._array(entropy.normalized),
            row_max=self._array(layer.fact(facts.RowMax()).weights), delimiters=self._array(delimiter),
            distances=distance.distances.cpu().numpy(), by_distance=self._array(distance.mass),
            top_weights=self._array(top.weights),
            top_keys=top.keys[self.sample].cpu().numpy().astype(np.int32),
        )  # fmt: skip

    def _array(self, result: Tensor) -> Array:
        """Returns this sample's part (...) of a fact's result (B, ...) as a float32 array."""
        array: Array = result[self.sample].float().cpu().contiguous().numpy()
        return array

    def rows(self, layer: int, head: int, queries: Sequence[int]) -> Array:
        """Returns the exact weights (R, Lk) of the R queries with these indices."""
        call, first, last = self.layers[layer], min(queries), max(queries)
        if not _goes_by_position(call):
            rows: Array = self._array(call.rows(list(queries)))[head]
            return rows
        if last - first + 1 > 2 * len(queries):
            return np.concatenate([self.rows(layer, head, [query]) for query in queries])
        # Computes only this head and the queries from `first` to `last`.
        return np.take(_weights(*self._slice(call, head, first, last + 1)), [i - first for i in queries], 0)

    def tile(self, layer: int, head: int, queries: range, keys: range) -> Array:
        """Returns the exact weights (Q, K) of Q consecutive queries for K consecutive keys."""
        call = self.layers[layer]
        if not _goes_by_position(call):
            return self.rows(layer, head, queries)[:, keys.start : keys.stop]
        q, k, options = self._slice(call, head, queries.start, queries.stop)
        tile_options = {**options, "offset": options["offset"] - keys.start, "sink": None}
        tile_k = k[:, keys.start : keys.stop]
        # `_weights` normalises a row over the tile's keys only. `share` is the row's total weight on them.
        tile_lse, row_lse = lse(q, tile_k, tile_options), lse(q, k, options)
        share = torch.where(tile_lse.isfinite(), (tile_lse - row_lse).exp(), 0.0)
        weights: Array = _weights(q, tile_k, tile_options) * share[0, :, None].cpu().numpy()
        return weights

    def _slice(self, call: Layer, head: int, first: int, end: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Returns one head's queries [first, end), all its keys, and options for attention.

        The shapes are q (1, end - first, D) and k (1, Lk, D).
        """
        q, k = self.queries_and_keys(call, head)
        sink = call.options.get("sink")
        changed = {"offset": self.offset + first, "sink": None if sink is None else sink[head : head + 1]}
        return q[None, first:end], k[None], {**call.options, **changed}

    def queries_and_keys(self, call: Layer, head: int) -> tuple[Tensor, Tensor]:
        """Returns q (Lq, D) and k (Lk, D) of one head."""
        assert call.q is not None  # `__post_init__` checks it
        assert call.k is not None
        q, k = call.q[self.sample], call.k[self.sample]
        return q[head], k[head // (len(q) // len(k))]

    def roles(self, layer: int) -> list[list[tuple[str, float]]]:
        """Returns one list per head: (name, score) of the roles that reach their thresholds."""
        return [
            [(name, roles[name].score) for name, role in ROLES.items() if roles[name].score >= role.least]
            for roles in self.layers[layer].roles(self.sample)
        ]


def _goes_by_position(call: Layer) -> bool:
    """Returns whether the call has no bias and no mask other than a window.

    Then the weights of a query depend only on the keys and on the query and its position, so that
    they can be computed without the other queries.
    """
    mask = call.options.get("mask")
    return call.options.get("bias") is None and (mask is None or isinstance(mask, Window))


def _weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Array:
    """Returns all weights (Lq, Lk) of one head, given q (1, Lq, D) and k (1, Lk, D)."""
    (rows,) = evidence(q, k, None, facts.Rows(range(q.shape[1])), **options)
    weights: Array = rows[0].float().cpu().numpy()
    return weights
