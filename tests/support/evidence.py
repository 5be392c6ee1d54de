"""Facts of sampled calls, their expected results, and error limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from regard import facts as F, masks as M
from regard._backends.native import core
from regard.scores import Alibi, RelativeBias
from support import rel_l2
from support.forward import UNIT, Call, doubled, largest, sample

LIMIT = {torch.float64: 1e-11}  # relative L2; 1e-5 for other dtypes
ATTENTION_ONLY = ("dropout", "seed", "return_lse")


def every_fact(Lq: int, Lk: int, seed: int = 0) -> list[F.Fact]:
    """Returns facts of every kind. Some kinds occur twice with different arguments."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(Lk, generator=generator) < 0.3
    return [
        F.Rows([0, Lq // 2, -1]), F.TopK(8), F.ColumnMass(), F.Entropy(), F.RowMax(), F.DistanceHistogram(),
        F.MassOn(chosen), F.BlockMass(5), F.BlockMax(5), F.MassOn([0, -1, Lk // 3]), F.TopK(2),
        F.BlockMass(64), F.ColumnMass(torch.rand(Lq, generator=generator)), F.Rows([Lq // 3]),
    ]  # fmt: skip


def options_of(name: str, B: int, Hq: int, Lq: int, Lk: int) -> dict[str, Any]:
    """Returns the `attention` option of the given name."""
    ids = torch.arange(Lk) * 5 // Lk
    keep = torch.rand(1, Hq, Lq, Lk) < 0.4
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "none": dict,
        "causal": lambda: {"mask": M.Causal()},
        "causal at 0": lambda: {"mask": M.Causal(), "offset": 0},
        "window": lambda: {"mask": M.Window(19, 7)},
        "padding": lambda: {"mask": M.Lengths([Lk - 11 * (b + 1) for b in range(B)])},
        "packed": lambda: {"mask": M.Documents(ids) & M.Causal()},
        "dense": lambda: {"mask": M.Dense(keep)},
        "dilated": lambda: {"mask": M.Dilated(3) & M.Causal()},
        "dilated by head": lambda: {"mask": M.PerHead([M.Dilated(1 + h) for h in range(Hq)])},
        "longformer": lambda: {"mask": M.longformer((9, 9), [0, Lk // 2])},
        "bigbird": lambda: {"mask": M.bigbird(16)},
        "not": lambda: {"mask": ~M.Window(3, 3)},
        "bias": lambda: {"bias": torch.randn(B, Hq, Lq, Lk)},
        "excluding bias": lambda: {"bias": torch.randn(1, Hq, Lq, Lk).masked_fill(~keep, -float("inf"))},
        "alibi": lambda: {"bias": Alibi.standard(Hq), "mask": M.Causal()},
        "relative": lambda: {"bias": RelativeBias(torch.randn(32, Hq), max_distance=50)},
        "softcap": lambda: {"softcap": 2.0},
        "sink": lambda: {"sink": torch.randn(Hq), "mask": M.Causal()},
        "scale": lambda: {"scale": 0.03},
        "offset": lambda: {"offset": Lk // 3, "mask": M.Causal()},
        "offsets": lambda: {"offset": torch.arange(B) * 17 - 5, "mask": M.Window(30, 2)},
        "everything": lambda: {
            "mask": M.Window(40, 0) & M.Dilated(2), "bias": torch.randn(1, Hq, 1, Lk), "softcap": 3.0,
            "sink": torch.randn(Hq), "scale": 0.2, "offset": Lk - 5,
        },
    }  # fmt: skip
    return makers[name]()


OPTIONS = (
    "none", "causal", "causal at 0", "window", "padding", "packed", "dense", "dilated", "dilated by head",
    "longformer", "bigbird", "not", "bias", "excluding bias", "alibi", "relative", "softcap", "sink", "scale",
    "offset", "offsets", "everything",
)  # fmt: skip


def without_dropout(call: Call) -> Call:
    return call._replace(options={n: x for n, x in call.options.items() if n not in ATTENTION_ONLY})


def run(call: Call, want: list[F.Fact], impl: str) -> regard.Evidence:
    with core.use_isa(call.isa):
        return regard.evidence(call.q, call.k, call.v, *want, **call.options, impl=impl)


def expected(call: Call, want: list[F.Fact]) -> regard.Evidence:
    """Returns the facts from the reference definition, in float64."""
    q, k, v = (x.double() for x in call[:3])
    options = {n: doubled(x) for n, x in call.options.items()}
    return regard.evidence(q, k, v, *want, **options, impl="reference")


def float_tensors(result: Any) -> list[Tensor]:
    """Returns a result's floating-point tensors.

    Key indices are excluded: nearly equal weights may swap.
    """
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, F.Pyramid):
        return result.levels
    return [x for x in result if x.is_floating_point()]


def faults(call: Call, want: list[F.Fact], impl: str) -> list[str]:
    """Returns the faults of a call's facts, [] if there are none."""
    actual, reference = run(call, want, impl), expected(call, want)
    matrix, limit = matrix_of(call), allowed(call)
    messages = []
    for fact, result, expected_result in zip(want, actual, reference, strict=True):
        messages += [f"{fact}: {fault}" for fault in value_faults(result, expected_result, limit)]
        if isinstance(result, F.TopKResult | F.RowMaxResult):
            messages += [f"{fact}: {fault}" for fault in key_faults(result, expected_result, matrix, limit)]
    return messages


def allowed(call: Call) -> float:
    """Returns the error limit.

    The limit grows with |LSE|, because the rounding error of scores of that size does.
    """
    dtype, (_, lse) = call.q.dtype, call.expected()
    return max(LIMIT.get(dtype, 1e-5), 8 * UNIT[dtype] * largest(lse))


def matrix_of(call: Call) -> Tensor:
    options = {n: doubled(x) for n, x in call.options.items()}
    return regard.weights(*(x.double() for x in call[:3]), **options)


def value_faults(result: Any, expected_result: Any, limit: float) -> list[str]:
    messages = []
    for x, y in zip(float_tensors(result), float_tensors(expected_result), strict=True):
        if x.shape != y.shape:
            messages.append(f"shape {tuple(x.shape)} for {tuple(y.shape)}")
        elif x.isnan().any() or y.isnan().any():
            messages.append("NaN")
        elif (error := rel_l2(x, y)) > limit:
            messages.append(f"error {error:.3g} above {limit:.3g}")
    if isinstance(result, F.DistanceResult) and not torch.equal(result.distances, expected_result.distances):
        messages.append("distances differ")
    return messages


def key_faults(result: Any, expected_result: Any, matrix: Tensor, limit: float) -> list[str]:
    """Checks that keys are distinct, weights sorted, and each key has its weight in `matrix`."""
    keys, weights = result.keys, result.weights
    if not torch.equal(keys == -1, expected_result.keys == -1):
        return ["missing keys differ"]
    if keys.ndim < matrix.ndim:
        keys, weights = keys[..., None], weights[..., None]
    sorted_keys = keys.sort(-1).values
    if ((sorted_keys[..., 1:] == sorted_keys[..., :-1]) & (sorted_keys[..., 1:] != -1)).any():
        return ["duplicate key"]
    if (weights[..., 1:] > weights[..., :-1]).any():
        return ["not sorted"]
    if not matrix.shape[-1]:
        return []
    exact = matrix.gather(-1, keys.clamp(min=0)).masked_fill(keys == -1, 0.0)
    return [] if rel_l2(weights, exact) <= limit else [f"keys of other weights, {rel_l2(weights, exact):.3g}"]


def failures(seeds: range, work: float, impl: str) -> str:
    """Returns a report of the sampled calls with faults, empty if there are none."""
    report = []
    for seed in seeds:
        call = without_dropout(sample(seed, work))
        messages = faults(call, every_fact(call.q.shape[-2], call.k.shape[-2], seed), impl)
        report += [f"seed {seed}: {'; '.join(messages)} in {call}"] if messages else []
    return "\n".join(report)
