"""The command `regard transcribe`: transcribes speech with Whisper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.console import check_output, one_line_errors, printable, quiet_offline

from ._options import AttentionOption


def transcribe(
    file: Annotated[Path, typer.Argument(help="A wav file in PCM.")],
    words: Annotated[bool, typer.Option("--words", help="Print the times of each word.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw each word's attention over time.")] = None,
    beams: Annotated[int, typer.Option(help="Number of beams.", min=1)] = 5,
    model: Annotated[
        Path | None, typer.Option(help="An English Whisper in CTranslate2's format; default tiny.en.")
    ] = None,
    attention: AttentionOption = "regard",
) -> None:
    """Transcribe English speech with Whisper, optionally with the times of each word."""
    with one_line_errors():
        check_output("--picture", picture, picture=True)
        quiet_offline()
        from ..models import transcribe as speech, whisper
        from ..models._picture import draw
        from ..models._wav import read_wav

        samples = read_wav(file, speech.RATE)
        loaded = whisper.load(model, attention=attention)
        segments = speech.transcribe(loaded, samples, beams=beams)
        for segment in segments:
            typer.echo(printable(f"[{segment.start:7.2f} {segment.end:7.2f}] {segment.text.strip()}"))
        if not words and picture is None:
            return
        aligned = [speech.align(loaded, samples, segment) for segment in segments]
        if words:
            for word in (word for part in aligned for word in part.words):
                typer.echo(printable(f"{word.start:8.2f} {word.end:8.2f}  {word.text}"))
        if picture is not None:
            draw(aligned, picture)
            typer.echo(f"{picture}: {sum(len(part.words) for part in aligned)} words", err=True)
