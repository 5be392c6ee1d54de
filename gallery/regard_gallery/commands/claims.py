"""The command `regard claims`: lists claims about attention and runs their experiments."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import one_line_errors, sentence, tables

if TYPE_CHECKING:
    from ..claims import Finding


def claims(
    names: Annotated[list[str] | None, typer.Argument(help="Claims to test. Default: list them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Test all claims: about ten minutes.")] = False,
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
        tested = 0
        for i, name in enumerate(chosen, 1):
            typer.echo(f"{i} of {len(chosen)}: {name}", err=True)
            finding = _test(name)
            if finding is not None and page is not None:
                records.write({name: finding})  # at once, so that an interrupted run is not lost
            tested += finding is not None
        if page is not None:
            records.write_page(page)
        elif not chosen:
            _list()
        if tested < len(chosen):
            raise typer.Exit(1)


def _test(name: str) -> Finding | None:
    """Runs an experiment and prints its finding.

    Returns None if a package or a file is missing, after a message on stderr.
    """
    from ..claims import measure

    begin = perf_counter()
    try:
        finding = measure(name)
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"regard: {name} was not tested: {sentence(error)}", err=True)
        return None
    typer.echo(f"{finding}\nseconds: {perf_counter() - begin:.1f}\n")
    return finding


def _list() -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from ..claims import CLAIMS, GROUPS, records

    recorded = records.read()
    table = Table("name", "group", "verdict", "claim", box=SIMPLE)
    for name, group in sorted(CLAIMS, key=lambda claim: list(GROUPS).index(claim[1])):
        record = recorded.get(name, {"verdict": "not recorded", "claim": ""})
        table.add_row(name, group, record["verdict"], escape(record["claim"]))
    tables().print(table)
    typer.echo("`regard claims NAME` runs an experiment, `regard claims --all` runs all of them.")
