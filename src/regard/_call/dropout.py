"""The dropout pattern: a hash of (seed, batch, head, query, key), which does not depend on tiling.

splitmix64 computes a 64-bit word for each query row. From this word and the indices of two adjacent
keys, a second hash computes 32 bits, 16 for each key. A weight is dropped if its 16 bits are below
round(p * 65536). PyTorch lacks unsigned 64-bit arithmetic, so the code uses int64: products wrap
the same way, and a bit mask makes right shifts logical.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .spec import Problem

GOLDEN = 0x9E3779B97F4A7C15
LOW = 0xFFFFFFFF


class DropoutOrigin(NamedTuple):
    """Where a call lies in a larger call whose dropout pattern it draws.

    The weight (b, h, i, j) of the call has the random number of head index head + b * heads + h,
    query `query + i` and key `key + j` (types.h: DropoutOrigin).
    """

    head: int = 0
    heads: int = 0  # 0: Hq
    query: int = 0
    key: int = 0

    def heads_of(self, b: Tensor, h: Tensor, Hq: int) -> Tensor:
        """Returns the index of head h of sample b."""
        return self.head + b * (self.heads or Hq) + h


WHOLE = DropoutOrigin()


def keep_mask(seed: int, p: float, B: int, Hq: int, Lq: int, Lk: int, device: torch.device) -> Tensor:
    """Returns bool (B, Hq, Lq, Lk), True for weights that dropout keeps."""
    head, query, key = (torch.arange(n, device=device) for n in (B * Hq, Lq, Lk))
    return keep_mask_at(seed, p, head.view(B, Hq, 1, 1), query[:, None], key)


def keep_mask_of(problem: Problem, B: Tensor, H: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Returns bool (b, h, Q, K), True for weights that dropout keeps.

    `B`, `H`, `queries` and `keys` are the indices of samples (b,), heads (h,), queries and keys.
    """
    origin, spec = problem.origin, problem.spec
    head = origin.heads_of(B[:, None], H, spec.Hq)[..., None, None]
    query, key = origin.query + queries[:, None], origin.key + keys
    return keep_mask_at(int(problem.seed), spec.dropout, head, query, key)


def keep_mask_at(seed: int, p: float, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the keep mask at selected heads, queries and keys.

    `head`, `query` and `key` are int64 tensors that broadcast. `head` is b * Hq + h for head h of
    sample b.
    """
    row = _query_words(seed, head, query)
    x = ((key >> 1) * 0x9E3779B9 + (row & LOW)) & LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15) ^ _shift(row, 32)) * 0x846CA68B) & LOW
    x = x ^ (x >> 16)
    bits = torch.where(key % 2 == 0, x & 0xFFFF, x >> 16)
    return bits >= round(p * 65536)


def _query_words(seed: int, head: Tensor, query: Tensor) -> Tensor:
    """Returns the 64-bit hash of each query, from which the random bits of its keys follow."""
    start = _mix(torch.tensor(_signed(seed + GOLDEN), device=head.device))
    return _mix(_mix(start + head) + query)


def _mix(z: Tensor) -> Tensor:
    """Applies the finaliser of splitmix64."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, n: int) -> Tensor:
    """Shifts right by n bits, filling with zeros."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def _signed(x: int) -> int:
    """Returns the low 64 bits of x as a signed integer."""
    return (x + 2**63) % 2**64 - 2**63
