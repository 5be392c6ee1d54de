"""Checks and conversions of the arguments of a call. Every error message names the argument."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from .._tools.arguments import (
    as_int,
    broadcasts,
    check_not_3d,
    describe,
    holds_integers,
    is_integer,
    number,
)
from ..masks import Dense, Mask, Program
from ..scores import Alibi, RelativeBias
from .spec import DTYPES, MAX_OFFSET, QKV, Bias, Options, learned

MAX_FOLLOWING = 4096  # elements of a mask tensor that follows q to another device


def fail(
    error: type[Exception], name: str, expected: str, got: object, qkv: QKV | None = None, hint: str = ""
) -> NoReturn:
    shapes = ", ".join(f"{letter} {tuple(x.shape)}" for letter, x in zip("qkv", qkv or (), strict=False))
    raise error(f"{name}: expected {expected}, got {got}" + (f" ({shapes})" if shapes else "") + hint)


def check(qkv: QKV, program: Program | None, options: Options) -> tuple[int, ...]:
    """Checks shapes, dtypes, devices and options without reading data.

    Returns the broadcast batch dims. `options.mask` and `options.offset` must already be converted
    by `as_mask` and `as_offset`.
    """
    check_tensors(qkv)
    _check_scalars(options)
    batch = _check_sizes(qkv)
    q, k, _ = qkv
    Hq, Lq, Lk = 1 if q.ndim == 2 else q.shape[-3], q.shape[-2], k.shape[-2]
    _check_offset(options.offset, batch, qkv)
    if isinstance(options.mask, Mask) and program is not None:
        _check_mask_device(program, q)
        options.mask.check_shapes(batch, Hq, Lq, Lk, options.offset)
    _check_bias(options.bias, Hq, (Lq, Lk) if q.ndim == 2 else (*batch, Hq, Lq, Lk), qkv)
    _check_sink(options.sink, Hq, qkv)
    return batch


# Conversions


def as_numbers(options: Options) -> Options:
    """Converts the numeric options to Python floats.

    Raises TypeError for a value that is not a number.
    """
    scale = None if options.scale is None else number("scale", options.scale)
    softcap = None if options.softcap is None else number("softcap", options.softcap)
    dropout = number("dropout", options.dropout)
    if type(options.return_lse) is not bool:
        fail(TypeError, "return_lse", "a bool", describe(options.return_lse))
    return options._replace(scale=scale, softcap=softcap, dropout=dropout)


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """Converts a bool tensor to a `Dense` mask. A Mask or None is returned unchanged.

    Raises TypeError for any other value.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        fail(TypeError, "mask", "a Mask or a bool tensor (True = may attend)", describe(mask))
    if mask.dtype is torch.bool:
        return Dense.borrow(mask if mask.ndim > 1 else mask.reshape(1, -1))
    is_float = mask.dtype.is_floating_point
    added = ", or bias= if the numbers are added to the scores" if is_float else ""
    hint = f"write mask.bool() if 1 = may attend{added}"
    fail(TypeError, "mask", f"a Mask or a bool tensor, True = may attend ({hint})", describe(mask))


def as_offset(offset: int | Tensor | None) -> int | Tensor | None:
    """Returns the offset after a check of its type and, if it is an integer, of its range."""
    if offset is None:
        return None
    if not (holds_integers(offset) if isinstance(offset, Tensor) else is_integer(offset)):
        fail(TypeError, "offset", "an int, or integers of shape (B,)", describe(offset))
    if isinstance(offset, Tensor):
        return offset
    offset = as_int(offset)
    if abs(offset) > MAX_OFFSET:
        fail(ValueError, "offset", "a position between -2**48 and 2**48", offset)
    return offset


