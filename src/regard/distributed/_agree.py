"""Checks a call on this rank and compares it with the calls of the other ranks.

Each rank sends one short list of integers before it computes. An error on one rank, or an argument
that differs, therefore raises on all ranks instead of leaving some of them waiting.
"""

from __future__ import annotations

import os
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._backends.dispatch import check_name
from .._call import check
from .._call.spec import DTYPES, Options, learned
from ..masks import Mask
from ._call import DistributedCall
from ._group import Group, all_headers
from .layouts import Layout, as_pair, contiguous
from .plan import METHODS

VARIABLE = "REGARD_DISTRIBUTED_DEBUG"
_masks: dict[Mask, Mask] = {}  # equal masks of repeated calls become one object


class Header(NamedTuple):
    """What a rank tells the others about its call. The names appear in error messages."""

    failed: int = 0  # 1 + the index in ARGUMENTS of an invalid argument
    q_length: int = 0
    k_length: int = 0
    B: int = 0
    Hq: int = 0
    Hkv: int = 0
    D: int = 0
    Dv: int = 0
    dtype: int = 0
    requires_grad: int = 0  # a bit for each of q, k, v, bias and sink
    method: int = 0
    layout: int = 0
    mask: int = 0
    offset: int = 0
    bias: int = 0
    options: int = 0  # scale, softcap, dropout, return_lse and impl
    sink: int = 0
    debug: int = 0
    has_seed: int = 0
    seed: int = 0


COMPARED = Header._fields[3:19]  # B to has_seed
CHECKSUMS = {"method", "layout", "mask", "offset", "bias", "options", "sink"}
ARGUMENTS = (
    "another argument", "q", "k", "v", "mesh", "layout", "method", "mask", "offset", "bias", "scale",
    "softcap", "sink", "dropout", "seed", "return_lse", "impl",
)  # fmt: skip
SHOWN = {"options": "scale, softcap, dropout, return_lse, impl"}


def agree(
    groups: list[Group], q: Tensor, k: Tensor, v: Tensor, options: Options,
    layout: Layout | tuple[Layout, Layout] | None, method: str, impl: str, debug: bool | None,
) -> DistributedCall:  # fmt: skip
    """Returns the call that all ranks of the groups make. Raises on all ranks if there is none."""
    error: Exception | None = None
    header = Header()
    ranks, rank = _place(groups)
    debug = os.environ.get(VARIABLE, "0") not in ("", "0") if debug is None else debug
    try:
        options = _checked(q, k, v, options, method, impl, len(groups))
        layouts = _layouts(layout, ranks, rank, q, k)
        header = _header(q, k, v, options, layouts, method, impl, debug)
        seed = check.as_seed(options.seed, options.dropout)
        header = header._replace(has_seed=options.seed is not None, seed=int(seed))
    except (TypeError, ValueError, NotImplementedError) as caught:
        error, header = caught, Header(failed=1 + _argument(caught))
    headers = _gather(groups, header)
    if error is not None:
        raise error
    _compare(headers)
    layouts = layouts or _default(headers, ranks)
    # The options are equal on all ranks, so all ranks find the same error.
    return _call(q, k, v, options, layouts, impl, headers[0])


def _place(groups: list[Group]) -> tuple[int, int]:
    """Returns the number of ranks of the mesh and this rank's place in it."""
    ranks, rank = 1, 0
    for group in groups:
        ranks, rank = ranks * group.size, rank * group.size + group.rank
    return ranks, rank


def _checked(q: Tensor, k: Tensor, v: Tensor, options: Options, method: str, impl: str, dims: int) -> Options:
    """Checks what one rank can check. Returns the options with converted values."""
    check.check_tensors((q, k, v))
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected a shard (B, H, length, D), got shape {tuple(x.shape)}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected B = {q.shape[0]} samples as in q, got {x.shape[0]}")
    check._check_sizes((q, k, v))
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if (dims == 2) != (method == "usp") and not (dims == 2 and method == "auto"):
        needs = "two dims (ring, Ulysses)" if method == "usp" else "one dim, as mesh['cp']"
        raise ValueError(f"mesh: expected {needs} for method={method!r}, got {dims} dim(s)")
    check_name(impl, "impl", "auto")
    options = check.as_numbers(options)
    check._check_scalars(options)
    mask, offset = check.as_mask(options.mask), check.as_offset(options.offset)
    if mask is not None:
        mask = _masks.setdefault(mask, mask)
        if len(_masks) > 64:
            _masks.clear()
    return options._replace(mask=mask, offset=offset)


