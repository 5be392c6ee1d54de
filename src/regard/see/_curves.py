"""Bars and curves: what one token attends to, what reaches it, entropy by layer, mass by distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import Offset, count
from ..masks import Mask
from . import _style, _tokens
from ._capture import Capture
from ._layer import Head
from ._maps import check_recorded
from ._style import Palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 40


class Share(NamedTuple):
    """What one token gets from each."""

    row: Tensor  # (n,)
    texts: Sequence[str]
    own: int  # its own position
    unit: str


def token(head: Head, token: int | str, *, dark: bool = False, path: _style.Path = None) -> Figure:
    """What one token attends to: a bar for each key, or for the largest ones if there are more than 40."""
    at = _tokens.find(head.tokens, token)
    name = _style.labels([head.tokens[at]])[0]
    share = Share(head.row(at), head.key_tokens, head.layer.start(head.sample) + at, "weight")
    titles = f"What “{name}” attends to", f"{head.title}, query {at}: exact weights"
    return _style.finished(_bars(share, titles, _style.palette(dark)), path)


def rollout(
    seen: Capture, token: int | str, *, sample: int = 0, dark: bool = False, path: _style.Path = None
) -> Figure:
    """What reaches one token through all layers: its row of attention rollout."""
    row, texts = seen.rollout(token, sample), seen[0].texts(sample)
    at = _tokens.find(texts, token)
    below = f"rollout through {len(seen)} layers, heads averaged, ½ (A + I); exact"
    titles = f"What reaches “{_style.labels([texts[at]])[0]}”", below
    return _style.finished(_bars(Share(row, texts, at, "share"), titles, _style.palette(dark)), path)


def _bars(share: Share, titles: tuple[str, str], colours: Palette) -> Figure:
    n = len(share.row)
    chosen = list(range(n)) if n <= MOST_BARS else share.row.topk(MOST_BARS).indices.tolist()
    names, values = _style.labels([share.texts[i] for i in chosen]), share.row[chosen].tolist()
    title, below = titles
    if n > MOST_BARS:
        names = [f"{name}  [{i}]" for name, i in zip(names, chosen, strict=True)]
        below += f"; the largest {MOST_BARS} of {n}"
    figure = _style.new_figure(5.4, 0.23 * len(chosen) + 1.2, colours)
    axes = figure.subplots()
    _style.dress(axes, colours)
    tones = [colours.accent if i == share.own else colours.ramp[2] for i in chosen]
    axes.barh(range(len(chosen)), values, color=tones, height=0.72)
    for y, value in enumerate(values):
        axes.annotate(
            f"{value:.3f}" if value >= 0.0005 else "0", (value, y), (3, 0), textcoords="offset points",
            va="center", fontsize=7, color=colours.ink,
        )  # fmt: skip
    axes.set_yticks(range(len(chosen)), names, fontsize=9, parse_math=False)
    if share.own in chosen:
        axes.get_yticklabels()[chosen.index(share.own)].set_color(colours.accent)
    axes.set(xlim=(0, 1.14 * max(1e-6, *values)), ylim=(len(chosen) - 0.4, -0.6), xticks=[])
    axes.set_xlabel(share.unit, color=colours.ink, fontsize=9)
    _style.title(figure, title, below, colours)
    return figure


def entropy(seen: Capture, *, sample: int = 0, dark: bool = False, path: _style.Path = None) -> Figure:
    """Entropy by layer: a dot for each head, a line through their means."""
    colours, rows = _style.palette(dark), check_recorded("entropy", seen).entropy_map(sample)
    figure = _style.new_figure(5.6, 3.4, colours)
    axes = figure.subplots()
    _style.dress(axes, colours, frame=True)
    dots: dict[str, Any] = {"s": 22, "color": colours.ramp[2], "alpha": 0.8, "linewidths": 0, "zorder": 3}
    for at, row in enumerate(rows):
        axes.scatter([at] * len(row), row.numpy(), label=None if at else "a head", **dots)
    means = [row.mean().item() for row in rows]
    line: dict[str, Any] = {"color": colours.accent, "linewidth": 1.8, "marker": "o", "markersize": 4}
    axes.plot(range(len(rows)), means, label="mean of the layer", **line)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(-0.4, len(rows) - 0.4)
    axes.set_xticks(_few(len(rows)))
    axes.set_xlabel("layer", color=colours.ink, fontsize=9)
    axes.set_ylabel("entropy / log(allowed keys)", color=colours.ink, fontsize=9)
    axes.legend(frameon=False, fontsize=8, labelcolor=colours.ink)
    _style.title(figure, "How broadly each head looks", "mean over queries; exact", colours)
    return _style.finished(figure, path)


def distances(
    seen: Capture | Head, *, sample: int = 0, most: int = 32, dark: bool = False, path: _style.Path = None
) -> Figure:
    """How far heads look: the share of their mass at each distance, a curve for each layer or for a head."""
    count("most", most, 1)
    colours = _style.palette(dark)
    figure = _style.new_figure(6.2, 3.4, colours)
    axes = figure.subplots()
    _style.dress(axes, colours, frame=True)
    curves = _by_distance(seen, sample)
    ramp = _style.colormap(colours)
    for number, (name, far, share) in enumerate(curves):
        near = far.abs() <= most
        tone = ramp(0.35 + 0.65 * (number + 1) / len(curves))
        axes.plot(far[near].numpy(), share[near].numpy(), color=tone, linewidth=1.6, label=name)
    axes.axvline(0, color=colours.faint, linewidth=0.8, zorder=0)
    axes.set_ylim(0, None)
    axes.set_xlabel("distance: position of the query less that of the key", color=colours.ink, fontsize=9)
    axes.set_ylabel("share of the mass", color=colours.ink, fontsize=9)
    axes.legend(frameon=False, fontsize=7, labelcolor=colours.ink, ncols=1 + (len(curves) > 8))
    below = f"distances up to {most}; 1 is the token before, 0 itself; exact"
    _style.title(figure, "How far attention looks", below, colours)
    return _style.finished(figure, path)


def _by_distance(seen: Capture | Head, sample: int) -> list[tuple[str, Tensor, Tensor]]:
    """(name, distances, share of the mass) of each curve."""
    if isinstance(seen, Head):
        far, mass = seen.distances
        return [(seen.title, far, mass / mass.sum().clamp_min(1e-30))]
    found = []
    for layer in check_recorded("distances", seen):
        far = layer.head(0, sample).distances[0]
        mass = torch.stack([layer.head(h, sample).distances[1] for h in range(layer.heads)]).sum(0)
        found.append((f"layer {layer.index}", far, mass / mass.sum().clamp_min(1e-30)))
    return found


def mask(
    mask: Mask,
    Lq: int | None = None,
    Lk: int | None = None,
    offset: Offset = None,
    *,
    head: int = 0,
    sample: int = 0,
    dark: bool = False,
    path: _style.Path = None,
) -> Figure:
    """Which query may attend to which key: `mask.image`."""
    return mask.image(path, Lq, Lk, offset, head=head, sample=sample, dark=dark)


def _few(n: int) -> list[int]:
    return list(range(0, n, max(1, -(-n // 16))))
