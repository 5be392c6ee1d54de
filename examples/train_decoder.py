"""Trains a small decoder twice, with Regard's attention and with the formula in PyTorch operations.

Both runs have the same initial weights and the same batches.

The loss curves must agree: the script exits with 1 if they differ by 1e-3 or more at any step.
"""

import argparse
import copy
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import regard
from regard import masks as M

LIMIT = 1e-3  # largest allowed difference of two float32 loss curves at any step
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention with the full weight matrix. All shapes are (B, H, L, D)."""
    L, D = q.shape[-2:]
    later = torch.ones(L, L, dtype=torch.bool).triu(1)  # keys after the query
    return (q @ k.mT * D**-0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


WAYS: dict[str, Attention] = {
    "Regard": partial(regard.attention, mask=M.Causal()),
    "plain PyTorch math": plain_math,
    "PyTorch's SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
}


class Block(nn.Module):
    """A pre-norm Transformer block, (B, L, d) -> (B, L, d)."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.feed = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, d)
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    """A byte-level language model: bytes (B, L) -> logits of each next byte (B, L, 256)."""

    def __init__(self, length: int, d: int = 256, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 256)

    def forward(self, text: Tensor, attend: Attention) -> Tensor:
        x = self.byte(text) + self.place.weight
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def batches(steps: int, length: int) -> list[Tensor]:
    """Returns one batch (1, L + 1) per step, from the first 4 MB of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    library = bytearray(b"".join(file.read_bytes() for file in files)[:4_000_000])
    text = torch.frombuffer(library, dtype=torch.uint8).long()
    return [text[start : start + length + 1][None] for start in torch.randint(len(text) - length, (steps,))]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, attend: Attention) -> float:
    """Runs an optimizer step on `batch` (B, L + 1). Returns the loss, in nats per byte."""
    loss = F.cross_entropy(model(batch[:, :-1], attend).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(ways: list[str], steps: int, length: int) -> tuple[Tensor, Tensor]:
    """Trains a copy of the model with each of the attention functions named in `ways`.

    Returns losses and seconds, both (len(ways), steps). The functions alternate at every step, so
    other processes slow all of them down alike.
    """
    torch.manual_seed(0)
    first = Decoder(length)
    models = [copy.deepcopy(first) for _ in ways]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4) for model in models]
    losses, seconds = torch.zeros(2, len(ways), steps, dtype=torch.float64)
    for i, batch in enumerate(track(batches(steps, length), "training")):
        for w, way in enumerate(ways):
            began = time.perf_counter()
            losses[w, i] = step(models[w], optimizers[w], batch, WAYS[way])
            seconds[w, i] = time.perf_counter() - began
    return losses, seconds


def draw(losses: Tensor, path: Path) -> None:
    """Draws both loss curves (2, steps) and, below them, their difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    above.plot(losses[1], color="#e69f00", linewidth=4, label="plain PyTorch math")
    above.plot(losses[0], color="#0072b2", linewidth=1.2, label="Regard")
    above.legend(frameon=False)
    above.set_ylabel("loss, nats per byte")
    below.plot((losses[0] - losses[1]).abs(), color="#0072b2", linewidth=1.2)
    below.axhline(LIMIT, color="#d55e00", linestyle="--", linewidth=1)
    below.set(xlabel="step", ylabel="difference", yscale="log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=512, help="bytes per sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sdpa", action="store_true", help="train a third time, with PyTorch's SDPA")
    parser.add_argument("--quick", action="store_true", help="5 steps of 128 bytes, for a smoke test")
    parser.add_argument("--out", type=Path, default=Path("build/train_decoder.png"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ways = list(WAYS)[: 3 if options.sdpa else 2]
    losses, seconds = train(ways, *((5, 128) if options.quick else (options.steps, options.length)))
    differences = (losses - losses[0]).abs().amax(1)  # (ways,), NaN if any loss is NaN
    table = Table("attention", "final loss", "difference", "seconds", "ms per step", "ratio")
    for way, curve, gap, times in zip(ways, losses, differences, seconds, strict=True):
        cells = f"{curve[-1]:.5f}", f"{gap:.1e}", f"{times.sum():.1f}", f"{1e3 * times.mean():.0f}"
        table.add_row(way, *cells, f"{times.sum() / seconds[0].sum():.2f}")
    Console().print(table)
    draw(losses[:2], options.out)
    same = bool((differences < LIMIT).all())
    print("The same curve." if same else f"The curves differ by more than {LIMIT}.", "Saved in", options.out)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
