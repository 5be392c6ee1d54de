"""Why many heads? `python docs/why/heads.py`

Each token must name the four tokens before it, in order. One head computes one weighted mean of the
values: it can attend to all four positions, but it mixes their values. Four heads return the values
of the four positions separately. All layers here have the same number of parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.nn import Attention

KINDS, L, WIDTH, BACK = 8, 10, 64, 4


class Layer(nn.Module):
    """Predicts the four tokens (BACK = 4) before each token, nearest first.

    Maps tokens (B, L) to logits (B, L - BACK, BACK, KINDS), where KINDS is the number of different
    tokens. There is no prediction for the first four tokens.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(KINDS, WIDTH), nn.Embedding(L, WIDTH)
        self.attend = Attention(WIDTH, heads)
        self.name = nn.Linear(WIDTH, BACK * KINDS)

    def states(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.token(tokens) + self.place(torch.arange(L))
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.name(self.attend(self.states(tokens)))
        return scores.unflatten(-1, (BACK, KINDS))[:, BACK:]

    def weights(self, tokens: Tensor) -> Tensor:
        """Returns the attention weights (B, heads, L, L)."""
        qkv, options = self.attend.arguments(self.states(tokens))
        return regard.weights(*qkv, **options)


def before(tokens: Tensor) -> Tensor:
    """Returns the targets (B, L - BACK, BACK): the four tokens (BACK = 4) before each token.

    The nearest comes first. The first four tokens have no target.
    """
    return tokens[:, :-1].unfold(1, BACK, 1).flip(-1)


def train(heads: int, steps: int = 600) -> Layer:
    torch.manual_seed(0)
    layer = Layer(heads)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for _ in range(steps):
        tokens = torch.randint(KINDS, (64, L))
        optimizer.zero_grad()
        F.cross_entropy(layer(tokens).flatten(0, 2), before(tokens).flatten()).backward()
        optimizer.step()
    return layer.eval()


@torch.no_grad()
def named(layer: Layer) -> float:
    """Returns the share of tokens for which the layer names all four previous tokens correctly."""
    tokens = torch.randint(KINDS, (256, L), generator=torch.Generator().manual_seed(1))
    return float((layer(tokens).argmax(-1) == before(tokens)).all(-1).float().mean())


def measure(steps: int = 600) -> dict[int, float]:
    return {heads: named(train(heads, steps)) for heads in (1, 2, 4)}


if __name__ == "__main__":
    for heads, share in measure().items():
        print(f"heads: {heads}, all four named for {share:.0%} of the tokens")
