"""The cost of layers and models: the sum of their matrix products and attention calls."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from .._tools.arguments import count
from ..masks import Mask
from ._cache import AnyFormat, Format, What, allocated_bytes, cache_bytes, format_of, layers_of
from ._call import Flops
from ._layers import LayerSpec, Work
from ._model import ModelSpec


class CostRow(NamedTuple):
    """One row of a cost table: a name, an integer, its unit, and how it was counted."""

    name: str
    value: int
    unit: str
    convention: str


@dataclass(frozen=True)
class TotalCost:
    """The cost of layers or of a model.

    Byte counts include each tensor once, even if the kernels read it several times.
    """

    parameters: int
    products: dict[str, int]  # name -> forward FLOPs of all matrix products of this name outside attention
    forward: Flops  # attention only
    backward: Flops  # attention only
    saved_bytes: int
    scratch_bytes: int
    read_bytes: int
    written_bytes: int
    cache_bytes: int  # the bytes that the cached tokens need
    allocated_bytes: int  # the bytes that `regard.cache` allocates for these tokens

    @property
    def product_flops(self) -> int:
        return sum(self.products.values())

    @property
    def forward_flops(self) -> Flops:
        """Forward FLOPs of attention and of all other matrix products.

        The four conventions of `Flops` differ in the FLOPs of attention only.
        """
        return self.forward.plus(self.product_flops)

    @property
    def backward_flops(self) -> Flops:
        """Backward FLOPs of attention and of all other matrix products.

        Attention has five products in backward for two in forward. Any other product has two in
        backward for one in forward.
        """
        return self.backward.plus(2 * self.product_flops)

    @property
    def training_flops(self) -> int:
        """Three times the forward FLOPs for all query-key pairs (`dense`): the usual convention.

        It ignores that the backward pass recomputes the scores.
        """
        return 3 * self.forward_flops.dense

    def rows(self) -> list[CostRow]:
        products = [CostRow(name, flops, "FLOP", "forward, 2 m k n") for name, flops in self.products.items()]
        return [
            CostRow("parameters", self.parameters, "", "weights, biases, norms, tables"),
            *products,
            *_flop_rows("attention", self.forward, self.backward),
            *_flop_rows("total", self.forward_flops, self.backward_flops),
            CostRow("training", self.training_flops, "FLOP", "3 x forward, all pairs, no recomputation"),
            CostRow("saved for backward", self.saved_bytes, "B", SAVED),
            CostRow("scratch", self.scratch_bytes, "B", "largest attention call, all threads"),
            CostRow("read", self.read_bytes, "B", "forward, every operand once"),
            CostRow("written", self.written_bytes, "B", "forward, every result once"),
            CostRow("cache", self.cache_bytes, "B", "keys and values, without spare capacity"),
            CostRow("cache, allocated", self.allocated_bytes, "B", "with spare rows and pages"),
        ]

    def to_json(self) -> str:
        return json.dumps({"cost": asdict(self), "rows": [row._asdict() for row in self.rows()]}, indent=2)

    def __str__(self) -> str:
        rows = self.rows()
        name, number = max(len(row.name) for row in rows), max(len(f"{row.value:,}") for row in rows)
        return "\n".join(
            f"{row.name:<{name}}  {row.value:>{number},} {row.unit:<4}  {row.convention}" for row in rows
        )


SAVED = "inputs of products, q, k, v, results, row sums; not norms and rotations"
COUNTED = {
    "dense": "all pairs",
    "halved": "half of all pairs (FlashAttention's count)",
    "causal": "the exact triangle",
    "visible": "pairs that the mask allows",
    "executed": "pairs that the kernels compute",
}


def _flop_rows(what: str, forward: Flops, backward: Flops) -> list[CostRow]:
    """Returns a table row for each pass and each convention of counting FLOPs.

    The convention `halved` is used for attention only.
    """
    names = [name for name in COUNTED if what == "attention" or name != "halved"]
    passes = {"fwd": forward, "bwd": backward}
    return [
        CostRow(f"{what} {direction}, {name}", getattr(flops, name), "FLOP", COUNTED[name])
        for direction, flops in passes.items()
        for name in names
    ]


def estimate(
    what: What, tokens: int, *, past: int = 0, B: int = 1, dtype: torch.dtype = torch.float32,
    mask: Mask | None = None, cache: AnyFormat | None = None, page: int | None = None,
) -> TotalCost:  # fmt: skip
    """Estimates the cost of a forward and a backward pass over `tokens` tokens.

    Args:
        what: a layer spec, several layer specs, a model spec, or a module, whose attention layers
            are counted. `from_module`, `layers_in` and `from_config` return specs.
        tokens: new tokens per sample.
        past: earlier tokens per sample, stored in a cache.
        B: batch size.
        dtype: dtype of weights and activations.
        mask: a mask that is combined with each layer's mask by `&`, such as `masks.Documents(ids)`
            or `masks.Lengths(n)`.
        cache: storage format of cached keys and values. Default: `dtype`.
        page: page size in tokens, for a `PagedCache`.

    Example:
        >>> print(estimate(AttentionSpec(512, 8, kv_heads=2, mask=masks.Causal()), 1024))
    """
    work = Work(count("tokens", tokens, 1), count("past", past), count("B", B, 1), dtype, mask)
    layers, size, stored = layers_of(what), dtype.itemsize, format_of(dtype if cache is None else cache)
    for layer in layers:
        layer.check(work)
    whole, parts = ((what,), what.parts) if isinstance(what, ModelSpec) else (layers, layers)
    equal = Counter(parts).items()  # the cost of equal parts is computed once
    products = [product for part, times in equal for product in part.products(work) * times]
    calls = [cost for part, times in equal for call in part.calls(work) for cost in [call.cost()] * times]
    by_name: Counter[str] = Counter()
    for product in products:
        by_name[product.name] += product.flops
    read = sum(x.read for x in products) * size + sum(_as_stored(layer, work, stored) for layer in layers)
    return TotalCost(
        parameters=sum(x.parameters for x in whole),
        products=dict(by_name),
        forward=sum((call.forward for call in calls), Flops()),
        backward=sum((call.backward for call in calls), Flops()),
        saved_bytes=size * sum(x.inputs(work) for x in parts) + sum(call.saved_bytes for call in calls),
        scratch_bytes=max((call.scratch_bytes for call in calls), default=0),
        read_bytes=read + sum(call.read_bytes for call in calls),
        written_bytes=size * sum(x.written for x in products) + sum(call.written_bytes for call in calls),
        cache_bytes=cache_bytes(what, work.Lk, B=B, format=stored),
        allocated_bytes=allocated_bytes(what, work.Lk, B=B, format=stored, page=page),
    )


def _as_stored(layer: LayerSpec, work: Work, stored: Format) -> int:
    """Returns a correction, in bytes, that is added to the bytes read by a layer's attention calls.

    The cost of the calls assumes that they read all past tokens in `work.dtype`. In fact they read
    the cache, in the format `stored` and limited to the window. The correction is the difference of
    these sizes. It is 0 if the calls do not read the cache in place.
    """
    if not layer.reads_cache:
        return 0
    unquantized = work.B * work.past * layer.kv_values * work.dtype.itemsize
    return cache_bytes(layer, work.past, B=work.B, format=stored) - unquantized
