"""`accelerate` and `restore`: Regard's attention and linear layers in a model of Transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from .._api.projection import Linear
from .._backends.native.core import DTYPES, reason_unavailable
from .._tools.arguments import describe
from ..convert._replace import REGARD, set_implementation

BEFORE = "_regard_before"  # attribute of a changed module: its implementation or class before


@dataclass(frozen=True)
class AcceleratedLayer:
    """A linear layer, or a model with its attention modules, and whether Regard computes it."""

    kind: str  # "attention" or "linear"
    name: str  # in the model; "" for the model itself
    of: str  # the name of its class
    reason: str | None  # why PyTorch or Transformers computes it; None: Regard does


@dataclass(frozen=True)
class Acceleration:
    """The report of `accelerate`. `print` counts the layers by kind, class and reason."""

    layers: tuple[AcceleratedLayer, ...]

    @property
    def accelerated(self) -> tuple[str, ...]:
        """The names of the layers that Regard computes."""
        return tuple(layer.name for layer in self.layers if layer.reason is None)

    def __str__(self) -> str:
        groups = Counter((layer.kind, layer.of, layer.reason) for layer in self.layers)
        lines = [
            f"{count:4} x {kind} {of}: {'Regard' if reason is None else f'unchanged, {reason}'}"
            for (kind, of, reason), count in groups.items()
        ]
        return "\n".join(lines) or "no layers"


def accelerate(model: nn.Module) -> Acceleration:
    """Makes a Transformers model use Regard's attention and linear layers, in place.

    The attention implementation becomes "regard". Linear layers, also the head over the vocabulary,
    become `regard.nn.Linear`, which is fast with few rows, as in generation. Only classes change:
    parameters, tied weights, hooks and the `state_dict` stay the same, and generation, training and
    `save_pretrained` work as before. The report names the layers that do not change, and says why.
    `restore` undoes the changes.

    Example:
        >>> print(regard.hf.accelerate(model))
        >>> tokens = model.generate(**inputs)
    """
    models = _models(model)
    # Switching a model also switches the models in it.
    before = {name: m.config._attn_implementation for name, m in models.items()}
    attention = [_switched(name, m, before[name]) for name, m in models.items()]
    linear = [_replaced(*item) for item in model.named_modules() if isinstance(item[1], nn.Linear | Conv1D)]
    return Acceleration((*attention, *linear))


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`, in place: restores attention implementations and linear layers."""
    for m in _models(model).values():
        if before := vars(m).pop(BEFORE, None):
            set_implementation(m, before)
    for module in model.modules():
        if before := vars(module).pop(BEFORE, None):
            module.__class__ = before


def _models(model: nn.Module) -> dict[str, Any]:
    """Returns the Transformers models in `model`, itself included, by name."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    models = {name: m for name, m in modules if hasattr(m, "set_attn_implementation")}
    if not models:
        raise TypeError(f"model: expected a model of Transformers, got {describe(model)}")
    return models


def _switched(name: str, model: Any, before: str) -> AcceleratedLayer:
    """Sets the attention implementation of one model, and saves the one that it had."""
    error = set_implementation(model, REGARD)
    reason = None
    if model.config._attn_implementation != REGARD:
        reason = str(error) if error else f"the model keeps attn_implementation={before!r}"
    elif before != REGARD:
        setattr(model, BEFORE, before)
    return AcceleratedLayer("attention", name, type(model).__name__, reason)


def _replaced(name: str, module: nn.Module) -> AcceleratedLayer:
    """Changes the class of a linear layer, if that is possible, and saves the one that it had."""
    kind, reason = type(module), _reason(module)
    if reason is None and kind is not Linear:
        module.__class__ = Linear
        vars(module)[BEFORE] = kind
    return AcceleratedLayer("linear", name, kind.__name__, reason)


def _reason(module: Any) -> str | None:
    """Returns why Regard cannot compute a linear layer, or None if it can."""
    if isinstance(module, Conv1D):
        return "its weight is transposed"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and does not call it"
    if type(module) not in (nn.Linear, Linear):
        return "its class may compute something else"
    if "forward" in vars(module):
        return "its method forward was replaced"
    weight = module.weight
    if not weight.is_cpu:
        return f"its weight is on {weight.device}"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    return reason_unavailable()
