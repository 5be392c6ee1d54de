"""Converted modules in safetensors files: tensors, and what is needed to build the module anew."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from torch import nn

from ..masks import Causal, Mask
from ..nn import Attention, LatentAttention
from ..positions import NTK, Frequencies, LinearScaling, Llama3, Rotary, Scaling, YaRN
from ._origin import Origin
from ._report import Module, Report

SIZES: dict[type[Module], tuple[str, ...]] = {
    Attention: ("d_model", "heads", "kv_heads", "head_dim", "value_dim", "kv_model", "scale", "softcap",
                "dropout"),
    LatentAttention: ("d_model", "heads", "rank", "nope_dim", "rope_dim", "value_dim", "q_rank", "scale",
                      "dropout"),
}  # fmt: skip
SCALINGS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (LinearScaling, NTK, YaRN, Llama3, Frequencies)
}


def save(module: Module, path: str | os.PathLike[str], report: Report | None = None) -> None:
    """Writes the module to a safetensors file: its state_dict, and as metadata how to build it.

    With a report, also where it comes from, which `origin` reads.
    """
    from safetensors.torch import save_file

    about = {"format": "pt", "regard": json.dumps(_description(module))}
    if report is not None:
        about["origin"] = json.dumps(asdict(report.origin))
    tensors = {name: value.contiguous() for name, value in module.state_dict().items()}
    save_file(tensors, path, about)


def origin(path: str | os.PathLike[str]) -> Origin:
    """Reads where the module of a file comes from, if it was saved with its report."""
    found = json.loads(_metadata(path, "origin", "`save(module, path, report)`"))
    found["tensors"] = {name: tuple(made_of) for name, made_of in found["tensors"].items()}
    return Origin(**found)


def load(path: str | os.PathLike[str]) -> Module:
    """Builds the module that `save` wrote, in evaluation. A file with missing or extra tensors raises."""
    from safetensors.torch import load_file

    about = _metadata(path, "regard", "regard.convert.save")
    try:
        module = _built(json.loads(about))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"path: expected a module that regard.convert.save wrote, got {os.fspath(path)}, whose "
            f"description does not fit: {error}"
        ) from error
    module.load_state_dict(load_file(path), assign=True)
    return module.eval()


def _metadata(path: str | os.PathLike[str], name: str, writer: str) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about: str | None = (file.metadata() or {}).get(name)
    if about is None:
        raise ValueError(f"path: expected a file of {writer}, got {os.fspath(path)} without its metadata")
    return about


def _description(module: Module) -> dict[str, Any]:
    if type(module) not in SIZES:
        raise TypeError(f"module: expected Attention or LatentAttention, got {type(module).__name__}")
    sizes = {name: getattr(module, name) for name in SIZES[type(module)]}
    about = {"kind": type(module).__name__, **sizes}
    about["mask"] = _mask(module.mask)
    about["position"] = None if module.position is None else _position(module.position)
    about["out_bias"] = module.out.bias is not None
    if isinstance(module, LatentAttention):
        return about | _latent(module)
    if module.q_norm is not None:
        raise ValueError("module: expected no qk_norm, whose kind a file cannot name")
    first = module.qkv if module.kv_model is None else module.q
    gate, sink = module.gate is not None, module.sink is not None
    return about | {"bias": first.bias is not None, "gate": gate, "sink": sink}


def _latent(module: LatentAttention) -> dict[str, Any]:
    norm = module.kv_norm
    if not isinstance(norm, nn.Identity | nn.RMSNorm):
        raise ValueError(f"module: expected RMSNorm or no norm, got {type(norm).__name__}")
    eps = norm.eps if isinstance(norm, nn.RMSNorm) else None
    return {"bias": module.kv_down.bias is not None, "norm": eps}


def _mask(mask: Mask | None) -> str | None:
    if mask is None or mask == Causal():
        return None if mask is None else "causal"
    raise ValueError(f"module: expected mask None or Causal(), which a file can name, got {mask}")


def _position(rule: nn.Module) -> dict[str, Any]:
    if type(rule) is not Rotary:
        raise ValueError(f"module: expected position None or Rotary, which a file can name, got {rule}")
    return {"dims": rule.dims, "base": rule.base, "layout": rule.layout, "scaling": _scaling(rule.scaling)}


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    name = type(scaling).__name__
    if SCALINGS.get(name) is not type(scaling):
        raise ValueError(f"module: expected a scaling of regard.positions, got {scaling!r}")
    return {"kind": name, **vars(scaling)}


def _built(about: dict[str, Any]) -> Module:
    """Builds a module without memory: the tensors of the file become its parameters."""
    kind = {kind.__name__: kind for kind in SIZES}[about.pop("kind")]
    if about["mask"] not in (None, "causal"):
        raise ValueError(f"mask {about['mask']!r} is not known")
    about["mask"] = None if about["mask"] is None else Causal()
    about["position"] = None if about["position"] is None else _rotary(about["position"])
    if kind is LatentAttention:
        eps = about["norm"]
        about["norm"] = None if eps is None else lambda rank: nn.RMSNorm(rank, eps=eps)
    return kind(**about, device="meta")


def _rotary(about: dict[str, Any]) -> Rotary:
    scaling = about.pop("scaling")
    if scaling is not None:
        scaling = SCALINGS[scaling.pop("kind")](**scaling)
    return Rotary(**about, scaling=scaling)
