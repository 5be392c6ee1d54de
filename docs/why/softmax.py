"""Why softmax? `python docs/why/softmax.py`

The experiment uses attention as a memory: there are n keys, each with a value, and a query that
equals one of the keys. The output is right if it is more similar to the value of that key than to
any other value. Without softmax, the other keys have many small weights, and their values together
outweigh the value of the right key. The exponential makes the weight of the right key much larger
than every other weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

D, COUNTS = 32, (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def recalled(out: Tensor, v: Tensor) -> float:
    """Returns the share of outputs (n, D) that are most similar to their own value in v (n, D).

    The similarity of an output and a value is their dot product.
    """
    return float(((out @ v.T).argmax(-1) == torch.arange(len(v))).float().mean())


def measure() -> dict[int, dict[str, float]]:
    """Returns, for each number of keys, the share of values recalled with and without softmax.

    Each key is used as a query once.
    """
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
