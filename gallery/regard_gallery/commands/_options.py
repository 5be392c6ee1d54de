"""Command-line options that several commands of the gallery share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Attention = Literal["regard", "sdpa", "eager"]
Cache = Literal["dense", "bf16", "int8", "int4"]
AttentionOption = Annotated[Attention, typer.Option(help="The implementation of attention.")]
CacheOption = Annotated[Cache, typer.Option(help="The storage format of keys and values.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Sample from the fewest tokens with this total probability.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
ModelOption = Annotated[
    Path | None, typer.Option(help="A directory with safetensors, or a GGUF file. Default: SmolLM2-135M.")
]
EncoderOption = Annotated[Path | None, typer.Option(help="A sentence-transformers folder. Default: MiniLM.")]
