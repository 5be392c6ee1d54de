"""Attention within each sequence of a packed row or of a jagged nested tensor.

A packed row holds N sequences. `cu_seqlens` (N + 1,) are their cumulative lengths.
Positions start at 0 in every sequence, and `offset` applies to each sequence separately.

`attend_packed` and `attend_jagged` take the function `attention` as a parameter, because
`attention.py` imports this module.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._call.check import as_seed
from .._call.spec import QKV
from .._tools.arguments import broadcasts, describe, holds_integers, is_integer, readable
from ..masks import Documents, Mask, MaskKind, from_cu_seqlens
from ..scores import Alibi, RelativeBias

Attention = Callable[..., Any]
Options = dict[str, Any]  # the keyword arguments of `attention`
Result = tuple[Tensor, Tensor | None]  # out (Hq, total_q, Dv), and the LSE (Hq, total_q) or None

MAX_PLANS = 16


def attend_packed(
    attention: Attention, qkv: QKV, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options: Options
) -> Result:
    """Computes attention over packed q (Hq, total_q, D), k (Hkv, total_k, D), v (Hkv, total_k, Dv).

    One call of `attention` over the whole row suffices if the mask depends on distances only and
    one offset for the row gives each query its distances to the keys of its own sequence.
    Self-attention with equal offsets meets the second condition. Otherwise there is one call for
    each sequence. A padded batch would also be one call, but would spend time and memory on
    padding.
    """
    if not readable(cu_seqlens_q):
        row = _unread_row(qkv, cu_seqlens_q, cu_seqlens_k, options)
        return _attend(attention, qkv, options | {"mask": row, "offset": 0})
    plan = packed_plan(cu_seqlens_q, cu_seqlens_k, options, qkv[0].device)
    for name, x, sizes in zip("qkv", qkv, (plan.sizes_q, plan.sizes_k, plan.sizes_k), strict=True):
        if x.shape[1] != sum(sizes):
            raise ValueError(f"{name}: expected {sum(sizes)} tokens as in cu_seqlens, got {x.shape[1]}")
    if plan.row is None:
        return _one_by_one(attention, qkv, plan, options)
    return _attend(attention, qkv, options | {"mask": plan.row, "offset": plan.shift})


def attend_jagged(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention over nested q (N, Hq, jq, D), k (N, Hkv, jk, D) and v (N, Hkv, jk, Dv).

    jq and jk are the ragged dims. Returns nested out (N, Hq, jq, Dv) and, with `return_lse`, the
    nested LSE (N, Hq, jq).
    """
    rows_q, cu_seqlens_q = _row("q", q, len(q))
    rows_k, cu_seqlens_k = _row("k", k, len(q))
    rows_v, cu_seqlens_v = _row("v", v, len(q))
    if cu_seqlens_v is not cu_seqlens_k and not torch.equal(cu_seqlens_v, cu_seqlens_k):
        lengths = f"{cu_seqlens_k.diff().tolist()}, got {cu_seqlens_v.diff().tolist()}"
        raise ValueError(f"v: expected sequences as long as those of k, {lengths}")
    if isinstance(options["bias"], Tensor):
        raise TypeError(
            "bias: expected scores.Alibi or scores.RelativeBias with nested tensors, got a tensor; "
            "packing.varlen_attention takes a tensor over the packed row, (Hq, total_q, total_k)"
        )
    out, lse = attend_packed(attention, (rows_q, rows_k, rows_v), cu_seqlens_q, cu_seqlens_k, options)
    out = torch.nested.nested_tensor_from_jagged(out, cu_seqlens_q, jagged_dim=2)
    if lse is None:
        return out
    return out, torch.nested.nested_tensor_from_jagged(lse, cu_seqlens_q, jagged_dim=2)


def _row(name: str, x: Any, N: int) -> tuple[Tensor, Tensor]:
    """Returns the packed tokens (H, total, D) of a jagged tensor, and their cu_seqlens."""
    if not isinstance(x, Tensor) or x.layout is not torch.jagged:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a nested tensor of layout torch.jagged, like q, got {got}")
    nested: Any = x
    if x.ndim != 4 or nested._ragged_idx != 2:
        raise ValueError(
            f"{name}: expected (N, H, j, D) with ragged j, as from (N, j, H * D) by "
            f".unflatten(-1, (H, D)).transpose(1, 2), got {tuple(x.shape)}"
        )
    if nested.lengths() is not None:
        raise ValueError(f"{name}: expected no holes between the sequences; call .contiguous() to close them")
    if len(x) != N:
        raise ValueError(f"{name}: expected {N} sequences as in q, got {len(x)}")
    return nested.values(), nested.offsets()


