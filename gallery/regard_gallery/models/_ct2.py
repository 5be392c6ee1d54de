"""Reads CTranslate2's model.bin, a list of variables. Each has a name, shape, type and bytes."""

# CTranslate2's package is not used: it writes and runs this format, but does not expose the variables.

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._flat import Cursor

VERSION = 6
MAX_RANK = 8
TYPES: dict[int, Any] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}

Variables = dict[str, np.ndarray[Any, Any]]


class Model(NamedTuple):
    spec: str  # the kind of model, such as "WhisperSpec"
    variables: Variables  # arrays by name, read-only views of the file


def read(path: Path) -> Model:
    """Reads a model.bin. Raises ValueError if any part of the file is malformed."""
    cursor = Cursor(path)
    version = cursor.count("I", "the version")
    if version != VERSION:
        raise cursor.fault(f"expected version {VERSION} of CTranslate2's format, got {version}")
    spec = _name(cursor, "the kind of model")
    cursor.count("I", "the revision")
    variables: Variables = {}
    for _ in range(cursor.count("I", "the number of variables")):
        name = _name(cursor, "a variable's name")
        _add(cursor, variables, name, _variable(cursor, name))
    for _ in range(cursor.count("I", "the number of aliases")):
        alias, name = _name(cursor, "an alias"), _name(cursor, "the name behind an alias")
        if name not in variables:
            raise cursor.fault(f"{alias} stands for {name}, which is not in the file")
        _add(cursor, variables, alias, variables[name])
    if cursor.left:
        raise cursor.fault(f"expected the end of the file, but {cursor.left} bytes follow")
    return Model(spec, variables)


def _name(cursor: Cursor, what: str) -> str:
    return cursor.text(cursor.count("H", what), what).removesuffix("\0")


def _add(cursor: Cursor, variables: Variables, name: str, value: np.ndarray[Any, Any]) -> None:
    if name in variables:
        raise cursor.fault(f"{name} is there twice")
    variables[name] = value


def _variable(cursor: Cursor, name: str) -> np.ndarray[Any, Any]:
    rank = cursor.count("B", f"the rank of {name}")
    if rank > MAX_RANK:
        raise cursor.fault(f"{name}: expected a rank of at most {MAX_RANK}, got {rank}")
    shape = tuple(cursor.count("I", f"the shape of {name}") for _ in range(rank))
    if 0 in shape:
        raise cursor.fault(f"{name}: expected a shape without zeros, got {shape}")
    code = cursor.count("B", f"the type of {name}")
    if code not in TYPES:
        raise cursor.fault(f"{name}: expected a type in {sorted(TYPES)}, got {code}")
    dtype = np.dtype(TYPES[code])
    stored, needed = cursor.count("I", f"the size of {name}"), math.prod(shape) * dtype.itemsize
    if stored != needed:
        raise cursor.fault(f"{name}: {dtype.name} of shape {shape} takes {needed} bytes, got {stored}")
    return np.frombuffer(cursor.take(stored, name), dtype).reshape(shape)
