"""Bar charts and curves: weights of one query, rollout, entropy per layer, mass per distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import Offset, count
from ..masks import Mask
from . import _tokens
from ._layer import Head
from ._maps import check_recorded
from ._style import Drawing, Path, colormap
from ._weights import Labels, head_of, recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 40


class Share(NamedTuple):
    """The data of a bar chart: the contributions of all tokens to one token, and labels."""

    row: Tensor  # (L,), the contributions
    texts: Sequence[str]
    position: int  # of the token that receives the contributions, or -1 if it is none of these
    unit: str


def token(
    weights: Any, token: int | str, tokens: _tokens.Texts | None = None, *,
    key_tokens: _tokens.Texts | None = None, layer: int | str | None = None, head: int | None = None,
    sample: int = 0, title: str | None = None, ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws the weights of one query as bars, one per key.

    With more than 40 keys, draws only the 40 keys with the largest weights. `token` is the query:
    its index, or its text if it occurs once. The other arguments are those of `heatmap`.
    """
    shown = head_of(weights, Labels(tokens, key_tokens), layer, head, sample)
    at = _tokens.find(shown.tokens, token)
    own = -1 if shown.layer.key_tokens is not None else shown.layer.start(shown.sample) + at
    share = Share(shown.row(at), shown.key_tokens, own, "weight")
    drawing, below = _bars(share, dark, ax, path)
    text = f"What “{_tokens.label(shown.tokens[at])}” attends to"
    drawing.title(title, text, f"{shown.title}, query {at}: exact weights{below}")
    return drawing.finished()


def rollout(
    seen: Any, token: int | str, tokens: _tokens.Texts | None = None, *, sample: int = 0,
    title: str | None = None, ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws one token's row of attention rollout as bars.

    Each bar is the contribution of a token to the given token through all layers. `seen` is a
    recording, or weights as in `heatmap`. The other arguments are those of `heatmap`.
    """
    seen = recording(seen, tokens)
    row, texts = seen.rollout(token, sample), seen[0].texts(sample)
    at = _tokens.find(texts, token)
    drawing, below = _bars(Share(row, texts, at, "share"), dark, ax, path)
    text = f"Attention rollout of “{_tokens.label(texts[at])}”"
    drawing.title(title, text, f"rollout through {len(seen)} layers, heads averaged, ½ (A + I); exact{below}")
    return drawing.finished()


def _bars(share: Share, dark: bool, ax: Any, path: Path) -> tuple[Drawing, str]:
    """Returns a drawing of bars, and the end of its title."""
    n = len(share.row)
    chosen = list(range(n)) if n <= MOST_BARS else share.row.topk(MOST_BARS).indices.tolist()
    drawing = Drawing(5.4, 0.23 * len(chosen) + 1.2, dark, ax, path)
    axes, colours = drawing.axes, drawing.colours
    names, values = drawing.labels([share.texts[i] for i in chosen]), share.row[chosen].tolist()
    if n > MOST_BARS:
        names = [f"{name}  [{i}]" for name, i in zip(names, chosen, strict=True)]
    tones = [colours.accent if i == share.position else colours.ramp[2] for i in chosen]
    bars = axes.barh(range(len(chosen)), values, color=tones, height=0.72)
    captions = [f"{value:.3f}" if value >= 0.0005 else "0" for value in values]
    axes.bar_label(bars, captions, padding=3, fontsize=7, color=colours.ink)
    axes.set_yticks(range(len(chosen)), names, fontsize=9, parse_math=False)
    if share.position in chosen:
        axes.get_yticklabels()[chosen.index(share.position)].set_color(colours.accent)
    axes.set(xlim=(0, 1.14 * max(1e-6, *values)), ylim=(len(chosen) - 0.4, -0.6), xticks=[])
    drawing.name_axes(share.unit)
    return drawing, f"; the largest {MOST_BARS} of {n}" if n > MOST_BARS else ""


def entropy(
    seen: Any, tokens: _tokens.Texts | None = None, *, sample: int = 0, title: str | None = None,
    ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws each head's entropy as a dot above its layer, and a line through the layers' means.

    `seen` is a recording, or weights as in `heatmap`. The other arguments are those of `heatmap`.
    """
    seen = recording(seen, tokens)
    rows = check_recorded("entropy", seen).entropy_map(sample)
    drawing = Drawing(5.6, 3.4, dark, ax, path, frame=True)
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
    drawing.title(title, "Entropy of heads by layer", "mean over queries; exact")
    return drawing.finished()


def distances(
    seen: Any, tokens: _tokens.Texts | None = None, *, sample: int = 0, most: int = 32,
    title: str | None = None, ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws the share of attention mass at each distance between query and key.

    `seen` is a recording or weights as in `heatmap`, which give one curve per layer, or a head,
    which gives one curve. Draws distances from -most to most. The other arguments are those of
    `heatmap`.
    """
    count("most", most, 1)
    curves = _by_distance(seen, tokens, sample)
    drawing = Drawing(6.2, 3.4, dark, ax, path, frame=True)
    axes, colours = drawing.axes, drawing.colours
    for index, (name, distance, mass) in enumerate(curves):
        near, share = distance.abs() <= most, mass / mass.sum().clamp_min(1e-30)
        tone = colormap(colours)(0.35 + 0.65 * (index + 1) / len(curves))
        axes.plot(distance[near].numpy(), share[near].numpy(), color=tone, linewidth=1.6, label=name)
    axes.axvline(0, color=colours.faint, linewidth=0.8, zorder=0)
    axes.set_ylim(0, None)
    drawing.name_axes("distance (query position - key position)", "share of attention mass")
    axes.legend(frameon=False, fontsize=7, labelcolor=colours.ink, ncols=1 + (len(curves) > 8))
    below = f"distances up to {most}; 1 is the previous token, 0 the token itself; exact"
    drawing.title(title, "Attention mass by distance", below)
    return drawing.finished()


def _by_distance(seen: Any, tokens: _tokens.Texts | None, sample: int) -> list[tuple[str, Tensor, Tensor]]:
    """Returns for each curve its name, the distances, and the mass at each distance."""
    if isinstance(seen, Head):
        return [(seen.title, *seen.distances)]
    seen = recording(seen, tokens)
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
