"""The command `regard search`: finds passages of text files by meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.console import one_line_errors, printable, quiet_offline

from .._progress import bar
from ._options import AttentionOption, EncoderOption

MAX_BYTES = 64 << 20
SHOWN_LINES = 3
WIDTH = 100


def search(
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8.")],
    question: Annotated[str, typer.Option("--question", "-q", help="The text to search for.")],
    top: Annotated[int, typer.Option(help="Number of passages to show.")] = 5,
    size: Annotated[int, typer.Option(help="Most tokens per passage.")] = 128,
    model: EncoderOption = None,
    attention: AttentionOption = "regard",
) -> None:
    """Find the passages of text files that are nearest in meaning to a question."""
    with one_line_errors():
        texts = {str(file): _read(file) for file in files}
        quiet_offline()
        from ..models import minilm
        from ..models.search import passages, rank

        embedder = minilm.load(model, attention=attention)
        parts = [part for source, text in texts.items() for part in passages(embedder, source, text, size)]
        if not parts:
            raise ValueError("files: expected some text, got none")
        with bar(f"{len(parts)} passages", len(parts)) as update:
            vectors = embedder.embed([part.text for part in parts], done=lambda n: update(advance=n))
        for hit in rank(embedder.embed([question])[0], vectors, parts, top):
            typer.echo(printable(f"{hit.score:.3f}  {hit.passage.source}:{hit.passage.line}"))
            for line in hit.passage.text.splitlines()[:SHOWN_LINES]:
                typer.echo(printable(f"       {line[:WIDTH]}"))


def _read(file: Path) -> str:
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file}: expected at most {MAX_BYTES} bytes, got {file.stat().st_size}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected text in UTF-8: {error}") from None
