"""`Origin`: hashes of a conversion's inputs, so that a result can be reproduced and identified."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SOURCES = {"q": "qkv", "kv_down": "qkv", "kv_up": "qkv"}  # new layer -> the source layer it comes from


@dataclass(frozen=True)
class Origin:
    """Hashes of the inputs of a conversion.

    Conversions are deterministic: equal inputs give equal modules.

    Attributes:
        source: SHA-256 of the source module's state_dict: names, dtypes, shapes and data.
        calibration, held_out: SHA-256 of the tokens, or None if there were no tokens.
        tensors: maps the name of each tensor of the result to the names of the source tensors from
            which it was computed. If the source is not a `regard.nn.Attention`, it is converted to
            one first, and the names of its tensors are the names after this conversion.
    """

    source: str
    calibration: str | None
    held_out: str | None
    tensors: dict[str, tuple[str, ...]]


def origin(
    module: nn.Module, before: nn.Module, after: nn.Module, seen: Tensor | None, unseen: Tensor | None
) -> Origin:
    """Returns the `Origin` of the converted module `after`.

    `module` is the source module, and `before` the `regard.nn.Attention` with its weights.
    `seen` are the calibration tokens, and `unseen` the held-out tokens.
    """
    state = before.state_dict()
    tensors = {name: _sources(name, state) for name in after.state_dict()}
    calibration, held_out = (None if x is None else digest({"tokens": x}) for x in (seen, unseen))
    return Origin(digest(module.state_dict()), calibration, held_out, tensors)


def _sources(name: str, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    layer, _, _ = name.rpartition(".")
    source = SOURCES.get(layer, layer)
    return tuple(other for other in state if other.rpartition(".")[0] == source)


def digest(state: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of a state_dict in hexadecimal.

    The hash depends on names, dtypes, shapes and data, not on the order of names or on strides.
    """
    sha = hashlib.sha256()
    for name in sorted(state):
        x = state[name].detach().cpu().contiguous()
        sha.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        sha.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
