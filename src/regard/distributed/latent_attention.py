"""The public function `distributed.latent_attention`."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._call.spec import Options
from .._tools.arguments import count, describe
from .._tools.watching import uncompiled
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask
from ._agree import agree, refuse_dtensors
from ._group import groups_of
from ._latent import Expansion, run_latents
from .layouts import Layout
from .plan import choose_method

Layouts = Layout | tuple[Layout, Layout]


@hide_unknown
@uncompiled
def latent_attention(
    q: Tensor, latent: Tensor, up: Tensor | None = None, *, rank: int, mesh: DeviceMesh,
    layout: Layouts | None = None, method: str = "auto", debug: bool | None = None,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, scale: float | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, impl: str = "auto", **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Computes this rank's shard of latent attention (MLA). Only latents travel between ranks.

    A latent consists of `rank` content channels and the channels of the rotary key, which all heads
    share. With `up`, each rank computes keys and values from latents (the expanded form): head h has
    the key [W_uk[h] c, r] and the value W_uv[h] c of a latent [c, r]. Without `up`, the latent is the
    key of all heads and its content the value (the absorbed form).

    Args:
        q: queries (B, H, lengths[rank], D). Expanded: D = nope + rope. Absorbed: D = rank + rope.
        latent: latents of this rank's tokens (B, lengths[rank], rank + rope).
        up: W_uk[h] above W_uv[h] for each head h, (H, nope + value, rank), equal on all ranks. Its
            gradient is this rank's share: the sum over the ranks is the gradient.
        rank: the number of content channels.
        method: as in `distributed.attention`, but "ring" is "gather": each rank keeps all latents that
            it needs, and expands them for some heads at a time, again in backward.
        mesh, layout, debug, mask, offset, scale, dropout, seed, impl: as in `distributed.attention`.

    Returns:
        out (B, H, lengths[rank], value), or (B, H, lengths[rank], rank) in the absorbed form.

    Raises:
        TypeError, ValueError, RuntimeError: as in `distributed.attention`.
    """
    if unknown:
        raise unknown_keyword(latent_attention, unknown)
    groups, options = groups_of(mesh), Options(mask, offset, None, scale, None, None, dropout, seed)
    error: Exception | None = None
    k, v, width = q, q, 0
    try:
        refuse_dtensors(q=q, latent=latent, up=up)
        expand = _expansion(q, latent, up, rank)
        (k, v), width = expand.like_results(latent[:, None]), latent.shape[2]
    except (TypeError, ValueError) as caught:
        error = caught
    call = agree(groups, q, k, v, options, layout, method, impl, debug, latent=width, error=error)
    if method == "auto":
        method = choose_method(call, groups, q, v)
    out, _ = run_latents(method, call, groups, q, latent[:, None], expand)
    return out


def _expansion(q: Tensor, latent: Tensor, up: Tensor | None, rank: int) -> Expansion:
    """Checks the tensors of the call."""
    if not isinstance(q, Tensor) or q.ndim != 4:
        raise ValueError(f"q: expected a shard (B, H, length, D), got {describe(q)}")
    width = count("rank", rank, 1)
    if not isinstance(latent, Tensor) or latent.ndim != 3 or latent.shape[2] < width:
        expected = f"(B, length, rank + rope) with rank = {rank}"
        raise ValueError(f"latent: expected {expected}, got {describe(latent)}")
    for name, x in (("latent", latent), ("up", up)):
        if isinstance(x, Tensor) and x.dtype is not q.dtype:
            raise ValueError(f"{name}: expected q's dtype {q.dtype}, got {x.dtype}")
    rope = latent.shape[2] - width
    if up is None:
        return Expansion(width, None, width)
    H, nope = q.shape[1], q.shape[3] - rope
    fits = isinstance(up, Tensor) and up.ndim == 3 and up.shape[0] == H and up.shape[2] == width
    if not fits or not 0 <= nope < up.shape[1]:
        expected = (
            f"(H = {H}, nope + value, rank = {width}) with nope = {nope}, as q has {q.shape[3]} channels"
        )
        raise ValueError(f"up: expected {expected} and latents {rope} rotary ones, got {describe(up)}")
    return Expansion(width, up, up.shape[1] - nope)
