"""`regard chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from ._console import one_line_errors
from ._options import (
    Attention,
    AttentionOption,
    Cache,
    CacheOption,
    MaxTokens,
    ModelOption,
    Seed,
    Temperature,
    TopP,
)
from ._text import new_session, stream


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; else they are read line by line.")
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    cache: CacheOption = Cache.dense,
    model: ModelOption = None,
    attention: AttentionOption = Attention.regard,
) -> None:
    """Talk with SmolLM2-135M or a local model that has a chat template. Ctrl-C ends an answer, Ctrl-D the talk."""
    with one_line_errors():
        from ..models.generate import Conversation, Sampling

        sampling = Sampling(max_tokens, temperature, top_p, seed)
        session = new_session(model, attention.value, cache.value)
        talk = Conversation(session)
        for question in [prompt] if prompt is not None else _typed():
            try:
                stream(talk.say(question, sampling), session, cache.value)
            except KeyboardInterrupt:
                if prompt is not None or not sys.stdin.isatty():
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
