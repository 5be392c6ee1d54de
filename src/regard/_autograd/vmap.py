"""vmap over the operators: the samples that are mapped over join the batch.

A batch has one pattern of dropout, one bias by head and one sink. Where samples have their own, or want their
own gradients of these, each is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops as _ops
from .ops import FlatCall, backward_arguments

Apply = Callable[..., Any]
Dims = Sequence[Any]  # the mapped dim of each argument, None where it has none


def map_forward(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """The results of `apply` for `count` samples, and their mapped dims."""
    call, where = FlatCall(*args), FlatCall(*dims)
    if call.dropout or where.by_head is not None or where.sink is not None:
        return map_one_by_one(apply, count, dims, args)
    results = apply(*_joined_call(call, where, count))
    out_dims = [
        None if x is None or x.ndim == 1 else dim for x, dim in zip(results, (0, 0, 1, 0), strict=True)
    ]
    parted = (x if dim is None else _parted(x, count, dim) for x, dim in zip(results, out_dims, strict=True))
    return tuple(parted), tuple(out_dims)


def map_backward(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    (call, more), (where, more_where) = backward_arguments(args), backward_arguments(dims)
    wanted = more.wanted
    if call.dropout or wanted[4] or wanted[5] or where.by_head is not None or where.sink is not None:
        return map_one_by_one(apply, count, dims, args)
    if wanted[3]:  # a bias for each sample, so that its gradient is not summed over them
        call = call._replace(bias=_in_front(call.bias, where.bias, count))
        where = FlatCall(*where[:3], 0, *where[4:])  # type: ignore[arg-type]
    out, residual, dout, dlse = (
        _joined(getattr(more, name), getattr(more_where, name), count)
        for name in ("out", "residual", "dout", "dlse")
    )
    stats = _in_front(more.stats, more_where.stats, count).transpose(0, 1).flatten(1, 2)
    grads = apply(*_joined_call(call, where, count), out, stats, residual, dout, dlse, wanted)
    grads = [_parted(grad, count) if w else grad for grad, w in zip(grads, wanted, strict=True)]
    if wanted[3]:
        grads[3] = grads[3].sum_to_size(call.bias.shape)  # type: ignore[union-attr]
    return tuple(grads), tuple(0 if w else None for w in wanted)


def map_one_by_one(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    results = [apply(*_sample(args, dims, index)) for index in range(count)]
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _sample(args: Sequence[Any], dims: Dims, index: int) -> list[Any]:
    def one(x: Any, dim: Any) -> Any:
        if isinstance(dim, list | tuple):
            return _sample(x, dim, index)
        return x if dim is None else x.select(dim, index)

    return [one(x, dim) for x, dim in zip(args, dims, strict=True)]


def _joined_call(call: FlatCall, where: Any, count: int) -> FlatCall:
    """The call with the mapped samples in its batch."""
    B = _in_front(call.q, where.q, count).shape[1]

    def in_batch(x: Any, dim: Any) -> Any:
        """Tensors that all samples share stay (1, ...)."""
        if x is None or (dim is None and x.shape[0] == 1):
            return x
        x = _in_front(x, dim, count)
        return x.expand(count, B, *x.shape[2:]).flatten(0, 1)

    return call._replace(
        q=_joined(call.q, where.q, count),
        k=_joined(call.k, where.k, count),
        v=_joined(call.v, where.v, count),
        bias=in_batch(call.bias, where.bias),
        tensors=[in_batch(x, dim) for x, dim in zip(call.tensors, where.tensors, strict=True)],
        offsets=_joined(call.offsets, where.offsets, count),
    )


def _joined(x: Any, dim: Any, count: int) -> Any:
    """(B, ...) for each sample as (count * B, ...)."""
    return None if x is None else _in_front(x, dim, count).flatten(0, 1)


def _in_front(x: Any, dim: Any, count: int) -> Tensor:
    """(count, ...)"""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)  # type: ignore[no-any-return]


def _parted(x: Tensor, count: int, dim: int = 0) -> Tensor:
    return x.unflatten(dim, (count, x.shape[dim] // count))  # type: ignore[no-any-return]


def _register(op: Any, rule: Callable[[Apply, int, Dims, Sequence[Any]], tuple[Any, Any]]) -> None:
    def batching(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
        return rule(op, info.batch_size, dims, args)

    torch.library.register_vmap(op, batching, lib=_ops.library)


_register(_ops.attention_forward, map_forward)
_register(_ops.attention_backward, map_backward)
_register(_ops.attention_jvp, map_one_by_one)
_register(_ops.attention_double_backward, map_one_by_one)
