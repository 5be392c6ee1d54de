"""A progress bar in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Yields a function that updates the bar: it takes `completed` or `advance`, and `description`.

    The bar disappears when the context ends.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield partial(progress.update, progress.add_task(title, total=total))
