"""PyTorch's multi-head attention becomes Regard's, and back: the same objects, of another class.

Models of Hugging Face Transformers have a switch for that. They are known by it, so that nothing here needs
that library; who uses it has called `regard.hf.register()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..nn import MultiheadAttention
from ..nn.multihead import no_fast_path

PLAIN = nn.MultiheadAttention
OURS = "regard"  # the name under which `regard.hf` registers


def replace_attention(model: nn.Module) -> tuple[str, ...]:
    """Make every `nn.MultiheadAttention` in the model a `regard.nn.MultiheadAttention`; their names.

    The modules stay the same objects: parameters, their optimizer, hooks, ties and state_dict are kept, and
    nothing is copied. A subclass, which may compute something else, raises before anything has changed.
    A model of Hugging Face Transformers gets `attn_implementation="regard"`, with `regard.hf.register()`
    called before; the names are those of the models in it. One that has no such switch raises.
    """
    found = _found(model)
    switched = _switch(model, lambda part: OURS)
    for module in found.values():
        module.__class__ = MultiheadAttention
        module.register_forward_pre_hook(no_fast_path)
    return *found, *switched


def restore_attention(model: nn.Module) -> tuple[str, ...]:
    """The way back: every `regard.nn.MultiheadAttention` becomes PyTorch's; their names.

    A model of Transformers gets `attn_implementation="sdpa"`, or "eager" where it has nothing else.
    """
    switched = _switch(model, lambda part: "sdpa" if part._supports_sdpa else "eager")
    found = {name: m for name, m in model.named_modules() if type(m) is MultiheadAttention}
    for module in found.values():
        _make_plain(module)
    return *found, *switched


@contextmanager
def replaced_attention(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """`replace_attention` for a `with` block. After it, also if it raises, the model is as it was before."""
    plain = _found(model).values()
    before = {part: part.config._attn_implementation for part in _with_switch(model).values()}
    try:
        yield replace_attention(model)
    finally:
        for module in plain:
            _make_plain(module)
        for part, name in before.items():
            part.set_attn_implementation(name)


def _make_plain(module: nn.Module) -> None:
    module.__class__ = PLAIN
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is no_fast_path]:
        del module._forward_pre_hooks[key]


def _with_switch(model: nn.Module) -> dict[str, Any]:
    """The models of Transformers in this one, by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "set_attn_implementation")}


def _switch(model: nn.Module, choice: Callable[[Any], str]) -> tuple[str, ...]:
    """The names of the models of Transformers in this one, all of them switched, or none if one cannot be."""
    every = _with_switch(model)
    before = {name: m.config._attn_implementation for name, m in every.items()}
    for part in every.values():
        part.set_attn_implementation(choice(part))
    refused = [name for name, m in every.items() if m.config._attn_implementation != choice(m)]
    if refused:
        for name, part in every.items():
            part.set_attn_implementation(before[name])
        name = refused[0]
        raise TypeError(
            f"model: expected models that take attn_implementation={choice(every[name])!r}, but "
            f"{type(every[name]).__name__} at {name or 'the top'!r} stays with {before[name]!r}; nothing was "
            "replaced"
        )
    return tuple(name for name, m in every.items() if before[name] != m.config._attn_implementation)


def _found(model: nn.Module) -> dict[str, nn.Module]:
    every = {name: m for name, m in model.named_modules() if isinstance(m, PLAIN)}
    for name, module in every.items():
        if type(module) not in (PLAIN, MultiheadAttention):
            raise TypeError(
                f"model: expected nn.MultiheadAttention itself, got its subclass {type(module).__name__} "
                f"at {name or 'the top'!r}, which may compute something else; nothing was replaced"
            )
    return {name: module for name, module in every.items() if type(module) is PLAIN}
