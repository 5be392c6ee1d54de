"""Reads in the source code of models what they do with keywords and masks."""

from __future__ import annotations

import functools
import inspect
import re
import sys

import torch
from torch import nn

# A bool mask takes the place of the float mask of eager attention. To append to it is an error.
APPENDING = re.compile(r"\b(cat|pad)\(\[?attention_mask\b")


@torch.compiler.assume_constant_result
def only_passes_on(kind: type[nn.Module], name: str) -> bool:
    """Returns whether an attention module passes a keyword `name` on without naming it in its code.

    Such a keyword comes from the call of the whole model (`labels`, `pixel_values`) and does not
    change attention. Returns False if the code cannot be read.
    """
    return _takes_any_keyword(kind) and not re.search(rf"\b{name} ?=|[\"']{name}[\"']", _code(kind))


@functools.cache
def _takes_any_keyword(kind: type[nn.Module]) -> bool:
    parameters = inspect.signature(kind.forward).parameters.values()
    return bool(_code(kind)) and any(p.kind is p.VAR_KEYWORD for p in parameters)


@functools.cache
def _code(kind: type[nn.Module]) -> str:
    """Returns the source code of a class and its base classes, or "" if it cannot be read."""
    try:
        return "".join(inspect.getsource(base) for base in kind.__mro__[: kind.__mro__.index(nn.Module)])
    except (OSError, TypeError):
        return ""


@functools.cache
def appends_to_mask(kind: type[nn.Module]) -> bool:
    """Returns whether an attention module beside the model class `kind` appends to its mask.

    Models that support SDPA have code for bool masks, so the result for them is False.
    """
    if kind._supports_sdpa:
        return False
    try:
        classes = re.split(r"^(?=class )", inspect.getsource(sys.modules[kind.__module__]), flags=re.M)
    except (KeyError, OSError, TypeError):
        return False
    return any("attention_interface(" in code and APPENDING.search(code) for code in classes)
