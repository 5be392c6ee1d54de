"""`verify`: compares a model's outputs and gradients with a float64 copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from .._tools.modes import evaluating
from ._batch import warn_if_samples_interact
from ._replace import restore_attention
from ._sdpa import pytorch_sdpa


@dataclass(frozen=True)
class Verification:
    """Differences of a model from its reference, a float64 copy with PyTorch's attention.

    Attributes:
        output: largest difference of the outputs, relative to the largest output.
        gradients: maps each parameter to the largest difference of its gradient, relative to the
            largest entry of all gradients.
        plain_output, plain_gradients: the same differences for a copy of the model that has
            PyTorch's attention and the model's dtype. The reference is the same.
    """

    output: float
    gradients: dict[str, float]
    plain_output: float
    plain_gradients: dict[str, float]

    @property
    def gradient(self) -> float:
        """The largest value of `gradients`."""
        return max(self.gradients.values(), default=0.0)

    @property
    def plain_gradient(self) -> float:
        """The largest value of `plain_gradients`."""
        return max(self.plain_gradients.values(), default=0.0)

    def __str__(self) -> str:
        worst = max(self.gradients, key=self.gradients.__getitem__, default="no parameter")
        return (
            f"output: {self.output:.1e} from float64 (PyTorch's attention: {self.plain_output:.1e})\n"
            f"gradients: {self.gradient:.1e} at {worst} (PyTorch's attention: {self.plain_gradient:.1e})"
        )


class _Outcome(NamedTuple):
    results: list[Tensor]
    gradients: dict[str, Tensor]


def verify(model: nn.Module, /, *inputs: Any, **keywords: Any) -> Verification:
    """Compares a model's outputs and gradients with a float64 copy that uses PyTorch's attention.

    For comparison, also measures a copy with PyTorch's attention in the model's dtype. Dropout is
    off, and `.grad` is not modified. The loss whose gradients are compared is a fixed random linear
    combination of all outputs. A block of `sdpa` around the call does not apply to the copies.

    Some Hugging Face models round to float32 internally, even in float64. Inputs of Hugging Face
    models should be padded on the right, because implementations differ in the output of fully
    masked queries.

    Warns if the output of sample 0 changes when sample 1 of the batch is replaced by a copy of
    sample 0. The usual cause is a layer without `batch_first=True`, which reads the batch as the
    sequence. For a model whose inputs are (L, B, d), ignore the warning.

    Args:
        model: any module. It is not modified: `restore_attention` is applied to copies.
        inputs: positional arguments of the model. A single tuple is taken as all of them, a single
            mapping as keyword arguments.
        keywords: keyword arguments of the model.

    Example:
        >>> regard.convert.replace_attention(model)
        >>> print(regard.convert.verify(model, x, mask))
    """
    match inputs:
        case (Mapping() as named,):
            inputs, keywords = (), {**named, **keywords}
        case (tuple() as positional,):
            inputs = positional
    plain = copy.deepcopy(model)
    restore_attention(plain)
    with pytorch_sdpa():
        exact_model, arguments = _in_float64(plain), tree.tree_map(_doubled, (inputs, keywords))
        exact = _run(exact_model, *arguments)
        warn_if_samples_interact(lambda changed: _results(exact_model, *changed), arguments, exact.results)
        rounded = _differences(_run(plain, inputs, keywords), exact)
    return Verification(*_differences(_run(model, inputs, keywords), exact), *rounded)


def _run(model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> _Outcome:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with evaluating(model), torch.enable_grad():  # the backward pass, too: it may recompute checkpoints
        results = _results(model, inputs, keywords)
        loss = torch.stack([(x.double() * _factors(x)).sum() for x in results]).sum()
        grads = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True, materialize_grads=True)
    return _Outcome([x.detach() for x in results], dict(zip(parameters, grads, strict=True)))


def _results(model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
    """Returns the floating-point tensors in the model's output, in evaluation mode."""
    with evaluating(model):
        leaves = tree.tree_leaves(model(*inputs, **keywords))
    results = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if not results:
        raise TypeError("model: expected floating-point tensors as output, got none")
    return results


def _in_float64(model: nn.Module) -> nn.Module:
    """Returns a copy in float64.

    PyTorch's grouped matmul does not support float64, so the copy computes its MoE experts in a
    loop.
    """
    exact = copy.deepcopy(model).double()
    for m in exact.modules():
        if callable(set_experts := getattr(m, "set_experts_implementation", None)):
            set_experts("eager")
    return exact


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _factors(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)


def _differences(rounded: _Outcome, exact: _Outcome) -> tuple[float, dict[str, float]]:
    size = max((float(g.abs().max()) for g in exact.gradients.values()), default=0.0) or 1.0
    gradients = {
        name: float((rounded.gradients[name] - g).abs().max()) / size for name, g in exact.gradients.items()
    }
    pairs = list(zip(rounded.results, exact.results, strict=True))
    largest = max(float(b.abs().max()) for _, b in pairs) or 1.0
    return max(float((a - b).abs().max()) for a, b in pairs) / largest, gradients
