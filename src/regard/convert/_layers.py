"""`convert_layers`: converts all self-attention layers of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._tools.modes import evaluating
from ..nn import Attention
from ._report import Report, verdict
from ._source import is_convertible

Convert = Callable[[Attention, Tensor, Tensor], tuple[nn.Module, Report]]


@dataclass(frozen=True)
class ModelReport:
    """The reports of all layers and the error of the whole model.

    Attributes:
        layers: maps the name of each converted layer to its report.
        output: relative error of the model's output on held-out input.
        skipped: names of attention layers that were not converted: cross-attention layers, and
            PyTorch's attention modules.
    """

    layers: dict[str, Report]
    output: float
    skipped: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """A sentence that says whether the model can be used without training.

        The sentence depends on `output` and on `exact` and `tolerance` of the layers' reports.
        """
        reports = self.layers.values()
        exact, tolerance = max(r.exact for r in reports), min(r.tolerance for r in reports)
        return verdict(exact, self.output, tolerance)

    def __str__(self) -> str:
        parts = [f"{name}: {report}" for name, report in self.layers.items()]
        not_converted = [f"not converted: {', '.join(self.skipped)}"] if self.skipped else []
        return "\n".join([*parts, *not_converted, f"whole model: error {self.output:.2e}; {self.verdict}"])


@torch.no_grad()
def convert_layers(
    model: nn.Module, convert: Convert, calibration: Tensor, held_out: Tensor
) -> tuple[nn.Module, ModelReport]:
    """Returns a copy of the model with converted self-attention layers, and a report.

    Only layers of class `regard.nn.Attention` are converted.

    Args:
        model: a model that takes `calibration` and returns a tensor. It is not modified.
        convert: a function of a layer, its calibration tokens and its held-out tokens that returns
            the converted layer and its report.
        calibration, held_out: inputs of the model. A layer's calibration tokens are the inputs
            of the layer when the model runs on `calibration`. Its held-out tokens are the inputs of
            the layer when the model runs on `held_out`.

    Example:
        >>> def convert(layer, seen, unseen):
        ...     return regard.convert.to_latent(layer, 64, 16, calibration=seen, held_out=unseen)
        >>> converted, report = regard.convert.convert_layers(model, convert, x, other_x)
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Attention | nn.MultiheadAttention)}
    convertible = {n: m for n, m in layers.items() if isinstance(m, Attention) and is_convertible(m)}
    if not convertible:
        raise ValueError("model: expected at least one regard.nn.Attention for self-attention, got none")
    seen, unseen = (_layer_inputs(model, convertible, batch) for batch in (calibration, held_out))
    converted = {name: convert(m, seen[name], unseen[name]) for name, m in convertible.items()}
    # deepcopy replaces every reference to a layer by its entry in the memo, the converted layer.
    memo: dict[int, Any] = {id(m): converted[name][0] for name, m in convertible.items()}
    after = copy.deepcopy(model, memo)
    with evaluating(model, after):
        expected = model(held_out).double()
        error = float((after(held_out) - expected).norm() / expected.norm())
    reports = {name: report for name, (_, report) in converted.items()}
    return after, ModelReport(reports, error, tuple(name for name in layers if name not in convertible))


def _layer_inputs(model: nn.Module, layers: dict[str, Attention], batch: Tensor) -> dict[str, Tensor]:
    """Returns the first input (B, L, d_model) of each layer when the model runs on `batch`."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(name, args[0])

    with evaluating(model), ExitStack() as hooks:
        for name, m in layers.items():
            hooks.enter_context(m.register_forward_pre_hook(partial(keep, name)))
        model(batch)
    if missing := layers.keys() - inputs.keys():
        raise ValueError(f"model: expected calls of all layers, got none of {', '.join(sorted(missing))}")
    return inputs
