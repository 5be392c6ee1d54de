"""Where a converted module comes from, so that it can be made again and told from others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MADE_OF = {"q": "qkv", "kv_down": "qkv", "kv_up": "qkv"}  # layers that the source has not


@dataclass(frozen=True)
class Origin:
    """A conversion draws no random numbers: the same source and tokens give the same module.

    Attributes:
        source: SHA-256 of the module that was converted: names, dtypes, shapes and numbers of its state_dict.
        calibration, held_out: SHA-256 of the tokens, if there were any.
        tensors: for each tensor of the result, those of the source, as `regard.nn.Attention`, it is made of.
    """

    source: str
    calibration: str | None
    held_out: str | None
    tensors: dict[str, tuple[str, ...]]


def origin(
    module: nn.Module, before: nn.Module, after: nn.Module, seen: Tensor | None, unseen: Tensor | None
) -> Origin:
    """`before` is the module as `regard.nn.Attention`."""
    known = before.state_dict()
    tensors = {name: _sources(name, known) for name in after.state_dict()}
    calibration, held_out = (None if x is None else digest({"tokens": x}) for x in (seen, unseen))
    return Origin(digest(module.state_dict()), calibration, held_out, tensors)


def _sources(name: str, known: Mapping[str, Tensor]) -> tuple[str, ...]:
    layer, _, _ = name.rpartition(".")
    made_of = MADE_OF.get(layer, layer)
    return tuple(other for other in known if other.rpartition(".")[0] == made_of)


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 in hexadecimal, whatever the order of names and the layout in memory."""
    found = hashlib.sha256()
    for name in sorted(state):
        x = state[name].detach().cpu().contiguous()
        found.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
