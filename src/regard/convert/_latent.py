"""`to_latent`: converts multi-head attention to multi-head latent attention (MLA).

Rotary channels. A rotary pair of key head g is a complex number z[g]. Rotary embeddings multiply
the z[g] of all heads by the same factor, so they commute with any linear combination of heads. For
each pair, the principal components over heads are computed, with each head weighted by the norm of
its queries. The components whose scores would change most without the rotation become channels of
the rotary key that all heads share. For the other components, the rotation is replaced by its mean
over the distances that the mask allows.

Unrotated keys and values. The unrotated keys and the values of all heads are one linear map of the
token. This map is truncated to its first `rank` principal components. Errors of keys are weighted
by the queries and errors of values by the output projection. The weighted keys and the weighted
values are scaled to equal norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._tools.arguments import count
from ..nn import Attention, LatentAttention
from ..positions import Frequencies, Rotary
from ._parts import Channels, Parts, channels, linear, parts_of, root_moment
from ._report import Report, Spectrum, report
from ._source import refuse, source, split, widened

MAX_LENGTH = 512  # rotations are averaged over the distances in a sequence of at most this length
RIDGE = 1e-4  # minimum weight of a direction that queries hardly use, relative to the mean weight
POINTS = 8  # number of ranks on the report's curve of error against rank


class Components(NamedTuple):
    """For each rotary pair, the Hkv complex principal components of the key heads.

    In the shapes, d = d_model + 1: the last column is the bias.
    """

    energy: Tensor  # (pairs, Hkv): energy of each component, with heads weighted by their queries
    keys: Tensor  # (pairs, Hkv, d): maps a token to the components of its keys
    mixing: Tensor  # (pairs, Hkv, Hkv): key head g is the sum over c of mixing[:, g, c] * keys[:, c]


class RotarySplit(NamedTuple):
    """The matrices of the shared rotary key and of each head's unrotated keys.

    In the shapes, d = d_model + 1: the last column is the bias.
    """

    key: Tensor  # (rope, d)
    queries: Tensor  # (Hq, rope, d): the query channels that are multiplied by the rotary key
    frequencies: Tensor  # (rope / 2,)
    unrotated: Tensor  # (Hkv, nope, d)
    channels: Tensor  # (nope,): the indices in a source head of the channels of `unrotated`


class LatentFactors(NamedTuple):
    """The float64 matrices of a latent module before truncation to a rank.

    In the shapes, d = d_model + 1: the last column is the bias.
    """

    q: Tensor  # (Hq, nope + rope, d)
    key: Tensor  # (rope, d)
    frequencies: Tensor  # (rope / 2,)
    down: Tensor  # (all, d): all possible channels of the latent, sorted by decreasing energy
    up: Tensor  # (Hkv, nope + Dv, all)
    energy: Tensor  # (Hkv, all): energy of each head's keys and values in each channel
    nope: int


def to_latent(
    module: nn.Module, rank: int | None = None, rope_dims: int | None = None, *, calibration: Tensor,
    held_out: Tensor | None = None, tolerance: float = 0.05,
) -> tuple[LatentAttention, Report]:  # fmt: skip
    """Converts self-attention to multi-head latent attention (MLA).

    Returns the new module and a report of its errors and savings. The cache of the new module holds
    `rank + rope_dims` numbers per token. The input module is not modified.

    Args:
        module: a `regard.nn.Attention` with or without rotary embeddings, or a `MultiheadAttention`
            (Regard's or PyTorch's) for self-attention.
        rank: number of channels of the latent, not counting the rotary key. Default: full rank, at
            which the conversion of unrotated keys and of values is exact.
        rope_dims: even number of channels of the rotary key, which all heads share. Default:
            kv_heads times the number of rotary channels of a head, at which the conversion of
            rotated keys is exact.
        calibration: typical input of the module (B, L, d_model).
        held_out: other typical input (B, L, d_model), for the report. Default: the last quarter of
            the calibration samples.
        tolerance: the largest relative error of the output on `held_out` that the report accepts
            without training.

    Example:
        >>> latent, report = regard.convert.to_latent(module, 64, 16, calibration=x)
        >>> print(report.verdict)
    """
    before = source(module)
    names = ("position other than Rotary", "qk_norm", "gate", "sink", "softcap")
    refuse(before, names, " in a conversion to a latent")
    seen, unseen = split(before, calibration, held_out)
    root, L = root_moment(seen), seen.shape[1]
    rope_dims = _checked_rope(before, rope_dims)
    full = _full_rank(before, rope_dims)
    rank = _checked_rank(full if rank is None else rank, full)
    factors = _factors(before, rope_dims, root, L)
    after, untruncated = _truncated(before, factors, rank), _truncated(before, factors, full)
    full_rope, wide = _checked_rope(before, None), widened(before)
    lossless = _truncated(wide, _factors(wide, full_rope, root, L), _full_rank(before, full_rope))
    rope_step, rank_step = f"rotary keys of {rope_dims} of {full_rope} channels", f"rank {rank} of {full}"
    return after, report(
        module, before, after, list(range(before.heads)), seen, unseen, unseen,
        title=f"{before.kv_heads} key heads -> a latent of {rank} + {rope_dims} (all: {full} + {rope_dims})",
        proof=(wide, lossless), steps={rope_step: untruncated, rank_step: after}, tolerance=tolerance,
        sizes=sorted({max(1, full * i // POINTS) for i in range(1, POINTS + 1)} | {rank}),
        convert=lambda n: _truncated(before, factors, n), spectrum=_spectrum(factors.energy, rank),
        absorbed_from=_absorbed_from(after),
    )  # fmt: skip


# Arguments


def _checked_rope(module: Attention, rope_dims: int | None) -> int:
    rotary = module.position.dims if isinstance(module.position, Rotary) else 0
    limit = module.kv_heads * rotary
    dims = limit if rope_dims is None else count("rope_dims", rope_dims)
    if dims > limit or dims % 2:
        raise ValueError(
            f"rope_dims: expected an even number up to {limit} = kv_heads x {rotary} rotary channels, "
            f"got {dims}"
        )
    return dims


def _full_rank(module: Attention, rope_dims: int) -> int:
    """Returns a rank at which the conversion of unrotated keys and of values is always exact."""
    rows = module.kv_heads * (module.head_dim + module.value_dim) - rope_dims
    return min(rows, module.d_model + (module.qkv.bias is not None))


def _checked_rank(rank: int, full: int) -> int:
    if count("rank", rank, 1) > full:
        raise ValueError(f"rank: expected at most {full}, the full rank, got {rank}")
    return rank


# The factors


def _factors(module: Attention, rope_dims: int, root: Tensor, L: int) -> LatentFactors:
    parts = parts_of(module)
    rope = _rotary_split(module, parts, channels(module), rope_dims, root, L)
    q = parts.q[:, rope.channels]
    down, up, energy = _components(q, rope.unrotated, parts, root)
    q = torch.cat((q, rope.queries), 1)
    return LatentFactors(q, rope.key, rope.frequencies, down, up, energy, len(rope.channels))


def _rotary_split(
    module: Attention, parts: Parts, rotary: Channels, rope_dims: int, root: Tensor, L: int
) -> RotarySplit:
    """Returns a `RotarySplit` whose shared rotary key consists of `rope_dims / 2` components.

    These are the components whose scores would change most without the rotation. For all other
    components, the rotation is replaced by its mean.
    """
    components, gain = _components_of_pairs(parts, rotary, root), _mean_rotation(module, rotary, L)
    pair, component = _largest(components.energy * (1 - gain.abs().square())[:, None], rope_dims // 2)
    dropped = torch.ones_like(components.energy, dtype=torch.bool)
    dropped[pair, component] = False
    fixed = torch.einsum("pgc,pcd->gpd", components.mixing * dropped[:, None], components.keys)
    fixed = fixed * gain[:, None] * _attention_factor(module) ** 2
    unrotated = parts.k.clone()
    unrotated[:, rotary.first], unrotated[:, rotary.second] = fixed.real, fixed.imag
    remain = dropped.any(1)
    nope = torch.cat((rotary.first[remain], rotary.second[remain], rotary.unrotated))
    share = len(parts.q) // len(parts.k)  # query heads per key head
    by_head = components.mixing[pair, :, component].conj().T.repeat_interleave(share, 0)
    queries = by_head[..., None] * rotary.complex(parts.q)[:, pair]  # (Hq, rope / 2, d)
    key = _real(components.keys[pair, component])
    return RotarySplit(key, _real(queries), rotary.frequencies[pair], unrotated[:, nope], nope)


def _components_of_pairs(parts: Parts, rotary: Channels, root: Tensor) -> Components:
    z, zq = rotary.complex(parts.k), rotary.complex(parts.q)  # (Hkv, pairs, d), (Hq, pairs, d)
    R = root.to(z.dtype)
    energy_q = (zq @ R).abs().square().sum(-1).unflatten(0, (len(z), -1)).sum(1)  # (Hkv, pairs)
    size = energy_q.clamp_min(max(1e-12 * float(energy_q.sum()), 1e-300)).sqrt()
    weighted = (z * size[..., None]).transpose(0, 1)  # (pairs, Hkv, d)
    on_tokens = weighted @ R
    energy, U = torch.linalg.eigh(on_tokens @ on_tokens.mH)
    return Components(energy.clamp_min(0), U.mH @ weighted, U / size.T[..., None])


def _mean_rotation(module: Attention, rotary: Channels, L: int) -> Tensor:
    """Returns the mean rotation of each rotary pair, complex (pairs,).

    It is the mean of exp(-i frequency (p - j)) over all pairs of a query position p and a key
    position j that the mask allows in a sequence of min(L, MAX_LENGTH) tokens.
    """
    L = min(L, MAX_LENGTH)
    at = torch.arange(L)
    allowed = torch.ones(1, L, L) if module.mask is None else module.mask.to_dense(L, L).reshape(-1, L, L)
    distances = (at[:, None] - at + L - 1).flatten()  # shifted to 0 ... 2 L - 2
    pairs = torch.bincount(distances, weights=allowed.double().sum(0).flatten(), minlength=2 * L - 1)
    phases = torch.exp(-1j * rotary.frequencies[:, None] * torch.arange(1 - L, L))
    return phases @ (pairs / pairs.sum()).to(phases.dtype)


def _largest(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Returns the row and column indices of the n largest entries of a matrix."""
    flat = x.flatten().argsort(descending=True, stable=True)[:n]
    return flat // x.shape[1], flat % x.shape[1]