def as_seed(seed: int | Tensor | None, dropout: float, watched: bool = False) -> int | Tensor:
    """Returns the 64-bit seed of the dropout pattern, as a signed integer.

    Without a seed, draws one from PyTorch's default CPU generator. In a watched call, a seed that
    is a tensor stays a tensor, because its value may not be known yet.
    """
    if seed is None:
        if not dropout:
            return 0
        seed = torch.randint(2**63 - 1, (), device="cpu")
    valid = holds_integers(seed) and seed.numel() == 1 if isinstance(seed, Tensor) else is_integer(seed)
    if not valid:
        fail(TypeError, "seed", "an int, an integer tensor with one element, or None", describe(seed))
    if isinstance(seed, Tensor):
        if seed.device.type == "meta":
            fail(ValueError, "seed", "a tensor with a value", "one on the device meta")
        return seed.reshape(()).to(torch.int64) if watched else int(seed)
    seed = as_int(seed)
    if not -(2**63) <= seed < 2**64:
        fail(ValueError, "seed", "an integer of 64 bits", seed)
    return seed - 2**64 if seed >= 2**63 else seed


# Checks


def check_tensors(qkv: QKV) -> None:
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, Tensor):
            hint = f"; write torch.from_numpy({name})" if isinstance(x, np.ndarray) else ""
            fail(TypeError, name, "a torch.Tensor", describe(x), hint=hint)
        if x.is_nested or x.layout is not torch.strided:
            nested = "a nested tensor; attention takes q, k and v all nested with layout=torch.jagged"
            fail(TypeError, name, "a dense (strided) tensor", nested if x.is_nested else x.layout)
    for name, x in zip("qkv", qkv, strict=True):
        if x.dtype not in DTYPES:
            fail(TypeError, name, "dtype float64, float32, bfloat16 or float16", x.dtype, qkv)
    q = qkv[0]
    for name, x in zip("kv", qkv[1:], strict=True):
        if x.dtype is not q.dtype:
            fail(TypeError, name, f"q's dtype {q.dtype}", x.dtype, qkv, f"; write {name}.to(q.dtype)")
        _check_device(name, x, qkv)


def _check_sizes(qkv: QKV) -> tuple[int, ...]:
    """Checks that the shapes of q, k and v fit together. Returns the broadcast batch dims."""
    q, k, v = (x.shape for x in qkv)
    if len(q) < 2:
        fail(ValueError, "q", "(L, D), (H, L, D) or (..., H, L, D)", tuple(q), qkv)
    for name, x in (("k", k), ("v", v)):
        if len(x) != len(q):
            fail(ValueError, name, f"{len(q)} dims as in q", len(x), qkv)
    if k[-1] != q[-1]:
        fail(ValueError, "k", f"last dim D = {q[-1]} as in q", k[-1], qkv)
    if v[-2] != k[-2]:
        fail(ValueError, "v", f"Lk = {k[-2]} rows as in k", v[-2], qkv)
    if len(q) == 2:
        return ()
    if v[-3] != k[-3]:
        fail(ValueError, "v", f"Hkv = {k[-3]} heads as in k", v[-3], qkv)
    if q[-3] != k[-3] and (k[-3] == 0 or q[-3] % k[-3]):
        divisor = f"a number of heads Hkv that divides Hq = {q[-3]}"
        fail(ValueError, "k", divisor, k[-3], qkv, _layout_hint(q, k))
    return tuple(_broadcast(sizes, qkv) for sizes in zip(q[:-3], k[:-3], v[:-3], strict=True))


def _layout_hint(q: torch.Size, k: torch.Size) -> str:
    """Returns a question about the layout if the sizes would fit with heads and lengths swapped."""
    if k[-2] == 0 or q[-2] % k[-2]:
        return ""
    n = len(q)
    layout = {3: "(L, H, D)", 4: "(B, L, H, D)"}.get(n, "(..., L, H, D)")
    return f"; is this {layout}? transpose({n - 3}, {n - 2})"


