"""The public function `distributed.linear_attention`."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._api.linear_attention import FeatureMap, linear_attention as on_one_rank
from .._call.linear import LinearOptions, LinearState
from .._tools.watching import uncompiled
from .._tools.words import hide_unknown, unknown_keyword
from ._agree import place
from ._agree_linear import Agreed, agree_linear
from ._group import Group, flat_group, groups_of
from ._scan import LinearShards, Scan, StatePass, first_state, packed, pieces, unpacked
from ._sums import replicated, summed
from .layouts import Layout, positions

Layouts = Layout | tuple[Layout, Layout]


@hide_unknown
@uncompiled
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: DeviceMesh, layout: Layouts | None = None,
    debug: bool | None = None, causal: bool = True, feature_map: str | FeatureMap | None = None,
    normalize: bool = False, log_decay: Tensor | float | None = None, beta: Tensor | float | None = None,
    scale: float | None = None, lengths: Tensor | None = None, state: LinearState | None = None,
    return_state: bool = False, impl: str = "auto", **unknown: NoReturn,
) -> Tensor | tuple[Tensor, LinearState]:  # fmt: skip
    """Computes this rank's shard of linear attention over a sequence that a mesh of ranks shares.

    All ranks of the mesh call it together. The result equals this rank's shard of
    `regard.linear_attention` on the whole tensors. Ranks send states, never keys or values.

    Args:
        q, k, v: shards (B, Hq, lengths[rank], D), (B, Hkv, ...), as from `shard(x, layout, rank, 2)`.
        mesh: a DeviceMesh with one dim, such as `mesh["cp"]`, or with two, as in
            `distributed.attention`.
        layout: the tokens of each rank, or with causal=False a pair of layouts for queries and for
            keys. Default: `contiguous`, which also sends the fewest states.
        debug: whether to compare checksums of `lengths` and `state` of all ranks, as in
            `distributed.attention`.
        log_decay, beta: a number, (Hkv,), or this rank's shard of one value for each token.
        lengths, state: those of the whole call, on every rank.
        causal, feature_map, normalize, scale, return_state, impl: as in `regard.linear_attention`.

    Returns:
        out (B, Hq, lengths[rank], Dv). With `return_state` also the state after the last token, on
        every rank. The gradients of q, k, v and of gates for each token are those of the shards.
        The gradients of `state` and of other gates are this rank's share: their sum over the ranks
        is the gradient. The gradient of a returned state is the sum of the gradients that the ranks
        have for it.

    Raises:
        TypeError, ValueError: an argument is invalid on this rank, or differs between ranks. All
            ranks raise.
        RuntimeError: another rank failed or did not answer within the process group's time-out.

    Example:
        >>> layout = regard.distributed.contiguous(L, mesh.size())
        >>> q, k, v = (regard.distributed.shard(x, layout, rank, dim=2) for x in (q, k, v))
        >>> out = regard.distributed.linear_attention(q, k, v, mesh=mesh, feature_map="elu+1")
    """
    if unknown:
        raise unknown_keyword(linear_attention, unknown)
    groups = groups_of(mesh)
    agreed = agree_linear(
        groups, q, k, v, LinearOptions(causal, normalize, log_decay, beta, lengths, state), layout=layout,
        feature_map=feature_map, scale=scale, return_state=return_state, impl=impl, debug=debug,
    )  # fmt: skip
    out, end = _causal(agreed, flat_group(mesh), return_state) if causal else _full(agreed, groups, impl)
    return (out, end) if return_state and end is not None else out


def _causal(agreed: Agreed, group: Group, return_state: bool) -> tuple[Tensor, LinearState | None]:
    call, layouts, backend, threads = agreed
    spec, layout = call.spec, layouts[0].grouped(1)
    parts = pieces(spec.B, spec.Hq, spec.Hkv, group.size, threads)
    scan = Scan(group, layout, parts, backend, spec.scale, call.normalize, call.lengths, return_state)
    x = LinearShards(call.q, call.k, call.v, call.log_decay, call.beta, packed(first_state(call)))
    out, end = StatePass.apply(scan, *x)  # type: ignore[no-untyped-call]
    return out, None if end is None else scan.unpacked(end)


def _full(agreed: Agreed, groups: list[Group], impl: str) -> tuple[Tensor, LinearState]:
    """Each rank sums over its keys. The sum of these states over the ranks is the state of all keys."""
    call, (_, layout), _, _ = agreed
    q, k, v, lengths = call.q, call.k, call.v, call.lengths
    if lengths is not None:
        lengths = (positions(layout, place(groups)[1], lengths.device) < lengths[:, None]).sum(1)
    options: dict[str, Any] = {
        "causal": False, "normalize": call.normalize, "scale": call.scale, "impl": impl
    }  # fmt: skip
    _, own = on_one_rank(q[:, :, :0], k, v, lengths=lengths, return_state=True, **options)
    total = packed(own)
    for group in groups:
        total = replicated(group, summed(group, total))
    state = unpacked(total + packed(first_state(call)), call.normalize)
    out = on_one_rank(q, k[:, :, :0], v[:, :, :0], state=state, **options)
    return out, state
