"""Fewer key heads: groups of heads share the mean, the first or the aligned mean of their keys and values."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._tools.arguments import count
from ..nn import Attention
from ._parts import Channels, Parts, channels, parts_of, regrouped, root_moment, unturned
from ._report import Report, report
from ._source import refuse, source, split, tokens, widened

METHODS = ("mean", "first", "aligned")
ROUNDS = 4  # of aligning a group to its mean
TRIAL_TOKENS = 64  # random ones, where none are given


class Met(NamedTuple):
    """What aligning needs to know of the tokens."""

    root: Tensor  # (d, d), of `root_moment`
    turning: Channels
    similar: Tensor  # (Hkv, Hkv)


def to_grouped(
    module: nn.Module, kv_heads: int, method: str = "mean", *, calibration: Tensor | None = None,
    held_out: Tensor | None = None, tolerance: float = 0.05,
) -> tuple[Attention, Report]:  # fmt: skip
    """Grouped-query attention with `kv_heads` key heads, and a report of what that costs.

    Args:
        module: `regard.nn.Attention`, or a `MultiheadAttention` of self-attention, Regard's or PyTorch's. It
            stays as it is.
        kv_heads: a divisor of the module's key heads; as many as it has changes nothing.
        method: how the heads of a group become one. "mean": their matrices' mean (the GQA paper), "first":
            the first of them, both in groups of neighbours. "aligned": heads with similar keys and values
            are grouped, turned towards each other, then averaged. Turning a head's keys and its queries alike
            leaves its scores as they are, and so do its values and the last projection; under rotary
            embeddings only rotations that commute with theirs are used.
        calibration: (B, L, d_model): tokens as the module meets them; "aligned" needs them.
        held_out: other tokens for the report. Default: the last quarter of the calibration samples.
        tolerance: the relative error of the result, on held-out tokens, that needs no training.
    """
    before = source(module)
    _check(before, kv_heads, method, calibration)
    seen, unseen = None, None if held_out is None else tokens("held_out", held_out, before)
    if calibration is not None:
        seen, unseen = split(before, calibration, held_out)
    met = None if seen is None or method != "aligned" else _met(before, seen)
    after, order = _grouped(before, kv_heads, method, met)
    wide, n = widened(before), before.kv_heads
    return after, report(
        module, before, after, order, seen, unseen, _random(before) if unseen is None else unseen,
        title=f"{n} -> {kv_heads} key heads for {before.heads} query heads, {method}",
        proof=(wide, _grouped(wide, n, method, met)[0]), steps={"grouping": after},
        sizes=[size for size in range(1, n + 1) if n % size == 0],
        made=lambda size: _grouped(before, size, method, met)[0], tolerance=tolerance,
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
    refuse(module, names, " that belongs to a head for method 'aligned'")


def _met(module: Attention, x: Tensor) -> Met:
    root, turning, parts = root_moment(x), channels(module), parts_of(module)
    by_values = _similar(parts.v @ root, unturned(module.value_dim))
    return Met(root, turning, _similar(parts.k @ root, turning) + by_values)


def _grouped(module: Attention, kv_heads: int, method: str, met: Met | None) -> tuple[Attention, list[int]]:
    """Returns the converted module, and which head of the source each of its heads stands for."""
    parts, order = parts_of(module), list(range(module.heads))
    if met is not None:
        parts, order = _aligned(parts, kv_heads, met)
    k, v = (x.unflatten(0, (kv_heads, -1)) for x in (parts.k, parts.v))
    k, v = (x[:, 0] if method == "first" else x.mean(1) for x in (k, v))
    return regrouped(module, Parts(parts.q, k, v, parts.out)), order


def _random(module: Attention) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, TRIAL_TOKENS, module.d_model, generator=generator).to(module.out.weight)


# Aligning. A head is (D, d), keys or values times the root moment: products of heads are means over tokens.


def _aligned(parts: Parts, kv_heads: int, met: Met) -> tuple[Parts, list[int]]:
    """The parts with heads of a group side by side, turned towards each other; and which heads they were."""
    groups = _groups(met.similar, kv_heads)
    members = list(itertools.chain(*groups))
    share = len(parts.q) // len(parts.k)  # query heads of a key head
    order = [share * m + i for m in members for i in range(share)]
    by_keys, by_values = [], []
    for group in groups:
        by_keys += _towards_mean(parts.k[group] @ met.root, met.turning)
        by_values += _towards_mean(parts.v[group] @ met.root, unturned(parts.v.shape[1]))
    G, Gv = torch.stack(by_keys), torch.stack(by_values)  # (Hkv, D, D), (Hkv, Dv, Dv)
    each, each_v = G.repeat_interleave(share, 0), Gv.repeat_interleave(share, 0)
    turned = Parts(
        each @ parts.q[order], G @ parts.k[members], Gv @ parts.v[members],
        parts.out[order] @ each_v.transpose(1, 2),
    )  # fmt: skip
    return turned, order


def _similar(x: Tensor, turning: Channels) -> Tensor:
    """(n, n) for x (n, D, d): how much of two heads one rotation can make the same, from 0 to 1."""
    n, size = len(x), x.flatten(1).norm(dim=1).clamp_min(1e-300)
    found = torch.zeros(n, n, dtype=x.dtype)
    for a, b in itertools.combinations(range(n), 2):
        found[a, b] = found[b, a] = _overlap(x[a], x[b], turning) / (size[a] * size[b])
    return found


def _overlap(a: Tensor, b: Tensor, turning: Channels) -> Tensor:
    """Returns the largest inner product of a (D, d) and a rotation of b."""
    # The nuclear norm is the largest inner product with an orthogonal matrix.
    rest: Tensor = torch.linalg.matrix_norm(a[turning.still] @ b[turning.still].T, "nuc")
    return _pair_products(a, b, turning).abs().sum() + rest


def _pair_products(a: Tensor, b: Tensor, turning: Channels) -> Tensor:
    """(pairs,): sums over tokens of a conj(b)."""
    return (turning.complex(a) * turning.complex(b).conj()).sum(-1)


def _groups(similar: Tensor, kv_heads: int) -> list[list[int]]:
    """Groups of equal size; two heads change places as long as that makes groups more similar inside."""
    n = len(similar)
    size = n // kv_heads
    groups = [list(range(i, i + size)) for i in range(0, n, size)]
    places = [(g, i) for g in range(kv_heads) for i in range(size)]
    gained = True
    while gained:
        gained = False
        for (g, i), (h, j) in itertools.combinations(places, 2):
            if g != h and _gain(similar, groups, (g, i), (h, j)) > 1e-12:
                groups[g][i], groups[h][j] = groups[h][j], groups[g][i]
                gained = True
    return sorted(sorted(group) for group in groups)


def _gain(similar: Tensor, groups: list[list[int]], one: tuple[int, int], other: tuple[int, int]) -> float:
    a, b = groups[one[0]][one[1]], groups[other[0]][other[1]]
    near_a = [m for m in groups[one[0]] if m != a]
    near_b = [m for m in groups[other[0]] if m != b]
    now = similar[a, near_a].sum() + similar[b, near_b].sum()
    return float(similar[b, near_a].sum() + similar[a, near_b].sum() - now)


def _towards_mean(x: Tensor, turning: Channels) -> list[Tensor]:
    """Rotations (D, D) for x (n, D, d), one for each head, that bring them close to their mean."""
    found = [torch.eye(x.shape[1], dtype=x.dtype) for _ in x]
    if len(x) == 1:
        return found
    goal = x[0]
    for _ in range(ROUNDS):
        found = [_rotation(goal, head, turning) for head in x]
        goal = torch.stack([G @ head for G, head in zip(found, x, strict=True)]).mean(0)
    return found


def _rotation(goal: Tensor, head: Tensor, turning: Channels) -> Tensor:
    """The rotation (D, D), one that commutes with the turning pairs, of `head` that is closest to `goal`."""
    G = torch.zeros(len(head), len(head), dtype=head.dtype)
    still, first, second = turning.still, turning.first, turning.second
    U, _, V = torch.linalg.svd(goal[still] @ head[still].T)
    G[still[:, None], still] = U @ V  # the closest orthogonal matrix
    phase = _pair_products(goal, head, turning).angle()
    G[first, first] = G[second, second] = phase.cos()
    G[second, first] = phase.sin()
    G[first, second] = -phase.sin()
    return G
