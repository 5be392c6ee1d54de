"""The command `regard claims`: lists claims about attention and runs their experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import one_line_errors, sentence, tables

if TYPE_CHECKING:
    from ..claims import Finding


def claims(
    names: Annotated[list[str] | None, typer.Argument(help="Claims to test. Default: list them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Test all claims: about five minutes.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Record the findings, and write the tables of this page.")
    ] = None,
) -> None:
    """List the claims of study notes about attention with their verdicts, or test claims by experiments."""
    with one_line_errors():
        from ..claims import NAMES, records

        chosen = tuple(NAMES) if every else tuple(names or ())
        unknown = sorted(set(chosen) - set(NAMES))
        if unknown or (every and names):
            got = ", ".join(unknown) if unknown else f"{', '.join(names or ())} beside --all"
            raise ValueError(f"names: expected some of {', '.join(NAMES)}, got {got}")
        if page is not None and not page.is_file():
            raise ValueError(f"--page: expected a file that exists, got {page}")
        found = _run(chosen)
        if page is not None:
            records.write(found)
            records.write_page(page)
        elif not chosen:
            _list()
        if len(found) < len(chosen):
            raise typer.Exit(1)


def _run(names: Sequence[str]) -> dict[str, Finding]:
    """Runs experiments and prints their findings, progress to stderr. Returns the findings by name.

    An experiment that fails for want of a package or a file is reported on stderr and left out.
    """
    from ..claims import measure

    findings = {}
    for i, name in enumerate(names, 1):
        typer.echo(f"{i} of {len(names)}: {name}", err=True)
        begin = perf_counter()
        try:
            findings[name] = measure(name)
        except (ImportError, OSError, ValueError) as error:
            typer.echo(f"regard: {name} was not tested: {sentence(error)}", err=True)
            continue
        typer.echo(f"{findings[name]}\nseconds: {perf_counter() - begin:.1f}\n")
    return findings


def _list() -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from ..claims import CLAIMS, records

    recorded = records.read()
    table = Table("name", "group", "verdict", "claim", box=SIMPLE)
    for name, group in CLAIMS:
        record = recorded.get(name, {"verdict": "not recorded", "claim": ""})
        table.add_row(name, group, record["verdict"], escape(record["claim"]))
    tables().print(table)
    typer.echo("`regard claims NAME` runs an experiment, `regard claims --all` runs all of them.")
