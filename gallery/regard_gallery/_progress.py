"""A progress bar in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Shows a progress bar and yields the function that updates it. Used as a context manager.

    The function takes `completed` or `advance` (numbers of units) and `description` (a text). The
    bar disappears when the context ends.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield partial(progress.update, progress.add_task(title, total=total))
