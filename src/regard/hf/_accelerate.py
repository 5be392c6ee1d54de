"""`accelerate` and `restore`: Regard's attention and linear layers in a model of Transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .._api.projection import Linear
from .._backends.native.core import DTYPES, reason_unavailable
from .._tools.arguments import describe
from ..convert._replace import REGARD, hf_models, set_implementation
from ._register import register

SAVED = "_regard_replaced"  # attribute of an accelerated model: its attention implementations before


@dataclass(frozen=True)
class AcceleratedLayer:
    """A layer of an accelerated model: its class, whether it runs on Regard, and if not, why."""

    kind: str  # "attention" or "linear"
    name: str
    of: str  # name of its class
    runs: bool
    reason: str = ""


@dataclass(frozen=True)
class Acceleration:
    """The report of `accelerate`. `print` shows it grouped by kind, class and reason."""

    layers: tuple[AcceleratedLayer, ...]

    @property
    def accelerated(self) -> tuple[str, ...]:
        """The names of the layers that run on Regard."""
        return tuple(layer.name for layer in self.layers if layer.runs)

    def __str__(self) -> str:
        groups = Counter((layer.kind, layer.of, layer.runs, layer.reason) for layer in self.layers)
        examples = {(layer.kind, layer.of, layer.runs, layer.reason): layer.name for layer in self.layers}
        lines = [
            f"{count:5} {kind:9} {of:28} {'regard' if runs else reason} (such as {examples[key] or 'the model'})"
            for key, count in groups.items()
            for kind, of, runs, reason in [key]
        ]
        return "\n".join(["layers kind     class                        runs on", *lines])


def accelerate(model: nn.Module) -> Acceleration:
    """Makes a Transformers model use Regard's attention and linear layers, in place.

    Attention modules get `attn_implementation="regard"`. Linear layers, also the head over the
    vocabulary, become `regard.nn.Linear`, which is fast with few rows, as in generation. Only
    classes change: parameters, tied weights, hooks and the `state_dict` stay the same, and training
    and `save_pretrained` work as before. Layers that cannot change keep their class, and the report
    says why. `restore` undoes the changes.

    Example:
        >>> print(regard.hf.accelerate(model))
        >>> text = model.generate(**inputs)
    """
    models = hf_models(_checked(model))
    register_if_needed()
    before = {name: m.config._attn_implementation for name, m in models.items()}
    layers = [_switched(name, m) for name, m in models.items()]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            layers.append(_replaced(name, module))
    if not hasattr(model, SAVED):
        setattr(model, SAVED, before)
    return Acceleration(tuple(layers))
