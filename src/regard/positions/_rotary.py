"""Rotary embeddings: pairs of channels of queries and keys turn by an angle that grows with the position.

So a score depends on the distance alone. A pair is (i, i + dims / 2) in the layout "half" of Llama and
GPT-NeoX, and (2i, 2i + 1) in the layout "interleaved" of GPT-J and the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from .._tools.arguments import broadcasts, describe
from .._tools.watching import is_legacy_batchedtensor, is_watched
from ._frequencies import Scaling, frequencies
from ._places import Positions, places

LAYOUTS = ("half", "interleaved")
Pair = tuple[Tensor, Tensor]


def rotary_table(
    positions: Tensor, turns: Tensor, factor: float = 1.0, dtype: torch.dtype | None = None
) -> Pair:
    """Returns cos and sin (..., L, dims / 2) of positions (..., L), in float32 inside, or float64."""
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    angles = positions[..., None].to(exact) * turns.to(positions.device, exact)
    return (angles.cos() * factor).to(dtype or exact), (angles.sin() * factor).to(dtype or exact)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half", inplace: bool = False) -> Tensor:
    """Rotates the first channels of x (..., L, D): pair (a, b) -> (a cos - b sin, b cos + a sin).

    Args:
        x: queries or keys, any strides.
        cos: (..., L, dims / 2) as from `rotary_table`, broadcastable over what stands before L in x. Channels
            from `dims` on stay as they are.
        sin: the same shape.
        layout: which channels are a pair: "half" or "interleaved".
        inplace: write into x. For inference: autograd may need what is there.

    Allocates the result and nothing else (in place: half of x).
    """
    _check(x, cos, sin, layout)
    if inplace:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("inplace: expected a tensor that needs no gradient, got one that requires grad")
        return _turn_in_place(x, cos, sin, layout)
    if _is_followed(x, cos, sin):
        return _formula(x, cos, sin, layout)
    if x.requires_grad and torch.is_grad_enabled():
        return _Turn.apply(x, cos, sin, layout)  # type: ignore[no-any-return, no-untyped-call]
    return _turn(x, cos, sin, layout)


def _is_followed(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns whether plain operations are needed: for a compiler, a transform or forward mode."""
    return is_watched(x, cos, sin) or forward_ad._current_level >= 0 or is_legacy_batchedtensor(x)


def _check(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(f"x: expected floats (..., L, D), got {describe(x)}")
    if cos.shape != sin.shape or cos.shape[-2] != x.shape[-2] or 2 * cos.shape[-1] > x.shape[-1]:
        given = f"{tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}"
        raise ValueError(f"cos and sin: expected (..., L, dims / 2) with dims up to D, got {given}")
    if cos.dim() > 2 and not broadcasts(cos.shape[:-2], x.shape[:-2]):
        given = f"x {tuple(x.shape)}, got cos and sin {tuple(cos.shape)}"
        raise ValueError(f"positions: expected places for each of the samples of {given}")


def _pairs(x: Tensor, half: int, layout: str) -> Pair:
    """Returns the first and second channels (..., L, half) of all pairs, as views."""
    if layout == "half":
        return x[..., :half], x[..., half : 2 * half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    out, half = torch.empty_like(x), cos.shape[-1]
    (a, b), (c, d) = _pairs(x, half, layout), _pairs(out, half, layout)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=d).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _turn_in_place(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    a, b = _pairs(x, cos.shape[-1], layout)
    before = a.clone()
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(before, sin)
    return x


def _formula(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotates by plain operations, which compilers and transforms follow."""
    half = cos.shape[-1]
    a, b = _pairs(x, half, layout)
    pairs = a * cos - b * sin, b * cos + a * sin
    joined = torch.cat if layout == "half" else torch.stack
    turned = joined(pairs, -1).reshape(*a.shape[:-1], 2 * half)  # legacy vmap has no rule for flatten
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


class _Turn(Function):
    """The derivative of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _turn(x, cos, sin, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin, layout=ctx.layout), None, None, None


class Rotary(nn.Module):
    """Rotary embeddings of the first `dims` channels. No parameters; layers may share one.

    Args:
        dims: how many channels turn, even, at most D.
        base: the slowest pair turns once in about `2 pi base` steps.
        scaling: `LinearScaling`, `NTK`, `YaRN` or `Llama3`, for texts longer than those of training, or
            `Frequencies`.
        layout: "half" (Llama, GPT-NeoX) or "interleaved" (GPT-J).
    """

    def __init__(
        self, dims: int, *, base: float = 10000.0, scaling: Scaling | None = None, layout: str = "half"
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
        self.dims, self.base, self.scaling, self.layout = dims, base, scaling, layout
        # No buffer: it would follow the model to 16 bits or to the meta device.
        self.inv_freq, self.attention_factor = frequencies(dims, base, scaling)
        self._tables: dict[tuple[torch.device, torch.dtype], Pair] = {}

    def forward(self, x: Tensor, positions: Positions = 0, *, inplace: bool = False) -> Tensor:
        """Rotates x (..., H, L, D). Positions: an int, (L,), or (B, L) for x (B, H, L, D)."""
        cos, sin = self.table(x, positions)
        return rotate(x, cos, sin, layout=self.layout, inplace=inplace)

    def table(self, x: Tensor, positions: Positions = 0) -> Pair:
        """Returns cos and sin (L, dims / 2), or (B, 1, L, dims / 2), in x's dtype, for tensors like x."""
        if x.dim() < 2:
            raise ValueError(f"x: expected (..., H, L, D), got {describe(x)}")
        L = x.shape[-2]
        if type(positions) is int and positions >= 0 and not is_watched(x, x, x):
            cos, sin = self._remembered(positions + L, x.device, x.dtype)
            return cos[positions : positions + L], sin[positions : positions + L]
        at = places(positions, L, x.device)
        at = at.unsqueeze(-2) if at.ndim > 1 else at
        return rotary_table(at, self.inv_freq, self.attention_factor, x.dtype)

    def _remembered(self, length: int, device: torch.device, dtype: torch.dtype) -> Pair:
        """Returns the table of at least the first `length` positions. It doubles when it grows."""
        found = self._tables.get((device, dtype))
        if found is None or len(found[0]) < length:
            size = max(length, 2 * len(found[0]) if found is not None else 0)
            with torch.inference_mode(False):  # or it could not take part in training later
                at = torch.arange(size, device=device)
                found = rotary_table(at, self.inv_freq, self.attention_factor, dtype)
            self._tables[device, dtype] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return f"{self.dims}, base={self.base:g}, layout={self.layout!r}{scaling}"
