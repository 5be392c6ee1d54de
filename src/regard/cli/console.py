"""What commands share: quiet libraries, errors in one line, and text that cannot steer the terminal."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = {"transformers": "hf", "gguf": "hf", "tokenizers": "hf", "safetensors": "hf"}
EXTRAS |= {"matplotlib": "plot", "rich": "cli", "starlette": "explore", "uvicorn": "explore"}
APPS = ("pandas", "pyarrow", "sklearn", "torch_geometric", "gymnasium", "PIL", "sacrebleu")
EXTRAS |= dict.fromkeys(APPS, "apps")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What is wrong with arguments, files or the installation is said in a line, without a traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader has left; typer ends quietly
        raise
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"regard: {printable(str(error))}{_remedy(error)}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("", err=True)
        raise typer.Exit(130) from None


def _remedy(error: Exception) -> str:
    """The command that installs a package which is missing."""
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    extra = EXTRAS.get(name.partition(".")[0])
    return "" if extra is None else f"; pip install 'regard[{extra}]'"


def quiet_offline() -> None:
    """Transformers neither asks the network nor speaks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


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


def tables() -> Console:
    """A console for tables. What does not go to a terminal is not cut at 80 columns."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, 120))
