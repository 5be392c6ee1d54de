"""Why softmax? `python docs/why/softmax.py`

Attention as a memory: n keys, each with a value, and a query that is one of the keys. The result is right
if it is more like the value of that key than like any other. Without softmax the many small scores add up
to more than the one large score. The exponential lets the large one win.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

D, COUNTS = 32, (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def recalled(out: Tensor, v: Tensor) -> float:
    """The share of queries whose result has the largest product with their own value."""
    return float(((out @ v.T).argmax(-1) == torch.arange(len(v))).float().mean())


def measure() -> dict[int, dict[str, float]]:
    """By the number of keys; every key is asked for."""
    found = {}
    for n in COUNTS:
        k, v = F.normalize(torch.randn(2, n, D, generator=torch.Generator().manual_seed(n)), dim=-1)
        found[n] = {
            "softmax": recalled(regard.attention(k, k, v, scale=D**0.5), v),
            "the scores alone": recalled(k @ k.T @ v, v),
        }
    return found


if __name__ == "__main__":
    for n, shares in measure().items():
        print(f"{n:>4} keys, recalled:", ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
