"""`regard info`."""

from __future__ import annotations

import typer


def info() -> None:
    """What this installation has, what it would use, and whether it computes correctly."""
    from ..info import main

    raise typer.Exit(main())
