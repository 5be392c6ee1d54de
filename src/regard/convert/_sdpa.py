"""Runs the calls of PyTorch's `scaled_dot_product_attention` in a model's code on Regard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, overrides
from torch.utils._device import DeviceContext

from ..compat.torch import scaled_dot_product_attention


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    # A CausalBias. The import of its class would import PyTorch's compiler.
    if attn_mask is not None and hasattr(attn_mask, "_materialize"):
        attn_mask = attn_mask._materialize(query.device)
    if is_causal and attn_mask is not None:
        causal = attn_mask.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        is_bool = attn_mask.dtype is torch.bool
        attn_mask = attn_mask & causal if is_bool else attn_mask.masked_fill(~causal, -torch.inf)
        is_causal = False
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _changed(function: Any, **names: Any) -> FunctionType:
    """Returns a copy of a function of PyTorch that ignores active modes and uses other globals."""
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *tensors: False)
    copy = FunctionType(function.__code__, {**function.__globals__, **never, **names}, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy


# PyTorch disables a mode while the mode handles a function. So the mode does not see the calls inside
# `multi_head_attention_forward`, nor those of a checkpoint that is recomputed in a backward pass.
_multi_head = _changed(F.multi_head_attention_forward, scaled_dot_product_attention=_attend)
_DERIVATIVES = {f: _changed(f) for f in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class Sdpa(overrides.TorchFunctionMode):
    """Runs `F.scaled_dot_product_attention` on Regard."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs or {})
        if func is F.multi_head_attention_forward:
            return _multi_head(*args, **kwargs or {})
        if func in _DERIVATIVES:
            with self:
                return _DERIVATIVES[func](*args, **kwargs or {})
        return func(*args, **kwargs or {})


def sdpa() -> Sdpa:
    """Returns a context manager that runs `F.scaled_dot_product_attention` on Regard.

    Inside the `with` block, every call in the current thread is computed by Regard or raises; none
    falls back to PyTorch. This includes calls inside `nn.MultiheadAttention` (which needs
    `need_weights=False` to make them), Hugging Face models with `attn_implementation="sdpa"`, and
    functions that `torch.compile` compiles. It excludes TorchScript and `torch.ops.aten`. If both
    `attn_mask` and `is_causal` are given, both apply, as in PyTorch's CPU kernel. `see.capture`
    records the calls.

    Example:
        >>> with regard.convert.sdpa():
        ...     model(x).sum().backward()
    """
    return Sdpa()


_permanent = Sdpa()


def use_sdpa(on: bool = True) -> None:
    """Runs `F.scaled_dot_product_attention` on Regard from now on, as inside a block of `sdpa`.

    `use_sdpa(False)` undoes it. The setting applies to the current thread.
    """
    stack = [mode for mode in overrides._get_current_function_mode_stack() if mode is not _permanent]
    if on:
        # Below the modes of `with` blocks, which can then end as usual. Device modes must stay lowest.
        stack.insert(sum(isinstance(mode, DeviceContext) for mode in stack), _permanent)
    _set_stack(stack)


@contextmanager
def pytorch_sdpa() -> Iterator[None]:
    """Runs `F.scaled_dot_product_attention` on PyTorch within a `with` block inside `sdpa`."""
    modes = overrides._get_current_function_mode_stack()
    _set_stack([mode for mode in modes if not isinstance(mode, Sdpa)])
    try:
        yield
    finally:
        _set_stack(modes)


def _set_stack(modes: list[Any]) -> None:
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)
