"""Checks a function under torch.compile, torch.export, vmap and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

Function = Callable[..., Any]


class Wrapped(nn.Module):
    """A module that calls a function, for torch.export."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def check_traced(function: Function, args: list[Tensor], vmap: bool = True) -> None:
    """Compares the results of `function` in eager mode, compiled, exported, and mapped by vmap.

    Under fake tensors, only shapes and dtypes are compared.
    """
    expected = function(*args)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    _compare(compiled(*args), expected)
    _compare(torch.export.export(Wrapped(function), tuple(args)).module()(*args), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = function(*(mode.from_tensor(x) for x in args))
    for a, b in zip(tree_flatten(fake)[0], tree_flatten(expected)[0], strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if vmap:
        stacked = [torch.stack([x, x.flip(0)]) for x in args]
        results = [function(*(x[i] for x in stacked)) for i in range(2)]
        both = torch.vmap(function)(*stacked)
        for i, result in enumerate(results):
            _compare(tree_map(lambda x, i=i: x[i], both), result)


def _compare(actual: Any, expected: Any) -> None:
    for a, b in zip(tree_flatten(actual)[0], tree_flatten(expected)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
