"""The command `regard generate`: continues a text with a language model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from regard.cli.console import one_line_errors, show

from . import _options as options
from ._text import new_session, stream


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Default: read from stdin.")] = None,
    max_tokens: options.MaxTokens = 256, temperature: options.Temperature = 0.0, top_p: options.TopP = 1.0,
    seed: options.Seed = 0, cache: options.CacheOption = "dense", model: options.ModelOption = None,
    attention: options.AttentionOption = "regard",
) -> None:  # fmt: skip
    """Continue a text with SmolLM2-135M or a local model."""
    with one_line_errors():
        from ..models.generate import Sampling, pieces

        sampling = Sampling(max_tokens, temperature, top_p, seed)
        if prompt is None:
            prompt = typer.prompt("Text") if sys.stdin.isatty() else sys.stdin.read()
        session = new_session(model, attention, cache)
        tokens = session.generate(session.language.encode(prompt), sampling)
        show(prompt)
        stream(pieces(session.language.tokenizer, tokens), session, cache)
