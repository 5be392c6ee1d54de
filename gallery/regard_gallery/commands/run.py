"""The command `regard run`: trains an application of the gallery or uses a trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.console import one_line_errors

StepAttention = Literal["regard", "torch"]


def run(
    name: Annotated[str | None, typer.Argument(help="The application. Default: list them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A trial: less data, few steps.")] = False,
    attention: Annotated[StepAttention, typer.Option(help="The implementation of attention.")] = "regard",
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same results.")] = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, counted from --seed.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of checkpoints and pictures.")] = Path("build/apps"),
    use: Annotated[str | None, typer.Option(help="Run the trained model on this input.")] = None,
) -> None:
    """Train an application on real data and compare it with baselines, or use a trained one."""
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
