"""Counts of tokens: one number if all samples agree, otherwise one for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Count = int | tuple[int, ...]


def each(n: Count, B: int) -> tuple[int, ...]:
    """Returns the counts of B samples."""
    return (n,) * B if isinstance(n, int) else n


def shared(counts: Sequence[int]) -> Count:
    """Returns a single number if all counts are equal."""
    return counts[0] if len(set(counts)) == 1 else tuple(counts)


def plus(a: Count, b: Count) -> Count:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    B = len(a) if isinstance(a, tuple) else len(b)  # type: ignore[arg-type]
    return shared([x + y for x, y in zip(each(a, B), each(b, B), strict=True)])


def minus(a: Count, b: Count) -> Count:
    return plus(a, -b if isinstance(b, int) else tuple(-x for x in b))


def most(n: Count) -> int:
    """Returns the largest count."""
    return n if isinstance(n, int) else max(n)


def chosen(n: Count, samples: Iterable[int]) -> Count:
    """Returns the counts of some samples, in this order."""
    return n if isinstance(n, int) else shared([n[b] for b in samples])


def as_tensor(n: Count, B: int, device: torch.device) -> Tensor:
    """Returns the counts of B samples as an int64 tensor (B,)."""
    return torch.tensor(each(n, B), device=device)


def shown(counts: Sequence[int]) -> str:
    """Formats counts for messages and reprs."""
    if len(set(counts)) == 1:
        return str(counts[0])
    return str(list(counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"
