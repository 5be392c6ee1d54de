"""How far a model's results and gradients are from float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from .._tools.modes import evaluating
from ._replace import restore_attention


@dataclass(frozen=True)
class Verification:
    """Largest differences from the same model in float64 with PyTorch's attention.

    Attributes:
        output: of the results, by the largest result.
        gradients: of each parameter's gradient, by the largest gradient of all.
        plain_output, plain_gradients: the same for the model with PyTorch's attention in its own dtype.
    """

    output: float
    gradients: dict[str, float]
    plain_output: float
    plain_gradients: dict[str, float]

    @property
    def gradient(self) -> float:
        """The largest of `gradients`."""
        return max(self.gradients.values(), default=0.0)

    @property
    def plain_gradient(self) -> float:
        """The largest of `plain_gradients`."""
        return max(self.plain_gradients.values(), default=0.0)

    def __str__(self) -> str:
        worst = max(self.gradients, key=self.gradients.__getitem__, default="no parameter")
        return (
            f"output: {self.output:.1e} from float64 (PyTorch's attention: {self.plain_output:.1e})\n"
            f"gradients: {self.gradient:.1e} at {worst} (PyTorch's attention: {self.plain_gradient:.1e})"
        )


class _Run(NamedTuple):
    results: list[Tensor]
    gradients: dict[str, Tensor]


def verify(model: nn.Module, batch: Any) -> Verification:
    """Runs the model on a batch, and copies of it with PyTorch's attention, in float64 and in its own dtype.

    Dropout is off, and no `.grad` is touched. A fixed random combination of all results is differentiated.

    Models of Transformers round to float32 in places, also in float64. Their padding should be on the right:
    what a query computes that sees no key is not defined, and they differ in it.

    Args:
        model: any module; the attention of `replace_attention` is put back in the copies.
        batch: a tensor, a tuple of positional arguments or a mapping of named ones.
    """
    batch = dict(batch) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    plain = copy.deepcopy(model)
    restore_attention(plain)
    exact = _run(copy.deepcopy(plain).double(), tree.tree_map(_doubled, batch))
    return Verification(*_differences(_run(model, batch), exact), *_differences(_run(plain, batch), exact))


def _run(model: nn.Module, batch: dict[str, Any] | tuple[Any, ...]) -> _Run:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with evaluating(model), torch.enable_grad():
        leaves = tree.tree_leaves(model(**batch) if isinstance(batch, dict) else model(*batch))
        results = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        if not results:
            raise TypeError("model: expected results that are tensors of floating point, got none")
        loss = torch.stack([(x.double() * _factors(x)).sum() for x in results]).sum()
        grads = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True, materialize_grads=True)
    return _Run([x.detach() for x in results], dict(zip(parameters, grads, strict=True)))


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _factors(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)


def _differences(found: _Run, exact: _Run) -> tuple[float, dict[str, float]]:
    size = max((float(g.abs().max()) for g in exact.gradients.values()), default=0.0) or 1.0
    gradients = {
        name: float((found.gradients[name] - g).abs().max()) / size for name, g in exact.gradients.items()
    }
    pairs = list(zip(found.results, exact.results, strict=True))
    largest = max(float(b.abs().max()) for _, b in pairs) or 1.0
    return max(float((a - b).abs().max()) for a, b in pairs) / largest, gradients
