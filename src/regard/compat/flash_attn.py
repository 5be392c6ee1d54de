"""The functions of flash-attn 2, with its arguments, computed by Regard on any device.

Queries are (B, L, H, D), keys and values may have fewer heads. Causal masks and windows are aligned
to the bottom right. Options that all functions share:

- `dropout_p`: the probability that a weight is set to 0;
- `softmax_scale`: multiplies the scores, default 1 / sqrt(D);
- `causal`: whether a query attends to no later key;
- `window_size`: the distances to the farthest earlier and later key, -1 is unlimited;
- `softcap`: replaces a score s by softcap * tanh(s / softcap), 0 is off;
- `alibi_slopes`: (H,) or (B, H), adds -slope * distance to the scores;
- `deterministic`: ignored, results are always deterministic;
- `return_attn_probs`: also returns the LSE (B, H, L) and S_dmask. S_dmask is empty without dropout.
  With dropout it holds the n x n weights before dropout, negative if dropped.

A fully masked row has an output of zeros and an LSE of -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._api.attention import weights
from ..packing import cu_seqlens as _cu_seqlens
from ._flash import UNLIMITED, FlashOptions, Result, attend, attend_packed, joined
from ._flash_cache import cache_of, decode, rotary_of, rotated

__all__ = [
    "apply_rotary_emb", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache", "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input",
]  # fmt: skip

# Padded batches


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] = UNLIMITED, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes attention of q (B, Lq, Hq, D), k (B, Lk, Hkv, D) and v (B, Lk, Hkv, Dv).

    Returns (B, Lq, Hq, Dv). The module's docstring describes the options.
    """
    options = FlashOptions(
        causal, window_size, softmax_scale, softcap, alibi_slopes, dropout_p, return_lse=return_attn_probs
    )
    return _with_probs(q, k, v, options) if return_attn_probs else attend(q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] = UNLIMITED, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes `flash_attn_func` of kv (B, Lk, 2, Hkv, D)."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes `flash_attn_func` of qkv (B, L, 3, H, D)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def _with_probs(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, the LSE and S_dmask.

    Without dropout, S_dmask is empty. With dropout, it holds the attention weights, and dropped
    weights have a negative sign.
    """
    if not options.dropout:
        return (*attend(q, k, v, options), q.new_empty(0))
    if options.differ_by_sample:
        samples = enumerate(zip(q.split(1), k.split(1), v.split(1), strict=True))
        results = [_with_probs(*sample, options.of_sample(b)) for b, sample in samples]
        return joined(results)  # type: ignore[no-any-return]
    options = options._replace(seed=torch.randint(2**63 - 1, ()))
    out, lse = attend(q, k, v, options)
    keywords = options.keywords() | {"mask": options.mask(k.shape[1], q.device)}
    del keywords["return_lse"]
    heads_first = [x.detach().transpose(1, 2) for x in (q, k, v)]
    probs, kept = weights(*heads_first, **keywords | {"dropout": 0.0}), weights(*heads_first, **keywords)
    return out, lse, torch.where(kept == 0, -probs, probs)


# Packed sequences


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Computes attention within each sequence of packed q (total_q, Hq, D), k and v (total_k, ...).

    `cu_seqlens_q` and `cu_seqlens_k` are the cumulative lengths (N + 1,). With `block_table`
    (N, max_pages), k and v are pages (pages, page, Hkv, D). `max_seqlen_q` and `max_seqlen_k` are
    ignored.

    Returns (total_q, Hq, Dv). The LSE is (Hq, total_q). The module's docstring describes the
    options.
    """
    options = FlashOptions(
        causal, window_size, softmax_scale, softcap, alibi_slopes, dropout_p, return_lse=return_attn_probs
    )
    if return_attn_probs and dropout_p and block_table is None:
        return _packed_with_probs(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    result = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, options, table=block_table)
    return (*result, q.new_empty(0)) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes `flash_attn_varlen_func` of kv (total_k, 2, Hkv, D)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = UNLIMITED,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Computes `flash_attn_varlen_func` of qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _packed_with_probs(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, options: FlashOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, the LSE and S_dmask for packed sequences, computed by `_with_probs`.

    S_dmask is padded with zeros to (N, Hq, longest Lq, longest Lk).
    """
    sizes_q, sizes_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    parts = zip(*(x[None].split(n, 1) for x, n in ((q, sizes_q), (k, sizes_k), (v, sizes_k))), strict=True)
    results = [_with_probs(a, b, c, options.of_sample(s)) for s, (a, b, c) in enumerate(parts)]
    Lq, Lk, probs = max(sizes_q), max(sizes_k), [result[2] for result in results]
    padded = [pad(x, (0, Lk - x.shape[-1], 0, Lq - x.shape[-2])) for x in probs]
    out, lse = joined([(out[0], lse[0]) for out, lse, _ in results], (0, 1))
    return out, lse, torch.cat(padded)


# Caches


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = UNLIMITED,
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Writes new keys and values to a cache, in place, and attends to the cache. No gradients.

    Args:
        q: (B, Lq, Hq, D).
        k_cache: (batch of the cache, capacity, Hkv, D), or pages (pages, page, Hkv, D) with
            `block_table`. Pages are read in place if their size is a power of two >= 16.
        v_cache: like k_cache.
        k: new keys (B, L, Hkv, D), written at `cache_seqlens`.
        v: new values, like k.
        rotary_cos: (max_length, dims / 2). Rotates k to the positions cache_seqlens,
            cache_seqlens + 1, ... Rotates q to the same positions if `causal` or with a window,
            else all queries to the position cache_seqlens.
        rotary_sin: like rotary_cos.
        cache_seqlens: the number of keys before the write, an int or (B,). Default: the capacity.
        cache_batch_idx: the row of the cache of each sample, (B,).
        cache_leftpad: the index of the first key of each sample, (B,).
        block_table: the pages of each sample, (B, max_pages).
        rotary_interleaved: whether a pair is (2i, 2i + 1), else (i, i + dims / 2).
        num_splits: ignored.
        return_softmax_lse: whether to return the LSE (B, Hq, Lq), too.

    Returns:
        (B, Lq, Hq, D).
    """
    options = FlashOptions(
        causal, window_size, softmax_scale, softcap, alibi_slopes, return_lse=return_softmax_lse
    )
    cache = cache_of(k_cache, v_cache, cache_seqlens, cache_leftpad, block_table)
    rotary = rotary_of(rotary_cos, rotary_sin, cache.length, rotary_interleaved)
    return decode(q, cache, (k, v), options, rotary, cache_batch_idx)


# Padding and rotary embeddings


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows `indices` (n,) of input (rows, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros (first_axis_dim, ...) whose rows `indices` (n,) are values (n, ...)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the real tokens of a padded batch (B, L, ...) into one row (total, ...).

    Args:
        hidden_states: (B, L, ...).
        attention_mask: (B, L) bool or int, nonzero = real token.
        unused_mask: (B, L), nonzero = a token that is packed, too, but not counted as real.

    Returns:
        the row; the tokens' indices in (B * L); the cumulative lengths (B + 1,) int32; the longest
        length; and the number of real tokens of each sample (B,).
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = _cu_seqlens(keep=packed.bool())
    longest: int = cu_seqlens.diff().max().item()  # type: ignore[assignment]  # torch.export traces item()
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Unpacks a row (total, ...) into a padded batch (batch, seqlen, ...). Padding is zero."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotates the first channels of queries or keys by their positions.

    Args:
        x: (B, L, H, D), or (total, H, D) with `cu_seqlens`.
        cos: (max_length, dims / 2). Only the first `dims` channels are rotated.
        sin: like cos.
        interleaved: whether a pair is (2i, 2i + 1), else (i, i + dims / 2).
        inplace: whether to write the result into x.
        seqlen_offsets: the position of the first token, an int or (B,).
        cu_seqlens: the cumulative lengths of packed sequences, (B + 1,).
        max_seqlen: ignored.
    """
    first = torch.as_tensor(seqlen_offsets, device=x.device)
    if cu_seqlens is None:
        positions = first.reshape(-1, 1).expand(len(x), -1) + torch.arange(x.shape[1], device=x.device)
    else:
        shift = (first - cu_seqlens[:-1]).repeat_interleave(cu_seqlens.diff(), output_size=len(x))
        positions = shift + torch.arange(len(x), device=x.device)
    out = rotated(x, cos, sin, positions, interleaved)
    if inplace:
        x.copy_(out)
    return x if inplace else out
