"""Stand-ins: tensor subclasses that carry a mask or a cache through the code of models.

Masks, keys and values reach the attention function of Transformers through the code of several
hundred models. Some models read the shape and dtype of these tensors, and a few compute with them.
A stand-in has the shape and dtype of the dense tensor, but no memory. Any operation on a stand-in
first builds the dense tensor, so code that does not know stand-ins is correct but slower.
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
    """A tensor without data. Operations on it use the tensor that its method `dense` returns."""

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
                "change a clone"
            )
        args, kwargs = tree.tree_map_only(StandIn, lambda x: x.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


class MaskTensor(StandIn):
    """A stand-in for a dense mask (B, 1, Lq, Lk), True = may attend."""

    mask: Mask | None  # None: nothing is masked
    offset: int

    def __new__(
        cls: Any, mask: Mask | None, offset: int, shape: tuple[int, ...], device: torch.device | str
    ) -> Any:
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        tensor.mask, tensor.offset = mask, offset
        return tensor

    def dense(self) -> Tensor:
        B, _, Lq, Lk = self.shape
        if self.mask is None:
            return torch.ones(B, 1, Lq, Lk, dtype=torch.bool, device=self.device)
        return self.mask.to_dense(Lq, Lk, self.offset).expand(B, 1, Lq, Lk)


class StoredTensor(StandIn):
    """A stand-in for stored keys (B, Hkv, Lk, D) or values, which the kernels read in place."""

    stored: Stored
    which: int  # 0: keys, 1: values

    def __new__(cls: Any, stored: Stored, which: int, dtype: torch.dtype) -> Any:
        source, size = ((stored.k, stored.D), (stored.v, stored.Dv))[which]
        shape = (*source.shape[:2], stored.length, size)
        # If `dtype` is the storage's dtype, the stand-in has the strides of the storage.
        strides = source.stride() if source.dtype is dtype else None
        tensor = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=source.device)
        tensor.stored, tensor.which = stored, which
        return tensor

    def dense(self) -> Tensor:
        return self.stored.dense(self.dtype)[self.which].to(self.dtype)
