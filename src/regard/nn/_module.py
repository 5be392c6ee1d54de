"""`CheckedModule`: base class of the modules, with atomic `load_state_dict` and sizes in `repr`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class CheckedModule(nn.Module):
    """A module whose `load_state_dict` checks all names and shapes before it copies any tensor.

    PyTorch's `load_state_dict` copies the tensors that fit and then raises, which leaves a partly
    loaded model.
    """

    _shown: tuple[str, ...] = ()  # attributes that `repr` shows unless they are None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        faults = [*_wrong_shapes(self, state_dict), *(_wrong_names(self, state_dict) if strict else ())]
        if faults:
            name, details = type(self).__name__, "; ".join(faults)
            raise RuntimeError(f"state_dict of {name}: nothing was loaded; {details}")
        return super().load_state_dict(state_dict, strict, assign)

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self._shown}
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in values.items()
            if value is not None
        )


def _wrong_names(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    expected = module.state_dict().keys()
    missing, extra = sorted(expected - state.keys()), sorted(state.keys() - expected)
    faults = (("expected also", missing), ("got also", extra))
    return [f"{fault} {', '.join(names)}" for fault, names in faults if names]


def _wrong_shapes(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: expected shape {tuple(x.shape)}, got {tuple(state[name].shape)}"
        for name, x in module.state_dict().items()
        if isinstance(x, Tensor) and isinstance(state.get(name), Tensor) and x.shape != state[name].shape
    ]
