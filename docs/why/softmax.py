"""Why softmax? `python docs/why/softmax.py`

Attention as a memory: n keys, each with a value, and a query that equals one of the keys. The
output is right if it is more similar to the value of that key than to any other value. Without
softmax, the many small scores add up to more than the one large score. The exponential lets the
large score win.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

D, COUNTS = 32, (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def recalled(out: Tensor, v: Tensor) -> float:
    """Returns the share of queries whose output has the largest product with their own value."""
    return float(((out @ v.T).argmax(-1) == torch.arange(len(v))).float().mean())


def measure() -> dict[int, dict[str, float]]:
    """Returns the recalled shares by number of keys. Each key is queried once."""
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
