"""Token counts of B samples: an int if all samples have the same count, otherwise a tuple."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Count = int | tuple[int, ...]


def per_sample(n: Count, B: int) -> tuple[int, ...]:
    """Returns the counts as a tuple of B ints."""
    return (n,) * B if isinstance(n, int) else n


def shared(counts: Sequence[int]) -> Count:
    """Returns the counts as an int if all are equal, otherwise as a tuple."""
    return counts[0] if len(set(counts)) == 1 else tuple(counts)


def plus(a: Count, b: Count) -> Count:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    B = len(a) if isinstance(a, tuple) else len(b)  # type: ignore[arg-type]
    return shared([x + y for x, y in zip(per_sample(a, B), per_sample(b, B), strict=True)])


def minus(a: Count, b: Count) -> Count:
    return plus(a, -b if isinstance(b, int) else tuple(-x for x in b))


def largest(n: Count) -> int:
    """Returns the largest count."""
    return n if isinstance(n, int) else max(n)


def of_samples(n: Count, samples: Iterable[int]) -> Count:
    """Returns the counts of the given samples, in the order of `samples`."""
    return n if isinstance(n, int) else shared([n[b] for b in samples])


def as_tensor(n: Count, B: int, device: torch.device) -> Tensor:
    """Returns the counts of B samples as an int64 tensor (B,)."""
    return torch.tensor(per_sample(n, B), device=device)


def formatted(counts: Sequence[int]) -> str:
    """Returns the counts as text for messages and reprs."""
    if len(set(counts)) == 1:
        return str(counts[0])
    return str(list(counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"
