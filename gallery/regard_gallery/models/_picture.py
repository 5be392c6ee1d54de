"""Draws alignments of words with speech: words from top to bottom, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .transcribe import FRAME, RATE, Alignment

MAX_INCHES = 100.0
MAX_LETTERS = 24


def draw(alignments: Sequence[Alignment], path: Path) -> None:
    """Draws a row per word: the attention weights over time, and a line from start to end time.

    The weights of each word are scaled to a maximum of 1.
    """
    from matplotlib.figure import Figure

    alignments = [alignment for alignment in alignments if alignment.words]
    words = [word for alignment in alignments for word in alignment.words]
    if not words:
        raise ValueError("alignments: expected at least one word to draw, got none")
    figure = Figure(figsize=(10, min(MAX_INCHES, 1 + 0.22 * len(words))), layout="constrained")
    axes = figure.subplots()
    row = 0
    for alignment in alignments:
        count, frames = alignment.weights.shape
        end = alignment.start + frames * FRAME / RATE
        rows = alignment.weights / alignment.weights.amax(-1, keepdim=True).clamp_min(1e-12)
        extent = (alignment.start, end, row + count, row)
        axes.imshow(rows.numpy(), aspect="auto", cmap="magma", extent=extent)
        row += count
    for i, word in enumerate(words):
        axes.plot([word.start, word.end], [i + 0.5, i + 0.5], color="white", linewidth=1)
    axes.set(xlabel="seconds", xlim=(alignments[0].start, end), ylim=(row, 0))
    axes.set_yticks([i + 0.5 for i in range(row)], [_label(word.text) for word in words], parse_math=False)
    figure.savefig(path, dpi=120)


def _label(text: str) -> str:
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 1]}…"
