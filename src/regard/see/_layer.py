"""The recorded evidence of one call of attention, and of one head of it."""

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

MOST_WEIGHTS = 2**26  # of all heads, when a matrix is asked for


def on_cpu(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Moves results of facts to the CPU."""
    return tuple(tree.tree_map_only(Tensor, Tensor.cpu, result) for result in found)


class Link(NamedTuple):
    """How much a query attends to a key."""

    layer: int
    head: int
    weight: float


class Key(NamedTuple):
    """A key that is attended to."""

    position: int
    token: str
    weight: float


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """The evidence of one call of `regard.attention`: facts about its weights, not the weights.

    With `q` and `k` kept, everything else can be asked for later: `layer.fact(regard.BlockMax(64))`.
    """

    name: str  # of the module that called
    index: int  # among the calls
    shape: tuple[int, int, int, int]  # B, Hq, Lq, Lk
    offset: int | Tensor  # where query 0 stands
    found: dict[Any, Any]  # fact -> its result
    pairs: dict[str, tuple[Tensor, Tensor]]  # role that compares tokens -> scores (B, Hq), queries (B, Hq)
    tokens: tuple[tuple[str, ...], ...] | None = None  # of each sample, if the call was about them
    q: Tensor | None = None  # (B, Hq, Lq, D)
    k: Tensor | None = None  # (B, Hkv, Lk, D)
    options: dict[str, Any] = field(default_factory=dict)  # of `evidence`
    _roles: dict[int, list[dict[str, Role]]] = field(default_factory=dict)  # of samples that were asked for

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
        """Returns every head for one sample."""
        return [self.head(head, sample) for head in range(self.heads)]

    def fact(self, fact: Any) -> Any:
        """Returns the result of a fact: recorded, or computed now from `q` and `k`, if they were kept."""
        if fact not in self.found:
            self.found[fact] = self.ask(fact)
        return self.found[fact]

    def ask(self, fact: Any) -> Any:
        """Computes a fact from `q` and `k` without storing the result."""
        if self.q is None or self.k is None:
            raise ValueError(
                f"{fact!r} was not recorded of {self.name!r}; capture(model, want=[...]) records it, "
                'capture(model, keep="qk") keeps what it can be computed from'
            )
        return on_cpu(evidence(self.q, self.k, None, fact, **self.options))[0]

    def rows(self, queries: list[int]) -> Tensor:
        """Returns exact rows of weights of all samples and heads, (B, Hq, R, Lk)."""
        rows: Tensor = self.ask(facts.Rows(torch.tensor(queries)))
        return rows

    def texts(self, sample: int = 0) -> tuple[str, ...]:
        """Returns the tokens of the queries of a sample, or their positions if tokens are not known."""
        return self._texts(sample, self.start(sample), self.shape[2])

    def start(self, sample: int = 0) -> int:
        """Returns the position of query 0."""
        if isinstance(self.offset, Tensor):
            return int(self.offset.flatten()[sample if self.offset.numel() > 1 else 0])
        return self.offset

    def key_texts(self, sample: int = 0) -> tuple[str, ...]:
        """Returns the tokens of the keys of a sample, or their positions if tokens are not known."""
        return self._texts(sample, 0, self.shape[3])

    def _texts(self, sample: int, first: int, n: int) -> tuple[str, ...]:
        return tuple(map(str, range(first, first + n))) if self.tokens is None else self.tokens[sample]

    def roles(self, sample: int = 0) -> list[dict[str, Role]]:
        """Returns the scores of each head, by role: docs/seeing.md has the definitions."""
        if sample not in self._roles:
            self._roles[sample] = of_layer(self, sample)
        return self._roles[sample]

    def __repr__(self) -> str:
        B, Hq, Lq, Lk = self.shape
        kept = ", q and k kept" if self.q is not None else ""
        return f"Layer({self.index}, {self.name!r}: {B} x {Hq} heads, {Lq} queries x {Lk} keys{kept})"

    def _repr_html_(self) -> str:
        return _html.layer(self)


@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """One head of a layer, for one sample. Rows of padding are left out."""

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
        """(Lq,), divided by the logarithm of the number of keys that the query may attend to."""
        return self._own(self.layer.fact(facts.Entropy()).normalized)[: len(self.tokens)]

    @property
    def confidence(self) -> Tensor:
        """(Lq,), the largest weight of each row."""
        return self._own(self.layer.fact(facts.RowMax()).weights)[: len(self.tokens)]

    @property
    def column_mass(self) -> Tensor:
        """(Lk,), the sum of each key's weights over all queries."""
        return self._own(self.layer.fact(facts.ColumnMass()))[: len(self.key_tokens)]

    @property
    def distances(self) -> tuple[Tensor, Tensor]:
        """How far a key lies before its query, and the mass there. Negative distances are ahead."""
        found = self.layer.fact(facts.DistanceHistogram())
        return found.distances, self._own(found.mass)

    @property
    def roles(self) -> dict[str, Role]:
        return self.layer.roles(self.sample)[self.index]

    @property
    def role(self) -> Role | None:
        """The first role, in the order of `see.ROLES`, whose score is large enough; None: mixed."""
        return chosen(self.roles)

    def row(self, token: int | str) -> Tensor:
        """Returns the exact weights (Lk,) of one query, given by position or by its text."""
        row = self._own(self.layer.rows([_tokens.find(self.tokens, token)]))
        return row[0, : len(self.key_tokens)]

    def top(self, token: int | str, k: int = 8) -> list[Key]:
        """Returns the keys that one query attends to most, the largest weight first."""
        count("k", k, 1)
        at, texts = _tokens.find(self.tokens, token), self.key_tokens
        known = [fact for fact in self.layer.found if isinstance(fact, facts.TopK) and fact.k >= k]
        found = self.layer.fact(known[0] if known else facts.TopK(k))
        keys, weights = (self._own(x)[at, :k].tolist() for x in (found.keys, found.weights))
        pairs = zip(keys, weights, strict=True)
        return [Key(key, texts[key], weight) for key, weight in pairs if 0 <= key < len(texts)]

    def weights(self) -> Tensor:
        """Returns the exact weights (Lq, Lk). Raises if all heads together have more than 2**26."""
        B, Hq, Lq, Lk = self.layer.shape
        if B * Hq * Lq * Lk > MOST_WEIGHTS:
            raise ValueError(
                f"weights: expected at most 2**26 weights, got {self.layer!r}; `row(i)` gives one row, and "
                "`layer.fact(regard.BlockMass(64))` all of them at block resolution"
            )
        rows = self._own(self.layer.rows(list(range(len(self.tokens)))))
        return rows[:, : len(self.key_tokens)]

    def _own(self, result: Tensor) -> Tensor:
        return result[self.sample, self.index]

    def __repr__(self) -> str:
        return f"Head({self.title} of {self.layer.name!r}: {named(self.role)})"

    def _repr_html_(self) -> str:
        return _html.head(self)
