"""How tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def tables() -> Console:
    """A console for tables. What does not go to a terminal is not cut at 80 columns."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, 120))
