"""BigBird: blocks of tokens attend their neighbours, some random blocks, and global ones."""

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
from ._projected import Projected


def block_table(
    blocks: int, heads: int, *, window: int, random: int, global_blocks: Sequence[int], seed: int
) -> Tensor:
    """Returns which blocks attend to which, bool (heads, blocks, blocks).

    A block sees the `window` blocks around it (an odd number), the global blocks, and `random` others, drawn
    for each head and block from those that it would not see anyway. Global blocks see all; those beyond the
    last one are left out, so that one choice serves all lengths. The draw depends on the arguments alone.
    """
    blocks, heads, random = count("blocks", blocks), count("heads", heads, 1), count("random", random)
    window, global_blocks, seed = _odd(window), _integers(global_blocks), count("seed", seed)
    places = torch.arange(blocks)
    chosen = torch.zeros(blocks, dtype=torch.bool)
    chosen[[block for block in global_blocks if -blocks <= block < blocks]] = True
    near = (places[:, None] - places).abs() <= window // 2
    seen = (near | chosen | chosen[:, None]).expand(heads, -1, -1).clone()
    if not min(random, blocks):
        return seen
    lots = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(seed))
    drawn = lots.masked_fill(seen, -1).topk(min(random, blocks), -1)
    # Where fewer are left than wanted, topk gives some that are seen anyway.
    return seen.scatter(-1, drawn.indices, True)


class BigBirdAttention(Projected):
    """Blocks of tokens attend the blocks around them, random ones, and global ones.

    Exact over that pattern, in time O(L * block * (window + random + globals)). Global tokens are blocks of
    the sequence (BigBird-ITC: `global_blocks`), or tokens beside it (BigBird-ETC: `global_x` of a call,
    usually with `global_blocks=()`), or both.

    Args:
        d_model: the width of the tokens.
        heads: the number of heads H.
        block: tokens in a block.
        window: blocks that a block sees around itself, itself included: an odd number.
        random: further blocks that it sees, different for each head.
        global_blocks: blocks that see all and are seen by all; -1 is the last one. Those that a short
            sequence does not have are left out.
        seed: of the random blocks.
        head_dim: D. Default d_model / heads.
        bias: whether the projections of queries, keys and values have biases.
        out: whether there is a last projection. Hugging Face's `BigBirdBlockSparseAttention` has none, and
            with `out=False` its state_dict fits.
        dropout: of the weights, in training.

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
        """Attends from x (B, L, d_model) to itself and to global tokens beside it.

        Args:
            x: (B, L, d_model); L need not be a multiple of the block.
            global_x: (B, G, d_model): tokens that see all and are seen by all (ETC).
            lengths: (B,): the first n tokens of x are real, the rest is padding.
            table: the pattern itself, bool (H or 1, ceil(L / block), ceil(L / block)), for x alone. Default:
                `block_table` of the module's arguments.

        Returns:
            (B, L, d_model), and with `global_x` also (B, G, d_model).
        """
        self._check(x)
        if global_x is None:
            return self._finished(self.attend(*self._projected(x), lengths=lengths, table=table))
        lengths = checked_lengths(lengths, x, 1)
        self._check_beside(x, global_x, table)
        G, pad = global_x.shape[1], -global_x.shape[1] % self.block
        empty = x.new_zeros(x.shape[0], pad, self.d_model)
        qkv = self._projected(torch.cat((empty, global_x, x), 1))
        # Global tokens fill blocks in front of x; what is left of the first block is hidden.
        mask = self._pattern(x.shape[1], (pad + G) // self.block)
        found = self._attended(qkv, mask & ~Prefix(pad), None if lengths is None else lengths + pad + G)
        _, beside, own = self._finished(found).split((pad, G, x.shape[1]), 1)
        return own, beside

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """Attends without projections: q, k, v and the result are (B, H, L, D)."""
        self._check_heads(q, k, v)
        mask = self._pattern(q.shape[2]) if table is None else Blocks(table, self.block)
        return self._attended((q, k, v), mask, checked_lengths(lengths, q))

    def _attended(self, qkv: QKV, mask: Mask, lengths: Tensor | None) -> Tensor:
        padding = None if lengths is None else Lengths(lengths)
        return attention(*qkv, mask=both(mask, padding), dropout=self._dropped())

    def _pattern(self, L: int, beside: int = 0) -> Blocks:
        """Returns the mask of L tokens behind `beside` blocks of global tokens."""
        own = -(-L // self.block)
        inside = (beside + number % own for number in self.global_blocks if -own <= number < own)
        everywhere = (*range(beside), *inside)
        return _mask(own + beside, self.heads, self.block, self.window, self.random, everywhere, self.seed)

    def _check_beside(self, x: Tensor, global_x: Tensor, table: Tensor | None) -> None:
        if table is not None:
            raise ValueError(f"table: expected None with global_x, got {describe(table)}")
        if not isinstance(global_x, Tensor) or global_x.dim() != 3 or global_x.shape[::2] != x.shape[::2]:
            shape = f"(B = {x.shape[0]}, G, d_model = {self.d_model})"
            raise ValueError(f"global_x: expected {shape}, got {describe(global_x)}")


@functools.lru_cache(maxsize=32)
def _mask(
    blocks: int, heads: int, block: int, window: int, random: int, everywhere: tuple[int, ...], seed: int
) -> Blocks:
    table = block_table(blocks, heads, window=window, random=random, global_blocks=everywhere, seed=seed)
    return Blocks(table, block)


# Arguments


def _odd(window: int) -> int:
    if not count("window", window, 1) % 2:
        raise ValueError(f"window: expected an odd number of blocks, got {window}")
    return window


def _integers(blocks: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(blocks, Sequence) or not all(map(is_integer, blocks)):
        raise TypeError(f"global_blocks: expected numbers of blocks, got {describe(blocks)}")
    return tuple(blocks)
