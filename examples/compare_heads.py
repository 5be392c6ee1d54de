"""MHA, GQA-4, MQA and MLA of equal width, decoding through a whole small model.

`python examples/compare_heads.py` reads a prompt into the caches, checks that decoding gives what one call
over all tokens gives, and prints for each: parameters of a layer's attention, bytes of the caches,
multiplications of a step for each of those bytes, tokens in a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from regard import masks as M
from regard.nn import Attention, Block, LatentAttention, Stack, SwiGLU
from regard.positions import Rotary

LIMIT = 1e-4  # relative error of decoding beside one call, in float32 through all layers


class Model(nn.Module):
    """Bytes (B, L) -> scores of each next byte (B, L, 256)."""

    def __init__(self, attention: list[nn.Module], width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.stack = Stack([Block(a, SwiGLU(width)) for a in attention], nn.LayerNorm(width))
        self.score = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, caches: list[Any] | None = None) -> Tensor:
        scores: Tensor = self.score(self.stack(self.byte(tokens), caches=caches))
        return scores


def attention(kind: str, width: int, heads: int) -> nn.Module:
    """MLA has DeepSeek's proportions: rank 4 D, rotary keys of D / 2."""
    D = width // heads
    options: dict[str, Any] = {"mask": M.Causal(), "bias": False}
    if kind == "MLA":
        return LatentAttention(width, heads, rank=4 * D, nope_dim=D, rope_dim=D // 2, **options)
    kv_heads = {"MHA": heads, "GQA-4": 4, "MQA": 1}[kind]
    return Attention(width, heads, kv_heads=kv_heads, position=Rotary(D), **options)


def multiplications(module: nn.Module) -> int:
    """For each cached token, in one step of one layer: all query heads, scores and values."""
    if isinstance(module, LatentAttention):
        return module.heads * (2 * module.rank + module.rope_dim)  # absorbed
    assert isinstance(module, Attention)
    return module.heads * (module.head_dim + module.value_dim)


class Side:
    """A model with a prompt in its caches."""

    def __init__(self, kind: str, prompt: Tensor, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.kind = kind
        layers = [attention(kind, options.width, options.heads) for _ in range(options.layers)]
        self.parameters = sum(p.numel() for p in layers[0].parameters())
        self.model = Model(layers, options.width).eval()
        capacity = prompt.shape[1] + options.steps
        self.caches: list[Any] = self.model.stack.new_caches(1, capacity)
        self.intensity = multiplications(layers[0]) * capacity / self.caches[0].nbytes
        self.model(prompt, self.caches)
        self.best = float("inf")

    def decode(self, tokens: Tensor) -> Tensor:
        """Scores after each of the tokens (1, L), one step for each; the caches are as before afterwards."""
        begin = perf_counter()
        found = [self.model(token, self.caches) for token in tokens.split(1, 1)]
        self.best = min(self.best, (perf_counter() - begin) / tokens.shape[1])
        for cache in self.caches:
            cache.crop(-tokens.shape[1])
        return torch.cat(found, 1)

    def check(self, prompt: Tensor, tokens: Tensor) -> None:
        whole = self.model(torch.cat((prompt, tokens), 1))[:, prompt.shape[1] :]
        error = float((self.decode(tokens) - whole).norm() / whole.norm())
        if not error < LIMIT:
            raise SystemExit(f"{self.kind}: decoding is {error:.1e} away from one call over all tokens")

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="in the caches before decoding")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(256, (1, options.tokens + options.steps), generator=generator)
    prompt, tokens = text.split((options.tokens, options.steps), 1)
    kinds = ("MHA", "GQA-4", "MQA", "MLA")
    with torch.no_grad(), Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading the prompt", total=len(kinds) * (2 + options.rounds))
        sides = []
        for kind in kinds:
            sides.append(Side(kind, prompt, options))
            progress.advance(task)
            sides[-1].check(prompt, tokens)
            progress.advance(task)
        progress.update(task, description="decoding")
        for _ in range(options.rounds):  # in turns, so that a slow spell meets all
            for side in sides:
                side.decode(tokens)
                progress.advance(task)
    console.print(table(sides, options))
    return 0


def table(sides: list[Side], options: argparse.Namespace) -> Table:
    shape = f"width {options.width}, {options.heads} heads, {options.layers} layers"
    found = Table(title=f"{shape}, {options.tokens} tokens cached, float32, {options.threads} threads")
    measured = ("parameters", "cache bytes", "to MHA", "per byte", "tokens / s", "to MHA")
    for name in ("heads", *measured):
        found.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    first = sides[0]
    for side in sides:
        found.add_row(
            side.kind,
            f"{side.parameters:,}",
            f"{side.nbytes:,}",
            f"{side.nbytes / first.nbytes:.2f} x",
            f"{side.intensity:.2g}",
            f"{1 / side.best:.1f}",
            f"{first.best / side.best:.2f} x",
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
