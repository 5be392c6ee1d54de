"""Why queries, keys and values? `python docs/why/qkv.py`

Queries and keys: each of twelve tokens in a circle must attend to the next one. With one matrix W
for both, the score s(x, y) = W x . W y is symmetric, and 2 s(x, y) <= s(x, x) + s(y, y). Summed
around the circle, the scores of the wanted pairs do not exceed the scores of the tokens with
themselves. So for every W, some token attends at least as much to itself as to the next token.

Keys and values: queries and keys are twelve countries, and values are their capitals. The output
should be the capital of the queried country. With one matrix for keys and values, the output is the
country itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

N = 12
NEXT = torch.arange(N).roll(-1)  # index of the next token


def train(tied: bool, steps: int = 400) -> Tensor:
    """Trains a head to attend to the next token and returns its attention weights (N, N).

    If `tied`, one matrix computes queries and keys.
    """
    torch.manual_seed(0)
    W_q, W_k = (torch.randn(N, N, requires_grad=True) for _ in range(2))
    W_k = W_q if tied else W_k
    optimizer = torch.optim.Adam({W_q, W_k}, 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(W_q @ W_k.T, NEXT).backward()  # one-hot tokens: W's rows are the queries
        optimizer.step()
    return (W_q @ W_k.T).softmax(-1).detach()


def followed(weights: Tensor) -> float:
    """Returns the share of tokens whose largest weight is on the next token."""
    return float((weights.argmax(-1) == NEXT).float().mean())


def capitals_found(tied: bool) -> float:
    """Returns the share of countries for which the output is nearest to their own capital.

    If `tied`, the countries are also used as values, instead of the capitals.
    """
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
