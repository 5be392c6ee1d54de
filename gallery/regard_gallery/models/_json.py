"""Reads the JSON files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object.

    Raises ValueError if the file is larger than MAX_BYTES or has anything but an object.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path.name}: expected at most {MAX_BYTES} bytes, got {path.stat().st_size}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: expected JSON, got {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value
