"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Attention = Literal["regard", "sdpa", "eager"]
Cache = Literal["dense", "bf16", "int8", "int4"]
AttentionOption = Annotated[Attention, typer.Option(help="What computes attention.")]
CacheOption = Annotated[Cache, typer.Option(help="How keys and values are kept.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that have this share together.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
ModelOption = Annotated[
    Path | None,
    typer.Option(help="A local directory with safetensors, or a GGUF file; default SmolLM2-135M."),
]
EncoderOption = Annotated[
    Path | None, typer.Option(help="A local sentence-transformers directory; default MiniLM.")
]
