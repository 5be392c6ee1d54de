"""Transformer blocks, stacks of blocks, and the encoder-decoder model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._tools.words import check_options
from ..masks import Causal, Mask
from ._module import CheckedModule
from ._options import CacheLike, Context, Memory
from .additive import AdditiveAttention
from .attention import Attention
from .feedforward import FeedForward
from .latent import LatentAttention
from .linear import LinearAttention
from .named import CrossAttention
from .norms import PreNorm

if TYPE_CHECKING:
    from ..distributed import SequenceParallel

Residual = Callable[[int, nn.Module], nn.Module]


class Block(CheckedModule):
    """A transformer block: self-attention, optional cross-attention, and a feed-forward layer.

    Each sublayer has its own residual connection.

    Args:
        attention: the self-attention layer.
        feed_forward: a module that maps (..., d_model) to (..., d_model).
        cross: a layer for cross-attention to a context. Default: none.
        residual: factory of the residual connections, called as `residual(d_model, sublayer)`:
            `PreNorm`, `PostNorm`, or one of them with options, for example
            `partial(PreNorm, norm=nn.RMSNorm, dropout=0.1)`. The result must have the attribute
            `sublayer`.
    """

    def __init__(
        self, attention: Attention | LatentAttention | LinearAttention | AdditiveAttention,
        feed_forward: nn.Module, *, cross: Attention | AdditiveAttention | None = None,
        residual: Residual = PreNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        d_model = attention.d_model
        self.attention = residual(d_model, attention)
        self.cross = None if cross is None else residual(d_model, cross)
        self.feed_forward = residual(d_model, feed_forward)

    def forward(
        self, x: Tensor, context: Context = None, *, context_mask: Mask | Tensor | None = None,
        context_cu_seqlens: Tensor | None = None, return_weights: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Applies all sublayers to x (..., L, d_model). The output has x's shape.

        Args:
            x: the tokens, in any form that the self-attention takes.
            context: for cross-attention: a tensor (..., Lk, kv_model), or the result of `remember`.
            context_mask: mask of the cross-attention.
            context_cu_seqlens: (N + 1,), the cumulative sequence lengths of a packed context.
            return_weights: if True, returns (output, weights), or (output, weights, weights of the
                cross-attention) if the block has cross-attention. Weights are (B, heads, L, Lk).
            options: options of the self-attention: mask, lengths, cache, ... `parallel` and
                `cu_seqlens` go to the cross-attention, too.
        """
        if (context is None) != (self.cross is None):
            expected = "None" if self.cross is None else "a tensor or a Memory"
            raise ValueError(f"context: expected {expected} for this block, got {type(context).__name__}")
        wanted = {"return_weights": True} if return_weights else {}  # not every module has the option
        x, *weights = _as_tuple(self.attention(x, **options, **wanted))
        if self.cross is not None:
            shared = {name: options.get(name) for name in ("cu_seqlens", "parallel")}
            shared["context_cu_seqlens"] = context_cu_seqlens
            shared = {name: value for name, value in shared.items() if value is not None}
            x, *cross = _as_tuple(self.cross(x, context, mask=context_mask, **shared, **wanted))
            weights += cross
        out: Tensor = self.feed_forward(x)
        return (out, *weights) if return_weights else out

    def new_cache(self, B: int, capacity: int | None = None) -> CacheLike:
        """Returns an empty cache for B samples, of the class that the self-attention needs."""
        return self.attention.sublayer.new_cache(B, capacity)  # type: ignore[no-any-return, operator, union-attr]

    def remember(self, context: Tensor) -> Memory:
        """Returns the cross-attention's keys and values of a context.

        Pass them as `context` in later calls.
        """
        if self.cross is None:
            raise ValueError("remember: expected a block with cross-attention, got none")
        return self.cross.sublayer.remember(context)  # type: ignore[no-any-return, operator, union-attr]


