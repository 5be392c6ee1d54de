"""Batching rules of the operators for vmap: the mapped samples are flattened into the batch.

A flattened batch has one `by_head` (ALiBi slopes or a relative bias), one sink and one dropout
pattern. So each mapped sample is a separate call if there is dropout, if `by_head` or the sink is
mapped, or if the gradient of one of them is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops as _ops
from .ops import FlatCall, backward_arguments

Apply = Callable[..., Any]
Dims = Sequence[Any]  # the mapped dim of each argument, None for an argument that is not mapped


def map_forward(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the results of `apply` for `count` mapped samples, and each result's mapped dim."""
    call, call_dims = FlatCall(*args), FlatCall(*dims)
    if call.dropout or call_dims.by_head is not None or call_dims.sink is not None:
        return map_one_by_one(apply, count, dims, args)
    results = apply(*_flatten_call(call, call_dims, count))
    out_dims = [
        None if x is None or x.ndim == 1 else dim for x, dim in zip(results, (0, 0, 1, 0), strict=True)
    ]
    mapped = (x if dim is None else _split(x, count, dim) for x, dim in zip(results, out_dims, strict=True))
    return tuple(mapped), tuple(out_dims)


def map_backward(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the gradients for `count` mapped samples, and the mapped dim of each gradient."""
    (call, rest), (call_dims, rest_dims) = backward_arguments(args), backward_arguments(dims)
    wanted = rest.wanted
    if call.dropout or wanted[4] or wanted[5] or call_dims.by_head is not None or call_dims.sink is not None:
        return map_one_by_one(apply, count, dims, args)
    if wanted[3]:  # one bias for each sample, so that the gradient is not summed over samples
        call = call._replace(bias=_in_front(call.bias, call_dims.bias, count))
        call_dims = FlatCall(*call_dims[:3], 0, *call_dims[4:])  # type: ignore[arg-type]
    out, residual, dout, dlse = (
        _flatten(getattr(rest, name), getattr(rest_dims, name), count)
        for name in ("out", "residual", "dout", "dlse")
    )
    stats = _in_front(rest.stats, rest_dims.stats, count).transpose(0, 1).flatten(1, 2)
    grads = apply(*_flatten_call(call, call_dims, count), out, stats, residual, dout, dlse, wanted)
    grads = [_split(grad, count) if w else grad for grad, w in zip(grads, wanted, strict=True)]
    if wanted[3]:
        grads[3] = grads[3].sum_to_size(call.bias.shape)  # type: ignore[union-attr]
    return tuple(grads), tuple(0 if w else None for w in wanted)


def map_one_by_one(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """Calls `apply` separately for each mapped sample and stacks the results."""
    results = [apply(*_sample(args, dims, index)) for index in range(count)]
    stacked = tuple(None if xs[0] is None else torch.stack(xs) for xs in zip(*results, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _sample(args: Sequence[Any], dims: Dims, index: int) -> list[Any]:
    """Returns the arguments of one mapped sample."""

    def select(x: Any, dim: Any) -> Any:
        if isinstance(dim, list | tuple):
            return _sample(x, dim, index)
        return x if dim is None else x.select(dim, index)

    return [select(x, dim) for x, dim in zip(args, dims, strict=True)]


def _flatten_call(call: FlatCall, dims: Any, count: int) -> FlatCall:
    """Returns the call with the mapped samples flattened into its batch."""
    B = _in_front(call.q, dims.q, count).shape[1]

    def in_batch(x: Any, dim: Any) -> Any:
        """Flattens the mapped dim of x into its batch dim: (count * B, ...).

        A tensor (1, ...) that is not mapped is returned as it is.
        """
        if x is None or (dim is None and x.shape[0] == 1):
            return x
        x = _in_front(x, dim, count)
        return x.expand(count, B, *x.shape[2:]).flatten(0, 1)

    return call._replace(
        q=_flatten(call.q, dims.q, count),
        k=_flatten(call.k, dims.k, count),
        v=_flatten(call.v, dims.v, count),
        bias=in_batch(call.bias, dims.bias),
        tensors=[in_batch(x, dim) for x, dim in zip(call.tensors, dims.tensors, strict=True)],
        offsets=_flatten(call.offsets, dims.offsets, count),
    )


def _flatten(x: Any, dim: Any, count: int) -> Any:
    """Flattens the mapped dim into the batch: (count, B, ...) -> (count * B, ...)."""
    return None if x is None else _in_front(x, dim, count).flatten(0, 1)


def _in_front(x: Any, dim: Any, count: int) -> Tensor:
    """Returns x as (count, ...): moves the mapped dim to the front, or expands an unmapped x."""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)  # type: ignore[no-any-return]


def _split(x: Tensor, count: int, dim: int = 0) -> Tensor:
    """Splits dim `dim`, the flattened batch, into two dims (count, B)."""
    return x.unflatten(dim, (count, x.shape[dim] // count))  # type: ignore[no-any-return]


def _register(op: Any, rule: Callable[[Apply, int, Dims, Sequence[Any]], tuple[Any, Any]]) -> None:
    def batching(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
        return rule(op, info.batch_size, dims, args)

    torch.library.register_vmap(op, batching, lib=_ops.library)


_register(_ops.attention_forward, map_forward)
_register(_ops.attention_backward, map_backward)
_register(_ops.attention_jvp, map_one_by_one)
_register(_ops.attention_double_backward, map_one_by_one)
