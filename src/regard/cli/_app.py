"""The list of subcommands. Their files import what is heavy inside functions, so that --help is quick."""

from __future__ import annotations

import typer

from .crossover import crossover
from .info import info

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(crossover)
app.command()(info)


@app.callback()
def regard() -> None:
    """Attention: every mechanism behind one call, exact, with no cliffs."""
