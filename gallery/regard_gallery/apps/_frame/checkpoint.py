"""Checkpoints in safetensors files: tensors, and beside them a JSON object that says what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

KEY = "regard"


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]
    about: dict[str, Any]


def prepare(folder: Path) -> None:
    """Raise OSError now if nothing can be written there, not after minutes of training."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        pass


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """The whole file or none of it: an interruption leaves what was there before."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    new = path.with_suffix(".new")
    alone = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    try:
        save_file(alone, new, {"format": "pt", KEY: json.dumps(about)})
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written: {error}") from None
    os.replace(new, path)


def read(path: Path, expected: dict[str, object], wanted: Sequence[str]) -> Checkpoint:
    """What `write` wrote, if its description has these values, and something for each name in `wanted`."""
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
        raise ValueError(f"{path}: expected a checkpoint that says its {', '.join(missing)}; it does not")
    return Checkpoint(tensors, about)


def restore(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"checkpoint: expected the tensors of this model: {error}") from None


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin so, without the beginning."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def of_optimizer(optimizer: Optimizer) -> dict[str, Tensor]:
    """Its state, which for AdamW is tensors alone: "3.exp_avg"."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, own in state.items() for name, value in own.items()}


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
