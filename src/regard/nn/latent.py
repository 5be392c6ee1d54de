"""Multi-head latent attention (DeepSeek): all heads take keys and values from one short vector of a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import packing
from .._api.attention import attention
from .._call.spec import Trio
from .._tools.arguments import count, describe, probability
from ..cache import LatentCache
from ..masks import Causal, Lengths, Mask
from ..positions import Positions, Rotary, YaRN, rotate
from ._call import Call, both, check, is_nested, own_mask, places_after, places_in_row
from ._nested import row
from ._state import Whole

CAUSAL = Causal()
RMS = partial(nn.RMSNorm, eps=1e-6)


class Ways(NamedTuple):
    """Multiplications and additions of the two ways to attend."""

    absorbed: int
    expanded: int


class Queries(NamedTuple):
    """(..., H, L, nope_dim), and turned (..., H, L, rope_dim)"""

    nope: Tensor
    rope: Tensor


class LatentAttention(Whole):
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

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int | None = None,
        q_rank: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        norm: Callable[[int], nn.Module] | None = RMS,
        position: Rotary | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.heads = count("d_model", d_model, 1), count("heads", heads, 1)
        self.rank, self.q_rank = (
            count("rank", rank, 1),
            None if q_rank is None else count("q_rank", q_rank, 1),
        )
        self.nope_dim, self.rope_dim = count("nope_dim", nope_dim), count("rope_dim", rope_dim)
        if not nope_dim + rope_dim:
            raise ValueError("nope_dim, rope_dim: expected a query of at least one channel, got 0 and 0")
        self.value_dim = count("value_dim", nope_dim if value_dim is None else value_dim, 1)
        self.position = _rotary(position, rope_dim)
        self.scale = _default_scale(self) if scale is None else scale
        self.mask, self.dropout = own_mask(mask), probability("dropout", dropout)
        self._make_projections(
            bias, bias if out_bias is None else out_bias, norm, {"device": device, "dtype": dtype}
        )

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
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        lengths: Tensor | None = None,
        positions: Positions | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LatentCache | None = None,
        absorb: bool | None = None,
    ) -> Tensor:
        """Attention of x to itself, and to what the cache holds.

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
        call = Call(mask, lengths, positions, cu_seqlens, None, cache)
        if not (absorb is None or isinstance(absorb, bool)):
            raise TypeError(f"absorb: expected a bool or None, got {describe(absorb)}")
        if is_nested("x", x):
            return self._nested(x, call, absorb)
        self._check(x, call)
        L = x.shape[-2]
        if absorb is None:
            ways = self.operations(L, L if cache is None else L + len(cache))
            absorb = ways.absorbed < ways.expanded
        q, latent = self._projected(x, self._places(call, L))
        found = self._attended(q, latent, call, absorb)
        values = self._values(found) if absorb else found
        out: Tensor = self.out(values.transpose(-3, -2).flatten(-2))
        return out

    def new_cache(self, B: int, capacity: int | None = None) -> LatentCache:
        """An empty cache for B samples, of the dtype and on the device of the weights."""
        weight = self.kv_down.weight
        return LatentCache(
            B, self.rank, self.rope_dim, capacity=capacity, dtype=weight.dtype, device=weight.device
        )

    def arguments(self, x: Tensor, positions: Positions = 0) -> tuple[Trio, dict[str, Any]]:
        """What `regard.attention` is called with for x: (q, k, v), expanded, and options; dropout aside."""
        self._check(x, Call())
        qkv = self._trio(*self._projected(x, positions), False)
        return qkv, {"mask": self.mask, "scale": self.scale}

    def operations(self, Lq: int, Lk: int) -> Ways:
        """What Lq queries cost that attend Lk keys, for each sample, without what both ways share.

        Absorbed, products with W_uk and W_uv are paid for each query, expanded for each key; attention costs
        2 rank + rope_dim channels for each pair, or nope_dim + rope_dim + value_dim.
        """
        up = self.rank * (self.nope_dim + self.value_dim)
        pairs = Lq * Lk
        absorbed = Lq * up + pairs * (2 * self.rank + self.rope_dim)
        expanded = Lk * up + pairs * (self.nope_dim + self.rope_dim + self.value_dim)
        return Ways(2 * self.heads * absorbed, 2 * self.heads * expanded)

    # What is attended

    def _projected(self, x: Tensor, at: Positions) -> tuple[Queries, Tensor]:
        """The queries, and the latents (..., L, rank + rope_dim) with their keys turned."""
        asked = self.q(x) if self.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        by_head = asked.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        nope, rope = by_head.split((self.nope_dim, self.rope_dim), -1)
        content, key = self.kv_down(x).split((self.rank, self.rope_dim), -1)
        content = self.kv_norm(content)
        if self.position is None:
            return Queries(nope, rope), content
        cos, sin = self.position.table(rope, at)
        turned = rotate(key.unsqueeze(-3), cos, sin, layout=self.position.layout).squeeze(-3)
        rope = rotate(rope, cos, sin, layout=self.position.layout)
        return Queries(nope, rope), torch.cat((content, turned), -1)

    def _trio(self, q: Queries, latent: Tensor, absorb: bool) -> Trio:
        """What `attention` takes: the latents as one key head, or keys and values of all heads."""
        if absorb:
            key = latent.unsqueeze(-3)
            return self._absorbed(q), key, key[..., : self.rank]
        content, turned = latent.split((self.rank, self.rope_dim), -1)
        by_head = self.kv_up(content).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        nope, v = by_head.split((self.nope_dim, self.value_dim), -1)
        shared = turned.unsqueeze(-3).expand(*nope.shape[:-1], self.rope_dim)
        return torch.cat(q, -1), torch.cat((nope, shared), -1), v

    def _absorbed(self, q: Queries) -> Tensor:
        """(..., H, L, rank + rope_dim)"""
        return torch.cat((q.nope @ self._up()[0], q.rope), -1)

    def _values(self, found: Tensor) -> Tensor:
        """(..., H, L, rank) -> (..., H, L, value_dim)"""
        return found @ self._up()[1].transpose(-2, -1)

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_uk (H, nope_dim, rank) and W_uv (H, value_dim, rank)."""
        by_head = self.kv_up.weight.unflatten(0, (self.heads, -1))
        nope, value = by_head.split((self.nope_dim, self.value_dim), 1)
        return nope, value

    # Attending

    def _attended(self, q: Queries, latent: Tensor, call: Call, absorb: bool) -> Tensor:
        """(..., H, L, rank) absorbed, else (..., H, L, value_dim)"""
        mask, dropout = both(self.mask, call.mask), self.dropout if self.training else 0.0
        if call.cache is not None:
            if dropout:
                raise ValueError("cache: expected None in training with dropout; call eval() first")
            decoded = self._decoded if absorb else self._decoded_expanded
            return decoded(q, latent, call._replace(mask=None if mask == CAUSAL else mask))
        if call.lengths is not None:
            mask = both(mask, Lengths(call.lengths))
        options: dict[str, Any] = {"mask": mask, "scale": self.scale, "dropout": dropout}
        qkv = self._trio(q, latent, absorb)
        if call.cu_seqlens is None:
            out: Tensor = attention(*qkv, **options)
            return out
        q_row, k_row, v_row = (t.transpose(0, 1) for t in qkv)
        packed: Tensor = packing.varlen_attention(q_row, k_row, v_row, call.cu_seqlens, **options)
        return packed.transpose(0, 1)

    def _decoded(self, q: Queries, latent: Tensor, call: Call) -> Tensor:
        cache = cast(LatentCache, call.cache)
        return cache.attend(self._absorbed(q), latent, scale=self.scale, mask=call.mask, lengths=call.lengths)

    def _decoded_expanded(self, q: Queries, latent: Tensor, call: Call) -> Tensor:
        """As a cache attends: if anything raises, it is as it was before, and rows of padding give zeros."""
        cache = cast(LatentCache, call.cache)
        before = cache.lengths
        cache.append(latent, lengths=call.lengths)
        try:
            qkv = self._trio(q, cache.state_dict()["latent"].squeeze(1), False)
            found: Tensor = attention(*qkv, mask=both(CAUSAL, call.mask), offset=before, scale=self.scale)
        except BaseException:
            cache.crop(before)
            raise
        if call.lengths is None:
            return found
        real = call.lengths.to(found.device)[:, None]
        padding = torch.arange(found.shape[-2], device=found.device) >= real  # (B, L)
        return found.masked_fill(padding[:, None, :, None], 0)

    def _nested(self, x: Tensor, call: Call, absorb: bool | None) -> Tensor:
        call.refuse("with nested tensors", "lengths", "cu_seqlens", "cache")
        own = row("x", x)
        found = self(
            own.tokens, mask=call.mask, positions=call.positions, cu_seqlens=own.borders, absorb=absorb
        )
        return own.nested(found)

    # Arguments

    def _places(self, call: Call, L: int) -> Positions:
        if call.positions is not None:
            return call.positions
        if call.cu_seqlens is not None:
            return places_in_row(call.cu_seqlens, L)
        return 0 if call.cache is None else places_after(call.cache, L)

    def _check(self, x: Tensor, call: Call) -> None:
        if x.dim() not in (2, 3) or x.shape[-1] != self.d_model:
            raise ValueError(f"x: expected (..., L, d_model = {self.d_model}), got {describe(x)}")
        check(call, x, None)
        if self.position is None:
            call.refuse("with rope_dim = 0", "positions")
        cache, sizes = call.cache, f"rank={self.rank}, rope={self.rope_dim}"
        if cache is not None and not isinstance(cache, LatentCache):
            raise TypeError(f"cache: expected a LatentCache with {sizes}, got {describe(cache)}")
        if isinstance(cache, LatentCache) and (cache.rank, cache.rope) != (self.rank, self.rope_dim):
            raise ValueError(f"cache: expected {sizes}, got rank={cache.rank}, rope={cache.rope}")

    def extra_repr(self) -> str:
        compressed = "" if self.q_rank is None else f", q_rank={self.q_rank}"
        masked = "" if self.mask is None else f", mask={self.mask}"
        return (
            f"heads={self.heads}, rank={self.rank}, nope_dim={self.nope_dim}, rope_dim={self.rope_dim}, "
            f"value_dim={self.value_dim}{compressed}, scale={self.scale:g}, dropout={self.dropout:g}{masked}"
        )


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
