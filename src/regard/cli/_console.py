"""What commands share: quiet libraries, errors in one line, and text that cannot steer the terminal."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What is wrong with arguments, files or the installation is said in a line, without a traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader has left; typer ends quietly
        raise
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"regard: {printable(str(error))}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("", err=True)
        raise typer.Exit(130) from None


def quiet_offline() -> None:
    """Transformers neither asks the network nor speaks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:
        raise ModuleNotFoundError("models need transformers: pip install 'regard[hf]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def printable(text: str) -> str:
    """Control characters, which a terminal would obey, become a sign."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def show(text: str) -> None:
    """To the output, at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def amount(size: int) -> str:
    """Bytes for people: 1.6 MB."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