def _broadcast(sizes: tuple[int, int, int], qkv: QKV) -> int:
    a, b, c = sizes
    size = a if a != 1 else b if b != 1 else c
    if a not in (1, size) or b not in (1, size) or c not in (1, size):
        fail(ValueError, "q, k, v", "batch dims that are equal or 1", f"{a}, {b} and {c}", qkv)
    return size


def _check_scalars(options: Options) -> None:
    if options.scale is not None and not -math.inf < options.scale < math.inf:
        fail(ValueError, "scale", "a finite number", options.scale)
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        fail(ValueError, "softcap", "a finite number above 0", options.softcap)
    if not 0 <= options.dropout <= 1:
        fail(ValueError, "dropout", "a probability from 0 to 1", options.dropout)


def _check_offset(offset: int | Tensor | None, batch: tuple[int, ...], qkv: QKV) -> None:
    if not isinstance(offset, Tensor):
        return
    flat = (math.prod(batch),)
    if tuple(offset.shape) not in (flat, batch):
        expected = f"shape {flat}" if batch == flat else f"shape {flat} or {batch}"
        fail(ValueError, "offset", expected, tuple(offset.shape), qkv)
    _check_device("offset", offset, qkv)


def _check_mask_device(program: Program, q: Tensor) -> None:
    for x in program.tensors:
        if x.device != q.device and not q.is_meta and not _follows(x):
            fail(ValueError, "mask", f"tensors on q's device, as from mask.to({str(q.device)!r})", x.device)


def _follows(x: Tensor) -> bool:
    """Returns whether a tensor of a mask is moved to q's device.

    True for a small int64 tensor on the CPU, such as lengths that a user passed as a list.
    """
    return x.is_cpu and x.dtype is torch.int64 and x.numel() <= MAX_FOLLOWING


def _check_bias(bias: Bias | None, Hq: int, target: tuple[int, ...], qkv: QKV) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor | Alibi | RelativeBias):
        fail(TypeError, "bias", "a float tensor, scores.Alibi or scores.RelativeBias", describe(bias))
    if isinstance(bias, Tensor) and bias.dtype is torch.bool:
        fail(TypeError, "bias", "a float tensor (a bool tensor goes to mask=)", describe(bias))
    tensor = learned(bias)
    assert tensor is not None
    check_learned("bias", tensor, qkv)
    if isinstance(bias, Tensor):
        if len(target) > 3:
            check_not_3d("bias", bias.shape)
        if not broadcasts(bias.shape, target):
            expected = f"a shape broadcastable to (..., Hq, Lq, Lk) = {target}"
            fail(ValueError, "bias", expected, tuple(bias.shape), qkv)
    elif bias.heads != Hq:
        fail(ValueError, "bias", f"a {type(bias).__name__} for Hq = {Hq} heads", bias.heads, qkv)


def check_learned(name: str, x: Tensor, qkv: QKV) -> None:
    """Checks that x, such as a bias, has q's dtype or float32, is strided and on q's device."""
    q = qkv[0]
    if x.dtype not in (q.dtype, torch.float32):
        or_float = "" if q.dtype is torch.float32 else " or torch.float32"
        fail(TypeError, name, f"dtype {q.dtype}{or_float}", x.dtype, qkv)
    if x.layout is not torch.strided:
        fail(TypeError, name, "a dense (strided) tensor", x.layout)
    _check_device(name, x, qkv)


def _check_device(name: str, x: Tensor, qkv: QKV) -> None:
    if x.device != qkv[0].device:
        fail(ValueError, name, f"q's device {qkv[0].device}", x.device, qkv)


def _check_sink(sink: Tensor | None, Hq: int, qkv: QKV) -> None:
    if sink is None:
        return
    if not isinstance(sink, Tensor):
        fail(TypeError, "sink", "a tensor of shape (Hq,)", describe(sink))
    check_learned("sink", sink, qkv)
    if tuple(sink.shape) != (Hq,):
        fail(ValueError, "sink", f"shape (Hq,) = {(Hq,)}", tuple(sink.shape), qkv)
