"""`regard chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from regard.cli.console import one_line_errors

from . import _options as options
from ._text import new_session, stream


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; else they are read line by line.")
    ] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    cache: options.CacheOption = "dense",
    model: options.ModelOption = None,
    attention: options.AttentionOption = "regard",
) -> None:
    """Talk with SmolLM2-135M or a local chat model. Ctrl-C ends an answer, Ctrl-D the talk."""
    with one_line_errors():
        from ..models.generate import Conversation, Sampling

        sampling = Sampling(max_tokens, temperature, top_p, seed)
        session = new_session(model, attention, cache)
        talk = Conversation(session)
        if prompt is not None:
            stream(talk.say(prompt, sampling), session, cache)
            return
        for question in _typed():
            with _interruptible():
                stream(talk.say(question, sampling), session, cache)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C on a terminal ends the answer, not the talk."""
    try:
        yield
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        typer.echo()


def _typed() -> Iterator[str]:
    """Lines from the input that are not blank."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
