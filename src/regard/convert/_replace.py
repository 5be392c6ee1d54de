"""Replaces PyTorch's multi-head attention in a model by Regard's, and restores it.

A replaced module stays the same object: only its class changes. Hugging Face models are recognised
by their method `set_attn_implementation`, so that this file need not import Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..nn import Linear, MultiheadAttention
from ..nn.multihead import no_fast_path

TORCH, OUTPUT = nn.MultiheadAttention, NonDynamicallyQuantizableLinear
REGARD = "regard"  # the `attn_implementation` that `regard.hf` registers
BACKENDS = "_supports_attention_backend"


def replace_attention(model: nn.Module) -> tuple[str, ...]:
    """Replaces `nn.MultiheadAttention` in a model by `regard.nn.MultiheadAttention`, in place.

    Returns the names of the replaced modules. They stay the same objects, so parameters, optimizer
    state, hooks, weight tying and the state_dict are unaffected. Hugging Face models are set to
    `attn_implementation="regard"`, which needs an earlier `import regard.hf`. Submodels that declare
    `_supports_attention_backend = False` keep their attention. Raises ValueError for a model that
    has neither: if it calls `F.scaled_dot_product_attention`, use `convert.sdpa`. Raises TypeError,
    without changing the model, for subclasses of `nn.MultiheadAttention` and for Hugging Face
    models that do not support `attn_implementation` or that append to their mask (DeepSeek-V4).

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8), 6)
        >>> names = regard.convert.replace_attention(model)
    """
    _check_found(model)
    return _replace(model)


def _check_found(model: nn.Module) -> None:
    if not any(isinstance(m, TORCH) for m in model.modules()) and not _hf_models(model):
        raise ValueError(
            f"model: expected nn.MultiheadAttention modules or a Hugging Face model, got "
            f"{type(model).__name__} with neither; if it calls F.scaled_dot_product_attention, run it in "
            "`with regard.convert.sdpa():`"
        )


def _replace(model: nn.Module) -> tuple[str, ...]:
    modules = _torch_modules(model)
    switched = _switch(model, lambda hf_model: REGARD)
    for module in modules.values():
        module.__class__ = MultiheadAttention
        _exchange(module.out_proj, OUTPUT, Linear)
        module.register_forward_pre_hook(no_fast_path)
    return *modules, *switched


def restore_attention(model: nn.Module) -> tuple[str, ...]:
    """Replaces `regard.nn.MultiheadAttention` in a model by `nn.MultiheadAttention`, in place.

    Returns the names of the replaced modules. Hugging Face models are set to
    `attn_implementation="sdpa"`, or to "eager" if they do not support SDPA.
    """
    switched = _switch(model, lambda hf_model: "sdpa" if hf_model._supports_sdpa else "eager")
    modules = {name: m for name, m in model.named_modules() if type(m) is MultiheadAttention}
    for module in modules.values():
        _restore(module)
    return *modules, *switched


def replaced_attention(model: nn.Module) -> AbstractContextManager[tuple[str, ...]]:
    """A context manager that calls `replace_attention` on entry and restores the model on exit."""
    _check_found(model)
    return regard_attention(model)


@contextmanager
def regard_attention(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Like `replaced_attention`, but accepts a model with nothing to replace."""
    modules = _torch_modules(model).values()
    before = {hf_model: hf_model.config._attn_implementation for hf_model in _hf_models(model).values()}
    try:
        yield _replace(model)
    finally:
        for module in modules:
            _restore(module)
        for hf_model, name in before.items():
            set_implementation(hf_model, name)


def _exchange(module: Any, old: type[nn.Module], new: type[nn.Module]) -> None:
    if type(module) is old:
        module.__class__ = new


def _restore(module: nn.Module) -> None:
    module.__class__ = TORCH
    _exchange(module.out_proj, Linear, OUTPUT)
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is no_fast_path]:
        del module._forward_pre_hooks[key]


def declines_backends(kind: type[nn.Module]) -> bool:
    """Returns whether a Hugging Face model class declares `_supports_attention_backend = False`.

    The default of the base class, which is also False, does not count.
    """
    declared = [vars(c)[BACKENDS] for c in kind.__mro__ if BACKENDS in vars(c)]
    return len(declared) > 1 and not declared[0]


def _hf_models(model: nn.Module) -> dict[str, Any]:
    """Returns a dict from names to the Hugging Face models among the model's modules.

    Leaves out models that declare `_supports_attention_backend = False`, unless all of them do.
    """
    models = {name: m for name, m in model.named_modules() if hasattr(m, "set_attn_implementation")}
    return {name: m for name, m in models.items() if not declines_backends(type(m))} or models


def set_implementation(hf_model: Any, name: str) -> Exception | None:
    """Sets `attn_implementation`. Returns the error that the model raises, or None."""
    try:
        hf_model.set_attn_implementation(name)
    except (TypeError, ValueError) as error:
        return error
    return None


def _switch(model: nn.Module, choice: Callable[[Any], str]) -> tuple[str, ...]:
    """Sets `attn_implementation` of each Hugging Face model m in `model` to `choice(m)`.

    Returns the names of the models whose implementation changed. If a model does not support
    its new implementation, restores all models and raises TypeError.
    """
    hf_models = _hf_models(model)
    before = {name: m.config._attn_implementation for name, m in hf_models.items()}
    # An error does not matter if it comes from a submodel that cannot use the model's implementation.
    errors = {name: set_implementation(m, choice(m)) for name, m in hf_models.items()}
    refused = [name for name, m in hf_models.items() if m.config._attn_implementation != choice(m)]
    if refused:
        for name, m in hf_models.items():
            set_implementation(m, before[name])
        name = refused[0]
        raise TypeError(
            f"model: expected models that support attn_implementation={choice(hf_models[name])!r}, but "
            f"{type(hf_models[name]).__name__} at {name or 'the top'!r} stays with {before[name]!r}; nothing "
            "was replaced"
        ) from errors[name]
    return tuple(name for name, m in hf_models.items() if before[name] != m.config._attn_implementation)


def _torch_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a dict from names to the `nn.MultiheadAttention` modules of the model.

    Raises TypeError for a module of a subclass other than Regard's.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, TORCH)}
    for name, module in modules.items():
        if type(module) not in (TORCH, MultiheadAttention):
            raise TypeError(
                f"model: expected nn.MultiheadAttention itself, got its subclass {type(module).__name__} "
                f"at {name or 'the top'!r}, which may compute something else; nothing was replaced"
            )
    return {name: module for name, module in modules.items() if type(module) is TORCH}
