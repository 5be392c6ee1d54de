"""The base of the modules: a checkpoint is loaded whole or not at all, and `repr` shows sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class CheckedModule(nn.Module):
    """A module that compares names and shapes of a checkpoint before it copies anything.

    PyTorch copies what fits and raises afterwards, which leaves a model that is half new.
    """

    _shown: tuple[str, ...] = ()  # the attributes in `repr`, those aside that are None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        faults = [*_wrong_shapes(self, state_dict), *(_wrong_names(self, state_dict) if strict else ())]
        if faults:
            name, found = type(self).__name__, "; ".join(faults)
            raise RuntimeError(f"state_dict of {name}: nothing was loaded; {found}")
        return super().load_state_dict(state_dict, strict, assign)

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self._shown}
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in values.items()
            if value is not None
        )


def _wrong_names(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    own = module.state_dict().keys()
    missing, extra = sorted(own - state.keys()), sorted(state.keys() - own)
    named = (("expected also", missing), ("got also", extra))
    return [f"{what} {', '.join(names)}" for what, names in named if names]


def _wrong_shapes(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: expected shape {tuple(own.shape)}, got {tuple(state[name].shape)}"
        for name, own in module.state_dict().items()
        if isinstance(own, Tensor) and isinstance(state.get(name), Tensor) and own.shape != state[name].shape
    ]
