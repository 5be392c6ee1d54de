"""The command `regard shapes`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import check_output, one_line_errors, tables

if TYPE_CHECKING:
    from rich.table import Table

    from ..see._shapes import Shapes


def shapes(
    d_model: Annotated[int, typer.Option(min=1, help="Width of the tokens.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Number n of tokens.")] = 10,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads. Default: as many as heads.")] = None,
    d_k: Annotated[
        int | None, typer.Option(min=1, help="Width of a query head. Default: d_model / heads.")
    ] = None,
    d_v: Annotated[int | None, typer.Option(min=1, help="Width of a value head. Default: d_k.")] = None,
    context_length: Annotated[int | None, typer.Option(min=1, help="Keys of cross-attention.")] = None,
    kv_model: Annotated[
        int | None, typer.Option(min=1, help="Width of the context. Default: d_model.")
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Draw for a dark background.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Draw a PNG, PDF or SVG file. Default: print a table.")
    ] = None,
) -> None:
    """Print or draw the shapes in multi-head attention, from (n, d_model) to (n, d_model)."""
    with one_line_errors():
        check_output("--out", out, picture=True)
        from ..nn import Attention
        from ..see._shapes import shapes as draw, shapes_of

        sizes = {"kv_heads": kv_heads, "head_dim": d_k, "value_dim": d_v, "kv_model": kv_model}
        layer = Attention(d_model, heads, **sizes, device="meta")  # type: ignore[arg-type]
        if out is None:
            tables().print(_table(shapes_of(layer, length, context_length), heads))
            return
        draw(layer, length, context_length, dark=dark, path=out)
        typer.echo(f"shapes in {out}")


def _table(shapes: Shapes, heads: int) -> Table:
    from rich.table import Column, Table

    shown = "" if len(shapes.heads) == heads else ": the first two and the last"
    shape = Column("shape", justify="right")
    table = Table("matrix", shape, "computed as", "projection", title=f"Attention with {heads} heads{shown}")
    for x in shapes.rows():
        table.add_row(x.name, x.shape, x.formula, x.weight)
    return table
