"""Roles of heads: scores from 0 to 1, each with its definition and source.

All scores come from facts of O(n) size. Duplicate and induction need pairs of equal tokens: the mass that a
row gives to the keys of a mask is exp(LSE with that mask - LSE), so two more calls of attention measure it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import facts
from .._api.attention import attention
from ..masks import Causal, Documents, Mask, Window
from ..masks._both import both
from . import _tokens

if TYPE_CHECKING:
    from ._layer import Layer

Pair = tuple[Tensor, Tensor]  # scores (B, Hq), and from how many queries


class Definition(NamedTuple):
    meaning: str
    source: str
    least: float  # from here on a head is called so


# In the order in which a head gets its name: the special before the general.
ROLES = {
    "induction": Definition(
        "mass on tokens that followed an earlier occurrence of the query's token, mean over such queries",
        "prefix matching, Olsson et al. 2022", 0.5),
    "duplicate": Definition(
        "mass on other occurrences of the query's token, mean over the queries that have one",
        "duplicate token heads, TransformerLens", 0.5),
    "previous token": Definition(
        "mass on the token before, mean over the queries that have one", "Clark et al. 2019", 0.5),
    "fixed offset": Definition(
        "share of queries whose largest weight is at the commonest distance", "Voita et al. 2019", 0.9),
    "broad": Definition(
        "entropy divided by the logarithm of the number of allowed keys, mean over queries",
        "Clark et al. 2019", 0.9),
    "delimiter or sink": Definition(
        "share of all mass on the first token, special tokens and punctuation",
        "Clark et al. 2019; Xiao et al. 2023 (StreamingLLM)", 0.5),
    "sharp": Definition("the largest weight, mean over queries", "confidence, Voita et al. 2019", 0.5),
}  # fmt: skip
FEWEST = 3  # queries with a pair of equal tokens; fewer do not name a head
WANTED = (
    facts.ColumnMass(), facts.Entropy(), facts.RowMax(), facts.DistanceHistogram(), facts.TopK(8),
)  # fmt: skip


class Role(NamedTuple):
    name: str
    score: float  # 0 to 1
    detail: str = ""
    certain: bool = True  # False: too few queries to name a head so

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f}" + (f" ({self.detail})" if self.detail else "")


def named(role: Role | None) -> str:
    """Returns a role and its score as text. A head without a role is mixed."""
    return "mixed" if role is None else str(role)


def chosen(roles: dict[str, Role]) -> Role | None:
    """Returns the first role, in the order of `ROLES`, whose score suffices."""
    fitting = (roles[name] for name, role in ROLES.items() if roles[name].score >= role.least)
    return next((role for role in fitting if role.certain), None)


def of_layer(layer: Layer, sample: int) -> list[dict[str, Role]]:
    """Returns the roles of each head for one sample."""
    n = len(layer.texts(sample))
    largest = layer.fact(facts.RowMax())
    means = {
        "broad": layer.fact(facts.Entropy()).normalized[sample, :, :n].mean(-1),
        "sharp": largest.weights[sample, :, :n].mean(-1),
        "previous token": _previous(layer, sample, n),
    }
    offsets, shares = _commonest(_positions(layer, sample, n) - largest.keys[sample, :, :n])
    sinks, taken = _sinks(layer, sample, n)
    texts = layer.key_texts(sample)
    found = []
    for head in range(layer.heads):
        own = {name: Role(name, _unit(scores[head])) for name, scores in means.items()}
        own |= {name: _of_pairs(name, *pair, sample, head) for name, pair in layer.pairs.items()}
        own["fixed offset"] = Role("fixed offset", _unit(shares[head]), _way(int(offsets[head])))
        most = texts[int(taken[head])]
        own["delimiter or sink"] = Role("delimiter or sink", _unit(sinks[head]), f"most on {most!r}")
        found.append({name: own[name] for name in ROLES})
    return found


def _of_pairs(name: str, scores: Tensor, counts: Tensor, sample: int, head: int) -> Role:
    queries = int(counts[sample, head])
    told = "no repeated token" if not queries else f"{queries} quer{'y' if queries == 1 else 'ies'}"
    return Role(name, _unit(scores[sample, head]), told, queries >= FEWEST)


def _unit(score: Tensor) -> float:
    """Clamps to [0, 1], which rounding may exceed."""
    return min(1.0, max(0.0, score.item()))


def _positions(layer: Layer, sample: int, n: int) -> Tensor:
    """Returns the positions (n,) of the queries."""
    return layer.start(sample) + torch.arange(n)


def _previous(layer: Layer, sample: int, n: int) -> Tensor:
    """Returns the mass (Hq,) on the token before, averaged over the queries that have one."""
    histogram = layer.fact(facts.DistanceHistogram())
    before = _positions(layer, sample, n) - 1
    able = int(((before >= 0) & (before < len(layer.key_texts(sample)))).sum())
    mass: Tensor = histogram.mass[sample][:, histogram.distances == 1].sum(-1)
    return mass / max(1, able)


def _commonest(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mode of distances (Hq, n) for each head, and its share of the queries."""
    common = distances.mode(-1).values
    return common, (distances == common[:, None]).double().mean(-1)


