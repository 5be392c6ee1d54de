"""Checkpoints: safetensors files with a JSON object of metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from regard.cli.console import replacing

KEY = "regard"


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]
    about: dict[str, Any]


def prepare(folder: Path) -> None:
    """Creates the folder. Raises OSError if it is not writable.

    A run calls this first, so that it does not fail after minutes of training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        pass


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Writes a checkpoint atomically: an interruption leaves the previous file intact."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    copies = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    try:
        with replacing(path) as temporary:
            save_file(copies, temporary, {"format": "pt", KEY: json.dumps(about)})
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written: {error}") from None


def read(path: Path, expected: dict[str, object], wanted: Sequence[str]) -> Checkpoint:
    """Reads a checkpoint that `write` wrote.

    Raises ValueError unless the metadata contains the items of `expected` and all keys in `wanted`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: expected a sound safetensors file: {error}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path}: expected a checkpoint of `regard run`, got another file")
    for key, value in expected.items():
        if about.get(key) != value:
            raise ValueError(f"{path}: expected a checkpoint with {key} = {value!r}, got {about.get(key)!r}")
    if missing := [key for key in wanted if key not in about]:
        raise ValueError(f"{path}: expected a checkpoint with {', '.join(missing)}, got one without")
    return Checkpoint(tensors, about)


def restore(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"checkpoint: expected the tensors of this model: {error}") from None


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, under names without the prefix."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def of_optimizer(optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's state as a dict of tensors.

    A name such as "3.exp_avg" stands for `exp_avg` of parameter number 3.
    """
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, tensors in state.items() for name, value in tensors.items()}


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