class Stack(CheckedModule):
    """A sequence of blocks, followed by an optional norm.

    Args:
        blocks: modules such as `Block`, applied in order.
        norm: a norm that is applied to the output of the last block. Pre-norm blocks need it.
            Default: none.
    """

    def __init__(self, blocks: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), norm

    def forward(
        self, x: Tensor, context: Tensor | Sequence[Memory] | None = None, *,
        caches: Sequence[CacheLike] | None = None, return_weights: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Applies all blocks to x (..., L, d_model). The output has x's shape.

        Args:
            x: the tokens, in any form that `Attention` takes.
            context: for cross-attention: a tensor for all blocks, or the result of `remember`.
            caches: one cache per block, such as the result of `new_caches`.
            return_weights: if True, returns (output, weights), where weights is a list with one
                entry per block, or (output, weights, list of the cross-attentions' weights).
            options: options for all blocks: mask, lengths, positions, cu_seqlens, context_mask,
                context_cu_seqlens, parallel.
        """
        if "cache" in options:
            raise TypeError(
                f"cache: write caches=, a list with one cache for each of {len(self.blocks)} blocks, as from "
                "new_caches(B)"
            )
        contexts = self._by_block("context", context, Tensor)
        if return_weights:
            options = options | {"return_weights": True}
        weights = []
        for block, memory, cache in zip(self.blocks, contexts, self._caches(caches), strict=True):
            result = block(x, memory, **(options if cache is None else options | {"cache": cache}))
            x, *of_block = _as_tuple(result)
            weights.append(of_block)
        out = x if self.norm is None else self.norm(x)
        return (out, *map(list, zip(*weights, strict=True))) if return_weights else out

    def new_caches(self, B: int, capacity: int | None = None) -> list[CacheLike]:
        """Returns a list of empty caches for B samples, one cache per block."""
        return [block.new_cache(B, capacity) for block in self.blocks]  # type: ignore[operator]

    def remember(self, context: Tensor) -> list[Memory]:
        """Projects a context to the keys and values of each block's cross-attention.

        Returns one `Memory` per block. Pass the list as `context` in later calls.
        """
        return [block.remember(context) for block in self.blocks]  # type: ignore[operator]

    def _caches(self, caches: Sequence[CacheLike] | None) -> Sequence[Any]:
        """Returns one cache or None per block. Raises if several blocks would share a cache."""
        expected = f"a list with one cache for each of {len(self.blocks)} blocks, as from new_caches(B)"
        if not (caches is None or isinstance(caches, Sequence)):
            raise TypeError(f"caches: expected {expected}, got one {type(caches).__name__}")
        given = [] if caches is None else [id(cache) for cache in caches if cache is not None]
        if len(set(given)) < len(given):
            raise ValueError(f"caches: expected {expected}, got the same cache more than once")
        return self._by_block("caches", caches)

    def _by_block(self, name: str, value: Any, shared: type | tuple[()] = ()) -> Sequence[Any]:
        """Returns a sequence with one entry per block.

        None and a value of type `shared` are repeated for all blocks. Any other value must be a
        sequence with one entry per block.
        """
        if value is None or isinstance(value, shared):
            return [value] * len(self.blocks)
        if len(value) != len(self.blocks):
            raise ValueError(f"{name}: expected one for each of {len(self.blocks)} blocks, got {len(value)}")
        return value  # type: ignore[no-any-return]


class EncoderDecoder(CheckedModule):
    """An encoder for the source and a decoder with cross-attention for the target.

    Example of incremental decoding:
        >>> memory = model.decoder.remember(model.encoder(source))
        >>> caches = model.decoder.new_caches(len(source))
        >>> out = model.decoder(token, memory, caches=caches)  # once per token
    """

    def __init__(self, encoder: Stack, decoder: Stack) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self, source: Tensor, target: Tensor, *, source_mask: Mask | Tensor | None = None,
        target_mask: Mask | Tensor | None = None, parallel: SequenceParallel | None = None,
        return_weights: bool = False,
    ) -> Any:  # fmt: skip
        """Encodes `source` and returns the decoder's output for `target`.

        source (B, Ls, d_model), target (B, Lt, d_model) -> (B, Lt, d_model). `source_mask` applies
        to the encoder and to the cross-attention, `target_mask` to the decoder's self-attention.
        With `parallel`, whose layouts are those of the target and of the source, both are shards.
        With `return_weights`, returns (output, weights of the encoder, of the decoder, of the
        cross-attention). Each is a list with one tensor (B, heads, L, Lk) per block.
        """
        wanted = {"return_weights": True} if return_weights else {}
        of_source = {} if parallel is None else {"parallel": parallel.of_keys}
        of_target = {} if parallel is None else {"parallel": parallel}
        memory, *encoder = _as_tuple(self.encoder(source, mask=source_mask, **of_source, **wanted))
        masks = {"mask": target_mask, "context_mask": source_mask}
        out, *decoder = _as_tuple(self.decoder(target, memory, **masks, **of_target, **wanted))
        return (out, *encoder, *decoder) if return_weights else out


def _as_tuple(result: Any) -> tuple[Any, ...]:
    """Returns the result of a module as a tuple: (output, weights, ...) or (output,)."""
    return result if isinstance(result, tuple) else (result,)


# Constructors of common blocks


@check_options(Attention.__init__)
def EncoderBlock(
    d_model: int, heads: int, *, hidden: int | None = None, residual: Residual = PreNorm, **options: Any
) -> Block:
    """Returns an encoder block: self-attention without a mask, and a GELU `FeedForward`.

    `options` are further arguments of `Attention`.
    """
    return Block(Attention(d_model, heads, **options), FeedForward(d_model, hidden), residual=residual)


@check_options(Attention.__init__)
def DecoderBlock(
    d_model: int, heads: int, *, kv_model: int | None = None, hidden: int | None = None,
    residual: Residual = PreNorm, **options: Any,
) -> Block:  # fmt: skip
    """Returns a decoder block: causal self-attention and a GELU `FeedForward`.

    With `kv_model`, the block also has cross-attention to a context of that width. `options` go to
    the causal `Attention`, not to the cross-attention.
    """
    cross = None if kv_model is None else CrossAttention(d_model, heads=heads, kv_model=kv_model)
    attention = Attention(d_model, heads, **{"mask": Causal()} | options)
    return Block(attention, FeedForward(d_model, hidden), cross=cross, residual=residual)
