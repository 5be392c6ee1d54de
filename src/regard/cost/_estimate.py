"""What layers and models cost, added up from their products and their calls of attention."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import torch

from .._tools.arguments import count
from ..masks import Mask
from ._cache import What, allocated_bytes, cache_bytes, layers_of
from ._call import Flops
from ._formats import Format, format_of
from ._layers import Layer, Product, Work
from ._model import Model


class Row(NamedTuple):
    """An integer with its unit, and what it counts."""

    name: str
    value: int
    unit: str
    convention: str


@dataclass(frozen=True)
class Cost:
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
        return self._with_products(self.forward, 1)

    @property
    def backward_flops(self) -> Flops:
        """Of everything: two products for each one forward; attention computes its scores again."""
        return self._with_products(self.backward, 2)

    def _with_products(self, attention: Flops, times: int) -> Flops:
        return Flops(*(getattr(attention, f.name) + times * self.product_flops for f in fields(Flops)))

    @property
    def training_flops(self) -> int:
        """Three times dense forward: the usual convention, in which nothing is computed again."""
        return 3 * self.forward_flops.dense

    def rows(self) -> list[Row]:
        products = [Row(name, flops, "FLOP", "forward, 2 m k n") for name, flops in self.products.items()]
        return [
            Row("parameters", self.parameters, "", "weights, biases, norms, tables"),
            *products,
            *_flop_rows("attention", self.forward, self.backward),
            *_flop_rows("total", self.forward_flops, self.backward_flops),
            Row("training", self.training_flops, "FLOP", "3 x forward, all pairs, nothing recomputed"),
            Row("saved for backward", self.saved_bytes, "B", SAVED),
            Row("scratch", self.scratch_bytes, "B", "of the largest attention call, all threads"),
            Row("read", self.read_bytes, "B", "forward, every factor and input once"),
            Row("written", self.written_bytes, "B", "forward, every result once"),
            Row("cache", self.cache_bytes, "B", "keys and values, without slack"),
            Row("cache, allocated", self.allocated_bytes, "B", "with spare rows and pages"),
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


def _flop_rows(what: str, forward: Flops, backward: Flops) -> list[Row]:
    """Halving is a convention of attention alone. Backward computes the scores again."""
    names = [name for name in COUNTED if what == "attention" or name != "halved"]
    ways = {"fwd": forward, "bwd": backward}
    return [
        Row(f"{what} {way}, {name}", getattr(found, name), "FLOP", COUNTED[name])
        for way, found in ways.items()
        for name in names
    ]


def estimate(
    what: What,
    tokens: int,
    *,
    past: int = 0,
    B: int = 1,
    dtype: torch.dtype = torch.float32,
    mask: Mask | None = None,
    cache: str | torch.dtype | Format | None = None,
    page: int | None = None,
) -> Cost:
    """What a forward and a backward pass over so many tokens cost.

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
        >>> print(estimate(Heads(512, 8, kv_heads=2, mask=masks.Causal()), 1024))
    """
    work = Work(count("tokens", tokens, 1), count("past", past), count("B", B, 1), dtype, mask)
    for layer in layers_of(what):
        layer.check(work)
    parts = Counter(what.parts if isinstance(what, Model) else layers_of(what))
    products = [(times, product) for part, times in parts.items() for product in part.products(work)]
    calls = [(times, call.cost()) for part, times in parts.items() for call in part.calls(work)]
    inputs = sum(times * part.inputs(work) for part, times in parts.items())
    read = sum(times * product.read for times, product in products)
    written = sum(times * product.written for times, product in products)
    size, kept = dtype.itemsize, format_of(dtype if cache is None else cache)
    stored = sum(_as_stored(layer, work, kept) for layer in layers_of(what))
    return Cost(
        parameters=what.parameters if isinstance(what, Model) else sum(x.parameters for x in layers_of(what)),
        products=_by_name(products),
        forward=sum((call.forward.times(times) for times, call in calls), Flops()),
        backward=sum((call.backward.times(times) for times, call in calls), Flops()),
        saved_bytes=size * inputs + sum(times * call.saved_bytes for times, call in calls),
        scratch_bytes=max((call.scratch_bytes for _, call in calls), default=0),
        read_bytes=size * read + sum(times * call.read_bytes for times, call in calls) + stored,
        written_bytes=size * written + sum(times * call.written_bytes for times, call in calls),
        cache_bytes=cache_bytes(what, work.Lk, B=B, format=kept),
        allocated_bytes=allocated_bytes(what, work.Lk, B=B, format=kept, page=page),
    )


def _as_stored(layer: Layer, work: Work, kept: Format) -> int:
    """How many bytes more (or fewer) are read because the past lies in a cache, in its format and window."""
    if not layer.reads_cache:
        return 0
    plain = work.B * work.past * layer.kv_values * work.dtype.itemsize
    return cache_bytes(layer, work.past, B=work.B, format=kept) - plain


def _by_name(products: list[tuple[int, Product]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for times, product in products:
        found[product.name] += times * product.flops
    return dict(found)
