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
# Configuration keys that give numbers of layers, sizes and lengths. They are checked, because
# Transformers builds the whole model before it reads weights.
LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks?)|(\w+_)?(en|de)coder_layers|layers|depth")
SIZES = re.compile(
    r"(\w+_)?((hidden|intermediate|vocab|embedding)_size|(head|ffn|hidden|embed|mlp)_dim|attention_heads)"
    r"|(\w+_)?(num|n)_(\w+_)?(heads?|experts|buckets|mel_bins)|d_(model|ff|kv)|dim|n_(embd|inner)"
)
LENGTHS = re.compile(r"(\w+_)?(positions|position_embeddings)|sliding_window")
LEARNED = re.compile(r"(.*\.)?(\w*position_embeddings?|embed_positions|wpe)\.weight")
# Keys for which 0 is an error, because every model that has them has such layers, sizes or lengths.
POSITIVE = re.compile(
    r"(num_|n_)((hidden|encoder|decoder)_)?layers?|(en|de)coder_layers|(num|n)_(attention_|key_value_)?heads?"
    r"|(en|de)coder_attention_heads|(hidden|intermediate|vocab)_size|head_dim|d_(model|ff|kv)|dim|n_embd"
    r"|(\w+_)?(positions|position_embeddings)"
)
LONGEST, UNUSED = 2**31 - 1, 2**20
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
    _check_sizes(configurations["config.json"], dict(x for file in weights for x in _shapes(file).items()))
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


def _check_sizes(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError if a size in the configuration is too large for the weights.

    `shapes` has the shapes of the weights. A model has at most as many layers as tensors, and no
    size above the largest dim of a tensor. If the configuration contains those of submodels, sizes
    up to UNUSED are allowed, because it may have sizes that no submodel uses.
    """
    several = any(isinstance(value, dict) and "model_type" in value for value in config.values())
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    largest = max(largest, UNUSED) if several else largest
    learned = any(map(LEARNED.fullmatch, shapes))  # one row of weights for each position
    for name, value in _items(config):
        length = largest if learned and name in config else LONGEST
        limits = {LAYERS: len(shapes), SIZES: largest, LENGTHS: length}
        most = next((limit for pattern, limit in limits.items() if pattern.fullmatch(name)), None)
        if most is None or value is None:
            continue
        if LAYERS.fullmatch(name) and type(value) is int and value > most:
            limit = f"at most as many layers as the weights have tensors, {most}"
            raise ValueError(f"config.json: expected {limit}, got {name} = {value}")
        least = int(POSITIVE.fullmatch(name) is not None)
        if type(value) is not int or not least <= value <= most:
            expected = f"{name} in config.json to be an integer from {least} to {most}"
            raise ValueError(f"model: expected {expected}, got {value!r:.80}")


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


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as weights:
            return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file.name}: expected a sound safetensors file: {error}") from None
