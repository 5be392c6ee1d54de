"""Gradients and optimizer states of a model of which each rank holds a share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._divisions import Division
from ._group import Group
from ._share import LayerShare
from ._sums import summed

Divided = dict[int, tuple[Group, Division]]  # id of a parameter -> the ranks that hold its rows


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of a model with `HeadParallel` to a norm of at most `max_norm`, in place.

    Returns the norm before, that of the whole gradient, the same on all ranks.
    `torch.nn.utils.clip_grad_norm_` takes the norm of a rank's own rows, so that the ranks would
    scale differently. All ranks must call it.
    """
    divided, squares, total = _divided(model), dict[Group, Tensor](), torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        if p.grad is None:
            continue
        if id(p) not in divided:
            total = total + p.grad.double().square().sum()
            continue
        group, division = divided[id(p)]
        square = division.square(p.grad, group.rank)
        squares[group] = squares[group] + square if group in squares else square
    norm = torch.stack([total, *(summed(group, x) for group, x in squares.items())]).sum().sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def whole_states(optimizer: Optimizer, model: nn.Module) -> None:
    """Makes `optimizer.state_dict` return whole states and `load_state_dict` take them.

    The states of a parameter have its shape, so those of a parameter that `HeadParallel` divides are
    this rank's rows. With whole states, a checkpoint can be loaded with another number of ranks. All
    ranks must call both methods.
    """

    def gather(_: Optimizer, state: dict[str, Any]) -> None:
        for index, p, (group, division) in _parameters(optimizer, model):
            values = state["state"].get(index)
            if values is None:
                continue
            _check_shapes(values, p)
            state["state"][index] = {
                name: division.whole(group, x) if _has_shape(x, p.shape) else x for name, x in values.items()
            }

    def take(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        states = dict(state["state"])
        for index, p, (group, division) in _parameters(optimizer, model):
            whole = division.whole_shape(p)
            if index in states:
                states[index] = {
                    name: division.local(x, group.rank) if _has_shape(x, whole) else x
                    for name, x in states[index].items()
                }
        return state | {"state": states}

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(take)


def _has_shape(x: object, shape: tuple[int, ...]) -> bool:
    return isinstance(x, Tensor) and tuple(x.shape) == tuple(shape)


def _check_shapes(values: dict[str, Any], p: Tensor) -> None:
    for name, x in values.items():
        if isinstance(x, Tensor) and x.ndim and x.shape != p.shape:
            raise ValueError(
                f"optimizer: expected states of the parameter's shape {tuple(p.shape)}, or numbers, got "
                f"{name} of shape {tuple(x.shape)}"
            )


def _divided(model: nn.Module) -> Divided:
    divided: Divided = {}
    for layer in model.modules():
        share: LayerShare | None = getattr(layer, "_share", None)
        if share is not None:
            for name, division in share.divisions.items():
                divided[id(layer.get_parameter(name))] = share.group, division
    return divided


def _parameters(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[int, Tensor, Any]]:
    """Yields the index in a state_dict, the parameter and its division, of divided parameters."""
    divided = _divided(model)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    yield from ((i, p, divided[id(p)]) for i, p in enumerate(parameters) if id(p) in divided)
