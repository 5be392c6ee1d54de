"""The public functions `evidence` and `rollout`, which compute facts at O(n) memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._backends.dispatch import TABLE, select
from .._backends.torch.evidence import COLLECTORS
from .._call.make import make
from .._call.spec import Bias, Options, Problem, learned
from .._tools.arguments import as_int, describe, is_integer
from .._tools.watching import PLAIN, is_watched, uncompiled
from .._tools.words import hide_unknown, unknown_keyword
from ..facts import ColumnMass, Fact, MassOn
from ..masks import Mask


class Evidence(tuple[Any, ...]):
    """The results of `evidence`: a tuple with one result for each requested fact."""

    want: tuple[Fact, ...]

    def __new__(cls, want: Sequence[Fact], results: Sequence[Any]) -> Evidence:
        self = super().__new__(cls, results)
        self.want = tuple(want)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.want, tuple(self)

    def __repr__(self) -> str:
        return f"Evidence({', '.join(map(repr, self.want))})"


@hide_unknown
def evidence(
    q: Tensor, k: Tensor, v: Tensor | None = None, *want: Fact,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    impl: str = "auto", **unknown: NoReturn,
) -> Evidence:  # fmt: skip
    """Computes exact facts about the attention weights, at O(n) memory.

    The weights p = softmax(cap(scale * q.k) + bias, where the mask allows) are those of `attention`
    with the same arguments, before dropout. They are computed tile by tile and never stored as a
    whole. Results carry no gradient.

    Args:
        q: queries (..., Hq, Lq, D), (Hq, Lq, D) or (Lq, D).
        k: keys (..., Hkv, Lk, D).
        v: values (..., Hkv, Lk, Dv), or None. They are checked as in `attention`, but not
            used.
        want: facts of `regard.facts`: `Rows`, `TopK`, `ColumnMass`, `Entropy`, `RowMax`,
            `DistanceHistogram`, `MassOn`, `BlockMass`, `BlockMax`.
        mask, offset, bias, scale, softcap, sink: as in `attention`.
        impl: "auto", "native", "torch" or "reference". A backend chosen by name is
            never replaced by another.

    Returns:
        A tuple with the result of each fact, in the order of `want`. Results have q's leading dims
        (..., Hq), or none if q is (Lq, D). They are float32 (float64 for float64 inputs); key
        indices and distances are int64. A fully masked row has weights 0, entropy 0 and key indices
        -1.

    Example:
        >>> top, entropy = regard.evidence(
        ...     q, k, None, regard.TopK(8), regard.Entropy(), mask=masks.Causal())
        >>> top.keys.shape, entropy.nats.shape
    """
    if unknown:
        raise unknown_keyword(evidence, unknown)
    result: Evidence = _compute(q, k, v, want, Options(mask, offset, bias, scale, softcap, sink), impl)
    return result


@uncompiled
def _compute(
    q: Tensor, k: Tensor, v: Tensor | None, want: tuple[Fact, ...], options: Options, impl: str
) -> Evidence:
    _check_want(want)
    with torch.no_grad():
        problem = make(q, k, _no_values(k, v), options)
        _check_plain(problem)
        for fact in want:
            fact.check(problem.spec)
        parts = TABLE["evidence"][select("evidence", problem, impl)].run(problem, want)
    return Evidence(want, [fact.result(x, problem.spec) for fact, x in zip(want, parts, strict=True)])


def rollout(layers: Sequence[Sequence[Any]], row: int, *, impl: str = "auto") -> Tensor:
    """Computes one row of attention rollout, (..., L): each input token's share in output `row`.

    Attention rollout is the product of one matrix for each layer: A + I, with rows scaled to sum to
    1. A is the mean of the layer's attention weights over heads. I, the identity, stands for the
    residual connection. One row of the product needs only one vector-matrix product for each layer,
    computed tile by tile at O(L) memory.

    Args:
        layers: the layers in order, each (q, k) or (q, k, options): queries (..., Hq, L, D) and
            keys (..., Hkv, L, D) of self-attention, and a dict of keyword arguments of `evidence`,
            such as `mask`.
        row: the index of the output token, -1 for the last.
        impl: as in `evidence`.
    """
    if not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"layers: expected at least one (q, k) or (q, k, options), got {describe(layers)}")
    checked = [_layer(n, layer) for n, layer in enumerate(layers)]
    L = checked[0][0].shape[-2]
    for n, (q, *_) in enumerate(checked):
        if q.shape[-2] != L:
            raise ValueError(f"layers[{n}]: expected L = {L} tokens as in layers[0], got {q.shape[-2]}")
    if not is_integer(row):
        raise TypeError(f"row: expected an int, got {describe(row)}")
    if not -L <= as_int(row) < L:
        raise ValueError(f"row: expected a token below L = {L}, got {row}")
    vector = torch.zeros(L, dtype=torch.float64)
    vector[as_int(row)] = 1
    for q, k, options in reversed(checked):
        vector = _step_back(vector.to(q.device), q, k, {"impl": impl, **options})
    return vector.to(torch.float64 if checked[0][0].dtype is torch.float64 else torch.float32)


def _layer(n: int, layer: Sequence[Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Checks layer n of `rollout` and returns its q, k and options."""
    if not isinstance(layer, Sequence) or len(layer) not in (2, 3):
        raise TypeError(f"layers[{n}]: expected (q, k) or (q, k, options), got {describe(layer)}")
    q, k, options = (*layer, {})[:3]
    if not isinstance(options, dict):
        raise TypeError(f"layers[{n}]: expected options as a dict, got {describe(options)}")
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and min(q.ndim, k.ndim) > 1
    if not tensors or q.shape[-2] != k.shape[-2]:
        got = f"{describe(q)} and {describe(k)}"
        raise ValueError(f"layers[{n}]: expected q and k of equal length, as in self-attention, got {got}")
    return q, k, options


