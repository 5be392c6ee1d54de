"""Compares sparse attention with exact attention and with Hugging Face's Longformer and BigBird.

`python benchmarks/sparse.py` prints three tables, for 8 heads of 64 channels in float32:
- attention without projections: Longformer with 256 neighbours on each side and 8 global tokens,
  BigBird with blocks of 64 (3 in the window, 3 random, 2 global), and exact attention over all
  keys;
- whole layers of Regard and of Hugging Face with the same weights (Hugging Face's BigBird also
  fills an n x n matrix of weights);
- the peak memory of Longformer attention by length, and the exponent of its growth.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command
import numpy as np
import torch
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor

import regard
from regard import masks as M
from regard.cost import peak_memory
from regard.nn import BigBirdAttention, LongformerAttention, block_table

HEADS, D, NEIGHBOURS, GLOBALS, BLOCK, RANDOM = 8, 64, 256, 8, 64, 3
WIDTH = HEADS * D
Run = Callable[[], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 10.0, "row")
    parser.add_argument("--longformer", type=int, default=16384, help="tokens")
    parser.add_argument("--bigbird", type=int, default=8192, help="tokens")
    parser.add_argument("--memory", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with torch.no_grad():
        print("\n".join(attentions(options)), "\n", flush=True)
        print("\n".join(layers(options)), "\n", flush=True)
        print("\n".join(memory(options.memory)))
    print(session.closing(f"{HEADS} heads of {D}, float32"))
    return 0


def longformer() -> LongformerAttention:
    return LongformerAttention(WIDTH, HEADS, window=(NEIGHBOURS, NEIGHBOURS), out=False).eval()


def bigbird() -> BigBirdAttention:
    return BigBirdAttention(WIDTH, HEADS, block=BLOCK, random=RANDOM, out=False).eval()


def spread(L: int) -> Tensor:
    """Returns the positions of the global tokens, at equal distances."""
    return torch.arange(GLOBALS) * L // GLOBALS


# Attention without projections


def attentions(options: argparse.Namespace) -> Iterator[str]:
    yield "| attention | tokens | sparse | exact | speedup | density |"
    yield "|---|---:|---:|---:|---:|---:|"
    L = options.longformer
    q, k, v = inputs(L)
    pattern = M.Window(NEIGHBOURS, NEIGHBOURS) | M.Global(spread(L))
    ours = longformer()
    calls = {"sparse": lambda: ours.attend(q, k, v, global_tokens=spread(L))}
    yield row("Longformer", calls, (q, k, v), pattern, options.seconds)
    q, k, v = inputs(options.bigbird)
    table = block_table(
        -(-options.bigbird // BLOCK), HEADS, window=3, random=RANDOM, global_blocks=(0, -1), seed=0
    )
    calls = {"sparse": lambda: bigbird().attend(q, k, v)}
    yield row("BigBird", calls, (q, k, v), M.Blocks(table, BLOCK), options.seconds)


def inputs(L: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, L, D, generator=generator) for _ in range(3)]


def row(name: str, calls: dict[str, Run], qkv: Any, pattern: M.Mask, seconds: float) -> str:
    L = qkv[0].shape[2]
    check(name, calls["sparse"](), regard.attention(*qkv, mask=pattern))
    best = best_times(calls | {"exact": lambda: regard.attention(*qkv)}, seconds)
    share = regard.plan(*qkv, mask=pattern).flops / regard.plan(*qkv).flops
    times = " | ".join(milliseconds(t) for t in best.values())
    return f"| {name} | {L} | {times} | {best['exact'] / best['sparse']:.1f} x | {share:.1%} |"


# Whole layers


def layers(options: argparse.Namespace) -> Iterator[str]:
    yield "| layer | tokens | Regard | Hugging Face | speedup |"
    yield "|---|---:|---:|---:|---:|"
    for name, pair, L in (
        ("Longformer", longformer_layers, options.longformer),
        ("BigBird", bigbird_layers, options.bigbird),
    ):
        calls = pair(torch.randn(1, L, WIDTH, generator=torch.Generator().manual_seed(0)))
        check(name, calls["ours"](), calls["theirs"]())
        best = best_times(calls, options.seconds)
        times = " | ".join(milliseconds(t) for t in best.values())
        yield f"| {name} | {L} | {times} | {best['theirs'] / best['ours']:.1f} x |"


def longformer_layers(x: Tensor) -> dict[str, Run]:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    L = x.shape[1]
    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[2 * NEIGHBOURS], num_hidden_layers=1
    )
    theirs, ours = LongformerSelfAttention(config, 0).eval(), longformer()
    ours.load_state_dict(theirs.state_dict())
    marks = torch.zeros(1, L)
    marks[0, spread(L)] = 10000.0
    flags = {"is_index_masked": marks < 0, "is_index_global_attn": marks > 0, "is_global_attn": True}
    return {
        "ours": lambda: ours(x, global_tokens=spread(L)),
        "theirs": lambda: theirs(x, attention_mask=marks, **flags)[0],
    }


def bigbird_layers(x: Tensor) -> dict[str, Run]:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, block_size=BLOCK, num_random_blocks=RANDOM,
        max_position_embeddings=x.shape[1], num_hidden_layers=1,
    )  # fmt: skip
    theirs, ours = BigBirdBlockSparseAttention(config, seed=0).train(), bigbird()
    ours.load_state_dict(theirs.state_dict())
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(x.shape[:2]), BLOCK
    )
    table = their_table(theirs, x.shape[1])
    return {
        "ours": lambda: ours(x, table=table),
        "theirs": lambda: theirs(x, band, rows, columns, blocked, blocked)[0],
    }


def their_table(theirs: Any, L: int) -> Tensor:
    """Returns the block table that Hugging Face's BigBird uses in training.

    In evaluation, its random blocks are all block 0.
    """
    np.random.seed(theirs.seed)  # noqa: NPY002
    plan = theirs._get_rand_attn_plan(L, BLOCK, RANDOM)
    drawn = torch.tensor(
        np.stack(theirs._bigbird_block_rand_mask_with_head(L, L, BLOCK, BLOCK, HEADS, *plan))
    ).long()
    table = block_table(L // BLOCK, HEADS, window=3, random=0, global_blocks=(0, -1), seed=0)
    table[:, 1:-1].scatter_(-1, drawn, True)
    return table


def check(name: str, out: Tensor, expected: Tensor) -> None:
    error = float((out - expected).norm() / expected.norm())
    if not error < 1e-5:
        raise WrongResult(f"{name}: error {error:.1e}")


# Memory


def memory(lengths: Sequence[int]) -> Iterator[str]:
    peaks = {L: extra for L in sorted(lengths) if (extra := peak(L)) is not None}
    if not peaks:
        yield "Peak memory: this system does not report it."
        return
    yield "| tokens, Longformer | peak memory beyond q, k, v, MiB | bytes per token |"
    yield "|---:|---:|---:|"
    for L, extra in peaks.items():
        yield f"| {L} | {extra / 2**20:.1f} | {extra / L:,.0f} |"
    yield f"\nMemory grows with the length to the power {slope(peaks):.2f}."


def peak(L: int) -> int | None:
    ours, (q, k, v) = longformer(), inputs(L)
    peak_memory(lambda: ours.attend(*(x[:, :, :1024] for x in (q, k, v)), global_tokens=[0]))  # warm-up
    return peak_memory(lambda: ours.attend(q, k, v, global_tokens=spread(L)))


def slope(peaks: dict[int, int]) -> float:
    """Returns the exponent with which peak memory grows with the length, by a log-log fit.

    Returns NaN for fewer than two lengths.
    """
    if len(peaks) < 2:
        return math.nan
    x, y = (np.log(np.array(list(part), dtype=float)) for part in (peaks.keys(), peaks.values()))
    return float(np.polyfit(x, y, 1)[0])


if __name__ == "__main__":
    sys.exit(main())
