"""The list of subcommands. Their files import what is heavy inside functions, so that --help is quick."""

from __future__ import annotations

import typer

from .chat import chat
from .compare import compare
from .cost import cost
from .crossover import crossover
from .embed import embed
from .explore import explore
from .generate import generate
from .info import info
from .run import run
from .search import search
from .transcribe import transcribe

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (chat, generate, embed, search, transcribe, explore, cost, compare, crossover, run, info):
    app.command()(command)


@app.callback()
def regard() -> None:
    """Attention: every mechanism behind one call, exact, with no cliffs."""
