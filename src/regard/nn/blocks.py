"""Blocks and stacks of them: encoder, decoder, and both with cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ..masks import Causal, Mask
from ._module import CheckedModule
from ._options import CacheLike, Context, Memory
from .attention import Attention, CrossAttention
from .feedforward import FeedForward
from .latent import LatentAttention
from .linear import LinearAttention
from .norms import PreNorm

Residual = Callable[[int, nn.Module], nn.Module]


class Block(CheckedModule):
    """Attention, cross-attention if there is one, and a feed-forward layer, each in its own residual.

    Args:
        attention: of the tokens to each other.
        feed_forward: token by token.
        cross: attention to a context.
        residual: what stands around each part, made by `residual(d_model, part)`: `PreNorm`, `PostNorm`, or
            one of them with options, `partial(PreNorm, norm=nn.RMSNorm, dropout=0.1)`. Its attribute
            `sublayer` is the part.
    """

    def __init__(
        self, attention: Attention | LatentAttention | LinearAttention, feed_forward: nn.Module, *,
        cross: Attention | None = None, residual: Residual = PreNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        d_model = attention.d_model
        self.attention = residual(d_model, attention)
        self.cross = None if cross is None else residual(d_model, cross)
        self.feed_forward = residual(d_model, feed_forward)

    def forward(
        self, x: Tensor, context: Context = None, *, context_mask: Mask | Tensor | None = None,
        context_cu_seqlens: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """x (..., L, d_model) -> the same shape. `options` go to the attention: mask, lengths, cache, ..."""
        if (context is None) != (self.cross is None):
            expected = "None" if self.cross is None else "a tensor or a Memory"
            raise ValueError(f"context: expected {expected} for this block, got {type(context).__name__}")
        x = self.attention(x, **options)
        if self.cross is not None:
            own = options.get("cu_seqlens")
            x = self.cross(
                x, context, mask=context_mask, cu_seqlens=own, context_cu_seqlens=context_cu_seqlens
            )
        out: Tensor = self.feed_forward(x)
        return out

    def new_cache(self, B: int, capacity: int | None = None) -> CacheLike:
        """Returns an empty cache for B samples that fits the attention."""
        return self.attention.sublayer.new_cache(B, capacity)  # type: ignore[no-any-return, operator, union-attr]

    def remember(self, context: Tensor) -> Memory:
        """Returns the context's keys and values, to be passed in its place."""
        if self.cross is None:
            raise ValueError("context: this block has no cross-attention to remember it for")
        return self.cross.sublayer.remember(context)  # type: ignore[no-any-return, operator, union-attr]


class Stack(CheckedModule):
    """Blocks one after the other, and a norm at the end if one is given."""

    def __init__(self, blocks: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), norm

    def forward(
        self, x: Tensor, context: Tensor | Sequence[Memory] | None = None, *,
        caches: Sequence[CacheLike] | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """x (..., L, d_model) -> the same shape.

        Args:
            x: the tokens, in any form that `Attention` takes.
            context: for blocks with cross-attention: a tensor, or what `remember` made of it.
            caches: one for each block.
            options: mask, lengths, positions, cu_seqlens, context_mask, context_cu_seqlens: for each block.
        """
        contexts = self._each("context", context, Tensor)
        for block, own, cache in zip(self.blocks, contexts, self._each("caches", caches), strict=True):
            more = options if cache is None else options | {"cache": cache}
            x = block(x, own, **more)
        return x if self.norm is None else self.norm(x)

    def new_caches(self, B: int, capacity: int | None = None) -> list[CacheLike]:
        """Returns an empty cache for each block, for B samples."""
        return [block.new_cache(B, capacity) for block in self.blocks]  # type: ignore[operator]

    def remember(self, context: Tensor) -> list[Memory]:
        """Returns the context's keys and values for each block, so that decoding projects it once."""
        return [block.remember(context) for block in self.blocks]  # type: ignore[operator]

    def _each(self, name: str, given: Any, one: type | tuple[()] = ()) -> Sequence[Any]:
        """Returns a list with one entry for each block; a single value is repeated."""
        if given is None or isinstance(given, one):
            return [given] * len(self.blocks)
        if len(given) != len(self.blocks):
            raise ValueError(f"{name}: expected one for each of {len(self.blocks)} blocks, got {len(given)}")
        return given  # type: ignore[no-any-return]


class EncoderDecoder(CheckedModule):
    """An encoder reads the source, a decoder with cross-attention writes the target.

    Decoding step by step: `memory = model.decoder.remember(model.encoder(source))` once, then
    `model.decoder(token, memory, caches=caches)` for each token.
    """

    def __init__(self, encoder: Stack, decoder: Stack) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self, source: Tensor, target: Tensor, *, source_mask: Mask | Tensor | None = None,
        target_mask: Mask | Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """source (B, Ls, d), target (B, Lt, d) -> (B, Lt, d). `source_mask`: which keys are real."""
        memory = self.encoder(source, mask=source_mask)
        out: Tensor = self.decoder(target, memory, mask=target_mask, context_mask=source_mask)
        return out


# The usual blocks


def EncoderBlock(
    d_model: int, heads: int, *, hidden: int | None = None, residual: Residual = PreNorm, **options: Any
) -> Block:
    """Attention to all tokens, and GELU. `options` go to `Attention`."""
    return Block(Attention(d_model, heads, **options), FeedForward(d_model, hidden), residual=residual)


def DecoderBlock(
    d_model: int, heads: int, *, kv_model: int | None = None, hidden: int | None = None,
    residual: Residual = PreNorm, **options: Any,
) -> Block:  # fmt: skip
    """Causal attention, and GELU; with `kv_model` also cross-attention to a context of that width.

    `options` go to the causal `Attention` alone.
    """
    cross = None if kv_model is None else CrossAttention(d_model, heads, kv_model)
    own = Attention(d_model, heads, **{"mask": Causal()} | options)
    return Block(own, FeedForward(d_model, hidden), cross=cross, residual=residual)
