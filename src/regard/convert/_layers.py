"""All self-attention of a model converted, each layer on the tokens that it meets."""

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

Convert = Callable[[Attention, Tensor, Tensor], tuple[nn.Module, Report]]


@dataclass(frozen=True)
class ModelReport:
    """The report of each layer, by name, and the error of the whole model's result on held-out input."""

    layers: dict[str, Report]
    output: float
    skipped: tuple[str, ...]  # attention of other kinds: to a context, or PyTorch's

    @property
    def verdict(self) -> str:
        """Of the whole model: by its worst proof, its own error and the narrowest tolerance of a layer."""
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
    """Returns a copy of the model with every self-attention `regard.nn.Attention` converted, and a report.

    Args:
        model: takes `calibration` and returns a tensor. It stays as it is.
        convert: what is done with a layer, its calibration and its held-out tokens, for example
            `lambda layer, seen, unseen: to_latent(layer, 64, 16, calibration=seen, held_out=unseen)`.
        calibration, held_out: input of the model; each layer gets the tokens that reach it.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Attention | nn.MultiheadAttention)}
    own = {n: m for n, m in layers.items() if isinstance(m, Attention) and m.kv_model is None}
    if not own:
        raise ValueError("model: expected at least one regard.nn.Attention of self-attention, got none")
    seen, unseen = _met(model, own, calibration), _met(model, own, held_out)
    made = {name: convert(m, seen[name], unseen[name]) for name, m in own.items()}
    # What is in the memo of a deep copy counts as copied: wherever a layer stands, the converted one follows.
    memo: dict[int, Any] = {id(m): made[name][0] for name, m in own.items()}
    after = copy.deepcopy(model, memo)
    with evaluating(model, after):
        expected = model(held_out).double()
        error = float((after(held_out) - expected).norm() / expected.norm())
    reports = {name: report for name, (_, report) in made.items()}
    return after, ModelReport(reports, error, tuple(name for name in layers if name not in own))


def _met(model: nn.Module, layers: dict[str, Attention], batch: Tensor) -> dict[str, Tensor]:
    """Returns the tokens (B, L, d_model) that reach each layer."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        found.setdefault(name, args[0])

    with evaluating(model), ExitStack() as hooks:
        for name, m in layers.items():
            hooks.enter_context(m.register_forward_pre_hook(partial(keep, name)))
        model(batch)
    if missing := layers.keys() - found.keys():
        raise ValueError(f"model: expected all layers to be called, got none of {', '.join(sorted(missing))}")
    return found
