"""Checks a directory with a Transformers model, so that loading it runs no code from the model and
reads no files outside the directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._json import read_json

CONFIGURATIONS = ("config.json", "generation_config.json", "tokenizer_config.json")
# Configuration keys that choose code or files: custom classes, kernels of the Hugging Face Hub, weights
# in other places.
CHOOSING = re.compile(
    r"auto_map|custom_pipelines|custom_generate|transformers_weights|\w*_implementation(_internal)?"
)
# Configuration keys that give a number of layers. These numbers are checked, because Transformers builds
# all layers before it reads weights.
LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|(en|de)coder_layers")
INDEX = "model.safetensors.index.json"


def checked(path: Path) -> Path:
    """Returns `path`. Raises ValueError unless the directory is safe to load.

    The configuration must not refer to Python code, and the weights must be valid safetensors
    files.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"model: expected a directory with a config.json, got {path}")
    if (path / "adapter_config.json").exists():
        raise ValueError(f"model: expected a whole model, got {path}, which is an adapter to another one")
    configurations = {name: read_json(path / name) for name in CONFIGURATIONS if (path / name).exists()}
    for name, config in configurations.items():
        _check_names(config, name)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        there = ", ".join(sorted(file.name for file in path.iterdir()))
        raise ValueError(f"model: expected weights in safetensors files, got {path} with {there}")
    _check_layers(configurations["config.json"], sum(map(_count_tensors, weights)))
    if (path / INDEX).exists():
        _check_index(read_json(path / INDEX), {file.name for file in weights})
    return path


def _check_names(config: dict[str, Any], file: str) -> None:
    """Raises ValueError if a key of `config`, at any depth, selects code to run or files to read.

    Keys with the value null are allowed. `file` is the name of the file, for the error message.
    """
    for name, value in _items(config):
        if value is not None and CHOOSING.fullmatch(name):
            raise ValueError(f"{file}: expected no {name}, which chooses code or files, got {value!r}")


def _check_layers(config: dict[str, Any], tensors: int) -> None:
    """Raises ValueError if the configuration has more layers than the weights have tensors."""
    for name, value in _items(config):
        if LAYERS.fullmatch(name) and type(value) is int and value > tensors:
            limit = f"at most as many layers as the weights have tensors, {tensors}"
            raise ValueError(f"config.json: expected {limit}, got {name} = {value}")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield from inner.items()
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)


def _check_index(index: dict[str, Any], names: set[str]) -> None:
    """Raises ValueError unless the index of the weights refers only to the files `names`."""
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(type(x) is str and x in names for x in listed.values()):
        wanted = "a weight_map to the safetensors files beside it"
        raise ValueError(f"{INDEX}: expected {wanted}, got {listed!r:.200}")


def _count_tensors(file: Path) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as weights:
            return len(weights.keys())
    except SafetensorError as error:
        raise ValueError(f"{file.name}: expected a sound safetensors file: {error}") from None
