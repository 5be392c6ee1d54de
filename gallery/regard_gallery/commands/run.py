"""`regard run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.console import one_line_errors

StepAttention = Literal["regard", "torch"]


def run(
    name: Annotated[str | None, typer.Argument(help="The application; without it they are listed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less data, few steps: a trial.")] = False,
    attention: Annotated[StepAttention, typer.Option(help="What computes attention.")] = "regard",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was interrupted.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same numbers.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many to average over, from --seed on.")
    ] = None,
    out: Annotated[Path, typer.Option(help="For checkpoints and pictures.")] = Path("build/apps"),
    use: Annotated[str | None, typer.Option(help="Ask the model that was trained, instead.")] = None,
) -> None:
    """Train an application on real data, beside a plain baseline; or use one that was trained."""
    with one_line_errors():
        from .. import apps

        options = apps.Options(quick, attention, resume, seed, seeds, out)
        if name is None:
            if options != apps.Options() or use is not None:
                raise ValueError(f"name: expected one of {', '.join(apps.NAMES)} beside options, got none")
            for known, about in apps.NAMES.items():
                typer.echo(f"{known:16} {about}")
            return
        raise typer.Exit(apps.command(apps.find(name), options, use))
