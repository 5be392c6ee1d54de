"""The command `regard crossover`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import check_output, one_line_errors, tables

if TYPE_CHECKING:
    from rich.table import Table

    from ..crossover import Crossover

SHORTEST = 256


def crossover(
    longest: Annotated[int, typer.Option(min=SHORTEST, help="The longest sequence, in tokens.")] = 8192,
    causal: Annotated[bool, typer.Option("--causal", help="Use causal attention.")] = False,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    dim: Annotated[int, typer.Option(min=2, help="Channels per head.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of timing per length.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Also plot the curves to this file.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A short trial that overrides the sizes: one small head, 512 tokens."),
    ] = False,
) -> None:
    """Measure above which lengths approximations need less time or memory than exact attention."""
    with one_line_errors():
        check_output("--plot", plot, picture=True)
    from ..crossover import measure

    console = tables()
    if quick:
        longest, heads, dim, seconds = 2 * SHORTEST, 1, 16, 0.0
    lengths = [SHORTEST << step for step in range((longest // SHORTEST).bit_length())]
    with console.status("") as status:
        costs = measure(lengths, causal=causal, heads=heads, dim=dim, seconds=seconds, progress=status.update)
    console.print(_table(costs, f"{heads} heads of {dim} channels, float32{', causal' if causal else ''}"))
    if plot is not None:
        costs.plot(str(plot))
        console.print(f"curves in {plot}")


def _table(costs: Crossover, title: str) -> Table:
    from rich.table import Table

    from ..crossover import KINDS

    longest = f"{costs.lengths[-1]:,} tokens"
    caption = f"In parentheses: exact / mechanism at {longest}. Differences under 10 % do not count."
    table = Table("mechanism", title=f"Needs less than exact attention: {title}", caption=caption)
    for work, quantity in KINDS:
        table.add_column(f"{quantity}, {work}")
    for name in costs.mechanisms:
        table.add_row(name, *(costs.verdict(name, work, quantity) for work, quantity in KINDS))
    return table
