"""Why queries, keys and values? `python docs/why/qkv.py`

Queries and keys: twelve tokens in a circle, each shall attend to the next one. With one matrix for both,
W x . W y is symmetric, and 2 s(x, y) <= s(x, x) + s(y, y). Around the circle this adds up: the scores of
the wanted pairs are together not above the scores of the tokens with themselves, so they cannot all win,
whatever W is.

Keys and values: twelve countries with their capitals, asked by country. What comes back should be the
capital; with one matrix for both it is the country that was asked for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

N = 12
NEXT = torch.arange(N).roll(-1)  # the token after each


def train(tied: bool, steps: int = 400) -> Tensor:
    """The weights (N, N) of a head that has learned to attend to the next token as well as it can."""
    torch.manual_seed(0)
    W_q, W_k = (torch.randn(N, N, requires_grad=True) for _ in range(2))
    W_k = W_q if tied else W_k
    optimizer = torch.optim.Adam({W_q, W_k}, 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(W_q @ W_k.T, NEXT).backward()  # tokens are one-hot, so W is their queries
        optimizer.step()
    return (W_q @ W_k.T).softmax(-1).detach()


def followed(weights: Tensor) -> float:
    """The share of tokens whose largest weight is on the next one."""
    return float((weights.argmax(-1) == NEXT).float().mean())


def capitals_found(tied: bool) -> float:
    """The share of countries for which the nearest capital to the result is theirs."""
    countries, capitals = torch.randn(2, N, 64, generator=torch.Generator().manual_seed(0))
    out = regard.attention(countries, countries, countries if tied else capitals, scale=1.0)
    return float((torch.cdist(out, capitals).argmin(-1) == torch.arange(N)).float().mean())


def measure() -> dict[str, dict[str, float]]:
    return {
        name: {"next token": followed(train(tied)), "capital": capitals_found(tied)}
        for name, tied in (("separate", False), ("tied", True))
    }


if __name__ == "__main__":
    for name, shares in measure().items():
        print(f"{name:<8}:", ", ".join(f"{what} {share:.0%}" for what, share in shares.items()))
