"""The cost of layers and models, added up from their products and their calls of attention."""

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
    """An integer with its unit, and what it counts."""

    name: str
    value: int
    unit: str
    convention: str


@dataclass(frozen=True)
class TotalCost:
    """Integers all. Bytes count every tensor once."""

    parameters: int
    products: dict[str, int]  # forward FLOPs of matrix products, by name
    forward: Flops  # of attention itself
    backward: Flops
    saved_bytes: int
    scratch_bytes: int
    read_bytes: int
    written_bytes: int
    cache_bytes: int  # what the tokens need
    allocated_bytes: int  # what caches of `regard.cache` hold for them

    @property
    def product_flops(self) -> int:
        return sum(self.products.values())

    @property
    def forward_flops(self) -> Flops:
        """Of everything, by what is counted of attention."""
        return self.forward.plus(self.product_flops)

    @property
    def backward_flops(self) -> Flops:
        """Of everything: two products for each one forward; attention computes its scores again."""
        return self.backward.plus(2 * self.product_flops)

    @property
    def training_flops(self) -> int:
        """Three times dense forward: the usual convention, in which nothing is computed again."""
        return 3 * self.forward_flops.dense

    def rows(self) -> list[CostRow]:
        products = [CostRow(name, flops, "FLOP", "forward, 2 m k n") for name, flops in self.products.items()]
        return [
            CostRow("parameters", self.parameters, "", "weights, biases, norms, tables"),
            *products,
            *_flop_rows("attention", self.forward, self.backward),
            *_flop_rows("total", self.forward_flops, self.backward_flops),
            CostRow("training", self.training_flops, "FLOP", "3 x forward, all pairs, nothing recomputed"),
            CostRow("saved for backward", self.saved_bytes, "B", SAVED),
            CostRow("scratch", self.scratch_bytes, "B", "of the largest attention call, all threads"),
            CostRow("read", self.read_bytes, "B", "forward, every factor and input once"),
            CostRow("written", self.written_bytes, "B", "forward, every result once"),
            CostRow("cache", self.cache_bytes, "B", "keys and values, without slack"),
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
    "visible": "pairs that the mask leaves",
    "executed": "as tiled with this mask",
}


def _flop_rows(what: str, forward: Flops, backward: Flops) -> list[CostRow]:
    """Halving is a convention of attention alone. Backward computes the scores again."""
    names = [name for name in COUNTED if what == "attention" or name != "halved"]
    ways = {"fwd": forward, "bwd": backward}
    return [
        CostRow(f"{what} {way}, {name}", getattr(found, name), "FLOP", COUNTED[name])
        for way, found in ways.items()
        for name in names
    ]


def estimate(
    what: What, tokens: int, *, past: int = 0, B: int = 1, dtype: torch.dtype = torch.float32,
    mask: Mask | None = None, cache: AnyFormat | None = None, page: int | None = None,
) -> TotalCost:  # fmt: skip
    """Estimates what a forward and a backward pass over `tokens` tokens cost.

    Args:
        what: a layer, layers, or a model, from numbers, `from_module`, `layers_in` or `from_config`.
        tokens: new tokens of each sample.
        past: tokens before them, which a cache holds.
        B: samples.
        dtype: of weights and activations.
        mask: narrows the masks of the layers: `masks.Documents(ids)`, `masks.Lengths(n)`.
        cache: the format of keys and values in a cache. Default: the dtype.
        page: tokens of a page, for a `PagedCache`.

    Example:
        >>> print(estimate(AttentionSpec(512, 8, kv_heads=2, mask=masks.Causal()), 1024))
    """
    work = Work(count("tokens", tokens, 1), count("past", past), count("B", B, 1), dtype, mask)
    layers, size, kept = layers_of(what), dtype.itemsize, format_of(dtype if cache is None else cache)
    for layer in layers:
        layer.check(work)
    whole, parts = ((what,), what.parts) if isinstance(what, ModelSpec) else (layers, layers)
    equal = Counter(parts).items()  # counted once, however many there are
    products = [product for part, times in equal for product in part.products(work) * times]
    calls = [cost for part, times in equal for call in part.calls(work) for cost in [call.cost()] * times]
    by_name: Counter[str] = Counter()
    for product in products:
        by_name[product.name] += product.flops
    read = sum(x.read for x in products) * size + sum(_as_stored(layer, work, kept) for layer in layers)
    return TotalCost(
        parameters=sum(x.parameters for x in whole),
        products=dict(by_name),
        forward=sum((call.forward for call in calls), Flops()),
        backward=sum((call.backward for call in calls), Flops()),
        saved_bytes=size * sum(x.inputs(work) for x in parts) + sum(call.saved_bytes for call in calls),
        scratch_bytes=max((call.scratch_bytes for call in calls), default=0),
        read_bytes=read + sum(call.read_bytes for call in calls),
        written_bytes=size * sum(x.written for x in products) + sum(call.written_bytes for call in calls),
        cache_bytes=cache_bytes(what, work.Lk, B=B, format=kept),
        allocated_bytes=allocated_bytes(what, work.Lk, B=B, format=kept, page=page),
    )


def _as_stored(layer: LayerSpec, work: Work, kept: Format) -> int:
    """Returns how many bytes more are read because the past lies in a cache, in its format and window."""
    if not layer.reads_cache:
        return 0
    plain = work.B * work.past * layer.kv_values * work.dtype.itemsize
    return cache_bytes(layer, work.past, B=work.B, format=kept) - plain
