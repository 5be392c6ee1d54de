"""Loading a model and printing its text, for `regard generate` and `regard chat`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regard.cli.console import amount, quiet_offline, show

if TYPE_CHECKING:
    from ..models.generate import Session


def new_session(model: Path | None, attention: str, cache: str) -> Session:
    quiet_offline()
    from ..models import caches, language
    from ..models.generate import Session

    loaded = language.load(model, attention=attention)
    return Session(loaded, caches.maker(loaded.model, cache))


def stream(pieces: Iterable[str], session: Session, cache: str) -> None:
    """Writes the pieces of a text to stdout as they arrive, then speed and cache size to stderr."""
    for piece in pieces:
        show(piece)
    show("\n")
    report = session.report
    written = f"{report.written} tokens, {report.speed:.1f} a second"
    read = f"{report.read} tokens read in {report.reading:.2f} s"
    typer.echo(f"{written}; {read}; cache {amount(report.cache_bytes)} ({cache})", err=True)
