"""PyTorch's multi-head attention becomes Regard's, and back: the same objects, of another class."""

from __future__ import annotations

from torch import nn

from ..nn import MultiheadAttention
from ..nn.multihead import _asked

PLAIN = nn.MultiheadAttention


def replace_attention(model: nn.Module) -> tuple[str, ...]:
    """Make every `nn.MultiheadAttention` in the model a `regard.nn.MultiheadAttention`; their names.

    The modules stay the same objects: parameters, their optimizer, hooks, ties and state_dict are kept, and
    nothing is copied. A subclass, which may compute something else, raises before anything has changed.
    """
    found = _found(model, MultiheadAttention)
    for module in found.values():
        module.__class__ = MultiheadAttention
        module.register_forward_pre_hook(_asked)
    return tuple(found)


def restore_attention(model: nn.Module) -> tuple[str, ...]:
    """The way back: every `regard.nn.MultiheadAttention` becomes PyTorch's; their names."""
    found = {name: m for name, m in model.named_modules() if type(m) is MultiheadAttention}
    for module in found.values():
        module.__class__ = PLAIN  # type: ignore[assignment]
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _asked]:
            del module._forward_pre_hooks[key]
    return tuple(found)


def _found(model: nn.Module, ours: type[nn.Module]) -> dict[str, nn.Module]:
    every = {name: m for name, m in model.named_modules() if isinstance(m, PLAIN)}
    for name, module in every.items():
        if type(module) not in (PLAIN, ours):
            raise TypeError(
                f"model: expected nn.MultiheadAttention itself, got its subclass {type(module).__name__} "
                f"at {name or 'the top'!r}, which may compute something else; nothing was replaced"
            )
    return {name: module for name, module in every.items() if type(module) is PLAIN}
