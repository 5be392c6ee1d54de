"""Bar charts and curves: weights of one query, rollout, entropy per layer, mass per distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import Offset, count
from ..masks import Mask
from . import _tokens
from ._capture import Capture
from ._layer import Head
from ._maps import check_recorded
from ._style import Drawing, Path, colormap, labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 40


class Share(NamedTuple):
    """The data of a bar chart: the contributions of all tokens to one token, and labels."""

    row: Tensor  # (L,), the contributions
    texts: Sequence[str]
    position: int  # the position of the token that receives the contributions
    unit: str


def token(head: Head, token: int | str, *, dark: bool = False, path: Path = None) -> Figure:
    """Draws the weights of one query as bars, one per key.

    With more than 40 keys, draws only the 40 keys with the largest weights.
    """
    at = _tokens.find(head.tokens, token)
    share = Share(head.row(at), head.key_tokens, head.layer.start(head.sample) + at, "weight")
    title = f"What “{labels([head.tokens[at]])[0]}” attends to"
    return _bars(share, title, f"{head.title}, query {at}: exact weights", dark).finished(path)


def rollout(
    seen: Capture, token: int | str, *, sample: int = 0, dark: bool = False, path: Path = None
) -> Figure:
    """Draws one token's row of attention rollout as bars.

    Each bar is the contribution of a token to the given token through all layers.
    """
    row, texts = seen.rollout(token, sample), seen[0].texts(sample)
    at = _tokens.find(texts, token)
    title = f"Attention rollout of “{labels([texts[at]])[0]}”"
    below = f"rollout through {len(seen)} layers, heads averaged, ½ (A + I); exact"
    return _bars(Share(row, texts, at, "share"), title, below, dark).finished(path)


def _bars(share: Share, title: str, below: str, dark: bool) -> Drawing:
    n = len(share.row)
    chosen = list(range(n)) if n <= MOST_BARS else share.row.topk(MOST_BARS).indices.tolist()
    names, values = labels([share.texts[i] for i in chosen]), share.row[chosen].tolist()
    if n > MOST_BARS:
        names = [f"{name}  [{i}]" for name, i in zip(names, chosen, strict=True)]
        below += f"; the largest {MOST_BARS} of {n}"
    drawing = Drawing(5.4, 0.23 * len(chosen) + 1.2, dark)
    axes, colours = drawing.axes, drawing.colours
    tones = [colours.accent if i == share.position else colours.ramp[2] for i in chosen]
    bars = axes.barh(range(len(chosen)), values, color=tones, height=0.72)
    captions = [f"{value:.3f}" if value >= 0.0005 else "0" for value in values]
    axes.bar_label(bars, captions, padding=3, fontsize=7, color=colours.ink)
    axes.set_yticks(range(len(chosen)), names, fontsize=9, parse_math=False)
    if share.position in chosen:
        axes.get_yticklabels()[chosen.index(share.position)].set_color(colours.accent)
    axes.set(xlim=(0, 1.14 * max(1e-6, *values)), ylim=(len(chosen) - 0.4, -0.6), xticks=[])
    drawing.name_axes(share.unit)
    drawing.title(title, below)
    return drawing


def entropy(seen: Capture, *, sample: int = 0, dark: bool = False, path: Path = None) -> Figure:
    """Draws each head's entropy as a dot above its layer, and a line through the layers' means."""
    rows = check_recorded("entropy", seen).entropy_map(sample)
    drawing = Drawing(5.6, 3.4, dark, frame=True)
    axes, colours = drawing.axes, drawing.colours
    dots: dict[str, Any] = {"s": 22, "color": colours.ramp[2], "alpha": 0.8, "linewidths": 0, "zorder": 3}
    for at, row in enumerate(rows):
        axes.scatter([at] * len(row), row.numpy(), label=None if at else "a head", **dots)
    means = [row.mean().item() for row in rows]
    line: dict[str, Any] = {"color": colours.accent, "linewidth": 1.8, "marker": "o", "markersize": 4}
    axes.plot(range(len(rows)), means, label="mean of the layer", **line)
    ticks = range(0, len(rows), -(-len(rows) // 16))
    axes.set(xlim=(-0.4, len(rows) - 0.4), ylim=(-0.03, 1.03), xticks=ticks)
    drawing.name_axes("layer", "entropy / log(allowed keys)")
    axes.legend(frameon=False, fontsize=8, labelcolor=colours.ink)
    drawing.title("Entropy of heads by layer", "mean over queries; exact")
    return drawing.finished(path)


def distances(
    seen: Capture | Head, *, sample: int = 0, most: int = 32, dark: bool = False, path: Path = None
) -> Figure:
    """Draws the share of attention mass at each distance between query and key.

    `seen` is a recording, which gives one curve per layer, or a head, which gives one curve. Draws
    distances from -most to most.
    """
    count("most", most, 1)
    drawing = Drawing(6.2, 3.4, dark, frame=True)
    axes, colours = drawing.axes, drawing.colours
    curves = _by_distance(seen, sample)
    for index, (name, distance, mass) in enumerate(curves):
        near, share = distance.abs() <= most, mass / mass.sum().clamp_min(1e-30)
        tone = colormap(colours)(0.35 + 0.65 * (index + 1) / len(curves))
        axes.plot(distance[near].numpy(), share[near].numpy(), color=tone, linewidth=1.6, label=name)
    axes.axvline(0, color=colours.faint, linewidth=0.8, zorder=0)
    axes.set_ylim(0, None)
    drawing.name_axes("distance (query position - key position)", "share of attention mass")
    axes.legend(frameon=False, fontsize=7, labelcolor=colours.ink, ncols=1 + (len(curves) > 8))
    below = f"distances up to {most}; 1 is the previous token, 0 the token itself; exact"
    drawing.title("Attention mass by distance", below)
    return drawing.finished(path)


def _by_distance(seen: Capture | Head, sample: int) -> list[tuple[str, Tensor, Tensor]]:
    """Returns for each curve its name, the distances, and the mass at each distance."""
    if isinstance(seen, Head):
        return [(seen.title, *seen.distances)]
    curves = []
    for layer in check_recorded("distances", seen):
        distances, mass = zip(*(head.distances for head in layer._of_sample(sample)), strict=True)
        curves.append((f"layer {layer.index}", distances[0], torch.stack(mass).sum(0)))
    return curves


def mask(
    mask: Mask, Lq: int | None = None, Lk: int | None = None, offset: Offset = None, *, head: int = 0,
    sample: int = 0, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws which query may attend to which key. Same as `mask.image`."""
    return mask.image(path, Lq, Lk, offset, head=head, sample=sample, dark=dark)
