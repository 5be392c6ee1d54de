"""Tensor subclasses that carry a mask or a cache through the code of models.

Transformers passes a mask from the mask function to the attention function, and keys and values from the
cache to the attention function, through the code of several hundred models. Some of it reads shape and dtype,
a little of it computes. A stand-in has the shape and dtype of the dense tensor and no memory. An operation on
it first makes the dense tensor, so code that does not know stand-ins is correct, only slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from .._call.stored import Stored
from .._tools.watching import no_torch_function
from ..masks import Mask


class StandIn(Tensor):
    """A tensor without memory; operations on it receive the result of `dense`."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def dense(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], StandIn):
            raise RuntimeError(
                f"{type(args[0]).__name__} stands for a tensor and cannot be changed in place ({func}); "
                "change a clone of it"
            )
        args, kwargs = tree.tree_map_only(StandIn, lambda x: x.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


class MaskTensor(StandIn):
    """A dense mask (B, 1, Lq, Lk), True = may attend, that carries a `Mask` value."""

    mask: Mask | None  # None: every query sees every key
    offset: int

    def __new__(
        cls: Any, mask: Mask | None, offset: int, shape: tuple[int, ...], device: torch.device | str
    ) -> Any:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        made.mask, made.offset = mask, offset
        return made

    def dense(self) -> Tensor:
        B, _, Lq, Lk = self.shape
        if self.mask is None:
            return torch.ones(B, 1, Lq, Lk, dtype=torch.bool, device=self.device)
        return self.mask.to_dense(Lq, Lk, self.offset).expand(B, 1, Lq, Lk)


class Kept(StandIn):
    """The keys (B, Hkv, Lk, D) or values of a cache, which the kernels read in place."""

    stored: Stored
    which: int  # 0: keys, 1: values

    def __new__(cls: Any, stored: Stored, which: int, dtype: torch.dtype) -> Any:
        source, size = ((stored.k, stored.D), (stored.v, stored.Dv))[which]
        shape = (*source.shape[:2], stored.length, size)
        strides = source.stride() if source.dtype is dtype else None  # numbers are used as they lie
        made = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=source.device)
        made.stored, made.which = stored, which
        return made

    def dense(self) -> Tensor:
        return self.stored.dense(self.dtype)[self.which].to(self.dtype)
