"""The share that one rank has in a layer: some heads or hidden channels, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._api.attention import attend_part, attention
from .._api.packed import attend_packed
from .._api.projection import linear
from .._call.check import as_seed
from .._call.dropout import DropoutOrigin
from .._call.spec import QKV, learned
from ..masks import Mask
from ..masks._heads import of_heads
from ..scores import Alibi, RelativeBias
from ._divisions import Division
from ._group import Group, all_headers
from ._pairs import Run
from ._sums import replicated, summed


@dataclass(frozen=True, eq=False)
class LayerShare:
    """A rank's share in a layer that the ranks of a group compute together.

    The layer's attributes `heads` and `kv_heads` and its divided parameters are those of the share.
    """

    group: Group
    units: Run  # the query heads or hidden channels of this rank
    key_units: Run  # its key heads, or the same hidden channels
    all_units: int
    divisions: dict[str, Division]  # of the parameters of which each rank holds some rows
    addends: tuple[str, ...]  # undivided parameters, of whose gradients each rank computes an addend

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerShare:
        return self  # a process group cannot be copied

    def inputs(self, *values: Any) -> tuple[Any, ...]:
        """Returns tokens with gradients that are sums over the ranks. Other values stay the same.

        The packed tokens of a nested tensor are passed to the layer in a second call.
        """
        return tuple(
            replicated(self.group, x) if isinstance(x, Tensor) and not x.is_nested else x for x in values
        )

    def mask(self, mask: Mask | None) -> Mask | None:
        """Returns the mask of this rank's heads."""
        return None if mask is None else of_heads(mask, self.units, self.all_units)

    def bias(self, bias: Alibi | RelativeBias) -> Alibi | RelativeBias:
        """Returns the bias of this rank's heads. Every rank has the whole parameter."""
        tensor = learned(bias)
        assert tensor is not None
        tensor = replicated(self.group, tensor)
        whole = Alibi(tensor) if isinstance(bias, Alibi) else bias._with(tensor)
        return whole.of_heads(*self.units)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Computes `regard.attention` of this rank's heads with the dropout pattern of all heads."""
        drawn = self.dropout(options.get("dropout", 0.0))
        if not drawn:
            return attention(q, k, v, **options)
        return attend_part(DropoutOrigin(*drawn.pop("part")), q, k, v, **options | drawn)

    def dropout(self, p: float) -> dict[str, Any]:
        """Returns the seed of a call, and its part of the heads whose pattern a single process draws."""
        if not p:
            return {}
        return {"seed": self._agreed(int(as_seed(None, p))), "part": (self.units[0], self.all_units)}

    def packed(self, qkv: QKV, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, **options: Any) -> Tensor:
        """Computes attention of packed q, k, v (H, total, D) in this rank's heads."""
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        options = {"offset": None, "bias": None, "seed": None, "return_lse": False} | options
        return attend_packed(self.attention, qkv, cu_seqlens_q, cu_seqlens_k, options)[0]

    def _agreed(self, seed: int) -> int:
        """Returns the seed. Raises if the ranks have drawn different ones."""
        seeds = [header[0] for header in all_headers(self.group, [seed])]
        if len(set(seeds)) > 1:
            raise RuntimeError(
                "dropout: expected PyTorch's generators in one state on all ranks that share the heads, got "
                "other random numbers; call torch.manual_seed(n) with the same n on these ranks"
            )
        return seed


class SummedLinear(nn.Linear):
    """A linear layer of which each rank holds some input channels. The sum is taken before the bias."""

    share: LayerShare

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = summed(self.share.group, linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class DividedDropout(nn.Dropout):
    """Dropout of some of the channels, with the pattern that a single process draws for all."""

    share: LayerShare

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        begin, end = self.share.units
        ones = x.new_ones(*x.shape[:-1], self.share.all_units)
        return x * F.dropout(ones, self.p)[..., begin:end]


# Hooks of a layer with a share


def prepare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Makes gradients of inputs and of parameters sums over the ranks. A forward pre-hook."""
    share: LayerShare = module._share
    if torch.is_grad_enabled():
        for name in (*share.addends, *share.divisions):
            _sum_gradient(share, module.get_parameter(name), share.divisions.get(name))
    names = [name for name in ("x", "context", "value") if name in kwargs]
    inputs = share.inputs(*(kwargs[name] for name in names))
    return share.inputs(*args), kwargs | dict(zip(names, inputs, strict=True))


class GradientSum:
    """A hook of a parameter: sums its gradient over the ranks that hold the same rows."""

    def __init__(self, share: LayerShare, division: Division | None) -> None:
        self.share, self.division = share, division

    def __call__(self, grad: Tensor) -> Tensor:
        group = self.share.group
        return summed(group, grad) if self.division is None else self.division.sum_repeated(group, grad)


def _sum_gradient(share: LayerShare, parameter: nn.Parameter, division: Division | None) -> None:
    """Adds the hook once. A copy of a parameter, or one that was replaced, has no hooks."""
    hooks = (parameter._backward_hooks or {}).values()
    needed = parameter.requires_grad and (division is None or division.repeated)
    if needed and not any(isinstance(hook, GradientSum) for hook in hooks):
        parameter.register_hook(GradientSum(share, division))


def save_whole(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replaces divided parameters in a state_dict by whole ones. All ranks must take part."""
    for name, division in module._share.divisions.items():
        if prefix + name in state:
            state[prefix + name] = division.whole(module._share.group, state[prefix + name].detach())


def load_local(
    module: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Replaces whole parameters in a state_dict by this rank's rows."""
    share: LayerShare = module._share
    for name, division in share.divisions.items():
        whole = state.get(prefix + name)
        if whole is None:
            continue
        shape = division.whole_shape(module.get_parameter(name))
        if tuple(whole.shape) != shape:
            errors.append(f"{prefix}{name}: expected the whole {shape}, got {tuple(whole.shape)}")
        else:
            state[prefix + name] = division.local(whole, share.group.rank)
