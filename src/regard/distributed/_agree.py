"""Checks a call on this rank and compares it with the calls of the other ranks.

Each rank sends one short list of integers before it computes. An error on one rank, or an argument
that differs, therefore raises on all ranks instead of leaving some of them waiting.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._backends.dispatch import check_name, runs_kernels
from .._backends.native import core
from .._call import check
from .._call.spec import DTYPES, Options, learned
from ..masks import Mask
from ._call import DistributedCall
from ._group import Group, all_headers
from .layouts import Layout, as_pair, contiguous
from .plan import METHODS

VARIABLE = "REGARD_DISTRIBUTED_DEBUG"
MOST_MASKS = 16
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
    latent: int = 0  # channels of a latent, if keys and values follow from latents
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


H = TypeVar("H", bound=tuple[int, ...])  # a header

NOT_COMPARED = {"failed", "q_length", "k_length", "seed", "threads"}
CHECKSUMS = {"method", "layout", "mask", "offset", "bias", "options", "sink", "lengths", "state"}
ARGUMENTS = (
    "another argument", "q", "k", "v", "mesh", "layout", "method", "mask", "offset", "bias", "scale",
    "softcap", "sink", "dropout", "seed", "return_lse", "impl", "latent", "up", "rank",
)  # fmt: skip
SHOWN = {"options": "scale, softcap, dropout, return_lse, impl"}


def agree(
    groups: list[Group], q: Tensor, k: Tensor, v: Tensor, options: Options,
    layout: Layout | tuple[Layout, Layout] | None, method: str, impl: str, debug: bool | None, *,
    latent: int = 0, error: Exception | None = None,
) -> DistributedCall:  # fmt: skip
    """Returns the call that all ranks of the groups make. Raises on all ranks if there is none.

    `latent` is the number of channels of a latent, `error` what the caller found on this rank.
    """
    header = Header()
    ranks, rank = place(groups)
    debug = in_debug_mode(debug)
    try:
        if error is not None:
            raise error
        refuse_dtensors(q=q, k=k, v=v, mask=options.mask, bias=learned(options.bias), sink=options.sink)
        options = _checked(q, k, v, options, method, impl, len(groups))
        if not latent:
            _check_ring(method, impl, q.device, len(groups))
        layouts = layouts_of(layout, ranks, rank, q, k)
        header = _header(q, k, v, options, layouts, method, impl, debug)
        seed = check.as_seed(options.seed, options.dropout)
        header = header._replace(has_seed=options.seed is not None, seed=int(seed), latent=latent)
    except (TypeError, ValueError, NotImplementedError) as caught:
        error, header = caught, Header(failed=argument_index(caught, ARGUMENTS))
    headers = agreed(groups, header, error, ARGUMENTS, SHOWN)
    _compare_seeds(headers)
    layouts = layouts or default_layouts(headers, ranks)
    # The options are equal on all ranks, so all ranks find the same error.
    return _call(q, k, v, options, layouts, impl, headers[0])


def place(groups: list[Group]) -> tuple[int, int]:
    """Returns the number of ranks of the mesh and this rank's place in it."""
    ranks, rank = 1, 0
    for group in groups:
        ranks, rank = ranks * group.size, rank * group.size + group.rank
    return ranks, rank


def _checked(q: Tensor, k: Tensor, v: Tensor, options: Options, method: str, impl: str, dims: int) -> Options:
    """Checks what one rank can check. Returns the options with converted values."""
    check_shards(q, k, v)
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
        if len(_masks) > MOST_MASKS:
            _masks.clear()
    return options._replace(mask=mask, offset=offset)


def _check_ring(method: str, impl: str, device: torch.device, dims: int) -> None:
    """Checks that the native kernels run, whose partial results a ring of keys and values merges."""
    method = "usp" if dims == 2 else method
    if method in ("ring", "usp") and not runs_kernels(impl, device):
        got = core.reason_unavailable() or f"{impl!r} with tensors on {device}"
        raise NotImplementedError(
            f"impl: expected the native kernels for method={method!r}, which merges their partial results, "
            f"got {got}; method='gather' and 'ulysses' run with every backend"
        )