def _real(z: Tensor) -> Tensor:
    """Interleaves the real and imaginary parts of complex rows: (..., n, d) -> (..., 2 n, d)."""
    return torch.stack((z.real, z.imag), -2).flatten(-3, -2)


def _components(q: Tensor, unrotated: Tensor, parts: Parts, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `down` (all, d_model + 1), `up` (Hkv, nope + Dv, all) and `energy` (Hkv, all).

    They are fields of `LatentFactors`. The rows of `down` are the principal components of the
    unrotated keys and values of all heads. `all` is the number of components, `nope` the number of
    unrotated channels of a key, and d = d_model + 1, because the bias is the last column.
    """
    G, nope, _ = unrotated.shape
    queries = (q @ root).unflatten(0, (G, -1)).transpose(1, 2).flatten(2)  # (Hkv, nope, Hq / Hkv * d)
    outputs = parts.out.mT.unflatten(0, (G, -1)).transpose(1, 2).flatten(2)  # (Hkv, Dv, Hq / Hkv * d_model)
    keys, back_k = _weighted(unrotated, queries @ queries.mT, root)
    values, back_v = _weighted(parts.v, outputs @ outputs.mT, root)
    y = torch.cat((keys.flatten(0, 1), values.flatten(0, 1)))
    P, sizes, _ = torch.linalg.svd(y @ root, full_matrices=False)
    by_head_k, by_head_v = P[: G * nope].unflatten(0, (G, nope)), P[G * nope :].unflatten(0, (G, -1))
    energy = torch.cat((by_head_k, by_head_v), 1).square().sum(1) * sizes.square()
    return P.T @ y, torch.cat((back_k @ by_head_k, back_v @ by_head_v), 1), energy


def _weighted(x: Tensor, metric: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Transforms matrices x (Hkv, n, d) so that errors are weighted by `metric` (Hkv, n, n).

    Multiplies x by the square root of `metric`: the squared norm of an error e of x becomes
    proportional to e^T metric e, except for a small ridge. Then divides the product by its norm on
    the calibration tokens. Returns the result (Hkv, n, d) and the inverse transform (Hkv, n, n).
    """
    n = x.shape[1]
    if not n:
        return x, metric
    level = metric.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-300)
    values, Q = torch.linalg.eigh(metric / level + RIDGE * torch.eye(n, dtype=x.dtype))
    scales = values.clamp_min(RIDGE).sqrt()
    weighted = (Q * scales[:, None]) @ Q.mT @ x
    size = (weighted @ root).norm().clamp_min(1e-300)
    return weighted / size, (Q / scales[:, None]) @ Q.mT * size


