"""Rotary embeddings: rotate pairs of channels of q and k by an angle proportional to the position.

A pair is (i, i + dims / 2) in the layout "half" of Llama and GPT-NeoX, and (2i, 2i + 1) in the
layout "interleaved" of GPT-J and the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from .._tools.arguments import broadcasts, describe, readable
from .._tools.watching import is_legacy_batchedtensor, is_watched
from ._frequencies import Scaling, frequencies
from ._positions import Positions, position_tensor

LAYOUTS = ("half", "interleaved")
NEAR = 32768  # positions below NEAR share one cached table; a power of two
PAGE = 64  # a cached table of later positions starts and ends at multiples of PAGE
Pair = tuple[Tensor, Tensor]


def rotary_table(
    positions: Tensor, turns: Tensor, factor: float = 1.0, dtype: torch.dtype | None = None
) -> Pair:
    """Returns cos and sin (..., L, dims / 2) of the rotation angles at positions (..., L).

    Args:
        positions: integers (..., L).
        turns: frequencies (dims / 2,), in radians per position.
        factor: multiplies cos and sin.
        dtype: dtype of the results. Default: float32. Angles are always computed in float64: in
            float32 the angle at position 1,000,000 would be off by up to 0.03.
    """
    angles = positions[..., None] * turns.to(positions.device, torch.float64)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype or torch.float32), sin.to(dtype or torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half", inplace: bool = False) -> Tensor:
    """Rotates the first channels of x (..., L, D): pair (a, b) -> (a cos - b sin, b cos + a sin).

    Args:
        x: queries or keys (..., L, D), any strides.
        cos: (..., L, dims / 2), as from `rotary_table`. The dims before L broadcast to x. Only the
            first `dims` channels are rotated, the others are copied.
        sin: like cos.
        layout: which channels form a pair: "half" or "interleaved".
        inplace: whether to write the result into x, which then must not require grad.

    Allocates only the result, or with inplace=True temporary memory of half the size of x.
    """
    _check(x, cos, sin, layout)
    if inplace:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("inplace: expected an x that does not require grad, got one that does")
        return _rotate_in_place(x, cos, sin, layout)
    if _is_traced(x, cos, sin):
        return _rotate_traced(x, cos, sin, layout)
    if x.requires_grad and torch.is_grad_enabled():
        return _Rotate.apply(x, cos, sin, layout)  # type: ignore[no-any-return, no-untyped-call]
    return _rotate(x, cos, sin, layout)


def _is_traced(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns whether the call is watched or in forward mode, so that `out=` must not be used."""
    return is_watched(x, cos, sin) or forward_ad._current_level >= 0 or is_legacy_batchedtensor(x)


