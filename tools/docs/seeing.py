"""Draws the pictures of docs/seeing.md with pretrained weights of MiniLM.

`python tools/docs/seeing.py` draws them and prints the chosen heads. `pictures.py` draws them too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard import masks as M, see
from regard_gallery.models import minilm

SAT = "The cat sat on the mat"
ATE = "The cat, which was very hungry, ate the fish."
REPEATED = "the quick brown fox jumps over the lazy dog while the old cat sleeps on the mat. " * 3
UNSIGNED: dict[str, Any] = {"Software": None}  # files do not depend on matplotlib's version


def main(images: Path) -> None:
    loaded = minilm.load()

    def read(text: str) -> see.Capture:
        return see.read(loaded.model, loaded.tokenizer, text)

    sat, ate, repeated = read(SAT), read(ATE), read(REPEATED)
    sitting, eating = strongest(sat, "on", "mat"), strongest(ate, "ate", "cat")
    figures = {
        "seeing-sat": see.heatmap(sitting),
        "seeing-sat-dark": see.heatmap(sitting, dark=True),
        "seeing-sat-heads": see.grid(sat),
        "seeing-ate": see.heatmap(eating),
        "seeing-ate-token": see.token(eating, "ate"),
        "seeing-ate-dark": see.heatmap(eating, dark=True),
        "seeing-rollout": see.rollout(ate, "ate"),
        "seeing-duplicates": see.heatmap(named(repeated, "duplicate")),
        "seeing-entropy-map": see.entropy_map(repeated),
        "seeing-entropy": see.entropy(repeated),
        "seeing-distances": see.distances(repeated, most=20),
        "seeing-blocks": see.heatmap(long_head()),
    }
    for name, figure in figures.items():
        figure.savefig(images / f"{name}.png", dpi=100, metadata=UNSIGNED)


def strongest(seen: see.Capture, query: str, key: str) -> see.Head:
    """Prints and returns the head in which the token `query` gives `key` the largest weight."""
    best = seen.links(query, key)[0]
    print(f"{query} -> {key}: layer {best.layer}, head {best.head}, weight {best.weight:.3f}")
    head: see.Head = seen[best.layer, best.head]
    return head


def named(seen: see.Capture, role: str) -> see.Head:
    """Prints and returns the head with the highest score for a role."""
    head = max(seen.heads(), key=lambda head: head.roles[role].score)
    print(f"{role}: {head!r}")
    return head


def long_head(n: int = 4096) -> see.Head:
    """Returns a head over n tokens that attends to near tokens and to one earlier passage."""
    torch.manual_seed(0)
    position = torch.linspace(0, 1, n)[:, None]
    wave = torch.cat([torch.cos(9 * position), torch.sin(9 * position), 0.4 * torch.randn(n, 6)], 1)
    return see.record(10 * wave, wave, mask=M.Causal(), scale=1.0)[0]


if __name__ == "__main__":
    main(Path(__file__).parents[2] / "docs" / "images")
