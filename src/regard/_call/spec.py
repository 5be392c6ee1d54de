"""The values that describe a call: its `Options`, its `Spec` and its `Problem`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from ..scores import Alibi, RelativeBias
from .dropout import WHOLE, DropoutOrigin

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_OFFSET = 2**48  # positions stay far from the 2^62 that means "unlimited" in a mask program

Bias = Tensor | Alibi | RelativeBias
QKV = tuple[Tensor, Tensor, Tensor]  # q, k, v
Strides = tuple[int, int, int, int]

# fast_new(Options, (...)) equals Options(...) and takes a third of the time.
fast_new = tuple.__new__


class Options(NamedTuple):
    """The options of `attention`, as the caller passes them."""

    mask: Mask | Tensor | None = None
    offset: int | Tensor | None = None
    bias: Bias | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None
    return_lse: bool = False

    def of_weights(self) -> dict[str, Any]:
        """Returns a dict of the options that affect the weights before dropout."""
        return dict(zip(self._fields[:6], self, strict=False))


@dataclass(frozen=True)
class Spec:
    """A checked call without its data.

    Strides are those of the tensors viewed as (B, H, L, D), in elements, 0 in broadcast dims.
    """

    dtype: torch.dtype
    lse_dtype: torch.dtype  # compute_dtype(dtype)
    device: torch.device
    batch: tuple[int, ...]  # broadcast leading dims, () for (H, L, D) and (L, D)
    rank: int  # the caller's q.ndim; 2: no heads, (L, D)
    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    q_stride: Strides
    k_stride: Strides
    v_stride: Strides
    code: tuple[int, ...]  # the mask program, () when there is no mask
    offset: int | None  # None: each sample has an offset, in Problem.offset
    bias: str  # "none" | "tensor" | "alibi" | "relative"
    bias_dtype: torch.dtype | None
    bias_stride: Strides  # for "tensor": (B, H, Lq, Lk), 0 where broadcast
    scale: float
    softcap: float | None
    sink: bool
    dropout: float
    return_lse: bool
    copied: tuple[str, ...]  # tensors whose batch dims cannot be flattened without a copy
    out_shape: tuple[int, ...]  # with the caller's leading dims
    out_stride: Strides  # (B, H, L, Dv), dense, in q's memory order
    has_operands: bool  # the call has a tensor besides q, k and v, or a seed
    is_canonical: bool  # q, k and v have four dims and equal batch sizes: see `layout.canonical`
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # caches of other modules
    # impl -> the backend that dispatch chose. The first dict is for calls without gradients.
    choices: tuple[dict[str, str], dict[str, str]] = field(
        default_factory=lambda: ({}, {}), compare=False, repr=False
    )

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-1]

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs over all samples and heads."""
        return self.B * self.Hq * self.Lq * self.Lk

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (*self.out_shape[:-1], self.Lk)


class Problem(NamedTuple):
    """A Spec and the live tensors of a call."""

    spec: Spec
    q: Tensor  # the caller's tensor, or a copy if Spec.copied names it
    k: Tensor
    v: Tensor
    mask: Mask | None
    tensors: tuple[Tensor, ...]  # the tensors of the mask program, batch dims flattened to 1 or B
    offset: Tensor | None  # (B,) int64
    bias: Bias | None
    by_head: Tensor | None  # ALiBi slopes (Hq,), or a relative bias at distances -far to far
    sink: Tensor | None
    seed: Any  # a signed 64-bit integer; in a watched call possibly a tensor ()
    needs_grad: bool  # grad mode is on and an input requires grad, or an input has a tangent
    watched: bool = False  # the call must go through an operator: see `is_watched`
    origin: DropoutOrigin = WHOLE  # of dropout, if the call is a part of a larger one

    @property
    def bias_tensor(self) -> Tensor | None:
        """The bias if it is a tensor, else None."""
        return self.bias if isinstance(self.bias, Tensor) else None

    @property
    def batch_offset(self) -> int | Tensor:
        """The argument `offset` for masks and biases: an int, or a tensor of shape `batch`."""
        if self.offset is None:
            assert self.spec.offset is not None
            return self.spec.offset
        return self.offset.view(self.spec.batch)


def learned(bias: Bias | None) -> Tensor | None:
    """Returns the tensor of a bias: the bias itself, ALiBi slopes, or a RelativeBias's table."""
    return bias.slopes if isinstance(bias, Alibi) else bias.table if isinstance(bias, RelativeBias) else bias


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums over inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
