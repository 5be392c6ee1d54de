"""Roles of heads: scores from 0 to 1, each with its definition and source.

All scores are computed from facts of O(L) size. `duplicate` and `induction` need the mass on pairs
of equal tokens. A query's mass on the keys that a mask allows is exp(LSE with the mask - LSE
without it), where LSE is the log-sum-exp of scores. So each of these roles needs only two attention
calls that return the LSE: one with the mask of its pairs and one without it.
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

Pair = tuple[Tensor, Tensor]  # scores (B, Hq), and how many queries each score averages (B, Hq)


class Definition(NamedTuple):
    meaning: str
    source: str
    least: float  # the threshold: a head with this role has at least this score


# A head gets the first role whose score reaches the threshold, so special roles precede general ones.
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
FEWEST = 3  # `duplicate` and `induction` are certain only if this number of queries have a matching key
WANTED = (
    facts.ColumnMass(), facts.Entropy(), facts.RowMax(), facts.DistanceHistogram(), facts.TopK(8),
)  # fmt: skip


class Role(NamedTuple):
    """A head's score for one role."""

    name: str
    score: float  # 0 to 1
    detail: str = ""
    certain: bool = True  # False if the score is an average of too few queries

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f}" + (f" ({self.detail})" if self.detail else "")


def named(role: Role | None) -> str:
    """Returns a role and its score as text, or "mixed" for None."""
    return "mixed" if role is None else str(role)


def chosen(roles: dict[str, Role]) -> Role | None:
    """Returns the first role of `ROLES` whose score is certain and reaches the role's threshold.

    A score is certain if enough queries contribute to it. Returns None if there is no such role.
    """
    reached = (roles[name] for name, role in ROLES.items() if roles[name].score >= role.least)
    return next((role for role in reached if role.certain), None)


def of_layer(layer: Layer, sample: int) -> list[dict[str, Role]]:
    """Returns, for one sample, a list with one dict per head, from role names to `Role` objects."""
    n = len(layer.texts(sample))
    largest = layer.fact(facts.RowMax())
    means = {
        "broad": layer.fact(facts.Entropy()).normalized[sample, :, :n].mean(-1),
        "sharp": largest.weights[sample, :, :n].mean(-1),
        "previous token": _previous(layer, sample, n),
    }
    offsets, shares = _commonest(_positions(layer, sample, n) - largest.keys[sample, :, :n])
    sinks, largest_keys = _sinks(layer, sample, n)
    texts = layer.key_texts(sample)
    heads = []
    for head in range(layer.heads):
        roles = {name: Role(name, _unit(scores[head])) for name, scores in means.items()}
        roles |= {name: _of_pairs(name, *pair, sample, head) for name, pair in layer.pairs.items()}
        roles["fixed offset"] = Role("fixed offset", _unit(shares[head]), _direction(int(offsets[head])))
        key = texts[int(largest_keys[head])]
        roles["delimiter or sink"] = Role("delimiter or sink", _unit(sinks[head]), f"most on {key!r}")
        heads.append({name: roles[name] for name in ROLES})
    return heads


def _of_pairs(name: str, scores: Tensor, counts: Tensor, sample: int, head: int) -> Role:
    queries = int(counts[sample, head])
    detail = "no repeated token" if not queries else f"{queries} quer{'y' if queries == 1 else 'ies'}"
    return Role(name, _unit(scores[sample, head]), detail, queries >= FEWEST)


def _unit(score: Tensor) -> float:
    """Returns a score clamped to [0, 1], because rounding may put it slightly outside."""
    return min(1.0, max(0.0, score.item()))


def _positions(layer: Layer, sample: int, n: int) -> Tensor:
    """Returns the positions (n,) of the first n queries of a sample."""
    return layer.start(sample) + torch.arange(n)