def _layouts(
    layout: Layout | tuple[Layout, Layout] | None, ranks: int, rank: int, q: Tensor, k: Tensor
) -> tuple[Layout, Layout] | None:
    """Returns the layouts of queries and keys. None: contiguous, once all lengths are known."""
    if layout is None:
        return None
    pair = as_pair(layout, ranks)
    for name, x, own in (("q", q, pair[0]), ("k", k, pair[1])):
        if own.lengths[rank] != x.shape[2]:
            raise ValueError(
                f"layout: expected a layout of {name}'s length: rank {rank} has {own.lengths[rank]} of "
                f"{own.L} tokens, got {name} with {x.shape[2]}"
            )
    return pair


def _header(
    q: Tensor, k: Tensor, v: Tensor, options: Options, layouts: tuple[Layout, Layout] | None, method: str,
    impl: str, debug: bool,
) -> Header:  # fmt: skip
    mask, offset, bias, sink = options.mask, options.offset, options.bias, options.sink
    program = mask.lower() if isinstance(mask, Mask) else None
    code, tensors = ((), ()) if program is None else (program.code, program.tensors)
    given = [q, k, v, learned(bias), sink]
    bits = (x is not None and x.requires_grad and torch.is_grad_enabled() for x in given)
    scalars = (options.scale, options.softcap, options.dropout, options.return_lse, impl)
    return Header(
        0, q.shape[2], k.shape[2], q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3],
        DTYPES.index(q.dtype), sum(bit << i for i, bit in enumerate(bits)), _checksum(method),
        _checksum(layouts), _checksum((code, [_contents(x, debug) for x in tensors])),
        _checksum(_contents(offset, True)), _checksum((type(bias).__name__, _contents(learned(bias), debug))),
        _checksum(scalars), _checksum(_contents(sink, debug)), debug,
    )  # fmt: skip


def _contents(x: Any, debug: bool) -> object:
    """Describes a tensor, by its contents in debug mode. Other values describe themselves."""
    if not isinstance(x, Tensor):
        return x
    if not debug:
        return tuple(x.shape), str(x.dtype)
    data = x.detach().cpu().contiguous().flatten()
    return tuple(x.shape), str(x.dtype), zlib.crc32(data.view(torch.uint8).numpy().tobytes())


def _checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _gather(groups: list[Group], header: Header) -> list[Header]:
    """Returns the headers of all ranks of the mesh."""
    rows = [list(header)]
    for group in reversed(groups):
        flat = [n for row in rows for n in row]
        every = [n for row in all_headers(group, flat) for n in row]
        rows = [every[i : i + len(header)] for i in range(0, len(every), len(header))]
    return [Header(*row) for row in rows]


def _argument(error: Exception) -> int:
    name = str(error).partition(":")[0].partition("(")[0].strip()
    return ARGUMENTS.index(name) if name in ARGUMENTS else 0


def _compare(headers: list[Header]) -> None:
    first = headers[0]
    for rank, header in enumerate(headers):
        if header.failed:
            raise ValueError(
                f"{ARGUMENTS[header.failed - 1]}: expected a valid argument on all ranks, got an invalid one "
                f"on rank {rank}, whose own error describes it"
            )
        for name in COMPARED:
            here, there = getattr(header, name), getattr(first, name)
            if here != there:
                got = "different ones" if name in CHECKSUMS else f"{there} and {here}"
                raise ValueError(
                    f"{SHOWN.get(name, name)}: expected the same on all ranks, "
                    f"got {got} on ranks 0 and {rank}"
                )
        if header.has_seed and header.seed != first.seed:
            raise ValueError(
                f"seed: expected the same on all ranks, got {first.seed} and {header.seed} "
                f"on ranks 0 and {rank}"
            )


def _default(headers: list[Header], ranks: int) -> tuple[Layout, Layout]:
    """Returns contiguous layouts of the lengths that the ranks have."""
    pair = []
    for name in ("q_length", "k_length"):
        lengths = tuple(getattr(header, name) for header in headers)
        layout = contiguous(sum(lengths), ranks)
        if layout.lengths != lengths:
            raise ValueError(
                f"{name[0]}: expected lengths {layout.lengths} on the ranks, those of "
                f"contiguous({sum(lengths)}, {ranks}), got {lengths}; pass layout="
            )
        pair.append(layout)
    return pair[0], pair[1]


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    layouts: tuple[Layout, Layout],
    impl: str,
    first: Header,
) -> DistributedCall:
    """Checks the options against the sizes of the whole call."""
    (q_layout, k_layout), mask, qkv = layouts, options.mask, (q, k, v)
    B, Hq, sizes = q.shape[0], q.shape[1], (layouts[0].L, layouts[1].L)
    check._check_offset(options.offset, (B,), qkv)
    if isinstance(mask, Mask):
        check._check_mask_device(mask.lower(), q)
        mask.check((B,), Hq, *sizes, options.offset)
    check._check_bias(options.bias, Hq, (B, Hq, *sizes), qkv)
    check._check_sink(options.sink, Hq, qkv)
    options = options._replace(seed=first.seed)
    return DistributedCall(options, q_layout, k_layout, B, Hq, k.shape[1], impl)
