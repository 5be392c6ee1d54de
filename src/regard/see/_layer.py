"""`Layer` and `Head`: the recorded facts about one attention call, and about one of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from .. import facts
from .._api.evidence import evidence
from .._tools.arguments import count
from . import _html, _tokens
from ._roles import Role, chosen, named, of_layer

MOST_WEIGHTS = 2**26  # `Head.weights` raises if a layer has more weights, over all samples and heads


def on_cpu(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the results of `evidence`, with their tensors moved to the CPU."""
    return tuple(tree.tree_map_only(Tensor, Tensor.cpu, result) for result in results)


class Link(NamedTuple):
    """The attention weight of one query for one key in one head."""

    layer: int
    head: int
    weight: float


class Key(NamedTuple):
    """A key and its weight for one query."""

    position: int
    token: str
    weight: float


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """The recording of one call of `regard.attention`: facts about its weights, not the weights.

    If `q` and `k` were stored, other facts can be computed later, such as
    `layer.fact(regard.BlockMax(64))`.
    """

    name: str  # name of the module that called attention
    index: int  # index of the call in the recording
    shape: tuple[int, int, int, int]  # B, Hq, Lq, Lk
    offset: int | Tensor  # the position of query 0
    found: dict[Any, Any]  # fact -> its result
    pairs: dict[str, tuple[Tensor, Tensor]]  # "duplicate", "induction" -> scores and query counts (B, Hq)
    tokens: tuple[tuple[str, ...], ...] | None = None  # one tuple per sample; None if tokens are unknown
    key_tokens: tuple[tuple[str, ...], ...] | None = None  # of the keys, if they are other tokens
    q: Tensor | None = None  # (B, Hq, Lq, D)
    k: Tensor | None = None  # (B, Hkv, Lk, D)
    options: dict[str, Any] = field(default_factory=dict)  # options of the call
    _roles: dict[int, list[dict[str, Role]]] = field(default_factory=dict)  # sample -> cached roles

    @property
    def heads(self) -> int:
        return self.shape[1]

    def __len__(self) -> int:
        return self.heads

    def __iter__(self) -> Iterator[Head]:
        return iter(self._of_sample())

    def __getitem__(self, head: int) -> Head:
        return self.head(head)

    def head(self, head: int, sample: int = 0) -> Head:
        B, Hq, _, _ = self.shape
        return Head(self, _tokens.index("head", head, Hq), _tokens.index("sample", sample, B))

    def _of_sample(self, sample: int = 0) -> list[Head]:
        """Returns all heads of the layer for one sample."""
        return [self.head(head, sample) for head in range(self.heads)]

    def fact(self, fact: Any) -> Any:
        """Returns the recorded result of a fact, or computes it from `q` and `k` and stores it."""
        if fact not in self.found:
            self.found[fact] = self.ask(fact)
        return self.found[fact]

    def ask(self, fact: Any) -> Any:
        """Computes a fact from `q` and `k` without storing the result."""
        if self.q is None or self.k is None:
            raise ValueError(
                f"{fact!r} was not recorded for {self.name!r}; capture(model, want=[...]) records it, "
                'and capture(model, keep="qk") allows computing it later'
            )
        return on_cpu(evidence(self.q, self.k, None, fact, **self.options))[0]

    def rows(self, queries: list[int]) -> Tensor:
        """Returns the exact weights (B, Hq, R, Lk) of the R queries with these indices."""
        rows: Tensor = self.ask(facts.Rows(torch.tensor(queries)))
        return rows

    def texts(self, sample: int = 0) -> tuple[str, ...]:
        """Returns the tokens of a sample's queries, or positions if the tokens are unknown."""
        return _texts(self.tokens, sample, self.start(sample), self.shape[2])

    def start(self, sample: int = 0) -> int:
        """Returns the position of query 0 in a sample."""
        if isinstance(self.offset, Tensor):
            return int(self.offset.flatten()[sample if self.offset.numel() > 1 else 0])
        return self.offset

    def key_texts(self, sample: int = 0) -> tuple[str, ...]:
        """Returns the tokens of a sample's keys, or their positions if the tokens are unknown."""
        return _texts(self._of_keys, sample, 0, self.shape[3])

    @property
    def _of_keys(self) -> tuple[tuple[str, ...], ...] | None:
        """The tokens of the keys, which are those of the queries in self-attention."""
        return self.tokens if self.key_tokens is None else self.key_tokens

    def roles(self, sample: int = 0) -> list[dict[str, Role]]:
        """Returns one dict per head, from role names to scores. docs/seeing.md lists the roles."""
        if sample not in self._roles:
            self._roles[sample] = of_layer(self, sample)
        return self._roles[sample]

    def __repr__(self) -> str:
        B, Hq, Lq, Lk = self.shape
        note = ", q and k kept" if self.q is not None else ""
        return f"Layer({self.index}, {self.name!r}: {B} x {Hq} heads, {Lq} queries x {Lk} keys{note})"

    def _repr_html_(self) -> str:
        return _html.layer(self)


