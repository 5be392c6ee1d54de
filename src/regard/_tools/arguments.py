"""Arguments: what messages and reprs show of them, checks that several modules share, where queries stand."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .watching import is_functorch_wrapped_tensor

LARGEST = 2**62
INTEGER = (int, torch.SymInt)

Offset = int | Tensor | None


def describe(value: object) -> str:
    """A value as messages show it: tensors by dtype and shape, others by type and the start of their repr."""
    if isinstance(value, Tensor):
        return f"{_dtype(value)} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


def brief(value: object) -> str:
    """A value as reprs show it: a few integers as they are, other tensors as <dtype shape>."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.ndim < 2 and value.numel() <= 8 and value.dtype == torch.int64 and readable(value):
        return repr(value.tolist())
    return f"<{_dtype(value)} {tuple(value.shape)}>"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_integer(value: object) -> bool:
    """Whether it is one integer, Python's or NumPy's; a bool or a tensor is not."""
    if isinstance(value, bool | Tensor):
        return False
    if isinstance(value, INTEGER):
        return True
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def as_int(value: Any) -> int:
    """One integer as Python's. A compiler's symbol stays one: it would become a constant."""
    return value if isinstance(value, INTEGER) else operator.index(value)  # type: ignore[return-value]


def holds_integers(tensor: Tensor) -> bool:
    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())


def count(name: str, value: Any, least: int = 0) -> int:
    """An integer from `least` up to 2^62; a bool, a float or a tensor is refused."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    number = as_int(value)
    if not least <= number < LARGEST:
        raise ValueError(f"{name} must be an integer from {least} to 2^62 - 1, got {number}")
    return number


def number(name: str, value: Any) -> float:
    """An int or float, also NumPy's, as a float. A bool or a tensor is a mistake."""
    if isinstance(value, bool | Tensor | complex) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {describe(value)}") from None


def probability(name: str, value: float) -> float:
    if not 0 <= number(name, value) <= 1:
        raise ValueError(f"{name}: expected a probability from 0 to 1, got {value}")
    return value


def bool_tensor(name: str, value: Any, least_dims: int) -> Tensor:
    """A private bool tensor with at least `least_dims` dimensions."""
    tensor = tensor_of(name, value)
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"{name} must be a bool tensor where True means 'may attend', got {describe(tensor)}; "
            "write `x != 0` if 1 means keep, and pass a float tensor as `bias`"
        )
    return snapshot(_deep_enough(name, tensor, least_dims))


def int_tensor(name: str, value: Any, least_dims: int) -> Tensor:
    """A private int64 tensor with at least `least_dims` dimensions."""
    tensor = tensor_of(name, value)
    if not holds_integers(tensor):
        raise TypeError(f"{name} must be integers, got {describe(tensor)}")
    return snapshot(_deep_enough(name, tensor, least_dims).to(torch.int64))


def _deep_enough(name: str, tensor: Tensor, least_dims: int) -> Tensor:
    if tensor.ndim < least_dims:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name} must have at least {least_dims} dimensions, got shape {shape}")
    return tensor


def tensor_of(name: str, value: Any) -> Tensor:
    """A tensor as it is, or one made from a list."""
    if isinstance(value, Tensor):
        return value
    try:
        tensor = torch.as_tensor(list(value) if isinstance(value, range) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor or a list, got {describe(value)}") from error
    return tensor.to(torch.int64) if tensor.numel() == 0 and not hasattr(value, "dtype") else tensor


def snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def readable(tensor: Tensor) -> bool:
    """Whether the values can be looked at: not fake, not on the meta device, not inside a transform."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.device.type != "meta"
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(tensor)
    )


def common_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in device, dtype, shape and values."""
    if a is b:
        return True
    if (a.device, a.dtype, a.shape) != (b.device, b.dtype, b.shape):
        return False
    return readable(a) and readable(b) and torch.equal(a, b)


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape`, aligned on the right, is `target` or 1 in every dimension."""
    aligned = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(s in (1, t) for s, t in zip(shape, aligned, strict=True))


def first_position(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Tensor | int:
    """Where query 0 stands among the keys: an int, or (*batch, 1)."""
    if offset is None:
        return Lk - Lq
    if isinstance(offset, Tensor):
        if not holds_integers(offset):
            raise TypeError(f"offset must be integers, got {describe(offset)}")
        return offset.to(device, torch.int64)[..., None]
    if not is_integer(offset):
        raise TypeError(f"offset must be an int or a (B,) int tensor, got {describe(offset)}")
    return as_int(offset)
