"""Multi-head latent attention (DeepSeek): all heads take keys and values from one short vector of a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.attention import attention
from .._call.spec import QKV
from .._tools.arguments import count, describe, probability
from ..cache import LatentCache
from ..masks import Mask
from ..masks._both import both
from ..positions import Positions, Rotary, YaRN, rotate
from ._layer import CAUSAL, AttentionLayer
from ._lengths import real_tokens
from ._options import LayerOptions, is_nested, own_mask
from ._sizes import join_heads, split_heads

RMS = partial(nn.RMSNorm, eps=1e-6)


class Ways(NamedTuple):
    """Multiplications and additions of the two ways to attend."""

    absorbed: int
    expanded: int


class Queries(NamedTuple):
    """Queries without position (..., H, L, nope_dim), and rotated ones (..., H, L, rope_dim)."""

    nope: Tensor
    rope: Tensor


class LatentAttention(AttentionLayer):
    """Attention whose keys and values are made of one latent for each token, which is all a cache keeps.

    With x a token, c = kv_norm(kv_down(x)[:rank]) its compressed vector and r = rotary(kv_down(x)[rank:]) a
    rotary key that all heads share, head h has the key [W_uk[h] c, r], the value W_uv[h] c and the query
    [q_nope, rotary(q_rope)]. W_uk and W_uv are the rows of `kv_up`. Two ways give the same result:

    - *expanded*: keys (nope_dim + rope_dim) and values (value_dim) of every head are made, then attended;
    - *absorbed*: since q . (W_uk c) = (q W_uk) . c, queries go through W_uk and all heads attend the latents
      themselves: one key head of rank + rope_dim channels, the first `rank` its value; W_uv comes after.

    Args:
        d_model: the width of the tokens.
        heads: query heads.
        rank: channels of the compressed vector.
        nope_dim: channels of a head's query and key without position; 0 for none.
        rope_dim: channels with position; 0 for none.
        value_dim: channels of a head's value. Default `nope_dim`.
        q_rank: queries come from a compressed vector too, of so many channels.
        bias: whether the projections of x have biases: `q` (or `q_down`) and `kv_down`.
        out_bias: whether the last one has. Default: as `bias`.
        norm: of the compressed vectors, made by `norm(rank)`; None for none.
        position: a `Rotary(rope_dim)`. Default: one with DeepSeek's interleaved layout.
        mask: a mask of every call, such as `masks.Causal()`.
        scale: default 1 / sqrt(nope_dim + rope_dim), with DeepSeek's correction if `position` has YaRN with
            `mscale_all_dim`.
        dropout: of the weights, in training.

    Example:
        >>> attend = LatentAttention(2048, 16, rank=512, nope_dim=128, rope_dim=64, mask=masks.Causal())
        >>> cache = attend.new_cache(1)
        >>> out = attend(prompt, cache=cache)      # (1, L, 2048): expanded
        >>> out = attend(token, cache=cache)       # (1, 1, 2048): absorbed
    """

    _shown = ("heads", "rank", "nope_dim", "rope_dim", "value_dim", "q_rank", "scale", "dropout", "mask")

    def __init__(
        self, d_model: int, heads: int, *, rank: int, nope_dim: int, rope_dim: int,
        value_dim: int | None = None, q_rank: int | None = None, bias: bool = False,
        out_bias: bool | None = None, norm: Callable[[int], nn.Module] | None = RMS,
        position: Rotary | None = None, mask: Mask | None = None, scale: float | None = None,
        dropout: float = 0.0, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.d_model, self.heads = count("d_model", d_model, 1), count("heads", heads, 1)
        self.rank = count("rank", rank, 1)
        self.q_rank = None if q_rank is None else count("q_rank", q_rank, 1)
        self.nope_dim, self.rope_dim = count("nope_dim", nope_dim), count("rope_dim", rope_dim)
        if not nope_dim + rope_dim:
            raise ValueError("nope_dim, rope_dim: expected a query of at least one channel, got 0 and 0")
        self.value_dim = count("value_dim", nope_dim if value_dim is None else value_dim, 1)
        self.position = _rotary(position, rope_dim)
        self.scale = _default_scale(self) if scale is None else scale
        self.mask, self.dropout = own_mask(mask), probability("dropout", dropout)
        made = {"device": device, "dtype": dtype}
        self._make_projections(bias, bias if out_bias is None else out_bias, norm, made)

    def _make_projections(
        self, bias: bool, out_bias: bool, norm: Callable[[int], nn.Module] | None, made: dict[str, Any]
    ) -> None:
        asked = self.heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            self.q = nn.Linear(self.d_model, asked, bias, **made)
        else:
            self.q_down = nn.Linear(self.d_model, self.q_rank, bias, **made)
            self.q_norm = nn.Identity() if norm is None else norm(self.q_rank).to(**made)
            self.q_up = nn.Linear(self.q_rank, asked, False, **made)
        self.kv_down = nn.Linear(self.d_model, self.rank + self.rope_dim, bias, **made)
        self.kv_norm = nn.Identity() if norm is None else norm(self.rank).to(**made)
        self.kv_up = nn.Linear(self.rank, self.heads * (self.nope_dim + self.value_dim), False, **made)
        self.out = nn.Linear(self.heads * self.value_dim, self.d_model, out_bias, **made)

    def forward(
        self, x: Tensor, *, mask: Mask | Tensor | None = None, lengths: Tensor | None = None,
        positions: Positions | None = None, cu_seqlens: Tensor | None = None,
        cache: LatentCache | None = None, absorb: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends from x to itself and to the tokens of the cache.

        Args:
            x: (B, L, d_model), (L, d_model), packed (total, d_model) with `cu_seqlens`, or nested
                (N, j, d_model).
            mask: narrows the module's own mask, as in `regard.attention`; True = may attend.
            lengths: (B,): the first n tokens of each sample are real, the rest is padding.
            positions: the places of x: an int, (L,) or (B, L). Default: from 0 on, after those of the cache,
                or anew in each packed sequence.
            cu_seqlens: (N + 1,): the borders of packed sequences.
            cache: appends the latents of x and attends causally to all it holds.
            absorb: the way to attend, by default the one with fewer operations (`operations`).
        """
        options = LayerOptions(mask, lengths, positions, cu_seqlens, None, cache)
        if not (absorb is None or isinstance(absorb, bool)):
            raise TypeError(f"absorb: expected a bool or None, got {describe(absorb)}")
        if is_nested("x", x):
            return self._forward_nested(x, options, absorb=absorb)
        self._check(x, options)
        L = x.shape[-2]
        if absorb is None:
            ways = self.operations(L, L if cache is None else L + len(cache))
            absorb = ways.absorbed < ways.expanded
        q, latent = self._projected(x, options.places(L))
        allowed, dropout = self._mask_and_dropout(options)
        if cache is None:
            found = self._attend(self._trio(q, latent, absorb), options, allowed, dropout)
        elif absorb:
            found = cache.attend(self._absorbed(q), latent, scale=self.scale, mask=allowed, lengths=lengths)
        else:
            found = self._decode_expanded(q, latent, cache, allowed, lengths)
        out: Tensor = self.out(join_heads(self._values(found) if absorb else found))
        return out

    def new_cache(self, B: int, capacity: int | None = None) -> LatentCache:
        """Returns an empty cache for B samples, of the dtype and on the device of the weights."""
        made, sizes = self.kv_down.weight, (self.rank, self.rope_dim)
        return LatentCache(B, *sizes, capacity=capacity, dtype=made.dtype, device=made.device)

    def arguments(self, x: Tensor, positions: Positions = 0) -> tuple[QKV, dict[str, Any]]:
        """Returns the arguments of `regard.attention` for x: (q, k, v), expanded, and options, no dropout."""
        self._check(x, LayerOptions())
        return self._trio(*self._projected(x, positions), False), {"mask": self.mask, **self._options()}

    def operations(self, Lq: int, Lk: int) -> Ways:
        """Counts the operations of Lq queries over Lk keys, for each sample, without those of both ways.

        Absorbed, products with W_uk and W_uv are paid for each query, expanded for each key; attention costs
        2 rank + rope_dim channels for each pair, or nope_dim + rope_dim + value_dim.
        """
        up = self.rank * (self.nope_dim + self.value_dim)
        pairs = Lq * Lk
        absorbed = Lq * up + pairs * (2 * self.rank + self.rope_dim)
        expanded = Lk * up + pairs * (self.nope_dim + self.rope_dim + self.value_dim)
        return Ways(2 * self.heads * absorbed, 2 * self.heads * expanded)

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    # Queries, keys and values

    def _projected(self, x: Tensor, at: Positions) -> tuple[Queries, Tensor]:
        """Returns the queries, and the latents (..., L, rank + rope_dim) with their keys rotated."""
        asked = self.q(x) if self.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        nope, rope = split_heads(asked, self.heads).split((self.nope_dim, self.rope_dim), -1)
        content, key = self.kv_down(x).split((self.rank, self.rope_dim), -1)
        content = self.kv_norm(content)
        if self.position is None:
            return Queries(nope, rope), content
        cos, sin = self.position.table(rope, at)
        turned = rotate(key.unsqueeze(-3), cos, sin, layout=self.position.layout).squeeze(-3)
        rope = rotate(rope, cos, sin, layout=self.position.layout)
        return Queries(nope, rope), torch.cat((content, turned), -1)

    def _trio(self, q: Queries, latent: Tensor, absorb: bool) -> QKV:
        """Returns q, k, v: the latents as one key head if absorbed, else keys and values of all heads."""
        if absorb:
            key = latent.unsqueeze(-3)
            return self._absorbed(q), key, key[..., : self.rank]
        content, turned = latent.split((self.rank, self.rope_dim), -1)
        nope, v = split_heads(self.kv_up(content), self.heads).split((self.nope_dim, self.value_dim), -1)
        shared = turned.unsqueeze(-3).expand(*nope.shape[:-1], self.rope_dim)
        return torch.cat(q, -1), torch.cat((nope, shared), -1), v

    def _absorbed(self, q: Queries) -> Tensor:
        """Multiplies queries by W_uk: (..., H, L, rank + rope_dim)."""
        return torch.cat((q.nope @ self._up()[0], q.rope), -1)

    def _values(self, found: Tensor) -> Tensor:
        """Multiplies results by W_uv: (..., H, L, rank) -> (..., H, L, value_dim)."""
        return found @ self._up()[1].transpose(-2, -1)

    def _up(self) -> tuple[Tensor, Tensor]:
        """Returns W_uk (H, nope_dim, rank) and W_uv (H, value_dim, rank)."""
        by_head = self.kv_up.weight.unflatten(0, (self.heads, -1))
        nope, value = by_head.split((self.nope_dim, self.value_dim), 1)
        return nope, value

    def _decode_expanded(
        self, q: Queries, latent: Tensor, cache: LatentCache, mask: Mask | None, lengths: Tensor | None
    ) -> Tensor:
        """Appends the latents and attends as a cache does.

        If anything raises, the cache is as it was before. Rows of padding are zeros.
        """
        before = cache.lengths
        cache.append(latent, lengths=lengths)
        try:
            qkv = self._trio(q, cache.state_dict()["latent"].squeeze(1), False)
            found: Tensor = attention(*qkv, mask=both(CAUSAL, mask), offset=before, scale=self.scale)
        except BaseException:
            cache.crop(before)
            raise
        return found if lengths is None else found.masked_fill(~real_tokens(lengths, found), 0)

    def _check(self, x: Tensor, options: LayerOptions) -> None:
        options.check(x, None, self.d_model)
        if self.position is None:
            options.refuse("with rope_dim = 0", "positions")
        cache, sizes = options.cache, f"rank={self.rank}, rope={self.rope_dim}"
        if cache is not None and not isinstance(cache, LatentCache):
            raise TypeError(f"cache: expected a LatentCache with {sizes}, got {describe(cache)}")
        if isinstance(cache, LatentCache) and (cache.rank, cache.rope) != (self.rank, self.rope_dim):
            raise ValueError(f"cache: expected {sizes}, got rank={cache.rank}, rope={cache.rope}")


def _rotary(position: Rotary | None, rope_dim: int) -> Rotary | None:
    if position is None:
        return Rotary(rope_dim, layout="interleaved") if rope_dim else None
    if not isinstance(position, Rotary) or position.dims != rope_dim:
        raise ValueError(f"position: expected a Rotary of rope_dim = {rope_dim} channels, got {position!r}")
    return position


def _default_scale(module: LatentAttention) -> float:
    """DeepSeek's YaRN divides cos and sin by a growth factor that it gives back here, to all channels."""
    scale = 1 / math.sqrt(module.nope_dim + module.rope_dim)
    scaling = None if module.position is None else module.position.scaling
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return scale
    return scale * scaling.growth(scaling.mscale_all_dim) ** 2