def _previous(layer: Layer, sample: int, n: int) -> Tensor:
    """Returns each head's mass (Hq,) on the previous token, averaged over queries that have one."""
    histogram = layer.fact(facts.DistanceHistogram())
    previous = _positions(layer, sample, n) - 1
    queries = int(((previous >= 0) & (previous < len(layer.key_texts(sample)))).sum())
    mass: Tensor = histogram.mass[sample][:, histogram.distances == 1].sum(-1)
    return mass / max(1, queries)


def _commonest(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the most frequent distance (Hq,) of each row of `distances` (Hq, n), and its share.

    The share (Hq,) is the fraction of the n queries with this distance.
    """
    common = distances.mode(-1).values
    return common, (distances == common[:, None]).double().mean(-1)


def _direction(offset: int) -> str:
    """Returns a distance as text, such as "2 back"."""
    names = {0: "itself", 1: "one back", -1: "one ahead"}
    return names.get(offset, f"{abs(offset)} {'back' if offset > 0 else 'ahead'}")


def _sinks(layer: Layer, sample: int, n: int) -> tuple[Tensor, Tensor]:
    """Returns each head's share (Hq,) of mass on sinks, and the index (Hq,) of its heaviest key.

    Sinks are the first key and, if the tokens are known, all delimiters. The heaviest key receives
    the most mass of all keys, whether it is a sink or not.
    """
    mass = layer.fact(facts.ColumnMass())[sample, :, : len(layer.key_texts(sample))]
    chosen = [0] if layer._of_keys is None else _tokens.delimiters(layer._of_keys[sample])
    return mass[:, chosen].sum(-1) / max(1, n), mass.argmax(-1)


# Pairs of equal tokens


def of_tokens(
    q: Tensor, k: Tensor, options: dict[str, Any], tokens: tuple[tuple[str, ...], ...] | None
) -> dict[str, Pair]:
    """Returns a dict from "duplicate" and "induction" to a score and a query count, each (B, Hq).

    A score is a mean over queries, and the count is the number of these queries. Scores and counts
    are 0 if no token repeats or if the tokens are unknown.
    """
    B, Hq, n = q.shape[0], q.shape[1], k.shape[2]
    if tokens is None or all(len(set(sample)) == len(sample) for sample in tokens):
        none = torch.zeros(B, Hq), torch.zeros(B, Hq, dtype=torch.int64)
        return {"duplicate": none, "induction": none}
    query_ids = torch.full((len(tokens), n), -1, device=q.device)
    key_ids, previous_ids = torch.full_like(query_ids, -2), torch.full_like(query_ids, -2)
    for row, sample in enumerate(tokens):
        ids = torch.tensor(_tokens.numbers(sample), device=q.device)
        query_ids[row, : len(ids)] = key_ids[row, : len(ids)] = ids
        previous_ids[row, 1 : len(ids)] = ids[:-1]
    masks = {
        "duplicate": Documents(query_ids, key_ids) & ~Window(0, 0),
        "induction": Documents(query_ids, previous_ids) & Causal(),
    }
    total = lse(q, k, options)
    return {name: _mean_mass(q, k, options, total, mask) for name, mask in masks.items()}


def _mean_mass(q: Tensor, k: Tensor, options: dict[str, Any], total: Tensor, mask: Mask) -> Pair:
    """Returns the mean mass (B, Hq) on the keys that a mask allows, and the query counts (B, Hq).

    Only queries with at least one allowed key are averaged and counted. `total` is the LSE without
    the mask.
    """
    narrowed = options | {"mask": both(mask, options.get("mask")), "sink": None}
    inside = lse(q, k, narrowed)
    has_keys = inside.isfinite()
    mass = torch.where(has_keys, (inside - total).exp(), 0.0)
    return (mass.sum(-1) / has_keys.sum(-1).clamp_min(1)).cpu(), has_keys.sum(-1).cpu()


def lse(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the log-sum-exp (..., Hq, Lq) of the scores."""
    out_and_lse: tuple[Tensor, Tensor] = attention(q, k, k[..., :1], **options, return_lse=True)
    return out_and_lse[1]