def _texts(tokens: tuple[tuple[str, ...], ...] | None, sample: int, first: int, n: int) -> tuple[str, ...]:
    """Returns the tokens of a sample, or n positions from `first` on if the tokens are unknown."""
    return tuple(map(str, range(first, first + n))) if tokens is None else tokens[sample]


@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """One head of a layer, for one sample. Queries and keys exclude padding."""

    layer: Layer
    index: int
    sample: int = 0

    @property
    def title(self) -> str:
        return f"layer {self.layer.index}, head {self.index}"

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.layer.texts(self.sample)

    @property
    def key_tokens(self) -> tuple[str, ...]:
        return self.layer.key_texts(self.sample)

    @property
    def entropy(self) -> Tensor:
        """The entropy (Lq,) of each query's weights, divided by log(number of allowed keys)."""
        return self._select(self.layer.fact(facts.Entropy()).normalized)[: len(self.tokens)]

    @property
    def confidence(self) -> Tensor:
        """The largest weight (Lq,) of each query."""
        return self._select(self.layer.fact(facts.RowMax()).weights)[: len(self.tokens)]

    @property
    def column_mass(self) -> Tensor:
        """The total attention (Lk,) that each key receives from all queries."""
        return self._select(self.layer.fact(facts.ColumnMass()))[: len(self.key_tokens)]

    @property
    def distances(self) -> tuple[Tensor, Tensor]:
        """A tensor of distances (query position - key position), and the attention mass at each."""
        histogram = self.layer.fact(facts.DistanceHistogram())
        return histogram.distances, self._select(histogram.mass)

    @property
    def roles(self) -> dict[str, Role]:
        return self.layer.roles(self.sample)[self.index]

    @property
    def role(self) -> Role | None:
        """The first role of `see.ROLES` whose certain score reaches its threshold, or None."""
        return chosen(self.roles)

    def row(self, token: int | str) -> Tensor:
        """Returns the exact weights (Lk,) of one query. `token` is its index or its text."""
        row = self._select(self.layer.rows([_tokens.find(self.tokens, token)]))
        return row[0, : len(self.key_tokens)]

    def top(self, token: int | str, k: int = 8) -> list[Key]:
        """Returns the k keys with the largest weights of one query, sorted by descending weight."""
        count("k", k, 1)
        at, texts = _tokens.find(self.tokens, token), self.key_tokens
        recorded = [fact for fact in self.layer.found if isinstance(fact, facts.TopK) and fact.k >= k]
        top = self.layer.fact(recorded[0] if recorded else facts.TopK(k))
        keys, weights = (self._select(x)[at, :k].tolist() for x in (top.keys, top.weights))
        pairs = zip(keys, weights, strict=True)
        return [Key(key, texts[key], weight) for key, weight in pairs if 0 <= key < len(texts)]

    def weights(self) -> Tensor:
        """Returns the exact weights (Lq, Lk). Raises ValueError for more than 2**26 weights."""
        B, Hq, Lq, Lk = self.layer.shape
        if B * Hq * Lq * Lk > MOST_WEIGHTS:
            raise ValueError(
                f"weights: expected at most 2**26 weights, got {self.layer!r}; `row(i)` returns one row, and "
                "`layer.fact(regard.BlockMass(64))` the sums of blocks"
            )
        rows = self._select(self.layer.rows(list(range(len(self.tokens)))))
        return rows[:, : len(self.key_tokens)]

    def _select(self, result: Tensor) -> Tensor:
        """Returns the part (...) of a fact's result (B, Hq, ...) for this sample and head."""
        return result[self.sample, self.index]

    def __repr__(self) -> str:
        return f"Head({self.title} of {self.layer.name!r}: {named(self.role)})"

    def _repr_html_(self) -> str:
        return _html.head(self)