def _step_back(vector: Tensor, q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns vector (..., L) times the rollout matrix (L, L) of one layer.

    The matrix is A + I with rows scaled to sum to 1, where A is the mean of the attention weights
    over heads. Rows of A sum to less than 1 if there is a sink.
    """
    all_keys = torch.ones(k.shape[-2], dtype=torch.bool)
    (row_sums,) = evidence(q, k, None, MassOn(all_keys), **options)
    share = vector / (1 + _mean_over_heads(q, row_sums))
    (column_sums,) = evidence(q, k, None, ColumnMass(share), **options)
    return share + _mean_over_heads(q, column_sums)


def _mean_over_heads(q: Tensor, x: Tensor) -> Tensor:
    """Averages x over heads in float64: (..., Hq, L) -> (..., L).

    If q is (L, D), x has no heads and is only converted.
    """
    return x.double() if q.ndim == 2 else x.mean(-2, dtype=torch.float64)


def _check_want(want: tuple[Fact, ...]) -> None:
    if not want:
        raise ValueError("want: expected at least one fact, such as regard.Entropy(), got none")
    for fact in want:
        if type(fact) not in COLLECTORS:
            raise TypeError(f"want: expected facts, such as regard.Entropy(), got {describe(fact)}")


def _no_values(k: Tensor, v: Tensor | None) -> Tensor:
    """Returns a placeholder for v with Dv = 0, because facts do not depend on the values."""
    like = k if v is None else v
    return like[..., :0] if isinstance(like, Tensor) and like.ndim and not like.is_nested else like


def _check_plain(problem: Problem) -> None:
    """Raises NotImplementedError for traced or transformed calls, subclasses and meta tensors."""
    plain = all(x is None or type(x) in PLAIN for x in (learned(problem.bias), problem.sink))
    if is_watched(problem.q, problem.k, problem.v, by_profiler=False) or not plain or problem.q.is_meta:
        raise NotImplementedError(
            "evidence: expected plain tensors with values, got tensors that PyTorch traces or transforms; "
            "call it outside of vmap and of modes"
        )
