"""The command `regard info`."""

from __future__ import annotations

import typer


def info() -> None:
    """Print what is installed, which backend is used, and whether it computes correctly."""
    from ..info import main

    raise typer.Exit(main())
