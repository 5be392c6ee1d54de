"""Directories with models of transformers: only data is read from them, and nothing outside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._json import read_json

CONFIGURATIONS = ("config.json", "generation_config.json", "tokenizer_config.json")
# Names that would choose code: classes from a repository, kernels from the hub.
CODE = re.compile(r"auto_map|custom_pipelines|custom_generate|_?\w*_implementation(_internal)?")


def checked(path: Path) -> Path:
    """`path`, if it holds a configuration that names no code, and weights in sound safetensors files."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model: expected a directory with a config.json, got {path}")
    if (path / "adapter_config.json").exists():
        raise ValueError(f"model: expected a whole model, got {path}, which is an adapter to another one")
    for name in CONFIGURATIONS:
        if (path / name).exists():
            _check_names(read_json(path / name), name)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"model: expected weights in safetensors files, got {path} with {_files(path)}")
    for file in weights:
        _check_weights(file)
    return path


def _files(path: Path) -> str:
    return ", ".join(sorted(file.name for file in path.iterdir()))


def _check_names(config: dict[str, Any], file: str) -> None:
    """Nothing in the file, at any depth, says which code is to run. A null says nothing."""
    for name, value in _items(config):
        if value is not None and CODE.fullmatch(name):
            raise ValueError(f"{file}: expected no {name}, which names code to run, got {value!r}")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield from inner.items()
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)


def _check_weights(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file.name}: expected a sound safetensors file: {error}") from None
