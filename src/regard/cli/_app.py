"""The list of subcommands. Their files import what is heavy inside functions, so that --help is quick."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from .cost import cost
from .crossover import crossover
from .explore import explore
from .info import info

GROUP = "regard.commands"  # the entry points of other distributions that add subcommands
GALLERY = ("chat", "generate", "embed", "search", "transcribe", "run", "compare")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def regard() -> None:
    """Attention: every mechanism behind one call, exact, with no cliffs."""


def _missing(name: str) -> None:
    """Registers a hidden command that says what to install."""

    @app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})
    def missing(arguments: list[str] = typer.Argument(None)) -> None:  # noqa: B008
        typer.echo(f"regard: {name} is a command of the gallery; pip install regard-gallery", err=True)
        raise typer.Exit(1)


def _register() -> None:
    for command in (explore, cost, crossover, info):
        app.command()(command)
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in found.items():
        app.command(name)(point.load())
    for name in GALLERY:
        if name not in found:
            _missing(name)


_register()
