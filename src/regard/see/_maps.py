"""Heat maps of one head, of all heads, and of entropy.

Long sequences are drawn at block resolution: a cell is a block of queries and keys, and its value
is computed from the exact mass of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import facts
from .._tools.arguments import count, number
from ._capture import Capture
from ._layer import Head, Layer
from ._roles import named
from ._style import ROLE_COLOURS, Drawing, Path, colormap
from ._tokens import Texts
from ._weights import Labels, head_of, recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 256  # the most rows or columns of a map at block resolution
MOST_LABELS = 64
THUMBNAIL = 64
TICKS = (0, 0.05, 0.2, 0.5, 1)  # of the colour scale, as shares of `vmax`
SIDE, TALL = 0.88, 1.1  # thumbnail size and row spacing; the column spacing is 1


class Cells(NamedTuple):
    """The values of a heat map.

    If `block` is 1, a value is a weight. Otherwise it is the mass that a query of the block places
    on the block's keys, averaged over the block's queries.
    """

    values: Tensor  # (rows, columns)
    block: int

    @property
    def exactness(self) -> str:
        if self.block == 1:
            return "exact"
        return f"exact at block resolution: a cell is {self.block} queries x {self.block} keys"


def heatmap(
    weights: Any, tokens: Texts | None = None, *, key_tokens: Texts | None = None,
    layer: int | str | None = None, head: int | None = None, sample: int = 0, vmax: float = 1.0,
    limit: int = 512, title: str | None = None, ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws the weights of one head: a row for each query, a column for each key.

    The colour scale is the square root of the weight, so that small weights are visible.

    Args:
        weights: a head of a recording; a recording or one of its layers; a tensor or an array
            (L, L), (H, L, L) or (B, H, L, L); or a sequence with one of them per layer, such as the
            `outputs.attentions` of Transformers, or `outputs`.
        tokens: L strings, or one list of strings per sample, if `weights` is not a recording.
            Default: positions.
        key_tokens: the tokens of the keys, if they are other tokens than those of the queries, as
            in cross-attention with weights (B, H, Lq, Lk). Default: `tokens`.
        layer, head: which layer and head, if there are several.
        sample: which sample of a batch.
        vmax: the weight at the end of the colour scale.
        limit: with more than `limit` tokens, a cell is a block, and its value is the mean mass that
            the block's queries place on the block's keys.
        title: replaces the title, which names layer, head and role.
        ax: matplotlib axes to draw into. Default: a new figure.
        dark: whether to use colours for a dark background.
        path: a PNG, PDF or SVG file to write.

    Returns:
        The matplotlib figure.

    Example:
        >>> see.heatmap(outputs.attentions, tokens, layer=2, head=7)
    """
    count("limit", limit, 1)
    shown = head_of(weights, Labels(tokens, key_tokens), layer, head, sample)
    cells = _cells(shown, limit)
    nq, nk = len(shown.tokens), len(shown.key_tokens)
    side = 5.2 if cells.block > 1 else min(7.2, max(3.0, 0.32 * max(nq, nk)))
    drawing = Drawing(side + 2.0, side * min(2.0, max(0.15, nq / nk)) + 1.4, dark, ax, path)
    image = _paint(drawing, cells, (-0.5, -0.5), 1.0, vmax)
    drawing.axes.set(xlim=(-0.5, nk - 0.5), ylim=(nq - 0.5, -0.5))
    if cells.block == 1 and max(nq, nk) <= MOST_LABELS:
        _label(drawing, shown)
    drawing.name_axes("key", "query")
    drawing.title(title, f"{shown.title} · {named(shown.role)}", f"{nq} x {nk} tokens, {cells.exactness}")
    drawing.scale(image, [vmax * tick for tick in TICKS], "weight" if cells.block == 1 else "mass")
    return drawing.finished()


