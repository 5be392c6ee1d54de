"""Compares MHA, GQA-4, MQA and MLA of equal width in decode steps of a small model.

`python examples/compare_heads.py` fills the caches with a prompt and checks that decode steps equal one
call over all tokens. For each kind it prints the parameters of one attention layer, the bytes of the
caches, the multiplications per cached byte in one step, and tokens per second. `regard compare` also
trains the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from regard.nn import Attention, LatentAttention
from regard_gallery.compare import NOTES, Side, Sizes, decoded, layer, parameters

KINDS = tuple(NOTES["memory"])


def multiplications(module: nn.Module) -> int:
    """Returns a layer's multiplications per cached token in a decode step, over all query heads."""
    if isinstance(module, LatentAttention):
        return module.heads * (2 * module.rank + module.rope_dim)  # in the absorbed form
    assert isinstance(module, Attention)
    return module.heads * (module.head_dim + module.value_dim)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens in the caches before decoding (default 2048)"
    )
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded per round (default 16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    sizes = Sizes(options.width, options.heads, options.layers)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(KINDS) * (1 + options.rounds))
        sides = decoded(
            KINDS, sizes, tokens=options.tokens, steps=options.steps, rounds=options.rounds,
            progress=lambda kind: progress.update(task, description=kind, advance=1),
        )  # fmt: skip
    console.print(table(sides, sizes, options))
    return 0


def table(sides: list[Side], sizes: Sizes, options: argparse.Namespace) -> Table:
    shape = f"width {sizes.width}, {sizes.heads} heads, {sizes.layers} layers"
    result = Table(title=f"{shape}, {options.tokens} tokens cached, float32, {options.threads} threads")
    columns = ("parameters", "cache bytes", "to MHA", "per byte", "tokens/s", "to MHA")
    for name in ("heads", *columns):
        result.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    tokens = options.tokens + options.steps
    first, all_bytes = sides[0], {side: side.model.cache_bytes(tokens) for side in sides}
    for side, nbytes in all_bytes.items():
        one = layer(side.kind, sizes)
        result.add_row(
            side.kind,
            f"{parameters(one):,}",
            f"{nbytes:,}",
            f"{nbytes / all_bytes[first]:.2f} x",
            f"{multiplications(one) * tokens * sizes.layers / nbytes:.2g}",
            f"{1 / side.to_write:.1f}",
            f"{first.to_write / side.to_write:.2f} x",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