def _way(offset: int) -> str:
    names = {0: "itself", 1: "one back", -1: "one ahead"}
    return names.get(offset, f"{abs(offset)} {'back' if offset > 0 else 'ahead'}")


def _sinks(layer: Layer, sample: int, n: int) -> tuple[Tensor, Tensor]:
    """Returns two tensors (Hq,): the share of mass on the first key and delimiters, and the key with most."""
    mass = layer.fact(facts.ColumnMass())[sample, :, : len(layer.key_texts(sample))]
    chosen = [0] if layer.tokens is None else _tokens.delimiters(layer.tokens[sample])
    return mass[:, chosen].sum(-1) / max(1, n), mass.argmax(-1)


# Pairs of equal tokens


def of_tokens(
    q: Tensor, k: Tensor, options: dict[str, Any], tokens: tuple[tuple[str, ...], ...] | None
) -> dict[str, Pair]:
    """Returns the scores of roles that compare tokens: 0 if no token repeats or tokens are not known."""
    B, Hq, n = q.shape[0], q.shape[1], k.shape[2]
    if tokens is None or all(len(set(sample)) == len(sample) for sample in tokens):
        none = torch.zeros(B, Hq), torch.zeros(B, Hq, dtype=torch.int64)
        return {"duplicate": none, "induction": none}
    asking = torch.full((len(tokens), n), -1, device=q.device)
    asked, after = torch.full_like(asking, -2), torch.full_like(asking, -2)
    for row, sample in enumerate(tokens):
        ids = torch.tensor(_tokens.numbers(sample), device=q.device)
        asking[row, : len(ids)] = asked[row, : len(ids)] = ids
        after[row, 1 : len(ids)] = ids[:-1]
    pairs = {
        "duplicate": Documents(asking, asked) & ~Window(0, 0),
        "induction": Documents(asking, after) & Causal(),
    }
    total = lse(q, k, options)
    return {name: _mean_mass(q, k, options, total, where) for name, where in pairs.items()}


def _mean_mass(q: Tensor, k: Tensor, options: dict[str, Any], total: Tensor, where: Mask) -> Pair:
    """Returns the mass on the keys of a mask, averaged over queries with such keys, and their number.

    `total` is the LSE over all keys.
    """
    narrowed = options | {"mask": both(where, options.get("mask")), "sink": None}
    inside = lse(q, k, narrowed)
    able = inside.isfinite()
    mass = torch.where(able, (inside - total).exp(), 0.0)
    return (mass.sum(-1) / able.sum(-1).clamp_min(1)).cpu(), able.sum(-1).cpu()


def lse(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the log-sum-exp (..., Hq, Lq) of the scores."""
    found: tuple[Tensor, Tensor] = attention(q, k, k[..., :1], **options, return_lse=True)
    return found[1]