def _check(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(f"x: expected a float tensor (..., L, D), got {describe(x)}")
    if cos.shape != sin.shape or cos.shape[-2] != x.shape[-2] or 2 * cos.shape[-1] > x.shape[-1]:
        got = f"{tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}"
        raise ValueError(f"cos and sin: expected (..., L, dims / 2) with dims up to D, got {got}")
    if cos.dim() > 2 and not broadcasts(cos.shape[:-2], x.shape[:-2]):
        shapes = f"x {tuple(x.shape)}, got cos and sin {tuple(cos.shape)}"
        raise ValueError(f"positions: expected leading dims broadcastable to {shapes}")


def _pairs(x: Tensor, half: int, layout: str) -> Pair:
    """Returns two views (..., L, half) of x: the first and the second channels of all pairs."""
    if layout == "half":
        return x[..., :half], x[..., half : 2 * half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    out, half = torch.empty_like(x), cos.shape[-1]
    (a, b), (c, d) = _pairs(x, half, layout), _pairs(out, half, layout)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=d).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    a, b = _pairs(x, cos.shape[-1], layout)
    before = a.clone()
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(before, sin)
    return x


def _rotate_traced(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotates without writing into existing tensors, for compilers, transforms and forward mode."""
    half = cos.shape[-1]
    a, b = _pairs(x, half, layout)
    pairs = a * cos - b * sin, b * cos + a * sin
    join = torch.cat if layout == "half" else torch.stack
    rotated = join(pairs, -1).reshape(*a.shape[:-1], 2 * half)  # legacy vmap has no rule for flatten
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), -1)


class _Rotate(Function):
    """Autograd function of a rotation. The gradient is rotated by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _rotate(x, cos, sin, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin, layout=ctx.layout), None, None, None


class Rotary(nn.Module):
    """A module that rotates the first `dims` channels of queries and keys. It has no parameters.

    Args:
        dims: number of rotated channels, even, at most D.
        base: the lowest frequency is about 1 / base radians per position.
        scaling: `LinearScaling`, `NTK`, `YaRN` or `Llama3`, for contexts longer than in training,
            or `Frequencies`.
        layout: "half" (Llama, GPT-NeoX) or "interleaved" (GPT-J).

    Example:
        >>> rotary = positions.Rotary(64)
        >>> q, k = rotary(q), rotary(k)    # (B, H, L, 64), positions 0 to L - 1
    """

    def __init__(
        self, dims: int, *, base: float = 10000.0, scaling: Scaling | None = None, layout: str = "half"
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
        self.dims, self.base, self.scaling, self.layout = dims, base, scaling, layout
        # Not a buffer, because `model.half()` and `model.to("meta")` would convert it.
        self.inv_freq, self.attention_factor = frequencies(dims, base, scaling)
        self._tables: dict[tuple[torch.device, torch.dtype, bool], tuple[int, Tensor, Tensor]] = {}

    def forward(self, x: Tensor, positions: Positions = 0, *, inplace: bool = False) -> Tensor:
        """Rotates x (..., H, L, D).

        `positions` is the position of the first token, or integers (L,) or (B, L).
        """
        cos, sin = self.table(x, positions)
        return rotate(x, cos, sin, layout=self.layout, inplace=inplace)

    def table(self, x: Tensor, positions: Positions = 0) -> Pair:
        """Returns cos and sin for x, (L, dims / 2) or (B, 1, L, dims / 2), in x's dtype."""
        if x.dim() < 2:
            raise ValueError(f"x: expected (..., H, L, D), got {describe(x)}")
        L, watched = x.shape[-2], is_watched(x, x, x)
        if type(positions) is int and positions >= 0 and not watched:
            return self._cached_rows(positions, positions + L, x.device, x.dtype)
        at = position_tensor(positions, L, x.device).long()
        at = at.unsqueeze(-2) if at.ndim > 1 else at
        if at.is_cpu and at.numel() and not watched and readable(at):
            first, last = (int(position) for position in at.aminmax())
            if first >= 0 and last < NEAR:  # reading a table is faster than computing cos and sin
                cos, sin = self._cached_rows(0, last + 1, x.device, x.dtype)
                return cos[at], sin[at]
        return rotary_table(at, self.inv_freq, self.attention_factor, x.dtype)

    def _cached_rows(self, begin: int, end: int, device: torch.device, dtype: torch.dtype) -> Pair:
        """Returns cos and sin at the positions from `begin` to `end` - 1, as views of a table.

        Two tables are cached for each device and dtype: one of the positions from 0 on, which grows
        by doubling up to NEAR rows, and one of the positions of the latest call beyond NEAR. A
        table of more than NEAR rows is not cached.
        """
        near = end <= NEAR
        first, cos, sin = self._tables.get((device, dtype, near), (0, None, None))
        if cos is None or sin is None or begin < first or end > first + cos.shape[0]:
            first = 0 if near else begin // PAGE * PAGE
            last = 1 << (end - 1).bit_length() if near else -(-end // PAGE) * PAGE
            with torch.inference_mode(False):  # an inference tensor could not be used in training later
                at = torch.arange(first, last, device=device)
                cos, sin = rotary_table(at, self.inv_freq, self.attention_factor, dtype)
            if last - first <= NEAR:
                self._tables[device, dtype, near] = first, cos, sin
        return cos[begin - first : end - first], sin[begin - first : end - first]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return f"{self.dims}, base={self.base:g}, layout={self.layout!r}{scaling}"
