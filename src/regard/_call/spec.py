"""The values that describe a call: its options, the checked `Spec`, and the `Problem` with its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from ..scores import Alibi, RelativeBias

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_OFFSET = 2**48  # positions stay far from the 2^62 that means "unlimited" in a mask program

Bias = Tensor | Alibi | RelativeBias
QKV = tuple[Tensor, Tensor, Tensor]  # q, k, v
Strides = tuple[int, int, int, int]

# fast_new(Options, (...)) is Options(...) in a third of the time, for calls that take microseconds.
fast_new = tuple.__new__


class Options(NamedTuple):
    """The options of `attention`, as given."""

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
        """Those that the weights before dropout depend on, by name."""
        return dict(zip(self._fields[:6], self, strict=False))


@dataclass(frozen=True)
class Spec:
    """A checked call without its data. Strides are for (B, H, L, D), in elements, 0 in broadcast dims."""

    dtype: torch.dtype
    lse_dtype: torch.dtype  # `compute_dtype` of the dtype
    device: torch.device
    batch: tuple[int, ...]  # broadcast leading dims, () for (H, L, D) and (L, D)
    rank: int  # rank of q as given: 2 is the textbook form without heads
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
    offset: int | None  # None: one for each sample, in Problem.offset
    bias: str  # "none" | "tensor" | "alibi" | "relative"
    bias_dtype: torch.dtype | None
    bias_stride: Strides  # for "tensor": (B, H, Lq, Lk), 0 where broadcast
    scale: float
    softcap: float | None
    sink: bool
    dropout: float
    return_lse: bool
    copied: tuple[str, ...]  # tensors whose batch dims cannot be flattened without a copy
    out_shape: tuple[int, ...]  # as the caller gets it
    out_stride: Strides  # (B, H, L, Dv), dense, ordered like q's
    is_plain: bool  # q, k, v and the Spec say it all: no other tensor and no seed
    is_canonical: bool  # the tensors have four dims and q, k and v the same batch: see `layout.canonical`
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of layout and backends
    # Dispatch's memo: impl -> backend, without and with gradients.
    choices: tuple[dict[str, str], dict[str, str]] = field(
        default_factory=lambda: ({}, {}), compare=False, repr=False
    )

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-1]

    @property
    def pairs(self) -> int:
        """Queries times keys, over all samples and heads."""
        return self.B * self.Hq * self.Lq * self.Lk

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (*self.out_shape[:-1], self.Lk)


class Problem(NamedTuple):
    """A Spec and the live tensors."""

    spec: Spec
    q: Tensor  # as given, or the one copy named in Spec.copied
    k: Tensor
    v: Tensor
    mask: Mask | None
    tensors: tuple[Tensor, ...]  # the mask program's, batch dims flattened to 1 or B
    offset: Tensor | None  # (B,) int64
    bias: Bias | None
    by_head: Tensor | None  # behind ALiBi (Hq,) or a relative bias (Hq, 2 * far + 1), in lse_dtype
    sink: Tensor | None
    seed: Any  # 64 bits, as a signed integer; in a call that is watched it may be a tensor ()
    needs_grad: bool  # grad mode is on and a floating input requires grad
    watched: bool = False  # the call must go through PyTorch's dispatcher: see `is_watched`

    @property
    def bias_tensor(self) -> Tensor | None:
        """A bias of pairs; None for a bias by head and distance."""
        return self.bias if isinstance(self.bias, Tensor) else None

    @property
    def batch_offset(self) -> int | Tensor:
        """The offset as masks and biases take it: an int, or a tensor of shape `batch`."""
        if self.offset is None:
            assert self.spec.offset is not None
            return self.spec.offset
        return self.offset.view(self.spec.batch)


def learned(bias: Bias | None) -> Tensor | None:
    """The tensor behind a bias: itself, ALiBi's slopes or the relative table."""
    return bias.slopes if isinstance(bias, Alibi) else bias.table if isinstance(bias, RelativeBias) else bias


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, the LSE and states: float64 for float64, float32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32
