"""Claim: the recommender sample predicts a user's next item from the user's history.
`regard claims recommender`

The sample gives a batch (users, items, d) to PyTorch's encoder without `batch_first=True`. The
encoder expects (items, users, d), so it takes the users as the sequence: each position attends to
the same position of the other users. The shapes fit and nothing raises. The experiment changes the
other users, and then the user's own earlier items, and measures the change of the user's logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .finding import Finding, verdict

ITEMS = 50


class Recommender(nn.Module):
    """The sample: embeddings of items and positions, six layers, logits of the next item."""

    def __init__(self, d: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.item, self.position = nn.Embedding(ITEMS, d), nn.Embedding(1000, d)
        layer = nn.TransformerEncoderLayer(d, heads, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.output = nn.Linear(d, ITEMS)

    def forward(self, items: Tensor) -> Tensor:
        x = self.item(items) + self.position(torch.arange(items.shape[1]))
        logits: Tensor = self.output(self.encoder(x)[:, -1])
        return logits


def changed(items: Tensor, users: slice, positions: slice) -> Tensor:
    """Returns a copy of the histories (B, L) with other items for some users at some positions."""
    other = items.clone()
    other[users, positions] = (other[users, positions] + 7) % ITEMS
    return other


@torch.no_grad()
def influences(d: int, heads: int, batch_first: bool) -> tuple[float, float]:
    """Returns how much other users, and the own earlier items, change the logits of user 0."""
    torch.manual_seed(0)
    model = Recommender(d, heads, batch_first).eval()
    items = torch.randint(ITEMS, (4, 9))
    before = model(items)[0]
    others, own = changed(items, slice(1, None), slice(None)), changed(items, slice(0, 1), slice(0, -1))
    return float((model(others)[0] - before).abs().max()), float((model(own)[0] - before).abs().max())


def measure(d: int = 512, heads: int = 8) -> Finding:
    printed, mended = influences(d, heads, False), influences(d, heads, True)
    return Finding(
        claim="the recommender sample predicts from a user's own history",
        verdict=verdict(printed[0] < 1e-5 < printed[1], "incomplete" if printed[1] > 1e-5 else "wrong"),
        measured=f"other users of the batch change a user's logits by {printed[0]:.2f}, "
        f"the user's own earlier items by {printed[1]:g}",
        correct=f"with `batch_first=True`, other users change the logits by {mended[0]:.1g}, "
        f"the own earlier items by {mended[1]:.2f}",
        numbers={
            "change by other users, printed": printed[0],
            "change by own earlier items, printed": printed[1],
            "change by other users, batch_first": mended[0],
            "change by own earlier items, batch_first": mended[1],
        },
    )
