"""The command `regard chat`: a conversation with a language model in the terminal."""

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
        str | None, typer.Argument(help="One question. Default: read questions from stdin, one per line.")
    ] = None,
    max_tokens: options.MaxTokens = 512, temperature: options.Temperature = 0.0, top_p: options.TopP = 1.0,
    seed: options.Seed = 0, cache: options.CacheOption = "dense", model: options.ModelOption = None,
    attention: options.AttentionOption = "regard",
) -> None:  # fmt: skip
    """Chat with SmolLM2-135M or a local model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    with one_line_errors():
        from ..models.generate import Conversation, Sampling

        sampling = Sampling(max_tokens, temperature, top_p, seed)
        session = new_session(model, attention, cache)
        conversation = Conversation(session)
        if prompt is not None:
            stream(conversation.say(prompt, sampling), session, cache)
            return
        for question in _questions():
            with _interruptible():
                stream(conversation.say(question, sampling), session, cache)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Makes Ctrl-C on a terminal end the answer, not the conversation."""
    try:
        yield
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        typer.echo()


def _questions() -> Iterator[str]:
    """Yields the lines of stdin that are not blank."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
