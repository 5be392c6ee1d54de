"""Helpers for all commands: one-line errors, offline mode, printable text, tables, saving."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .._tools.replacing import replacing as replacing  # for commands of other packages

if TYPE_CHECKING:
    from rich.console import Console

# Missing package -> the argument of `pip install` that provides it.
INSTALL = dict.fromkeys(("transformers", "tokenizers", "safetensors"), "'regard[hf]'")
INSTALL |= {"matplotlib": "'regard[plot]'", "rich": "'regard[cli]'"}
INSTALL |= dict.fromkeys(("starlette", "uvicorn"), "'regard[explore]'")
OTHERS = ("gguf", "pandas", "pyarrow", "sklearn", "torch_geometric", "gymnasium", "PIL", "sacrebleu")
INSTALL |= dict.fromkeys(OTHERS, "regard-gallery")

PICTURES = (".png", ".pdf", ".svg")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Returns a context that turns exceptions into one-line messages on stderr.

    A ValueError, OSError or ModuleNotFoundError ends the command with status 1, and Ctrl-C with
    status 130.
    """
    try:
        yield
    except BrokenPipeError:  # typer catches this error and exits without a message
        raise
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"regard: {sentence(error)}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("", err=True)
        raise typer.Exit(130) from None


def sentence(error: Exception) -> str:
    """Returns the message of an error, with the command that installs a missing package.

    An error of the operating system is told without its number.
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror.lower()}")
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    package = INSTALL.get(name.partition(".")[0])
    remedy = "" if package is None else f"; pip install {package}"
    return printable(str(error)) + remedy


def check_output(option: str, path: Path | None, *, picture: bool = False) -> None:
    """Raises unless a file can be written to `path`, before a command that takes long begins.

    A picture needs matplotlib, and a name with an ending that says its format.
    """
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: expected a file in a directory that exists, got {path}")
    if picture and path.suffix.lower() not in PICTURES:
        raise ValueError(f"{option}: expected a file that ends in {', '.join(PICTURES)}, got {path}")
    if picture and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f"{option}: expected matplotlib, which is not installed", name="matplotlib")


def quiet_offline() -> None:
    """Sets Transformers to offline mode and turns off its warnings and progress bars."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def printable(text: str) -> str:
    """Replaces control characters by U+FFFD, because a terminal would interpret them.

    Newlines and tabs are kept.
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def show(text: str) -> None:
    """Writes text to stdout and flushes."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def amount(size: int) -> str:
    """Returns a number of bytes as text, such as "1.6 MB"."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def tables() -> Console:
    """Returns a console for tables, with at least 120 columns if the output is not a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 120))
