"""Attention over keys and values as a cache keeps them."""

from __future__ import annotations

from torch import Tensor

from ._attention import attention
from ._problem import Bias
from ._stored import Stored
from .masks import Mask


def attend_stored(
    q: Tensor,
    stored: Stored,
    *,
    mask: Mask | None = None,
    offset: int | Tensor | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention(q, *stored.dense(q.dtype), ...)`, q (B, Hq, Lq, D)."""
    k, v = stored.dense(q.dtype)
    return attention(
        q, k, v, mask=mask, offset=offset, bias=bias, scale=scale, softcap=softcap, sink=sink,
        return_lse=return_lse, impl=impl,
    )  # fmt: skip
