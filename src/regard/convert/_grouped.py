"""`to_grouped`: converts multi-head attention to grouped-query attention (GQA)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._tools.arguments import count
from ..nn import Attention
from ._parts import Channels, Parts, channels, parts_of, regrouped, root_moment, unrotated_channels
from ._report import Report, report
from ._source import refuse, source, split, tokens, widened

METHODS = ("mean", "first", "aligned")
ROUNDS = 4  # number of iterations of `_rotations`
TRIAL_TOKENS = 64  # number of random tokens for the report if the caller passes no tokens


class Statistics(NamedTuple):
    """Statistics of the calibration tokens and of the heads, which method "aligned" needs."""

    root: Tensor  # (d, d) with d = d_model + 1, the result of `root_moment`
    channels: Channels
    similarity: Tensor  # (Hkv, Hkv), between the key heads of the source


def to_grouped(
    module: nn.Module, kv_heads: int, method: str = "mean", *, calibration: Tensor | None = None,
    held_out: Tensor | None = None, tolerance: float = 0.05,
) -> tuple[Attention, Report]:  # fmt: skip
    """Converts self-attention to grouped-query attention with `kv_heads` key heads.

    Returns the new module and a report of its errors and savings. The input module is not modified.

    Args:
        module: a `regard.nn.Attention`, or a `MultiheadAttention` (Regard's or PyTorch's) for
            self-attention.
        kv_heads: a divisor of the module's number of key heads. If it equals that number, the
            result computes the same function as the module.
        method: how the key heads of a group become one. "mean": groups neighbouring heads and
            averages their weights (the GQA paper). "first": groups neighbouring heads and keeps the
            first of each group. "aligned": groups heads with similar keys and values, rotates each
            head towards the mean of its group, and averages. Rotating both the keys and the queries
            of a head does not change its scores. Rotating both the values and the columns of the
            output projection does not change its output. With rotary embeddings, only rotations
            that commute with them are used.
        calibration: typical input of the module (B, L, d_model). Method "aligned" requires it.
        held_out: other typical input (B, L, d_model), for the report. Default: the last quarter of
            the calibration samples.
        tolerance: the largest relative error of the output on `held_out` that the report accepts
            without training.

    Example:
        >>> grouped, report = regard.convert.to_grouped(module, 2, "aligned", calibration=x)
        >>> print(report.verdict)
    """
    before = source(module)
    _check(before, kv_heads, method, calibration)
    seen, unseen = None, None if held_out is None else tokens("held_out", held_out, before)
    if calibration is not None:
        seen, unseen = split(before, calibration, held_out)
    statistics = None if seen is None or method != "aligned" else _statistics(before, seen)
    after, order = _grouped(before, kv_heads, method, statistics)
    wide, n = widened(before), before.kv_heads
    return after, report(
        module, before, after, order, seen, unseen, _random(before) if unseen is None else unseen,
        title=f"{n} -> {kv_heads} key heads for {before.heads} query heads, {method}",
        proof=(wide, _grouped(wide, n, method, statistics)[0]), steps={"grouping": after},
        sizes=[size for size in range(1, n + 1) if n % size == 0],
        convert=lambda size: _grouped(before, size, method, statistics)[0], tolerance=tolerance,
    )  # fmt: skip


def _check(module: Attention, kv_heads: int, method: str, calibration: Tensor | None) -> None:
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    if module.kv_heads % count("kv_heads", kv_heads, 1):
        raise ValueError(f"kv_heads: expected a divisor of the {module.kv_heads} key heads, got {kv_heads}")
    if method != "aligned":
        return
    if calibration is None:
        raise ValueError("calibration: expected tokens (B, L, d_model) for method 'aligned', got None")
    names = ("position other than Rotary", "qk_norm", "gate", "sink")
    refuse(module, names, " with method 'aligned', which reorders and rotates heads")


def _statistics(module: Attention, x: Tensor) -> Statistics:
    root, rotary, parts = root_moment(x), channels(module), parts_of(module)
    of_values = _similarity(parts.v @ root, unrotated_channels(module.value_dim))
    return Statistics(root, rotary, _similarity(parts.k @ root, rotary) + of_values)


def _grouped(
    module: Attention, kv_heads: int, method: str, statistics: Statistics | None
) -> tuple[Attention, list[int]]:
    """Returns the converted module and the list `order`.

    Query head i of the converted module replaces query head order[i] of the source.
    """
    parts, order = parts_of(module), list(range(module.heads))
    if statistics is not None:
        parts, order = _aligned(parts, kv_heads, statistics)
    k, v = (x.unflatten(0, (kv_heads, -1)) for x in (parts.k, parts.v))
    k, v = (x[:, 0] if method == "first" else x.mean(1) for x in (k, v))
    return regrouped(module, Parts(parts.q, k, v, parts.out)), order


def _random(module: Attention) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, TRIAL_TOKENS, module.d_model, generator=generator).to(module.out.weight)


# Alignment. Below, a head is a matrix (D, d): the key or value matrix of a head, multiplied by the result of
# `root_moment`. The inner product of two heads is then the mean over tokens of the inner product of their
# keys or values.


def _aligned(parts: Parts, kv_heads: int, statistics: Statistics) -> tuple[Parts, list[int]]:
    """Reorders heads so that groups are contiguous, and rotates each head towards its group's mean.

    Returns the new matrices and `order`: query head i of the result is query head order[i] of the
    source.
    """
    groups = _groups(statistics.similarity, kv_heads)
    members = list(itertools.chain(*groups))
    share = len(parts.q) // len(parts.k)  # query heads per key head
    order = [share * m + i for m in members for i in range(share)]
    of_keys, of_values = [], []
    for group in groups:
        of_keys += _rotations(parts.k[group] @ statistics.root, statistics.channels)
        of_values += _rotations(parts.v[group] @ statistics.root, unrotated_channels(parts.v.shape[1]))
    G, Gv = torch.stack(of_keys), torch.stack(of_values)  # (Hkv, D, D), (Hkv, Dv, Dv)
    G_q, Gv_q = G.repeat_interleave(share, 0), Gv.repeat_interleave(share, 0)  # for query heads
    k, v, out = G @ parts.k[members], Gv @ parts.v[members], parts.out[order] @ Gv_q.transpose(1, 2)
    return Parts(G_q @ parts.q[order], k, v, out), order


def _similarity(x: Tensor, rotary: Channels) -> Tensor:
    """Returns the cosine similarities (n, n) of n heads with the matrices x (n, D, d_model + 1).

    For each pair of heads, one head is rotated such that the similarity is largest. The diagonal is
    0.
    """
    n, size = len(x), x.flatten(1).norm(dim=1).clamp_min(1e-300)
    similarity = torch.zeros(n, n, dtype=x.dtype)
    for a, b in itertools.combinations(range(n), 2):
        similarity[a, b] = similarity[b, a] = _overlap(x[a], x[b], rotary) / (size[a] * size[b])
    return similarity


def _overlap(a: Tensor, b: Tensor, rotary: Channels) -> Tensor:
    """Returns the largest inner product of `a` with any rotation of `b`, both (D, d_model + 1).

    Only rotations that commute with rotary embeddings are considered.
    """
    # The largest inner product of a matrix M with any orthogonal matrix is the nuclear norm of M.
    unrotated: Tensor = torch.linalg.matrix_norm(a[rotary.unrotated] @ b[rotary.unrotated].T, "nuc")
    return _pair_products(a, b, rotary).abs().sum() + unrotated


def _pair_products(a: Tensor, b: Tensor, rotary: Channels) -> Tensor:
    """Returns the complex inner product of `a` and `b` (D, d_model + 1) for each rotary pair."""
    return (rotary.complex(a) * rotary.complex(b).conj()).sum(-1)


def _groups(similarity: Tensor, kv_heads: int) -> list[list[int]]:
    """Splits heads into `kv_heads` groups of equal size, such that heads of a group are similar.

    Local search: starts with groups of neighbouring heads, and swaps two heads of different groups
    as long as a swap increases the sum of the similarities within groups.
    """
    n = len(similarity)
    size = n // kv_heads
    groups = [list(range(i, i + size)) for i in range(0, n, size)]
    members = [(g, i) for g in range(kv_heads) for i in range(size)]
    has_swapped = True
    while has_swapped:
        has_swapped = False
        for (g, i), (h, j) in itertools.combinations(members, 2):
            if g != h and _gain(similarity, groups, (g, i), (h, j)) > 1e-12:
                groups[g][i], groups[h][j] = groups[h][j], groups[g][i]
                has_swapped = True
    return sorted(sorted(group) for group in groups)


def _gain(similarity: Tensor, groups: list[list[int]], one: tuple[int, int], other: tuple[int, int]) -> float:
    """Returns how much a swap of two heads increases the sum of similarities within groups.

    `one` and `other` are pairs (group, index in the group).
    """
    a, b = groups[one[0]][one[1]], groups[other[0]][other[1]]
    near_a = [m for m in groups[one[0]] if m != a]
    near_b = [m for m in groups[other[0]] if m != b]
    now = similarity[a, near_a].sum() + similarity[b, near_b].sum()
    return float(similarity[b, near_a].sum() + similarity[a, near_b].sum() - now)


def _rotations(x: Tensor, rotary: Channels) -> list[Tensor]:
    """Returns n rotations (D, D) that rotate the heads x (n, D, d_model + 1) to their mean.

    Generalised Procrustes analysis: alternates between rotating the heads and computing the mean.
    """
    rotations = [torch.eye(x.shape[1], dtype=x.dtype) for _ in x]
    if len(x) == 1:
        return rotations
    mean = x[0]
    for _ in range(ROUNDS):
        rotations = [_rotation(mean, head, rotary) for head in x]
        mean = torch.stack([G @ head for G, head in zip(rotations, x, strict=True)]).mean(0)
    return rotations


def _rotation(goal: Tensor, head: Tensor, rotary: Channels) -> Tensor:
    """Returns the rotation G (D, D) that minimises |G head - goal| (orthogonal Procrustes problem).

    `head` and `goal` are (D, d_model + 1). Only rotations that commute with rotary embeddings are
    considered.
    """
    G = torch.zeros(len(head), len(head), dtype=head.dtype)
    unrotated, first, second = rotary.unrotated, rotary.first, rotary.second
    U, _, V = torch.linalg.svd(goal[unrotated] @ head[unrotated].T)
    G[unrotated[:, None], unrotated] = U @ V  # the solution for unrotated channels
    phase = _pair_products(goal, head, rotary).angle()
    G[first, first] = G[second, second] = phase.cos()
    G[second, first] = phase.sin()
    G[first, second] = -phase.sin()
    return G