def _attend(attention: Attention, qkv: QKV, options: Options) -> Result:
    result: Any = attention(*qkv, **options)
    return result if options["return_lse"] else (result, None)


# The plan of a packed call


class PackedPlan(NamedTuple):
    """How to run a packed call: as one call over all sequences, or one call for each sequence."""

    sizes_q: list[int]  # number of queries of each sequence
    sizes_k: list[int]  # number of keys of each sequence
    offsets: list[int]  # position of query 0 of each sequence
    row: Mask | None  # mask of one call over the row; None: one call for each sequence
    shift: int  # offset of the call over the row


def packed_plan(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options: Options, device: torch.device
) -> PackedPlan:
    """Returns the plan of a packed call with the options mask, bias and offset."""
    return _plan(
        _as_ints("cu_seqlens_q", cu_seqlens_q), _as_ints("cu_seqlens_k", cu_seqlens_k), options["mask"],
        _offset(options["offset"]), _by_distance(options), device,
    )  # fmt: skip


def _by_distance(options: Options) -> bool:
    """Returns whether the bias depends on distances."""
    return isinstance(options["bias"], Alibi | RelativeBias)


def _as_ints(name: str, cu_seqlens: Tensor) -> tuple[int, ...]:
    if cu_seqlens.ndim != 1 or not holds_integers(cu_seqlens):
        raise ValueError(f"{name}: expected integers of shape (N + 1,), got {describe(cu_seqlens)}")
    return tuple(cu_seqlens.tolist())


def _offset(offset: Any) -> int | tuple[int, ...] | None:
    if isinstance(offset, Tensor) and offset.ndim == 1 and holds_integers(offset):
        return tuple(offset.tolist())
    if offset is not None and not is_integer(offset):
        raise TypeError(f"offset: expected an int, or integers of shape (N,), got {describe(offset)}")
    return None if offset is None else operator.index(offset)


@functools.lru_cache(maxsize=MAX_PLANS)
def _plan(
    cu_seqlens_q: tuple[int, ...], cu_seqlens_k: tuple[int, ...], mask: Mask | None,
    offset: int | tuple[int, ...] | None, by_distance: bool, device: torch.device,
) -> PackedPlan:  # fmt: skip
    """Plans a packed call. The plan is cached, because all layers of a model share it.

    `by_distance` says whether the call has a bias that depends on distances.
    """
    with torch.inference_mode(False):  # inference tensors in the cached plan could not be used in training
        cu_seqlens = (torch.tensor(numbers, device=device) for numbers in (cu_seqlens_q, cu_seqlens_k))
        documents = from_cu_seqlens(*cu_seqlens)
    sizes_q, sizes_k = (
        [b - a for a, b in pairwise(cu_seqlens)] for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)
    )
    offsets = _offsets(offset, sizes_q, sizes_k)
    kinds = _kinds(mask)
    shifts = {o + k - q for o, q, k in zip(offsets, cu_seqlens_q, cu_seqlens_k, strict=False)}
    if not kinds and not by_distance:
        shifts = {0}  # neither mask nor bias depends on positions
    # In the row, two tokens of a sequence keep their distance, but not their positions.
    if MaskKind.POSITION in kinds or len(shifts) > 1:
        return PackedPlan(sizes_q, sizes_k, offsets, None, 0)
    return PackedPlan(
        sizes_q, sizes_k, offsets, documents if mask is None else documents & mask, shifts.pop()
    )


def _offsets(offset: int | tuple[int, ...] | None, sizes_q: list[int], sizes_k: list[int]) -> list[int]:
    if offset is None:
        return [k - q for q, k in zip(sizes_q, sizes_k, strict=True)]
    if isinstance(offset, int):
        return [offset] * len(sizes_q)
    if len(offset) != len(sizes_q):
        raise ValueError(f"offset: expected shape (N,) = ({len(sizes_q)},), got ({len(offset)},)")
    return list(offset)


