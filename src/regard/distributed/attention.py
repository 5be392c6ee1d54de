"""The public function `distributed.attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._call.spec import Bias, Options
from .._tools.watching import uncompiled
from .._tools.words import hide_unknown, unknown_keyword
from ..masks import Mask
from ._agree import agree
from ._gather import gather
from ._group import groups_of
from ._ring import ring
from ._ulysses import ulysses, usp
from .layouts import Layout
from .plan import choose_method

Layouts = Layout | tuple[Layout, Layout]
RUN = {"ring": ring, "gather": gather, "ulysses": ulysses, "usp": usp}


@hide_unknown
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh, layout: Layouts | None = None,
    method: str = "auto", debug: bool | None = None,
    mask: Mask | Tensor | None = None, offset: int | Tensor | None = None, bias: Bias | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, impl: str = "auto",
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Computes this rank's shard of exact attention over a sequence that a mesh of ranks shares.

    All ranks of the mesh call it together. q, k and v are this rank's shards; mask, offset, bias,
    sink and seed are those of the whole call, on every rank. The result equals this rank's shard of
    `regard.attention` on the whole tensors, with the same dropout pattern.

    Args:
        q, k, v: shards (B, Hq, lengths[rank], D), (B, Hkv, ...), as from `shard(x, layout, rank, 2)`.
        mesh: a DeviceMesh with one dim, such as `mesh["cp"]`. `usp` needs two dims: the ring, then
            Ulysses. Then a rank's index in the layout is its place in the flattened mesh.
        layout: the tokens of each rank, or a pair of layouts for queries and for keys. Default:
            `contiguous`.
        method: "ring", "gather", "ulysses", "usp", or "auto" (see `plan`).
        debug: whether to compare checksums of the masks, biases and sinks of all ranks. Default: the
            environment variable REGARD_DISTRIBUTED_DEBUG is set to something else than 0.
        mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse, impl: as in
            `regard.attention`. Without a seed, rank 0 draws it. `ring` and `usp` run in the native
            backend, and have no second derivatives.

    Returns:
        out (B, Hq, lengths[rank], Dv), with `return_lse` also the LSE (B, Hq, lengths[rank]).
        Gradients of q, k and v are those of the shards. Gradients of bias and sink are this rank's
        share: their sum over the ranks is the gradient, as for the weights of every layer.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is invalid on this rank, or differs
            between ranks. All ranks raise.
        FloatingPointError: a score of a ring is beyond the range of the compute type. All ranks raise.
        RuntimeError: another rank failed or did not answer within the process group's time-out.

    Example:
        >>> layout = regard.distributed.zigzag(L, mesh.size())
        >>> q, k, v = (regard.distributed.shard(x, layout, rank, dim=2) for x in (q, k, v))
        >>> out = regard.distributed.attention(q, k, v, mesh=mesh, layout=layout, mask=masks.Causal())
    """
    if unknown:
        raise unknown_keyword(attention, unknown)
    options = Options(mask, offset, bias, scale, softcap, sink, dropout, seed, return_lse)
    out, lse = attend_heads(None, q, k, v, options, mesh, layout, method, debug, impl)
    return (out, lse) if return_lse else out


@uncompiled
def attend_heads(
    part: tuple[int, int] | None, q: Tensor, k: Tensor, v: Tensor, options: Options, mesh: DeviceMesh,
    layout: Layouts | None = None, method: str = "auto", debug: bool | None = None, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes the shards of out and the LSE.

    `part` is the first head of q and the number of heads of a larger call, whose dropout pattern the
    call draws.
    """
    groups = groups_of(mesh)
    call = agree(groups, q, k, v, options, layout, method, impl, debug)
    if part is not None:
        call = replace(call, head=part[0], all_heads=part[1])
    if method == "auto":
        method = choose_method(call, groups, q, v)
    return RUN[method](call, groups, q, k, v)
