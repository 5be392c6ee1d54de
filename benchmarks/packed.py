"""Compares packed and padded causal attention over sequences of different lengths.

`python benchmarks/packed.py` prints one row for each batch: the share of real keys in the padded
batch, and the times of
- packed: `packing.varlen_attention` on packed sequences;
- from padded: the same, including packing q, k, v and unpacking the result;
- padded: `attention` on the padded batch with `Causal() & Lengths(n)`;
- SDPA, padded: `scaled_dot_product_attention` on the padded batch. If every sequence has as many
  queries as keys, it gets `is_causal`, because right padding then needs no mask; otherwise it gets
  a precomputed mask.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import command
import torch
import torch.nn.functional as F
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor

import regard
from regard import masks as M, packing

H, D = 8, 64
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Sizes = tuple[list[int], list[int]]  # lengths of the sequences: queries, keys


def batches(most: int) -> dict[str, Sizes]:
    """Returns a dict from names to batches of sequence lengths. No length exceeds `most`."""
    generator = torch.Generator().manual_seed(0)

    def between(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    self_attention = {
        f"8 of {most // 2}": [most // 2] * 8,
        f"16 of 1 to {most // 2}": between(1, most // 2, 16),
        f"1 of {most}, 31 of {most // 32}": [most] + [most // 32] * 31,
        f"128 of 1 to {most // 16}": between(1, most // 16, 128),
    }
    cached = between(most // 8, most, 32)
    return {name: (sizes, sizes) for name, sizes in self_attention.items()} | {
        f"16 chunks of {most // 16}, {most // 8} to {most} keys": ([most // 16] * 16, cached[:16]),
        f"32 single queries, {most // 8} to {most} keys": ([1] * 32, cached),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 3.0, "batch")
    parser.add_argument("--most", type=int, default=1024, help="the longest sequence")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--impl", default="auto")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    rows = [row(name, sizes, options) for name, sizes in batches(options.most).items()]
    print("| sequences | real keys | packed | from padded | padded | SDPA, padded |")
    print("|---|---:|---:|---:|---:|---:|")
    print("\n".join(rows))
    print(session.closing(f"{H} heads, D = {D}, float32"))
    return 0


def row(name: str, sizes: Sizes, options: argparse.Namespace) -> str:
    sizes_q, sizes_k = sizes
    padded = [torch.randn(len(n), H, max(n), D) for n in (sizes_q, sizes_k, sizes_k)]
    sides = calls(sizes, options.impl)
    inputs = {side: packed(padded, sizes) if side == "packed" else padded for side in sides}
    with torch.no_grad():
        check({side: call(*inputs[side]) for side, call in sides.items()}, sizes_q)
    timed = backward if options.backward else forward
    best = best_times({side: partial(timed, sides[side], inputs[side]) for side in sides}, options.seconds)
    full = sum(sizes_k) / (len(sizes_k) * max(sizes_k))
    return f"| {name} | {full:.0%} | " + " | ".join(milliseconds(t) for t in best.values()) + " |"


def packed(padded: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
    """Packs q, k and v to (total, H, D)."""
    sizes_q, sizes_k = sizes
    pairs = zip(padded, (sizes_q, sizes_k, sizes_k), strict=True)
    return [packing.pack(x, n).transpose(0, 1).contiguous() for x, n in pairs]


def calls(sizes: Sizes, impl: str) -> dict[str, Call]:
    """Returns the function to time for each column. Only "packed" takes packed q, k and v."""
    (sizes_q, sizes_k), (cu_q, cu_k) = sizes, map(packing.cu_seqlens, sizes)
    mask, offset = M.Causal() & M.Lengths(sizes_k), torch.tensor(sizes_k) - torch.tensor(sizes_q)
    attend = partial(packing.varlen_attention, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, impl=impl)
    dense = mask.to_dense(max(sizes_q), max(sizes_k), offset)
    peer = {"is_causal": True} if sizes_q == sizes_k else {"attn_mask": dense}

    def from_padded(*padded: Tensor) -> Tensor:
        return packing.unpack(attend(*packed(padded, sizes)).transpose(0, 1), cu_q)

    return {
        "packed": attend,
        "from padded": from_padded,
        "padded": partial(regard.attention, mask=mask, offset=offset, impl=impl),
        "SDPA": partial(F.scaled_dot_product_attention, **peer),
    }


def forward(call: Call, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        call(*inputs)


def backward(call: Call, inputs: Sequence[Tensor]) -> None:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def check(outs: dict[str, Tensor], sizes_q: list[int]) -> None:
    """Checks that all functions return the same outputs for real tokens."""
    expected = outs.pop("packed").transpose(0, 1)
    for side, out in outs.items():
        if not torch.allclose(packing.pack(out, sizes_q), expected, atol=1e-4):
            raise WrongResult(f"{side} and packed disagree on sequences of {sizes_q}")


if __name__ == "__main__":
    sys.exit(main())
