"""Reads in the source code of models what they do with keywords and masks."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch import nn

# A bool mask takes the place of the float mask of eager attention. To append to it is an error.
APPENDING = re.compile(r"\b(cat|pad)\(\[?attention_mask\b")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def only_passes_on(kind: Any, name: str) -> bool:
    """Returns whether an attention module passes a keyword `name` on without naming it in its code.

    Such a keyword comes from the call of the whole model (`labels`, `pixel_values`) and does not
    change attention. Returns False if the code cannot be read.
    """
    return _only_passes_on(kind, name)


@functools.cache
def _only_passes_on(kind: Any, name: str) -> bool:
    parameters = inspect.signature(kind.forward).parameters.values()
    if not _code(kind) or not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return False
    return not re.search(rf"\b{re.escape(name)} ?=|[\"']{re.escape(name)}[\"']", _code(kind))


@functools.cache
def _code(kind: Any) -> str:
    """Returns the source code of a class and its base classes, or "" if it cannot be read."""
    try:
        return "".join(inspect.getsource(base) for base in kind.__mro__[: kind.__mro__.index(nn.Module)])
    except (OSError, TypeError):
        return ""


@functools.cache
def appends_to_mask(kind: Any) -> bool:
    """Returns whether an attention module in the source file of `kind` appends to its mask.

    `kind` is the class of a model. Models that support SDPA have code for bool masks, so
    the result for them is False.
    """
    if kind._supports_sdpa:
        return False
    try:
        classes = re.split(r"^(?=class )", inspect.getsource(sys.modules[kind.__module__]), flags=re.M)
    except (KeyError, OSError, TypeError):
        return False
    return any("attention_interface(" in code and APPENDING.search(code) for code in classes)
