"""Well-known attention patterns, composed of atoms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._tools.arguments import count
from ._atoms import Causal, Dilated, Documents, Global, Prefix, RandomBlocks, Window
from ._mask import Mask


def sliding(window: int) -> Mask:
    """Returns a mask of the `window` keys that end with the query's own (Mistral, Transformers).

    `sliding(4)` is `Window(left=3, right=0)`.
    """
    return Window(count("sliding(window)", window, 1) - 1, 0)


def streaming(window: int, sinks: int = 4) -> Mask:
    """Returns a causal mask of a sliding window and the first `sinks` keys (StreamingLLM).

    The window is the `window` keys that end with the query's own.
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


def distances(name: str, window: int | tuple[int, int], causal: bool = False) -> tuple[int, int]:
    """Returns the distances (left, right) of a window around the query.

    A number counts keys, the query's own included: an odd number, centred on the query, or with
    `causal` any number, ending with the query. A pair is (left, right).
    """
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"{name}: expected a number of keys or distances (left, right), got {window}")
        return count(f"{name}[0]", window[0]), count(f"{name}[1]", window[1])
    keys = count(name, window, 1)
    if causal:
        return keys - 1, 0
    if keys % 2 == 0:
        raise ValueError(
            f"{name}: expected an odd number of keys, the query's own included, or distances (left, right), "
            f"got {keys}; Transformers' attention_window={keys} is {keys + 1} or {keys // 2, keys // 2}"
        )
    return keys // 2, keys // 2


def longformer(
    window: int | tuple[int, int], global_tokens: Sequence[int] | Tensor | None = None, dilation: int = 1,
    causal: bool = False,
) -> Mask:  # fmt: skip
    """Returns the Longformer mask: a sliding window and global tokens.

    Args:
        window: number of keys in the window, the query's own included: an odd number, centred on
            the query, or with `causal` any number, ending with the query. Or distances
            (left, right). Transformers' `attention_window=512` is (256, 256).
        global_tokens: positions, as in `Global`.
        dilation: the distance between neighbouring keys of the window. It multiplies `left` and
            `right`.
        causal: whether to exclude keys after the query.
    """
    left, right = distances("longformer(window)", window, causal)
    step = count("longformer(dilation)", dilation, 1)
    band = Window(left * step, right * step)
    local: Mask = band if step == 1 else band & Dilated(step)
    mask = local if global_tokens is None else local | Global(global_tokens)
    return mask & Causal() if causal else mask


def bigbird(
    block: int, window: int = 3, random: int = 3, global_blocks: int = 2, seed: int = 0, causal: bool = False,
) -> Mask:  # fmt: skip
    """Returns the BigBird mask: a window, random blocks and global blocks.

    Args:
        block: tokens per block.
        window: width of the window around each query, in blocks, the query's own included.
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
