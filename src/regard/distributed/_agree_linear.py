"""Checks a call of linear attention on this rank and compares it with the calls of the other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._api.linear_attention import FeatureMap, _features
from .._backends.dispatch import select
from .._call.linear import LinearCall, LinearOptions, LinearState, _flat_lengths, check
from .._call.spec import DTYPES
from .._tools.arguments import describe
from . import _agree as ranks
from ._agree import checksum, contents
from ._group import Group
from .layouts import Layout

Layouts = tuple[Layout, Layout]


class LinearHeader(NamedTuple):
    """What a rank tells the others about its call. The names appear in error messages."""

    failed: int = 0
    q_length: int = 0
    k_length: int = 0
    B: int = 0
    Hq: int = 0
    Hkv: int = 0
    D: int = 0  # after the feature map
    Dv: int = 0
    dtype: int = 0
    requires_grad: int = 0  # a bit for each of q, k, v, log_decay, beta, S and z
    layout: int = 0
    lengths: int = 0
    state: int = 0
    options: int = 0
    debug: int = 0
    threads: int = 0


ARGUMENTS = (
    "another argument", "q", "k", "v", "mesh", "layout", "causal", "feature_map", "normalize", "log_decay",
    "beta", "scale", "lengths", "state", "return_state", "impl",
)  # fmt: skip
SHOWN = {"options": "causal, feature_map, normalize, log_decay, beta, scale, return_state, impl"}


class Agreed(NamedTuple):
    """A call that all ranks make: its canonical form on this rank, and what the ranks share."""

    call: LinearCall  # with the lengths of the whole call
    layouts: Layouts
    backend: str
    threads: int  # of the rank with the most


def agree_linear(
    groups: list[Group], q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, *,
    layout: Layout | Layouts | None, feature_map: str | FeatureMap | None, scale: float | None,
    return_state: bool, impl: str, debug: bool | None,
) -> Agreed:  # fmt: skip
    """Returns the call that all ranks make. Raises on all ranks if there is none."""
    error: Exception | None = None
    header, debug = LinearHeader(), ranks.in_debug_mode(debug)
    count, rank = ranks.place(groups)
    try:
        ranks.refuse_dtensors(q=q, k=k, v=v, log_decay=options.log_decay, beta=options.beta)
        ranks.check_shards(q, k, v)
        call = check(*_features(feature_map, q, k), v, scale, options._replace(lengths=None))
        backend = select("linear", call, impl)
        layouts = ranks.layouts_of(layout, count, rank, q, k)
        if options.causal and layouts is not None and layouts[0] != layouts[1]:
            raise ValueError(
                "layout: expected one layout with causal=True, whose queries are its keys, got two"
            )
        if type(return_state) is not bool:
            raise TypeError(f"return_state: expected a bool, got {describe(return_state)}")
        shown = feature_map if isinstance(feature_map, str | None) else "a function"
        header = _header(call, options, layouts, (shown, scale, return_state, impl), debug)
    except (TypeError, ValueError, NotImplementedError) as caught:
        error, header = caught, LinearHeader(failed=ranks.argument_index(caught, ARGUMENTS))
    headers = ranks.agreed(groups, header, error, ARGUMENTS, SHOWN)
    layouts = layouts or ranks.default_layouts(headers, count)
    whole = replace(call.spec, Lk=layouts[1].L)
    call = call._replace(lengths=_flat_lengths(whole, options.lengths))
    return Agreed(call, layouts, backend, max(header.threads for header in headers))


def _header(
    call: LinearCall, options: LinearOptions, layouts: Layouts | None, scalars: tuple[Any, ...], debug: bool
) -> LinearHeader:
    spec, state = call.spec, options.state or LinearState(None, None)  # type: ignore[arg-type]
    bits = (x is not None and x.requires_grad and torch.is_grad_enabled() for x in call[:7])
    gates = ["a tensor" if isinstance(x, Tensor) else x for x in (options.log_decay, options.beta)]
    return LinearHeader(
        0, spec.Lq, spec.Lk, spec.B, spec.Hq, spec.Hkv, spec.D, spec.Dv, DTYPES.index(spec.dtype),
        sum(bit << i for i, bit in enumerate(bits)), checksum(layouts),
        checksum(contents(options.lengths, True)), checksum([contents(x, debug) for x in state]),
        checksum((options.causal, options.normalize, gates, scalars)), debug, torch.get_num_threads(),
    )  # fmt: skip
