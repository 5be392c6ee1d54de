"""The command `regard embed`: writes sentence embeddings of texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.console import check_output, one_line_errors, quiet_offline

from ._options import AttentionOption, EncoderOption


def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts. Default: lines of stdin.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a .npy file instead of JSON lines.")] = None,
    model: EncoderOption = None, attention: AttentionOption = "regard",
) -> None:  # fmt: skip
    """Embed texts as vectors of length 1. Texts with similar meanings have similar vectors."""
    with one_line_errors():
        check_output("--out", out)
        lines = texts or [line.rstrip("\n") for line in sys.stdin]
        quiet_offline()
        import numpy as np

        from ..models import minilm

        vectors = minilm.load(model, attention=attention).embed(lines)
        if out is not None:
            with open(out, "wb") as file:
                np.save(file, vectors.numpy(), allow_pickle=False)
            typer.echo(f"{len(lines)} vectors of {vectors.shape[1]} numbers in {out}", err=True)
            return
        for vector in vectors.tolist():
            typer.echo(json.dumps(vector))
