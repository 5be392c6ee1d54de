"""Saves attention modules to safetensors files and loads them.

The metadata of a file holds the module's constructor arguments.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import Any

from torch import nn

from .._tools.arguments import describe, existing_file, number
from .._tools.replacing import replacing
from ..masks import Causal, Mask
from ..nn import Attention, LatentAttention
from ..positions import NTK, Frequencies, LinearScaling, Llama3, Rotary, Scaling, YaRN
from ._origin import Origin
from ._report import Module, Report

SIZES: dict[type[Module], tuple[str, ...]] = {
    Attention: ("d_model", "heads", "kv_heads", "head_dim", "value_dim", "kv_model", "value_model", "scale",
                "softcap", "dropout"),
    LatentAttention: ("d_model", "heads", "rank", "nope_dim", "rope_dim", "value_dim", "q_rank", "scale",
                      "dropout"),
}  # fmt: skip
SCALINGS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (LinearScaling, NTK, YaRN, Llama3, Frequencies)
}

FLAGS = ("bias", "out", "out_bias", "gate", "sink", "truncate")
TEXTS, NESTED = ("kind", "mask", "layout"), ("position", "scaling")
POSITIVE = ("softcap", "norm", "factor", "attention_factor")


def save(module: Module, path: str | os.PathLike[str], report: Report | None = None) -> None:
    """Writes the module's state_dict and constructor arguments to a safetensors file.

    An interruption leaves the previous file unchanged.

    Args:
        module: an `Attention` or a `LatentAttention`.
        path: the file. `load(path)` builds the module again.
        report: the report of the conversion. If it is passed, the file also holds `report.origin`.
    """
    from safetensors.torch import save_file

    metadata = {"format": "pt", "regard": json.dumps(_description(module))}
    if report is not None:
        metadata["origin"] = json.dumps(asdict(report.origin))
    tensors = {name: value.contiguous() for name, value in module.state_dict().items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def origin(path: str | os.PathLike[str]) -> Origin:
    """Returns the `Origin` stored in a file. The file must have been saved with a report."""
    fields = json.loads(_metadata(path, "origin", "`save(module, path, report)`"))
    fields["tensors"] = {name: tuple(sources) for name, sources in fields["tensors"].items()}
    return Origin(**fields)


def load(path: str | os.PathLike[str]) -> Module:
    """Returns the module that `save` wrote to a file, in evaluation mode.

    Raises ValueError if the file has missing or extra tensors or constructor arguments that are not
    valid.
    """
    from safetensors.torch import load_file

    description = _metadata(path, "regard", "regard.convert.save")
    try:
        fields = json.loads(description)
        _check_values(fields)
        module = _built(fields)
        module.load_state_dict(load_file(path), assign=True)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"path: expected a file of regard.convert.save, got {os.fspath(path)} with constructor arguments "
            f"or tensors that are not valid: {error}"
        ) from error
    return module.eval()


def _metadata(path: str | os.PathLike[str], name: str, writer: str) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(existing_file("path", path), "pt") as file:
            value: str | None = (file.metadata() or {}).get(name)
    except SafetensorError as error:
        raise ValueError(f"path: expected a file of {writer}, got {os.fspath(path)}: {error}") from error
    if value is None:
        raise ValueError(f"path: expected a file of {writer}, got {os.fspath(path)} without its metadata")
    return value


def _description(module: Module) -> dict[str, Any]:
    """Returns the module's class name and constructor arguments as a JSON-serialisable dict."""
    if type(module) not in SIZES:
        raise TypeError(f"module: expected Attention or LatentAttention, got {type(module).__name__}")
    sizes = {name: getattr(module, name) for name in SIZES[type(module)]}
    description = {"kind": type(module).__name__, **sizes}
    description["mask"] = _mask(module.mask)
    description["position"] = None if module.position is None else _position(module.position)
    description["out_bias"] = getattr(module.out, "bias", None) is not None
    if isinstance(module, LatentAttention):
        return description | _latent(module)
    if module.q_norm is not None:
        raise ValueError("module: expected qk_norm=None, because files do not store norms, got a norm")
    flags = {"bias": module.projections[0].bias is not None, "out": isinstance(module.out, nn.Linear)}
    return description | flags | {"gate": module.gate is not None, "sink": module.sink is not None}


def _latent(module: LatentAttention) -> dict[str, Any]:
    norm = module.kv_norm
    if not isinstance(norm, nn.Identity | nn.RMSNorm):
        raise ValueError(f"module: expected RMSNorm or no norm, got {type(norm).__name__}")
    eps = norm.eps if isinstance(norm, nn.RMSNorm) else None
    return {"bias": module.kv_down.bias is not None, "norm": eps}


def _mask(mask: Mask | None) -> str | None:
    if mask is None or mask == Causal():
        return None if mask is None else "causal"
    raise ValueError(f"module: expected mask None or Causal(), which files can store, got {mask}")


def _position(rule: nn.Module) -> dict[str, Any]:
    if type(rule) is not Rotary:
        raise ValueError(f"module: expected position None or Rotary, which files can store, got {rule}")
    return {"dims": rule.dims, "base": rule.base, "layout": rule.layout, "scaling": _scaling(rule.scaling)}


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    name = type(scaling).__name__
    if SCALINGS.get(name) is not type(scaling):
        raise ValueError(f"module: expected a scaling of regard.positions, got {scaling!r}")
    return {"kind": name, **vars(scaling)}


def _check_values(description: dict[str, Any]) -> None:
    """Checks that flags are bools and numbers finite. Constructors check sizes and strings."""
    for name, value in description.items():
        if name in FLAGS:
            if type(value) is not bool:
                raise ValueError(f"{name}: expected true or false, got {describe(value)}")
        elif name in NESTED and isinstance(value, dict):
            _check_values(value)
        elif name not in TEXTS and value is not None:
            for x in value if name == "values" else [value]:
                least = 0.0 if name in POSITIVE else -math.inf
                if not least < number(name, x) < math.inf:
                    kind = "a finite number above 0" if name in POSITIVE else "a finite number"
                    raise ValueError(f"{name}: expected {kind}, got {x!r}")


def _built(description: dict[str, Any]) -> Module:
    """Returns a module with empty tensors on the meta device, from the result of `_description`."""
    kind = {kind.__name__: kind for kind in SIZES}[description.pop("kind")]
    if description["mask"] not in (None, "causal"):
        raise ValueError(f"mask: expected None or 'causal', got {description['mask']!r}")
    description["mask"] = None if description["mask"] is None else Causal()
    description["position"] = None if description["position"] is None else _rotary(description["position"])
    if kind is LatentAttention:
        eps = description["norm"]
        description["norm"] = None if eps is None else lambda rank: nn.RMSNorm(rank, eps=eps)
    return kind(**description, device="meta")


def _rotary(description: dict[str, Any]) -> Rotary:
    scaling = description.pop("scaling")
    if scaling is not None:
        scaling = SCALINGS[scaling.pop("kind")](**scaling)
    return Rotary(**description, scaling=scaling)
