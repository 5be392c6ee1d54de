"""A check that the samples of a batch do not influence each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

LIMIT = 1e-6  # relative to the largest output; some models round to float32 even in float64


def warn_if_samples_interact(
    run: Callable[[Any], Sequence[Tensor]], arguments: Any, results: Sequence[Tensor]
) -> None:
    """Warns if the output of sample 0 changes when sample 1 is replaced by a copy of sample 0.

    The usual cause is a layer without `batch_first=True`, which reads a batch (B, L, d) as B tokens
    of L samples. The inputs are not checked if they have no batch dimension of 2 or more, or if the
    model rejects the changed inputs.

    Args:
        run: returns the outputs of the model for a tree of arguments.
        arguments: the arguments of the model.
        results: the outputs of the model for these arguments.
    """
    size = _batch_size(tree.tree_leaves(arguments))
    if size < 2:
        return
    try:
        with torch.no_grad():
            changed = run(tree.tree_map(lambda x: _copied(x, size), arguments))
    except Exception:  # for example, two samples with different numbers of images
        return
    change = _change_of_first_sample(results, changed, size)
    if change > LIMIT:
        warnings.warn(
            f"verify: if sample 1 is replaced by a copy of sample 0, the output of sample 0 changes by "
            f"{change:.1g} (relative). If dim 0 of the inputs is the batch, the model mixes samples; a layer "
            "may need batch_first=True. If dim 0 is the sequence, ignore this warning",
            stacklevel=3,
        )


def _batch_size(leaves: Sequence[Any]) -> int:
    """Returns the size of dim 0 of the first input with a batch dimension, or 0 if there is none.

    Indices (B, L) and floating-point tensors of 3 dims or more have one. A matrix (L, d) has none.
    """
    for x in leaves:
        if isinstance(x, Tensor) and not x.is_nested and x.ndim >= (3 if x.is_floating_point() else 2):
            return x.shape[0]
    return 0


def _copied(x: Any, size: int) -> Any:
    """Replaces sample 1 of a tensor (size, ...) by sample 0. Returns other objects unchanged."""
    if not isinstance(x, Tensor) or x.is_nested or x.ndim == 0 or x.shape[0] != size:
        return x
    copy = x.detach().clone()
    copy[1] = x[0]
    return copy


def _change_of_first_sample(before: Sequence[Tensor], after: Sequence[Tensor], size: int) -> float:
    """Returns the largest change of sample 0 in outputs (size, ...), relative to the largest output.

    Skips matrices (size, size), which compare samples with each other, such as the logits of CLIP.
    """
    pairs = [
        (a, b) for a, b in zip(before, after, strict=True)
        if not a.is_nested and a.ndim > 1 and a.shape == b.shape and a.shape[0] == size
        and a.shape != (size, size) and a.numel() > 0
    ]  # fmt: skip
    largest = max((float(a.abs().max()) for a, _ in pairs), default=0.0) or 1.0
    return max((float((a[0] - b[0]).abs().max()) for a, b in pairs), default=0.0) / largest
