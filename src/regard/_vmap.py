"""vmap over the operators: the samples that are mapped over join the batch.

What a batch cannot hold, several patterns of dropout, biases by head or sinks, and gradients of these for
each sample, is one call for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._ops import Backward, Call, backward_arguments

Apply = Callable[..., Any]
Dims = Sequence[Any]  # the mapped dim of each argument, None where it has none


def map_forward(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """The results of `apply` for `count` samples, and their mapped dims."""
    call, where = Call(*args), Call(*dims)
    if call.dropout or where.by_head is not None or where.sink is not None:
        return map_one_by_one(apply, count, dims, args)
    out, lse, stats, rest = apply(*_merged_call(call, where, count))
    if rest is None or rest.dim() != 4:
        return (_parted(out, count), _parted(lse, count), _parted(stats, count, 1), rest), (0, 0, 1, None)
    results = _parted(out, count), _parted(lse, count), _parted(stats, count, 1), _parted(rest, count)
    return results, (0, 0, 1, 0)


def map_backward(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    (call, more), (where, more_where) = backward_arguments(args), backward_arguments(dims)
    wanted = more.wanted
    if call.dropout or wanted[4] or wanted[5] or where.by_head is not None or where.sink is not None:
        return map_one_by_one(apply, count, dims, args)
    B = _in_front(call.q, where.q, count).shape[1]
    if wanted[3]:  # a bias for each sample, so that its gradient is not summed over them
        bias = _in_front(call.bias, where.bias, count)
        call, where = call._replace(bias=bias), where._replace(bias=0)
    stats = _in_front(more.stats, more_where.stats, count).transpose(0, 1).flatten(1, 2)
    rows = Backward(
        out=_merged(more.out, more_where.out, count, B),
        stats=stats,
        rest=more.rest if more_where.rest is None else _merged(more.rest, more_where.rest, count, B),
        dout=_merged(more.dout, more_where.dout, count, B),
        dlse=_merged(more.dlse, more_where.dlse, count, B) if more.dlse is not None else None,
        wanted=wanted,
    )
    grads = list(apply(*_merged_call(call, where, count), *rows))
    for index, is_wanted in enumerate(wanted):
        if is_wanted:
            grads[index] = _parted(grads[index], count)
    if wanted[3] and call.bias is not None and call.bias.shape[1] == 1:
        grads[3] = grads[3].sum(1, keepdim=True)
    return tuple(grads), tuple(0 if is_wanted else None for is_wanted in wanted)


def map_one_by_one(apply: Apply, count: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    results = [apply(*_sample(args, dims, index)) for index in range(count)]
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _sample(args: Sequence[Any], dims: Dims, index: int) -> list[Any]:
    return [
        _sample(x, dim, index)
        if isinstance(dim, list | tuple)
        else x
        if dim is None
        else x.select(dim, index)
        for x, dim in zip(args, dims, strict=True)
    ]


def _merged_call(call: Call, where: Call, count: int) -> Call:
    """The call with the mapped samples in its batch."""
    B = _in_front(call.q, where.q, count).shape[1]

    def merge(x: Tensor | None, dim: int | None) -> Tensor | None:
        return None if x is None else _merged(x, dim, count, B)

    # What is the same for all samples of the batch stays so, if it is not mapped.
    shared = call.bias is None or (where.bias is None and call.bias.shape[0] == 1)
    return call._replace(
        q=_merged(call.q, where.q, count, B),
        k=_merged(call.k, where.k, count, B),
        v=_merged(call.v, where.v, count, B),
        bias=call.bias if shared else merge(call.bias, where.bias),
        tensors=[
            x if dim is None and x.shape[0] == 1 else _merged(x, dim, count, B)
            for x, dim in zip(call.tensors, where.tensors, strict=True)
        ],
        offsets=merge(call.offsets, where.offsets),
    )


def _merged(x: Tensor, dim: int | None, count: int, B: int) -> Tensor:
    """(1 or B, ...) for each sample as (count * B, ...)."""
    x = _in_front(x, dim, count)
    return x.expand(count, B, *x.shape[2:]).flatten(0, 1)


def _in_front(x: Tensor, dim: int | None, count: int) -> Tensor:
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _parted(x: Tensor, count: int, dim: int = 0) -> Tensor:
    return x.unflatten(dim, (count, x.shape[dim] // count))


def _register(op: Any, rule: Callable[[Apply, int, Dims, Sequence[Any]], tuple[Any, Any]]) -> None:
    def batching(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
        return rule(op, info.batch_size, dims, args)

    torch.library.register_vmap(op, batching, lib=_ops.library)


_register(_ops.attention_forward, map_forward)
_register(_ops.attention_backward, map_backward)
_register(_ops.attention_jvp, map_one_by_one)
_register(_ops.attention_double_backward, map_one_by_one)
