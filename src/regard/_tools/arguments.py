"""Argument checks that several modules share, and the formatting of values for messages."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from .watching import is_functorch_wrapped_tensor

LARGEST = 2**62
INTEGER = (int, torch.SymInt)

Offset = int | Tensor | None


def describe(value: object) -> str:
    """Describes a value for an error message: dtype and shape of a tensor or array, else type and repr.

    A class of this package, such as `Causal` without parentheses, is named with the call to write.
    """
    if isinstance(value, Tensor):
        return f"{_dtype(value)} tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"ndarray of {value.dtype} and shape {value.shape}"
    if isinstance(value, type) and value.__module__.startswith("regard."):
        arguments = "..." if inspect.signature(value).parameters else ""
        return f"the class {value.__name__}; call it: {value.__name__}({arguments})"
    return " ".join(f"{type(value).__name__} {value!r:.200}".split())[:80]


def brief(value: object) -> str:
    """Formats a value for a repr.

    A tensor becomes `<dtype shape>`, or a list if it has at most 8 elements and is an int64 vector.
    """
    if not isinstance(value, Tensor):
        return repr(value)
    if value.ndim < 2 and value.numel() <= 8 and value.dtype == torch.int64 and readable(value):
        return repr(value.tolist())
    return f"<{_dtype(value)} {tuple(value.shape)}>"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_integer(value: object) -> bool:
    """Returns whether a value is a Python or NumPy integer or a SymInt.

    Returns False for bools and tensors.
    """
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
    """Converts an integer to a Python int.

    A SymInt is returned as it is: as an int, it would become a constant of the compiled graph.
    """
    return value if isinstance(value, INTEGER) else operator.index(value)  # type: ignore[return-value]


def holds_integers(tensor: Tensor) -> bool:
    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())


def count(name: str, value: Any, least: int = 0) -> int:
    """Checks that a value is an integer in [least, 2^62) and returns it as a Python int.

    Raises TypeError for bools, floats and tensors, ValueError for an integer out of range.
    """
    if not is_integer(value):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    number = as_int(value)
    if not least <= number < LARGEST:
        raise ValueError(f"{name}: expected an integer from {least} to 2^62 - 1, got {number}")
    return number


def number(name: str, value: Any) -> float:
    """Converts a Python or NumPy number to float. Raises TypeError for bools and tensors."""
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


def bool_tensor(name: str, value: Any, min_dims: int) -> Tensor:
    """Copies a bool tensor or a list of bools to a new tensor.

    Raises TypeError for another dtype, ValueError for fewer than `min_dims` dimensions.
    """
    tensor = tensor_of(name, value)
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"{name}: expected a bool tensor where True means 'may attend', got {describe(tensor)}; "
            "write `x != 0` if 1 means keep, and pass a float tensor as `bias`"
        )
    return snapshot(_check_ndim(name, tensor, min_dims))


def int_tensor(name: str, value: Any, min_dims: int) -> Tensor:
    """Copies an integer tensor or a list of integers to a new int64 tensor.

    A list becomes a CPU tensor. On the default device, which may be "meta", it could lose its
    values. Raises TypeError for another dtype, ValueError for fewer than `min_dims` dimensions.
    """
    tensor = tensor_of(name, value, "cpu")
    if not holds_integers(tensor):
        raise TypeError(f"{name}: expected integers, got {describe(tensor)}")
    return snapshot(_check_ndim(name, tensor, min_dims).to(torch.int64))


def _check_ndim(name: str, tensor: Tensor, min_dims: int) -> Tensor:
    if tensor.ndim < min_dims:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name}: expected at least {min_dims} dimensions, got shape {shape}")
    return tensor


def tensor_of(name: str, value: Any, device: str | None = None) -> Tensor:
    """Returns a tensor unchanged. Converts a list to a tensor on `device` or the default device."""
    if isinstance(value, Tensor):
        return value
    try:
        tensor = torch.as_tensor(list(value) if isinstance(value, range) else value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a tensor or a list, got {describe(value)}") from error
    return tensor.to(torch.int64) if tensor.numel() == 0 and not hasattr(value, "dtype") else tensor


def snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def readable(tensor: Tensor) -> bool:
    """Returns whether a tensor's values can be read.

    Fake and meta tensors have no values. While PyTorch compiles or transforms, nothing can be read.
    """
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.device.type != "meta"
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(tensor)
    )


def existing_file(name: str, path: str | os.PathLike[str]) -> Path:
    """Returns `path` as a Path. Raises FileNotFoundError if no file is there."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{name}: expected a file, got {os.fspath(path)}, which does not exist")
    return Path(path)


def check_not_3d(name: str, shape: Sequence[int]) -> None:
    """Raises ValueError for a mask or bias of three dims in a call with batch dims."""
    if len(shape) == 3:
        raise ValueError(
            f"{name}: expected (Lq, Lk) or at least 4 dims (..., Hq, Lq, Lk), as q has batch dims, got "
            f"{tuple(shape)}; write {name}[:, None] if dim 0 is the samples, {name}[None] if it is the heads"
        )


def common_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def same(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have equal device, dtype, shape and values."""
    if a is b:
        return True
    if (a.device, a.dtype, a.shape) != (b.device, b.dtype, b.shape):
        return False
    return readable(a) and readable(b) and torch.equal(a, b)


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Returns whether `shape` can be expanded to `target`."""
    aligned = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(s in (1, t) for s, t in zip(shape, aligned, strict=True))


def first_position(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Tensor | int:
    """Returns the position of query 0: an int, or (*batch, 1) if offsets differ by sample."""
    if offset is None:
        return Lk - Lq
    if isinstance(offset, Tensor):
        if not holds_integers(offset):
            raise TypeError(f"offset: expected integers, got {describe(offset)}")
        return offset.to(device, torch.int64)[..., None]
    if not is_integer(offset):
        raise TypeError(f"offset: expected an int or a (B,) int tensor, got {describe(offset)}")
    return as_int(offset)
