"""BigBird: block-sparse attention to neighbouring, random and global blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.types import Device

from .._api.attention import attention
from .._call.spec import QKV
from .._tools.arguments import count, describe, is_integer
from ..masks import Blocks, Lengths, Mask, Prefix
from ..masks._both import both
from ._lengths import checked_lengths
from ._padding import finite_padding
from ._projected import Projected


def block_table(
    blocks: int, heads: int, *, window: int, random: int, global_blocks: Sequence[int], seed: int
) -> Tensor:
    """Returns BigBird's block mask, bool (heads, blocks, blocks).

    Entry (h, i, j) is True if block i may attend to block j in head h. A block attends to the
    `window` blocks around it, to the global blocks, and to `random` further blocks that are drawn
    for each head and block. Global blocks attend to all blocks. Equal arguments give equal masks.

    Args:
        blocks: number of blocks of the sequence.
        heads: number of heads.
        window: odd number of neighbouring blocks that a block attends to, itself included.
        random: number of random blocks that a block attends to.
        global_blocks: indices of the global blocks, -1 for the last. Indices out of range are
            ignored.
        seed: seed of the random blocks.
    """
    blocks, heads, random = count("blocks", blocks), count("heads", heads, 1), count("random", random)
    window, global_blocks, seed = _odd(window), _integers(global_blocks), count("seed", seed)
    index = torch.arange(blocks)
    is_global = torch.zeros(blocks, dtype=torch.bool)
    is_global[[block for block in global_blocks if -blocks <= block < blocks]] = True
    near = (index[:, None] - index).abs() <= window // 2
    table = (near | is_global | is_global[:, None]).expand(heads, -1, -1).clone()
    if not min(random, blocks):
        return table
    priority = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(seed))
    drawn = priority.masked_fill(table, -1).topk(min(random, blocks), -1)
    # If fewer than `random` blocks are left to draw, topk also returns blocks that are already True.
    return table.scatter(-1, drawn.indices, True)


class BigBirdAttention(Projected):
    """BigBird block-sparse self-attention: (B, L, d_model) -> (B, L, d_model).

    Each block of tokens attends to the blocks around it, to random blocks and to global blocks.
    Time is O(L * block * (window + random + number of global blocks)). Global tokens are blocks of
    the sequence (`global_blocks`, BigBird-ITC), or separate tokens (the argument `global_x` of
    `forward`, BigBird-ETC), or both. BigBird-ETC is usually used with `global_blocks=()`.

    Args:
        d_model: width of the input and of the output.
        heads: number of heads H.
        block: number of tokens in a block.
        window: odd number of neighbouring blocks that a block attends to, itself included.
        random: number of random blocks that a block attends to, drawn for each head.
        global_blocks: indices of blocks that attend to all blocks and that all blocks attend to, -1
            for the last. Indices beyond the end of a short sequence are ignored.
        seed: seed of the random blocks.
        head_dim: D, the width of a head. Default: d_model / heads.
        bias: if True, the projections of queries, keys and values have biases.
        out: if True, the module has an output projection. With `out=False` the module loads the
            state_dict of Hugging Face's `BigBirdBlockSparseAttention`.
        dropout: dropout probability of the attention weights in training.

    Example:
        >>> attend = regard.nn.BigBirdAttention(512, 8, block=64)
        >>> attend(torch.randn(1, 4096, 512)).shape
        torch.Size([1, 4096, 512])
    """

    _shown = ("heads", "head_dim", "block", "window", "random", "global_blocks", "seed", "dropout")

    def __init__(
        self, d_model: int, heads: int, *, block: int = 64, window: int = 3, random: int = 3,
        global_blocks: Sequence[int] = (0, -1), seed: int = 0, head_dim: int | None = None,
        bias: bool = True, out: bool = True, dropout: float = 0.0, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, head_dim, bias, out, dropout, device, dtype)
        self.block, self.random = count("block", block, 1), count("random", random)
        self.window, self.global_blocks = _odd(window), _integers(global_blocks)
        self.seed = count("seed", seed)

    def forward(
        self, x: Tensor, global_x: Tensor | None = None, *, lengths: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Computes self-attention over x and, if there are any, the separate global tokens.

        Args:
            x: (B, L, d_model). L need not be a multiple of the block size.
            global_x: (B, G, d_model), tokens that attend to all tokens and that all tokens attend
                to (BigBird-ETC).
            lengths: (B,), the number of real tokens of each sample of x. The rest is padding.
            table: block mask, bool (H or 1, ceil(L / block), ceil(L / block)). Must be None with
                `global_x`. Default: the result of `block_table` for the module's arguments.

        Returns:
            (B, L, d_model). With `global_x`, a pair: (B, L, d_model) and (B, G, d_model).
        """
        self._check(x)
        x = finite_padding(x, lengths)
        if global_x is None:
            return self._output(self.attend(*self._projected(x), lengths=lengths, table=table))
        lengths = checked_lengths(lengths, x, 1)
        self._check_global_x(x, global_x, table)
        G, pad = global_x.shape[1], -global_x.shape[1] % self.block
        padding = x.new_zeros(x.shape[0], pad, self.d_model)
        qkv = self._projected(torch.cat((padding, global_x, x), 1))
        # Padding before the global tokens makes x start at a block boundary. ~Prefix(pad) masks the padding.
        mask = self._pattern(x.shape[1], (pad + G) // self.block)
        attended = self._attended(qkv, mask & ~Prefix(pad), None if lengths is None else lengths + pad + G)
        _, global_out, out = self._output(attended).split((pad, G, x.shape[1]), 1)
        return out, global_out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """Computes attention without projections: q, k, v (B, H, L, D) -> (B, H, L, D)."""
        self._check_heads(q, k, v)
        mask = self._pattern(q.shape[2]) if table is None else Blocks(table, self.block)
        return self._attended((q, k, v), mask, checked_lengths(lengths, q))

    def _attended(self, qkv: QKV, mask: Mask, lengths: Tensor | None) -> Tensor:
        padding = None if lengths is None else Lengths(lengths)
        return attention(*qkv, mask=both(mask, padding), dropout=self._call_dropout())

    def _pattern(self, L: int, before: int = 0) -> Blocks:
        """Returns the block mask of a sequence: `before` blocks of global tokens, then L tokens."""
        n = -(-L // self.block)
        inside = (before + index % n for index in self.global_blocks if -n <= index < n)
        global_blocks = (*range(before), *inside)
        return _mask(n + before, self.heads, self.block, self.window, self.random, global_blocks, self.seed)

    def _check_global_x(self, x: Tensor, global_x: Tensor, table: Tensor | None) -> None:
        if table is not None:
            raise ValueError(f"table: expected None with global_x, got {describe(table)}")
        if not isinstance(global_x, Tensor) or global_x.dim() != 3 or global_x.shape[::2] != x.shape[::2]:
            shape = f"(B = {x.shape[0]}, G, d_model = {self.d_model})"
            raise ValueError(f"global_x: expected {shape}, got {describe(global_x)}")


@functools.lru_cache(maxsize=32)
def _mask(
    blocks: int, heads: int, block: int, window: int, random: int, global_blocks: tuple[int, ...], seed: int
) -> Blocks:
    table = block_table(blocks, heads, window=window, random=random, global_blocks=global_blocks, seed=seed)
    return Blocks(table, block)


# Arguments


def _odd(window: int) -> int:
    if not count("window", window, 1) % 2:
        raise ValueError(f"window: expected an odd number of blocks, got {window}")
    return window


def _integers(blocks: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(blocks, Sequence) or not all(map(is_integer, blocks)):
        raise TypeError(f"global_blocks: expected a sequence of block indices, got {describe(blocks)}")
    return tuple(blocks)
