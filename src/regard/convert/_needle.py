"""A needle-in-a-haystack test per head: does the head still attend to its preferred token?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._api.attention import weights
from ..nn import Attention, LatentAttention

DEPTHS = (0.25, 0.5, 0.75)  # positions of the needle, as fractions of the haystack's length
LONGER = 4  # the second haystack is this many times as long as the first


@dataclass(frozen=True)
class Needle:
    """The result of a needle-in-a-haystack test.

    A needle is a token that a head prefers. It is planted among other tokens (the haystack), once
    for each head and each of several positions. A head finds the needle if its last query gives the
    needle the largest weight.

    Attributes:
        length: number of tokens of the haystack.
        before: fraction of needles that the source module finds.
        after: fraction of needles that the converted module finds.
    """

    length: int
    before: float
    after: float


def needles(
    before: Attention, after: Attention | LatentAttention, order: list[int], x: Tensor
) -> tuple[Needle, ...]:
    """Runs the needle test in two haystacks, of L and 4 L tokens from x (B, L, d_model).

    A head's needle is the vector with the largest score for the last query, among all vectors whose
    norm is the root mean square norm of the haystack's tokens. The longer haystack reveals errors
    of rotary embeddings. Head i of `after` replaces head order[i] of `before`.
    """
    return tuple(_test(before, after, order, _haystack(x, n)) for n in (x.shape[1], LONGER * x.shape[1]))


def _haystack(x: Tensor, n: int) -> Tensor:
    """Concatenates the samples of x and returns the first n tokens (n, d_model).

    Repeats x if it has fewer than n tokens.
    """
    rows = x.flatten(0, 1)
    return rows.repeat(-(-n // len(rows)), 1)[:n]


def _test(before: Attention, after: Attention | LatentAttention, order: list[int], hay: Tensor) -> Needle:
    n, hits = len(hay), torch.zeros(2)
    positions = [int(depth * (n - 1)) for depth in DEPTHS]
    for position in positions:
        for i, needle in enumerate(_preferred(before, hay, position)[order]):
            planted = hay.clone()
            planted[position] = needle
            hits[0] += _top_key(before, planted, order[i]) == position
            hits[1] += _top_key(after, planted, i) == position
    return Needle(n, *(hits / (len(positions) * before.heads)).tolist())


def _preferred(module: Attention, hay: Tensor, position: int) -> Tensor:
    """Returns each head's needle for a position: (Hq, d_model).

    A needle is the gradient of the last query's score with respect to the token at this position,
    rescaled to the root mean square norm of the tokens in `hay` (n, d_model).
    """
    with torch.enable_grad():
        x = hay.detach().clone().requires_grad_()
        (q, k, _), _ = module.arguments(x)
        keys = k[:, position].repeat_interleave(module.heads // module.kv_heads, 0)
        scores = (q[:, -1] * keys).sum(-1)
        grads = [torch.autograd.grad(score, x, retain_graph=True)[0][position] for score in scores]
    directions = torch.stack(grads)
    size = hay.norm(dim=-1).square().mean().sqrt()
    needles: Tensor = directions * size / directions.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return needles


@torch.no_grad()
def _top_key(module: Attention | LatentAttention, x: Tensor, head: int) -> int:
    """Returns the index of the key to which the last query of x (L, d_model) attends most.

    Only the given query head is considered.
    """
    (q, k, v), options = module.arguments(x)
    w: Tensor = weights(q[:, -1:], k, v, **options)
    return int(w[head, 0].argmax())