def _spectrum(energy: Tensor, rank: int) -> Spectrum:
    shares, together = (x / x.sum(-1, keepdim=True).clamp_min(1e-300) for x in (energy, energy.sum(0)))
    return Spectrum(rank, tuple(tuple(head) for head in shares.tolist()), tuple(together.tolist()))


def _absorbed_from(module: LatentAttention) -> int | None:
    """Returns the number of cached tokens from which the absorbed form is cheaper in a decode step.

    The cost of each form is a constant plus a cost per cached token. Returns None if the absorbed
    form is not cheaper for long caches.
    """
    start, one = module.operations(1, 0), module.operations(1, 1)
    extra = start.absorbed - start.expanded
    gain = (one.expanded - start.expanded) - (one.absorbed - start.absorbed)
    return extra // gain + 1 if gain > 0 else None


# The module


def _truncated(module: Attention, factors: LatentFactors, rank: int) -> LatentAttention:
    """Builds a `LatentAttention` from the factors, truncated to the first `rank` components.

    Mask, scale, dropout and output projection are those of the source `module`.
    """
    Hkv, rows, _ = factors.up.shape
    weight, rope = module.out.weight, len(factors.key)
    frequencies = Frequencies(tuple(factors.frequencies.tolist()), _attention_factor(module))
    latent = LatentAttention(
        module.d_model, module.heads, rank=rank, nope_dim=factors.nope, rope_dim=rope,
        value_dim=module.value_dim, bias=module.qkv.bias is not None, out_bias=module.out.bias is not None,
        norm=None, position=Rotary(rope, layout="interleaved", scaling=frequencies) if rope else None,
        mask=module.mask, scale=module.head_dim**-0.5 if module.scale is None else module.scale,
        dropout=module.dropout, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    latent.q = linear(factors.q.flatten(0, 1), module.qkv)
    latent.kv_down = linear(torch.cat((factors.down[:rank], factors.key)), module.qkv)
    up = factors.up[..., :rank].repeat_interleave(module.heads // Hkv, 0)
    with torch.no_grad():
        latent.kv_up.weight.copy_(up.reshape(module.heads * rows, rank))
    latent.out.load_state_dict(module.out.state_dict())
    return latent.train(module.training)


def _attention_factor(module: Attention) -> float:
    return module.position.attention_factor if isinstance(module.position, Rotary) else 1.0