def grid(
    seen: Any, tokens: Texts | None = None, *, key_tokens: Texts | None = None, sample: int = 0,
    vmax: float = 1.0, title: str | None = None, ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws all heads of all layers as thumbnails, each with a frame in the colour of its role.

    `seen` is a recording, or weights as in `heatmap`. The other arguments are those of `heatmap`.
    """
    seen = recording(seen, tokens, key_tokens)
    columns = max(layer.heads for layer in check_recorded("grid", seen))
    drawing = Drawing(max(4.4, 0.86 * columns + 0.7), 0.98 * len(seen) + 0.9, dark, ax, path)
    axes, used = drawing.axes, set()
    for row, layer in enumerate(seen):
        heads = layer._of_sample(sample)
        maps = _blocks(layer, max(layer.shape[2:]), THUMBNAIL, sample)
        for head, cells in zip(heads, maps, strict=True):
            used.add(_thumb(drawing, head, cells, row, vmax))
    axes.set(xlim=(-0.06, columns - 0.06), ylim=(len(seen) * TALL, -0.06), aspect="equal")
    axes.xaxis.tick_top()
    axes.set_xticks([x + 0.44 for x in range(columns)], [f"head {x}" for x in range(columns)])
    axes.set_yticks([y * TALL + 0.44 for y in range(len(seen))], [f"layer {y}" for y in range(len(seen))])
    _legend(drawing, used)
    if title is not None:
        drawing.title(title, "")
    return drawing.finished()


def entropy_map(
    seen: Any, tokens: Texts | None = None, *, sample: int = 0, title: str | None = None, ax: Any = None,
    dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws the normalised entropy of every head, averaged over queries.

    0 means that all weight is on one key, 1 that all allowed keys have equal weights. `seen` is a
    recording, or weights as in `heatmap`. The other arguments are those of `heatmap`.
    """
    seen = recording(seen, tokens)
    rows = check_recorded("entropy_map", seen).entropy_map(sample)
    table = pad_sequence(rows, batch_first=True, padding_value=torch.nan)
    widest = table.shape[1]
    drawing = Drawing(max(4.0, 0.5 * widest + 1.9), max(2.2, 0.42 * len(rows) + 1.2), dark, ax, path)
    axes, ramp = drawing.axes, drawing.colours.ramp
    image = axes.imshow(table.numpy(), cmap=colormap(drawing.colours), vmin=0, vmax=1, aspect="auto")
    for y, x in table.isfinite().nonzero().tolist():
        value = table[y, x].item()
        ink = ramp[0] if value > 0.5 else ramp[-1]
        axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set(xticks=range(widest), yticks=range(len(rows)))
    drawing.name_axes("head", "layer")
    below = "0: one key, 1: equal weights; mean over queries, exact"
    drawing.title(title, "Entropy of every head", below)
    drawing.scale(image, (0, 0.5, 1), "entropy")
    return drawing.finished()


def check_recorded(name: str, seen: Capture) -> Capture:
    if not len(seen):
        raise ValueError(f"{name}: expected a capture with layers, got one without")
    return seen


def _cells(head: Head, limit: int) -> Cells:
    longest = max(len(head.tokens), len(head.key_tokens))
    if longest <= limit:
        return Cells(head.weights(), 1)
    return _blocks(head.layer, longest, min(limit, MOST_CELLS), head.sample)[head.index]


def _blocks(layer: Layer, longest: int, most: int, sample: int) -> list[Cells]:
    """Returns a heat map of each head at block resolution, with at most `most` rows and columns.

    A value is the attention mass of a block, divided by the number of queries in the block.
    `longest` is the number of queries or of keys, whichever is larger.
    """
    block = 1 << (-(-longest // most) - 1).bit_length()  # smallest power of two with at most `most` blocks
    mass = layer.fact(facts.BlockMass(block)).levels[0][sample]  # (Hq, nq, nk)
    starts = torch.arange(mass.shape[-2]) * block
    counts = (len(layer.texts(sample)) - starts).clamp(1, block)
    return [Cells(head / counts[:, None], block) for head in mass]


def _paint(drawing: Drawing, cells: Cells, corner: tuple[float, float], token: float, vmax: float) -> Any:
    """Draws cells as an image whose upper left corner is `corner`, and returns the image.

    `token` is the width of a token in units of the axes. The last block may extend beyond the last
    token.
    """
    from matplotlib.colors import PowerNorm

    if number("vmax", vmax) <= 0:
        raise ValueError(f"vmax: expected more than 0, got {vmax}")
    (x, y), (rows, columns), cell = corner, cells.values.shape, cells.block * token
    return drawing.axes.imshow(
        cells.values.clamp(0, 1).numpy(), cmap=colormap(drawing.colours), norm=PowerNorm(0.5, 0, vmax),
        extent=(x, x + columns * cell, y + rows * cell, y), interpolation="nearest", aspect="equal",
    )  # fmt: skip


def _label(drawing: Drawing, head: Head) -> None:
    """Labels rows with the queries' tokens and columns with the keys' tokens."""
    longest = max(len(head.tokens), len(head.key_tokens))
    style = {"fontsize": 9 if longest <= 24 else 7 if longest <= 40 else 5.5, "parse_math": False}
    turned = {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
    columns, rows = (drawing.labels(tokens) for tokens in (head.key_tokens, head.tokens))
    drawing.axes.set_xticks(range(len(columns)), columns, **style, **turned)
    drawing.axes.set_yticks(range(len(rows)), rows, **style)


def _thumb(drawing: Drawing, head: Head, cells: Cells, row: int, vmax: float) -> str:
    """Draws a head's thumbnail and returns the name of the head's role.

    The frame has the colour of the role, and the caption below gives its name and score.
    """
    from matplotlib.patches import Rectangle

    x, y = head.index, row * TALL
    nq, nk = len(head.tokens), len(head.key_tokens)
    token = SIDE / max(nq, nk)
    image = _paint(drawing, cells, (x, y), token, vmax)
    role = head.role
    name = "mixed" if role is None else role.name
    colour = ROLE_COLOURS[name]
    border = Rectangle((x, y), nk * token, nq * token, fill=False, edgecolor=colour, linewidth=1.8)
    image.set_clip_path(drawing.axes.add_patch(border))
    short = name if role is None else f"{SHORT.get(name, name)} {role.score:.2f}"
    style = {"ha": "center", "va": "top", "fontsize": 5.5, "color": drawing.colours.ink}
    text = drawing.axes.text(x + nk * token / 2, y + nq * token + 0.03, short, **style)
    # These artists lie inside the axes. Excluding them from the layout halves its time.
    for artist in (image, border, text):
        artist.set_in_layout(False)
    return name


SHORT = {"previous token": "previous", "delimiter or sink": "delimiter", "fixed offset": "offset"}


def _legend(drawing: Drawing, used: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in ROLE_COLOURS.items() if name in used]
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": drawing.colours.ink}
    if drawing.own:
        columns = int(drawing.figure.get_figwidth() / 1.4)
        drawing.figure.legend(handles=patches, loc="outside lower center", ncols=columns, **style)
    else:
        drawing.axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), **style)
