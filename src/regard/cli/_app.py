"""The list of subcommands. Subcommands import heavy packages inside functions, so that --help is fast."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from .cost import cost
from .crossover import crossover
from .explore import explore
from .info import info
from .shapes import shapes

GROUP = "regard.commands"  # the entry point group in which other distributions register subcommands
GALLERY = ("chat", "generate", "embed", "search", "transcribe", "run", "compare", "claims")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {version('regard')}")
        raise typer.Exit


def regard(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Tools for exact attention: explore models, estimate costs, measure crossovers."""


def make_app() -> typer.Typer:
    """Returns the `regard` command with the subcommands of the library and of installed distributions."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback()(regard)
    for command in (explore, cost, crossover, shapes, info):
        app.command()(command)
    installed = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in installed.items():
        app.command(name)(point.load())
    for name in GALLERY:
        if name not in installed:
            _add_missing(app, name)
    return app


def _add_missing(app: typer.Typer, name: str) -> None:
    """Adds a hidden command in place of the gallery's command `name`, which is not installed.

    The hidden command accepts any arguments, prints the `pip install` command for the gallery, and
    exits with status 1.
    """
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, hidden=True, add_help_option=False, context_settings=anything)
    def missing() -> None:
        typer.echo(f"regard: {name} is a command of the gallery; pip install regard-gallery", err=True)
        raise typer.Exit(1)


app = make_app()
