"""Multi-head latent attention (MLA, DeepSeek-V2): all heads share one low-rank latent per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.attention import attention
from .._api.projection import Linear
from .._call.spec import QKV
from .._tools.arguments import count, describe, probability
from .._tools.words import check_keywords, hide_unknown, unknown_keyword
from ..cache import LatentCache
from ..masks import Mask
from ..masks._both import both
from ..positions import Positions, Rotary, YaRN, rotate
from ._layer import CAUSAL, AttentionLayer
from ._lengths import real_tokens
from ._options import LayerOptions, checked_mask, is_nested
from ._parallel import attend_shards
from ._recorded import with_weights
from ._sizes import Run, join_heads, rows, split_heads

if TYPE_CHECKING:
    from ..distributed import SequenceParallel

RMS = partial(nn.RMSNorm, eps=1e-6)


class Ways(NamedTuple):
    """The number of multiplications and additions of latent attention in each of its two forms."""

    absorbed: int
    expanded: int


class Queries(NamedTuple):
    """Queries, split into unrotated channels `nope` and rotated channels `rope`.

    The shapes are (..., H, L, nope_dim) and (..., H, L, rope_dim).
    """

    nope: Tensor
    rope: Tensor


class LatentAttention(AttentionLayer):
    """Multi-head latent attention (MLA): (B, L, d_model) -> (B, L, d_model).

    Each token has one latent, from which the keys and values of all heads are computed. A cache
    stores only the latents.

    Token x has the content vector c = kv_norm(kv_down(x)[:rank]) and the rotary key
    r = rotary(kv_down(x)[rank:]), which all heads share. Head h has the key [W_uk[h] c, r], the
    value W_uv[h] c and the query [q_nope, rotary(q_rope)]. The weight of `kv_up` consists of the
    matrices W_uk[h] and W_uv[h]. The latent is [c, r]. There are two forms of the computation, with
    equal results:

    - *expanded*: computes the keys (nope_dim + rope_dim channels) and the values (value_dim
      channels) of every head.
    - *absorbed*: uses q . (W_uk c) = (q W_uk) . c. It multiplies the queries by W_uk, attends to
      the latents, and multiplies the output by W_uv. The latents are one key head with
      rank + rope_dim channels. The first `rank` channels of a latent are also its value.

    Args:
        d_model: width of the input and of the output.
        heads: number of query heads.
        rank: number of channels of the content vector.
        nope_dim: number of unrotated channels of a query and key head. May be 0.
        rope_dim: number of rotated channels of a query head and of the shared rotary key. May be 0.
        value_dim: number of channels of a value head. Default: `nope_dim`.
        q_rank: rank of the query projection. Default: full rank.
        bias: if True, the projections of x (`q` or `q_down`, and `kv_down`) have biases.
        out_bias: if True, the output projection has a bias. Default: `bias`.
        norm: factory of the norms of the outputs of `kv_down` and `q_down`, called as `norm(rank)`
            and `norm(q_rank)`. None: no norm.
        position: a `Rotary(rope_dim)`. Default: a `Rotary` with DeepSeek's interleaved layout.
        mask: a mask for every call. Example: `masks.Causal()`.
        scale: scale of the scores. Default: 1 / sqrt(nope_dim + rope_dim), with DeepSeek's
            correction if `position` has YaRN with `mscale_all_dim`.
        dropout: dropout probability of the attention weights in training.
        device, dtype: device and dtype of the parameters. Default: PyTorch's defaults.

    Example:
        >>> sizes = {"rank": 512, "nope_dim": 128, "rope_dim": 64}
        >>> attend = regard.nn.LatentAttention(2048, 16, **sizes, mask=regard.masks.Causal())
        >>> cache = attend.new_cache(1)
        >>> out = attend(prompt, cache=cache)      # (1, L, 2048): expanded
        >>> out = attend(token, cache=cache)       # (1, 1, 2048): absorbed
    """

    _shown = ("heads", "rank", "nope_dim", "rope_dim", "value_dim", "q_rank", "scale", "dropout", "mask")

    @check_keywords
    def __init__(
        self, d_model: int, heads: int, *, rank: int, nope_dim: int, rope_dim: int,
        value_dim: int | None = None, q_rank: int | None = None, bias: bool = False,
        out_bias: bool | None = None, norm: Callable[[int], nn.Module] | None = RMS,
        position: Rotary | None = None, mask: Mask | None = None, scale: float | None = None,
        dropout: float = 0.0, device: Device = None, dtype: torch.dtype | None = None, **unknown: NoReturn,
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
        self.mask, self.dropout = checked_mask(mask), probability("dropout", dropout)
        factory = {"device": device, "dtype": dtype}
        self._make_projections(bias, bias if out_bias is None else out_bias, norm, factory)

    def _make_projections(
        self, bias: bool, out_bias: bool, norm: Callable[[int], nn.Module] | None, factory: dict[str, Any]
    ) -> None:
        queries = self.heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            self.q = Linear(self.d_model, queries, bias, **factory)
        else:
            self.q_down = Linear(self.d_model, self.q_rank, bias, **factory)
            self.q_norm = nn.Identity() if norm is None else norm(self.q_rank).to(**factory)
            self.q_up = Linear(self.q_rank, queries, False, **factory)
        self.kv_down = Linear(self.d_model, self.rank + self.rope_dim, bias, **factory)
        self.kv_norm = nn.Identity() if norm is None else norm(self.rank).to(**factory)
        self.kv_up = Linear(self.rank, self.heads * (self.nope_dim + self.value_dim), False, **factory)
        self.out = Linear(self.heads * self.value_dim, self.d_model, out_bias, **factory)

    @property
    def _units(self) -> tuple[int, int]:
        return self.heads, self.heads

    def _rows(self, heads: Run, _: Run) -> dict[str, list[Run]]:
        """Returns the rows of each projection that compute some heads, and the columns of `out`."""
        q = rows(heads, self.nope_dim + self.rope_dim)
        kv_up = rows(heads, self.nope_dim + self.value_dim)
        return {"q": [q], "q_up": [q], "kv_up": [kv_up], "out": [rows(heads, self.value_dim)]}

    @hide_unknown
    def forward(
        self, x: Tensor, *, mask: Mask | Tensor | None = None, lengths: Tensor | None = None,
        positions: Positions | None = None, cu_seqlens: Tensor | None = None,
        cache: LatentCache | None = None, parallel: SequenceParallel | None = None,
        absorb: bool | None = None, return_weights: bool = False, **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Computes attention from x to itself and to cached tokens. The output has x's shape.

        Args:
            x: (B, L, d_model), (L, d_model), packed (total, d_model) with `cu_seqlens`, or nested
                (N, j, d_model).
            mask: a mask or a bool tensor (True = may attend) that applies together with the
                module's mask. A tensor is (L, Lk), (B, L, Lk) or (B, heads or 1, L, Lk).
            lengths: (B,), the number of real tokens of each sample. The rest is padding.
            positions: positions of x: an int (the first position), (L,) or (B, L). Default:
                0, 1, ... in each sequence, or the positions that follow the cached tokens.
            cu_seqlens: (N + 1,), the cumulative sequence lengths of packed x.
            cache: a `LatentCache`. The call appends the latents of x and attends causally to all
                cached tokens.
            parallel: the ranks that share the sequence. x and the output are then this rank's
                shards, all other arguments those of the whole sequence. The ranks send latents.
            absorb: True for the absorbed form, False for the expanded one. Default: the form with
                fewer operations (see `operations`).
            return_weights: if True, returns the pair (output, weights), as `Attention` does. The
                weights are (B, heads, L, Lk). Both forms have the same weights.
        """
        if unknown:
            raise unknown_keyword(LatentAttention.forward, unknown)
        options = LayerOptions(mask, lengths, positions, cu_seqlens, None, cache, parallel)
        if not (absorb is None or isinstance(absorb, bool)):
            raise TypeError(f"absorb: expected a bool or None, got {describe(absorb)}")
        if is_nested("x", x):
            return self._forward_nested(x, options, absorb=absorb, return_weights=return_weights)
        if return_weights:
            options.refuse("with return_weights", "parallel")
            keywords = {name: value for name, value in options._asdict().items() if value is not None}
            return with_weights(partial(self.forward, x, absorb=absorb, **keywords), cu_seqlens, None)
        self._check(x, options)
        options = options.of_call(x, None)
        x, L = options.finite(x, self.mask), x.shape[-2]
        if absorb is None:
            absorb = self._absorbs(L, options)
        q, latent = self._projected(x, options.token_positions(L))
        allowed, dropout = self._mask_and_dropout(options)
        if options.parallel is not None:
            if self._share is not None and dropout:
                raise NotImplementedError(
                    f"dropout: expected 0 with HeadParallel and parallel, got {dropout}"
                )
            result = self._attend_latents(q, latent, absorb, options, {"mask": allowed, "dropout": dropout})
        elif cache is None:
            result = self._attend(self._qkv(q, latent, absorb), options, allowed, dropout)
        elif absorb:
            result = cache.attend(self._absorbed(q), latent, scale=self.scale, mask=allowed, lengths=lengths)
        else:
            result = self._decode_expanded(q, latent, cache, allowed, lengths)
        out: Tensor = self.out(join_heads(self._values(result) if absorb else result))
        return out

    def new_cache(self, B: int, capacity: int | None = None) -> LatentCache:
        """Returns an empty `LatentCache` for B samples, with the weights' dtype and device."""
        weight, sizes = self.kv_down.weight, (self.rank, self.rope_dim)
        return LatentCache(B, *sizes, capacity=capacity, dtype=weight.dtype, device=weight.device)

    def arguments(self, x: Tensor, positions: Positions = 0) -> tuple[QKV, dict[str, Any]]:
        """Returns the arguments of `regard.attention` for x: expanded (q, k, v) and the options.

        The options do not include dropout.
        """
        self._check(x, LayerOptions())
        return self._qkv(*self._projected(x, positions), False), {"mask": self.mask, **self._options()}

    def operations(self, Lq: int, Lk: int) -> Ways:
        """Counts the operations per sample of both forms for Lq queries and Lk keys.

        Operations that both forms share are not counted. The absorbed form multiplies each query
        by W_uk and each output by W_uv, and uses 2 * rank + rope_dim channels for each pair of
        query and key. The expanded form multiplies each latent by W_uk and W_uv, and uses
        nope_dim + rope_dim + value_dim channels for each pair.
        """
        up = self.rank * (self.nope_dim + self.value_dim)
        pairs = Lq * Lk
        absorbed = Lq * up + pairs * (2 * self.rank + self.rope_dim)
        expanded = Lk * up + pairs * (self.nope_dim + self.rope_dim + self.value_dim)
        return Ways(2 * self.heads * absorbed, 2 * self.heads * expanded)

    def _absorbs(self, L: int, options: LayerOptions) -> bool:
        """Returns whether the absorbed form has fewer operations for L tokens. All ranks agree."""
        keys = L if options.cache is None else L + len(options.cache)
        if options.parallel is not None:
            layout = options.parallel.layouts[0]
            L, keys = -(-layout.L // layout.ranks), layout.L
        ways = self.operations(L, keys)
        return ways.absorbed < ways.expanded

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    # Queries, keys and values

    def _projected(self, x: Tensor, at: Positions) -> tuple[Queries, Tensor]:
        """Returns the queries and the latents (..., L, rank + rope_dim) of x.

        A latent is the content vector, followed by the rotated key.
        """
        q = self.q(x) if self.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        nope, rope = split_heads(q, self.heads).split((self.nope_dim, self.rope_dim), -1)
        content, key = self.kv_down(x).split((self.rank, self.rope_dim), -1)
        content = self.kv_norm(content)
        if self.position is None:
            return Queries(nope, rope), content
        cos, sin = self.position.table(rope, at)
        key = rotate(key.unsqueeze(-3), cos, sin, layout=self.position.layout).squeeze(-3)
        rope = rotate(rope, cos, sin, layout=self.position.layout)
        return Queries(nope, rope), torch.cat((content, key), -1)

    def _qkv(self, q: Queries, latent: Tensor, absorb: bool) -> QKV:
        """Returns q, k, v in the absorbed form (one key head) or in the expanded form."""
        if absorb:
            key = latent.unsqueeze(-3)
            return self._absorbed(q), key, key[..., : self.rank]
        content, rotary_key = latent.split((self.rank, self.rope_dim), -1)
        nope, v = split_heads(self.kv_up(content), self.heads).split((self.nope_dim, self.value_dim), -1)
        shared = rotary_key.unsqueeze(-3).expand(*nope.shape[:-1], self.rope_dim)
        return torch.cat(q, -1), torch.cat((nope, shared), -1), v

    def _attend_latents(
        self, q: Queries, latent: Tensor, absorb: bool, options: LayerOptions, call: dict[str, Any]
    ) -> Tensor:
        """Computes attention of shards. Every rank computes the keys and values that it needs."""
        assert options.parallel is not None
        call |= {"rank": self.rank, **self._options()}
        if not absorb:
            call["up"] = self.kv_up.weight.unflatten(0, (self.heads, -1))
        shards = self._absorbed(q) if absorb else torch.cat(q, -1), latent
        cu_seqlens = (options.cu_seqlens, None)
        return attend_shards(options.parallel, options.parallel.latent_attention, shards, cu_seqlens, call)

    def _absorbed(self, q: Queries) -> Tensor:
        """Multiplies the unrotated channels of q by W_uk and appends the rotated channels.

        Returns (..., H, L, rank + rope_dim).
        """
        return torch.cat((q.nope @ self._up_matrices()[0], q.rope), -1)

    def _values(self, attended: Tensor) -> Tensor:
        """Multiplies absorbed outputs by W_uv: (..., H, L, rank) -> (..., H, L, value_dim)."""
        return attended @ self._up_matrices()[1].transpose(-2, -1)

    def _up_matrices(self) -> tuple[Tensor, Tensor]:
        """Returns W_uk (H, nope_dim, rank) and W_uv (H, value_dim, rank)."""
        by_head = self.kv_up.weight.unflatten(0, (self.heads, -1))
        nope, value = by_head.split((self.nope_dim, self.value_dim), 1)
        return nope, value

    def _decode_expanded(
        self, q: Queries, latent: Tensor, cache: LatentCache, mask: Mask | None, lengths: Tensor | None
    ) -> Tensor:
        """Appends the latents to the cache and computes attention in the expanded form.

        Returns (B, H, L, value_dim), with zero rows for padding. If attention raises, the cache is
        restored.
        """
        before = cache.lengths
        cache.append(latent, lengths=lengths)
        try:
            qkv = self._qkv(q, cache.state_dict()["latent"].squeeze(1), False)
            out: Tensor = attention(*qkv, mask=both(CAUSAL, mask), offset=before, scale=self.scale)
        except BaseException:
            cache.crop(before)
            raise
        return out if lengths is None else out.masked_fill(~real_tokens(lengths, out), 0)

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
    """Returns 1 / sqrt(nope_dim + rope_dim), with DeepSeek's correction for YaRN.

    If `mscale_all_dim` is set, the scale is multiplied by g^2, where g = growth(mscale_all_dim) and
    `growth` is the method of `YaRN`. With `mscale` too, YaRN multiplies cos and sin by
    growth(mscale) / g. In total, the scores of rotated channels are multiplied by growth(mscale)^2
    and those of the other channels by g^2.
    """
    scale = 1 / math.sqrt(module.nope_dim + module.rope_dim)
    scaling = None if module.position is None else module.position.scaling
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return scale
    return scale * scaling.growth(scaling.mscale_all_dim) ** 2
