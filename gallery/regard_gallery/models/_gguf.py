"""Reads GGUF files: the model's metadata and its tensors. Tensors are dequantised on access."""

# gguf's GGUFReader is not used: it is slow and checks no bounds (docs/decisions/0013-reading-gguf.md).

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ._flat import Cursor

T = TypeVar("T")

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_RANK = 4
# Kind of a metadata value -> its format in `struct`. Strings and arrays are read by `_string` and
# `_array` instead.
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Stored(NamedTuple):
    """The location and type of a tensor in the file."""

    name: str
    shape: tuple[int, ...]  # in PyTorch's order: the last dim is contiguous
    kind: int  # a value of gguf.GGMLQuantizationType
    begin: int  # offset in bytes from the start of the tensor data
    size: int  # in bytes


class Gguf:
    """A GGUF file with a checked header: all tensors are aligned, disjoint and inside the file."""

    def __init__(self, path: Path) -> None:
        self._cursor = cursor = Cursor(path)
        if bytes(cursor.take(4, "the magic")) != MAGIC:
            raise cursor.fault("expected a GGUF file, which begins with GGUF")
        version = cursor.count("I", "the version")
        if version not in VERSIONS:
            raise cursor.fault(f"expected version 2 or 3 of GGUF, got {version}")
        tensors, values = (cursor.count("Q", f"the number of {what}") for what in ("tensors", "values"))
        self.values: dict[str, Any] = {}
        for _ in range(values):
            key = _new_name(cursor, "a key", self.values)
            self.values[key] = _value(cursor, cursor.count("I", f"the kind of {key}"), key)
        self.tensors: dict[str, Stored] = {}
        for _ in range(tensors):
            name = _new_name(cursor, "a tensor's name", self.tensors)
            self.tensors[name] = _stored(cursor, name)
        self._start = self._checked_start(_alignment(cursor, self.values))

    def _checked_start(self, alignment: int) -> int:
        """Returns the offset of the tensor data in the file.

        Raises ValueError if a tensor is not aligned, overlaps another or ends after the file.
        """
        cursor = self._cursor
        start = math.ceil(cursor.at / alignment) * alignment
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.begin):
            if tensor.begin % alignment:
                raise cursor.fault(f"{tensor.name}: expected a multiple of {alignment}, got {tensor.begin}")
            if tensor.begin < end:
                raise cursor.fault(f"{tensor.name} at {tensor.begin} overlaps the tensor before it")
            end = tensor.begin + tensor.size
            if start + end > cursor.size:
                raise cursor.fault(f"{tensor.name} ends at byte {start + end} of {cursor.size}")
        return start

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the metadata value of `key`, or `default` if there is none.

        Raises ValueError if the value is not of type `kind`, or if there is neither a value nor a
        default.
        """
        value = self.values.get(key, default)
        if value is None:
            raise self._cursor.fault(f"expected the value {key}, which is missing")
        if type(value) is not kind:
            raise self._cursor.fault(f"{key}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self._stored(name).shape
        if len(shape) != rank:
            raise self._cursor.fault(f"{name}: expected {rank} dims, got shape {shape}")
        return shape

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            raise self._cursor.fault(f"expected the tensor {name}, which is missing")
        return self.tensors[name]

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor with this name, dequantised to float32."""
        from gguf.quants import dequantize

        stored = self._stored(name)
        begin = self._start + stored.begin
        raw = np.frombuffer(self._cursor.bytes[begin : begin + stored.size], np.uint8)
        rows = raw.reshape(*stored.shape[:-1], -1)
        values = dequantize(rows, _kind(self._cursor, stored.kind, name))
        return torch.from_numpy(np.array(values, np.float32, copy=not values.flags.writeable))


def _new_name(cursor: Cursor, what: str, seen: dict[str, Any]) -> str:
    name = _string(cursor, what)
    if name in seen:
        raise cursor.fault(f"{name} is there twice")
    return name


def _string(cursor: Cursor, what: str) -> str:
    return cursor.text(cursor.count("Q", what), what)


def _value(cursor: Cursor, kind: int, key: str) -> Any:
    if kind in FORMS:
        return cursor.number(FORMS[kind], key)
    if kind == STRING:
        return _string(cursor, key)
    if kind == ARRAY:
        return _array(cursor, key)
    raise cursor.fault(f"{key}: expected a kind of value from 0 to 12, got {kind}")


def _array(cursor: Cursor, key: str) -> Any:
    """Reads a metadata array. Returns strings as a list, numbers as a NumPy view of the file."""
    kind, count = cursor.count("I", f"the kind of {key}"), cursor.count("Q", f"the length of {key}")
    if kind in FORMS:
        dtype = np.dtype("<" + FORMS[kind])
        return np.frombuffer(cursor.take(count * dtype.itemsize, key), dtype)
    if kind != STRING:
        raise cursor.fault(f"{key}: expected an array of numbers or strings, got kind {kind}")
    if count * 8 > cursor.left:
        raise cursor.fault(f"{key}: {count} strings cannot be in {cursor.left} bytes")
    return [_string(cursor, key) for _ in range(count)]


def _alignment(cursor: Cursor, values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fault(f"general.alignment: expected a power of two from 8, got {alignment!r}")
    return alignment


def _kind(cursor: Cursor, number: int, name: str) -> Any:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise cursor.fault(f"{name}: {number} is no type of a tensor") from None


def _stored(cursor: Cursor, name: str) -> Stored:
    from gguf import GGML_QUANT_SIZES

    rank = cursor.count("I", f"the rank of {name}")
    if not 1 <= rank <= MAX_RANK:
        raise cursor.fault(f"{name}: expected a rank from 1 to {MAX_RANK}, got {rank}")
    shape = tuple(cursor.count("Q", f"the shape of {name}") for _ in range(rank))[::-1]
    kind = cursor.count("I", f"the type of {name}")
    begin = cursor.count("Q", f"the place of {name}")
    block, size = GGML_QUANT_SIZES[_kind(cursor, kind, name)]
    if 0 in shape or shape[-1] % block:
        raise cursor.fault(f"{name}: expected rows of a multiple of {block}, got shape {shape}")
    return Stored(name, shape, kind, begin, math.prod(shape) // block * size)