def _unread_row(qkv: QKV, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options: Options) -> Mask:
    """Returns the mask of one call over all sequences, without reading the values of cu_seqlens.

    Used if the values cannot be read, as under torch.compile. Raises NotImplementedError if one
    call may not be enough.
    """
    mask, kinds = options["mask"], _kinds(options["mask"])
    self_attention = cu_seqlens_k is cu_seqlens_q and options["offset"] is None
    if MaskKind.POSITION in kinds or not (self_attention or (not kinds and not _by_distance(options))):
        raise NotImplementedError(
            "cu_seqlens cannot be read under torch.compile, so a mask or bias with positions "
            "needs the same cu_seqlens for queries and keys, no offset, and Causal, Window or Dilated"
        )
    q_ids = _ids(cu_seqlens_q, qkv[0].shape[1])
    documents = Documents(
        q_ids, q_ids if cu_seqlens_k is cu_seqlens_q else _ids(cu_seqlens_k, qkv[1].shape[1])
    )
    return documents if mask is None else documents & mask


def _ids(cu_seqlens: Tensor, total: int) -> Tensor:
    """Returns the index of each token's sequence, (total,)."""
    return torch.repeat_interleave(
        torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device), cu_seqlens.diff(), output_size=total
    )


def _kinds(mask: Any) -> frozenset[MaskKind]:
    """Returns what a mask depends on: distances, positions or both. Empty without a mask.

    Raises TypeError if the mask depends on query or key indices, as `Dense` does, because it then
    fits only one size of call, not every sequence.
    """
    if mask is None:
        return frozenset()
    if not isinstance(mask, Mask) or MaskKind.INDEX in mask.kinds:
        raise TypeError(
            "mask: expected a mask that applies to sequences of any length (Causal, Window, Dilated, Prefix, "
            f"Global, RandomBlocks, PerHead, combined with &, |, ~), got {describe(mask)}; over one packed "
            "row: attention(..., mask=masks.from_cu_seqlens(cu_seqlens) & mask)"
        )
    return mask.kinds


# One call for each sequence


def _one_by_one(attention: Attention, qkv: QKV, plan: PackedPlan, options: Options) -> Result:
    (q, k, v), sizes_q, sizes_k = qkv, plan.sizes_q, plan.sizes_k
    # The gradient of `split` is one concatenation; the gradient of N slices is N padded sums.
    qs, ks, vs = q.split(sizes_q, 1), k.split(sizes_k, 1), v.split(sizes_k, 1)
    per_sequence = {
        "offset": plan.offsets,
        "bias": _blocks(options["bias"], (len(q), q.shape[1], k.shape[1]), sizes_q, sizes_k),
        "seed": _seeds(options["seed"], len(sizes_q)),
    }
    results = []
    for s in range(len(sizes_q)):
        changes = {name: values[s] for name, values in per_sequence.items()}
        results.append(_attend(attention, (qs[s], ks[s], vs[s]), options | changes))
    # Concatenated as (total, H, D), the usual memory order of packed tokens.
    out = torch.cat([x.transpose(0, 1) for x, _ in results]).transpose(0, 1)
    lses = [lse for _, lse in results if lse is not None]
    return out, torch.cat(lses, 1) if lses else None


def _blocks(bias: Any, target: tuple[int, int, int], sizes_q: list[int], sizes_k: list[int]) -> list[Any]:
    """Returns the bias of each sequence.

    For a tensor (Hq, total_q, total_k) this is the block of the sequence's queries and keys.
    """
    if not isinstance(bias, Tensor):
        return [bias] * len(sizes_q)
    if not broadcasts(tuple(bias.shape), target):
        raise ValueError(f"bias: expected a shape broadcastable to {target}, got {tuple(bias.shape)}")
    bias = torch.atleast_2d(bias)
    columns = bias.split(sizes_k, -1) if bias.shape[-1] > 1 else [bias] * len(sizes_k)
    return [x.split(sizes_q, -2)[s] if x.shape[-2] > 1 else x for s, x in enumerate(columns)]


def _seeds(seed: int | Tensor | None, count: int) -> list[Any]:
    """Returns one seed for each sequence, so that their dropout patterns differ."""
    if seed is None:
        return [None] * count
    first = as_seed(seed, 0.0)
    return [(first + s) % 2**64 for s in range(count)]