def refuse_dtensors(**tensors: object) -> None:
    from torch.distributed.tensor import DTensor  # imports SymPy

    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a plain tensor, because mesh and layout say what each rank holds, got a "
                f"DTensor; write {name}.to_local() for a shard, {name}.full_tensor() for the whole"
            )


def check_shards(q: Tensor, k: Tensor, v: Tensor) -> None:
    check.check_tensors((q, k, v))
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected a shard (B, H, length, D), got shape {tuple(x.shape)}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected B = {q.shape[0]} samples as in q, got {x.shape[0]}")
    check._check_sizes((q, k, v))


def layouts_of(
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
        0, q.shape[2], k.shape[2], q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], 0,
        DTYPES.index(q.dtype), sum(bit << i for i, bit in enumerate(bits)), checksum(method),
        checksum(layouts), checksum((code, [contents(x, debug) for x in tensors])),
        checksum(contents(offset, True)), checksum((type(bias).__name__, contents(learned(bias), debug))),
        checksum(scalars), checksum(contents(sink, debug)), debug,
    )  # fmt: skip


def contents(x: Any, debug: bool) -> object:
    """Describes a tensor, by its contents in debug mode. Other values describe themselves."""
    if not isinstance(x, Tensor):
        return x
    if not debug:
        return tuple(x.shape), str(x.dtype)
    data = x.detach().cpu().contiguous().flatten()
    return tuple(x.shape), str(x.dtype), zlib.crc32(data.view(torch.uint8).numpy().tobytes())


def checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def in_debug_mode(debug: bool | None) -> bool:
    return os.environ.get(VARIABLE, "0") not in ("", "0") if debug is None else debug


def agreed(
    groups: list[Group], header: H, error: Exception | None, arguments: tuple[str, ...], shown: dict[str, str]
) -> list[H]:
    """Returns the headers of all ranks of the mesh. Raises if a rank failed or if they differ.

    `error` is this rank's own error. `arguments` are the names that `failed` counts from 1, `shown`
    the names of fields in error messages.
    """
    rows = [list(header)]
    for group in reversed(groups):
        flat = [n for row in rows for n in row]
        every = [n for row in all_headers(group, flat) for n in row]
        rows = [every[i : i + len(header)] for i in range(0, len(every), len(header))]
    if error is not None:
        raise error
    make: Callable[..., H] = type(header)
    headers = [make(*row) for row in rows]
    _compare(headers, arguments, shown)
    return headers


def argument_index(error: Exception, arguments: tuple[str, ...]) -> int:
    """Returns the place of the argument that an error names, counted from 1; 1 for any other error."""
    name = re.split(r"\W", str(error), maxsplit=1)[0]
    return 1 + (arguments.index(name) if name in arguments else 0)


def _compare(headers: list[H], arguments: tuple[str, ...], shown: dict[str, str]) -> None:
    names: tuple[str, ...] = headers[0]._fields  # type: ignore[attr-defined]
    for rank, header in enumerate(headers):
        if header[0]:
            raise ValueError(
                f"{arguments[header[0] - 1]}: expected a valid argument on all ranks, got an invalid one "
                f"on rank {rank}, whose own error describes it"
            )
        for name, here, there in zip(names, header, headers[0], strict=True):
            if name not in NOT_COMPARED and here != there:
                got = "different ones" if name in CHECKSUMS else f"{there} and {here}"
                name = shown.get(name, name)
                raise ValueError(f"{name}: expected the same on all ranks, got {got} on ranks 0 and {rank}")


def _compare_seeds(headers: list[Header]) -> None:
    first = headers[0]
    for rank, header in enumerate(headers):
        if header.has_seed and header.seed != first.seed:
            raise ValueError(
                f"seed: expected the same on all ranks, got {first.seed} and {header.seed} "
                f"on ranks 0 and {rank}"
            )


def default_layouts(headers: Sequence[Any], ranks: int) -> tuple[Layout, Layout]:
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
    return DistributedCall(options, q_layout, k_layout, B, Hq, k.shape[1], impl, latent=first.latent)
