"""Well-known attention patterns, composed of atoms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._tools.arguments import count
from ._atoms import Causal, Dilated, Documents, Global, Prefix, RandomBlocks, Window
from ._mask import Mask


def sliding(window: int) -> Mask:
    """Returns a mask of the `window` keys that end with the query's position (Mistral, HF)."""
    return Window(count("sliding(window)", window, 1) - 1, 0)


def streaming(window: int, sinks: int = 4) -> Mask:
    """Returns a causal mask of a sliding window and the first `sinks` keys (StreamingLLM).

    The window is the `window` keys up to and including the query's position.
    """
    return (sliding(window) | Prefix(sinks)) & Causal()


def prefix_lm(n: int) -> Mask:
    """Returns a prefix-LM mask: causal, and every query may also attend to the first n keys."""
    return Causal() | Prefix(n)


def chunked(chunk: int, Lk: int) -> Mask:
    """Returns a mask that is causal within chunks of `chunk` tokens (Llama 4).

    Lk is the length of the sequence.
    """
    size = count("chunked(chunk)", chunk, 1)
    return Causal() & Documents(torch.arange(count("chunked(Lk)", Lk)) // size)


def longformer(
    window: int, global_tokens: Sequence[int] | Tensor | None = None, dilation: int = 1, causal: bool = False,
) -> Mask:  # fmt: skip
    """Returns the Longformer mask: a sliding window and global tokens.

    Args:
        window: number of keys on each side of the query. HF's `attention_window` counts both sides:
            it is 2 * window.
        global_tokens: positions, as in `Global`.
        dilation: the distance between neighbouring keys of the window.
        causal: whether to exclude keys after the query.
    """
    reach = count("longformer(window)", window) * count("longformer(dilation)", dilation, 1)
    local: Mask = Window(reach, reach) if dilation == 1 else Window(reach, reach) & Dilated(dilation)
    mask = local if global_tokens is None else local | Global(global_tokens)
    return mask & Causal() if causal else mask


def bigbird(
    block: int, window: int = 3, random: int = 3, global_blocks: int = 2, seed: int = 0, causal: bool = False,
) -> Mask:  # fmt: skip
    """Returns the BigBird mask: a window, random blocks and global blocks.

    Args:
        block: tokens per block.
        window: width of the window around each query, in blocks.
        random: number of random key blocks for each query block.
        global_blocks: number of blocks at the start of the sequence whose tokens are global.
        seed: selects the random blocks.
        causal: whether to exclude keys after the query.
    """
    half = count("bigbird(window)", window, 1) * count("bigbird(block)", block, 1) // 2
    mask: Mask = Window(half, half)
    if count("bigbird(random)", random):
        mask = mask | RandomBlocks(random, block, seed)
    if count("bigbird(global_blocks)", global_blocks):
        mask = mask | Global(range(global_blocks * block))
    return mask & Causal() if causal else mask
