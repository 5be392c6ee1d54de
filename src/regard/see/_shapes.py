"""The shapes of all matrices in a multi-head attention layer, as a list and as a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from .._tools.arguments import count, describe
from ..nn import Attention
from ._style import Drawing, Path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_HEADS = 4  # with more heads, only the first two and the last are drawn
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe and Ito: one colour for each drawn head
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SHORTEST, LONGEST = 0.25, 1.25  # sides of a drawn matrix, in inches
LABELS, LOWERED = 0.86, 0.14  # height of the labels of a matrix, and how far their centre is below its own
SPACE, FONT = 0.46, 7.5  # between columns, and the font size in points


class MatrixShape(NamedTuple):
    """A matrix of one sample: its name, its numbers of rows and columns, and how it is computed.

    `weight` is the name and shape of the projection in the formula, if there is one.
    """

    name: str
    rows: int
    columns: int
    formula: str
    weight: str = ""

    @property
    def shape(self) -> str:
        return f"{self.rows:,} × {self.columns:,}"


class Shapes(NamedTuple):
    """The matrices of a layer for one sample."""

    inputs: tuple[MatrixShape, ...]  # X, and in cross-attention the context
    heads: dict[int, tuple[MatrixShape, ...]]  # by head: queries, keys, weights, values, output
    joined: tuple[MatrixShape, ...]  # the concatenation and, with an output projection, the output

    def rows(self) -> list[MatrixShape]:
        """Returns the matrices in the order of the computation."""
        return [*self.inputs, *(matrix for head in self.heads.values() for matrix in head), *self.joined]


def shapes_of(layer: Attention, length: int, context_length: int | None = None) -> Shapes:
    """Returns the shapes of the matrices of a layer for one sample.

    x has `length` tokens. The context has `context_length` tokens (default: self-attention, or
    `length` tokens if the layer has projections for a context). With more than 4 heads, the result
    has the first two and the last.
    """
    if not isinstance(layer, Attention):
        raise TypeError(f"layer: expected a regard.nn.Attention, got {describe(layer)}")
    n, width = count("length", length, 1), layer.d_model
    m = n if context_length is None else count("context_length", context_length, 1)
    x = MatrixShape("X", n, width, "tokens")
    keys = MatrixShape("C", m, layer.kv_model or width, "context")
    keys = x if context_length is None and len(layer.projections) == 1 else keys
    values = keys if layer.value_model is None else MatrixShape("U", m, layer.value_model, "tokens of values")
    heads = range(layer.heads) if layer.heads <= MOST_HEADS else (0, 1, layer.heads - 1)
    joined = [MatrixShape("Concat", n, layer.heads * layer.value_dim, "heads side by side")]
    if hasattr(layer.out, "weight"):
        weight = f"W_O: {joined[0].columns:,} × {width:,}"
        joined.append(MatrixShape("Output", n, width, "Concat · W_O", weight))
    by_head = {head: _head(layer, head, x, keys, values) for head in heads}
    return Shapes(tuple(dict.fromkeys((x, keys, values))), by_head, tuple(joined))


def _head(
    layer: Attention, head: int, x: MatrixShape, keys: MatrixShape, values: MatrixShape
) -> tuple[MatrixShape, ...]:
    """Returns the matrices of one head: queries, keys, weights, values and output."""
    D, Dv = layer.head_dim, layer.value_dim
    i, j = (str(place + 1).translate(SUBSCRIPTS) for place in (head, head * layer.kv_heads // layer.heads))
    scale = f"/ √{D}" if layer.scale is None else f"· {layer.scale:g}"
    return (
        _projection(f"Q{i}", x, D),
        _projection(f"K{j}", keys, D),
        MatrixShape(f"A{i}", x.rows, keys.rows, f"softmax(Q{i} · K{j}ᵀ {scale})"),
        _projection(f"V{j}", values, Dv),
        MatrixShape(f"head{i}", x.rows, Dv, f"A{i} · V{j}"),
    )


def _projection(name: str, source: MatrixShape, width: int) -> MatrixShape:
    weight = f"W_{name}: {source.columns:,} × {width:,}"
    return MatrixShape(name, source.rows, width, f"{source.name} · W_{name}", weight)


def shapes(
    layer: Attention, length: int = 10, context_length: int | None = None, *, title: str | None = None,
    ax: Any = None, dark: bool = False, path: Path = None,
) -> Figure:  # fmt: skip
    """Draws the path of each head from (n, d_model) to (n, d_model), with the shape of every matrix.

    The sides of a matrix grow with the square root of its numbers of rows and columns. With more
    than 4 heads, the first two and the last are drawn.

    Args:
        layer: the attention layer. Only its sizes are read, so `device="meta"` is enough.
        length: n, the number of tokens of x.
        context_length: the number of keys in cross-attention. Default: self-attention.
        title, ax, dark, path: as in `heatmap`.

    Example:
        >>> see.shapes(regard.nn.Attention(512, 8), 10, path="shapes.png")
    """
    matrices = shapes_of(layer, length, context_length)
    picture = FigureLayout(matrices, layer.heads)
    width, height = picture.size
    drawing = Drawing(width, height + 0.5, dark, ax, path)
    picture.draw(drawing)
    drawing.axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal", xticks=[], yticks=[])
    kind = f"{layer.heads} heads" if layer.heads > 1 else "one head"
    if layer.kv_heads != layer.heads:
        kind += (
            f" that share {layer.kv_heads} key heads" if layer.kv_heads > 1 else " that share one key head"
        )
    last = matrices.joined[-1]
    drawing.title(
        title, f"From {matrices.inputs[0].shape} to {last.shape}: {kind}", "for each sample of a batch"
    )
    return drawing.finished()


class FigureLayout:
    """Places and draws the matrices: inputs, a row for each head, concatenation, output.

    Coordinates are inches from the top left.
    """

    def __init__(self, matrices: Shapes, heads: int) -> None:
        self.matrices, self.heads = matrices, heads
        self._largest = max(max(x.rows, x.columns) for x in matrices.rows())
        rows = list(matrices.heads.values())
        self._row = max(self._side(x.rows) for head in rows for x in head) + LABELS
        self._gap = 0.3 if len(rows) < heads else 0.0  # for the heads that are not drawn
        columns = [matrices.inputs, *zip(*rows, strict=True), *((x,) for x in matrices.joined)]
        self._widths = [max(map(self._width, column)) for column in columns]
        inputs = sum(self._side(x.rows) + LABELS for x in matrices.inputs)
        width = sum(self._widths) + SPACE * len(columns)
        self.size = (width, max(self._row * len(rows) + self._gap, inputs) + 0.1)

    def _side(self, size: int) -> float:
        return SHORTEST + (LONGEST - SHORTEST) * math.sqrt(size / self._largest)

    def _width(self, x: MatrixShape) -> float:
        """Returns the width of a matrix or of its labels."""
        return max(self._side(x.columns), 0.058 * max(len(x.formula), len(x.weight), 1.2 * len(x.shape)))

    def _middle(self, column: int) -> float:
        return sum(self._widths[:column]) + self._widths[column] / 2 + SPACE * (column + 0.5)

    def _height(self, row: int) -> float:
        """Returns the vertical centre of the matrices in a head's row."""
        count = len(self.matrices.heads)
        spare = self.size[1] - self._row * count - self._gap
        return spare / 2 + self._row * (row + 0.5) + self._gap * (row == count - 1) - LOWERED

    def draw(self, drawing: Drawing) -> None:
        centre, (inputs, heads, joined) = self.size[1] / 2 - LOWERED, self.matrices
        faint = drawing.colours.faint
        self._inputs(drawing, centre)
        for row, (head, colour) in enumerate(zip(heads.values(), COLOURS, strict=False)):
            y = self._height(row)
            self._arrow(drawing, (0, inputs[0], centre), (1, head[0], y))
            for column, x in enumerate(head, 1):
                self._matrix(drawing, x, column, y, [colour])
            self._arrow(drawing, (2, head[1], y), (3, head[2], y))
            self._arrow(drawing, (4, head[3], y), (5, head[4], y))
            self._arrow(drawing, (5, head[4], y), (6, joined[0], centre))
        if self._gap:
            y = (self._height(1) + self._height(2)) / 2 + LOWERED
            self._text(drawing, f"⋮   {self.heads - 3} more heads   ⋮", (self._middle(2), y))
        self._matrix(drawing, joined[0], 6, centre, self._stripes(faint))
        for column, x in enumerate(joined[1:], 7):
            self._arrow(drawing, (column - 1, joined[0], centre), (column, x, centre))
            self._matrix(drawing, x, column, centre, [faint])

    def _inputs(self, drawing: Drawing, centre: float) -> None:
        """Draws the inputs, one below the other, and joins several inputs by a line."""
        inputs = self.matrices.inputs
        heights = [centre + (i - (len(inputs) - 1) / 2) * (LONGEST + LABELS) for i in range(len(inputs))]
        edge = self._edge(0, 1)
        for x, y in zip(inputs, heights, strict=True):
            self._matrix(drawing, x, 0, y, [drawing.colours.faint])
            if len(inputs) > 1:
                self._line(drawing, (self._middle(0) + self._side(x.columns) / 2, y), (edge, y))
        if len(inputs) > 1:
            self._line(drawing, (edge, heights[0]), (edge, heights[-1]))

    def _stripes(self, faint: str) -> list[str]:
        """Returns the colours of the concatenated heads, `faint` for heads that are not drawn."""
        drawn = COLOURS[: len(self.matrices.heads)]
        return [*drawn[:2], *[faint] * min(5, self.heads - 3), drawn[2]] if self._gap else list(drawn)

    def _matrix(self, drawing: Drawing, x: MatrixShape, column: int, y: float, colours: list[str]) -> None:
        """Draws a matrix in stripes of the given colours, with its name, shape and formula."""
        from matplotlib.patches import Rectangle

        wide, tall, middle = self._side(x.columns), self._side(x.rows), self._middle(column)
        part, (left, top) = wide / len(colours), (middle - wide / 2, y - tall / 2)
        for place, colour in enumerate(colours):
            stripe = Rectangle((left + place * part, top), part, tall, color=colour, alpha=0.8, lw=0)
            drawing.axes.add_patch(stripe)
        border = Rectangle((left, top), wide, tall, fill=False, edgecolor=drawing.colours.ink, lw=0.8)
        drawing.axes.add_patch(border)
        self._text(drawing, x.name, (middle, top - 0.1), fontweight="bold")
        for line, text in enumerate((x.shape, x.formula, x.weight)):
            size = FONT if line == 0 else FONT - 1
            self._text(drawing, text, (middle, top + tall + 0.11 + 0.14 * line), fontsize=size)

    @staticmethod
    def _text(drawing: Drawing, text: str, at: tuple[float, float], **style: Any) -> None:
        style = {"ha": "center", "va": "center", "fontsize": FONT, "parse_math": False} | style
        drawing.axes.text(*at, text, color=drawing.colours.ink, **style)

    def _arrow(
        self, drawing: Drawing, start: tuple[int, MatrixShape, float], end: tuple[int, MatrixShape, float]
    ) -> None:
        """Draws an arrow between two matrices, each given as column, matrix and vertical centre.

        The arrow is level beside a matrix and slanted only between the columns, so that it crosses
        no label.
        """
        (first, source, y), (second, target, y2) = start, end
        right = self._middle(first) + self._side(source.columns) / 2
        left = self._middle(second) - self._side(target.columns) / 2 - 0.03
        if y != y2:
            if first or len(self.matrices.inputs) == 1:
                self._line(drawing, (right, y), (self._edge(first, 1), y))
            self._line(drawing, (self._edge(first, 1), y), (self._edge(second, -1), y2))
            right, y = self._edge(second, -1), y2
        style = {"arrowstyle": "-|>", "color": drawing.colours.ink, "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
        drawing.axes.annotate("", (left, y2), (right, y), arrowprops=style)

    def _edge(self, column: int, side: int) -> float:
        """Returns the right (side 1) or left (side -1) edge of a column with its labels."""
        return self._middle(column) + side * (self._widths[column] / 2 + 0.12)

    @staticmethod
    def _line(drawing: Drawing, start: tuple[float, float], end: tuple[float, float]) -> None:
        drawing.axes.plot(*zip(start, end, strict=True), color=drawing.colours.ink, lw=0.7)
