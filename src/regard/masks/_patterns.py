"""Named patterns: each is a line over the atoms, nothing more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._tools.arguments import count
from ._atoms import Causal, Dilated, Documents, Global, Prefix, RandomBlocks, Window
from ._mask import Mask


def sliding(window: int) -> Mask:
    """The last `window` keys up to and including the query itself (`sliding_window` of Mistral and HF)."""
    return Window(count("sliding(window)", window, 1) - 1, 0)


def streaming(window: int, sinks: int = 4) -> Mask:
    """The last `window` keys and the first `sinks` ones (StreamingLLM)."""
    return (sliding(window) | Prefix(sinks)) & Causal()


def prefix_lm(n: int) -> Mask:
    """The first n tokens see each other both ways, the rest is causal."""
    return Causal() | Prefix(n)


def chunked(chunk: int, Lk: int) -> Mask:
    """Causal inside chunks of `chunk` tokens, nothing across them (Llama 4), for a sequence of Lk tokens."""
    size = count("chunked(chunk)", chunk, 1)
    return Causal() & Documents(torch.arange(count("chunked(Lk)", Lk)) // size)


def longformer(
    window: int, global_tokens: Sequence[int] | Tensor | None = None, dilation: int = 1, causal: bool = False,
) -> Mask:  # fmt: skip
    """`window` keys on each side at distances that are multiples of `dilation`, and global tokens.

    `window` counts one side, like Window; HF's `attention_window` counts both.
    """
    reach = count("longformer(window)", window) * count("longformer(dilation)", dilation, 1)
    local: Mask = Window(reach, reach) if dilation == 1 else Window(reach, reach) & Dilated(dilation)
    both = local if global_tokens is None else local | Global(global_tokens)
    return both & Causal() if causal else both


def bigbird(
    block: int, window: int = 3, random: int = 3, global_blocks: int = 2, seed: int = 0, causal: bool = False,
) -> Mask:  # fmt: skip
    """A window, random blocks and global blocks, all counted in blocks of `block` tokens.

    The window is `window` blocks wide around each token; the global blocks are the first ones.
    """
    half = count("bigbird(window)", window, 1) * count("bigbird(block)", block, 1) // 2
    parts: Mask = Window(half, half)
    if count("bigbird(random)", random):
        parts = parts | RandomBlocks(random, block, seed)
    if count("bigbird(global_blocks)", global_blocks):
        parts = parts | Global(range(global_blocks * block))
    return parts & Causal() if causal else parts
