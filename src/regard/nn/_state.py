"""Loading a checkpoint: all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Whole(nn.Module):
    """A module that compares names and shapes of a checkpoint before it copies anything.

    PyTorch copies what fits and raises afterwards, which leaves a model that is half new.
    """

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        faults = [*_wrong_shapes(self, state_dict), *(_wrong_names(self, state_dict) if strict else ())]
        if faults:
            raise RuntimeError(
                f"state_dict of {type(self).__name__}: nothing was loaded; " + "; ".join(faults)
            )
        return super().load_state_dict(state_dict, strict, assign)


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
