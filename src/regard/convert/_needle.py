"""A needle in a haystack, for each head: does it still find the token that it would most like to see?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._api.attention import weights
from ..nn import Attention, LatentAttention

PLACES = (0.25, 0.5, 0.75)  # of the haystack
LONGER = 4  # times the samples' length: the second haystack


@dataclass(frozen=True)
class Needle:
    """Shares of heads and places at which the last query's largest weight is at the needle."""

    length: int  # tokens of the haystack
    before: float
    after: float


def needles(
    before: Attention, after: Attention | LatentAttention, order: list[int], x: Tensor
) -> tuple[Needle, ...]:
    """In tokens x (B, L, d_model), end to end, at two lengths. Head i of `after` was head order[i].

    The needle of a head is, of all tokens of the others' size, the one to which it would give the largest
    score at that place. What a conversion does to rotations shows at a distance.
    """
    return tuple(_found(before, after, order, _haystack(x, n)) for n in (x.shape[1], LONGER * x.shape[1]))


def _haystack(x: Tensor, n: int) -> Tensor:
    """(n, d_model)"""
    rows = x.flatten(0, 1)
    return rows.repeat(-(-n // len(rows)), 1)[:n]


def _found(before: Attention, after: Attention | LatentAttention, order: list[int], hay: Tensor) -> Needle:
    n, hits = len(hay), torch.zeros(2)
    places = [int(share * (n - 1)) for share in PLACES]
    for place in places:
        for i, needle in enumerate(_liked(before, hay, place)[order]):
            planted = hay.clone()
            planted[place] = needle
            hits[0] += _top(before, planted, order[i]) == place
            hits[1] += _top(after, planted, i) == place
    return Needle(n, *(hits / (len(places) * before.heads)).tolist())


def _liked(module: Attention, hay: Tensor, place: int) -> Tensor:
    """(Hq, d_model): along the gradient of each head's score of this place for the last query."""
    with torch.enable_grad():
        x = hay.detach().clone().requires_grad_()
        (q, k, _), _ = module.arguments(x)
        keys = k[:, place].repeat_interleave(module.heads // module.kv_heads, 0)
        scores = (q[:, -1] * keys).sum(-1)
        grads = [torch.autograd.grad(score, x, retain_graph=True)[0][place] for score in scores]
    liked = torch.stack(grads)
    size = hay.norm(dim=-1).square().mean().sqrt()
    needles: Tensor = liked * size / liked.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return needles


@torch.no_grad()
def _top(module: Attention | LatentAttention, x: Tensor, head: int) -> int:
    """The key to which the last query of x (L, d_model) gives its largest weight."""
    (q, k, v), options = module.arguments(x)
    found: Tensor = weights(q[:, -1:], k, v, **options)
    return int(found[head, 0].argmax())
