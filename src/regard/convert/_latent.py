"""From heads with keys and values of their own to one latent for each token.

Rotary pairs. Take a pair of channels of key head g as a complex number z[g]: a rotation is a factor that
all heads share, so any combination of heads commutes with it. For each pair the principal components over
heads are found, weighted with the size of the queries that meet them. Those that would lose most without a
rotation stay rotary keys, which all heads share. In the others the rotation becomes a constant, its mean over
the distances that the mask allows.

What remains. Keys without rotation and values of all heads are one linear map of the token, cut to its `rank`
principal components. Errors count as they are felt: keys by the queries that meet them, values by the
last projection, and both parts alike.
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

LONGEST = 512  # distances that decide what a rotation is worth
RIDGE = 1e-4  # of the mean: what no query asks for is not free
POINTS = 8  # of the curve


class Components(NamedTuple):
    """The principal components over heads of each turning pair, complex; there are Hkv of them."""

    energy: Tensor  # (pairs, Hkv): of the scores they make
    keys: Tensor  # (pairs, Hkv, d)
    seen: Tensor  # (pairs, Hkv of heads, Hkv): key head g is the sum of seen[g] times the keys


class Turning(NamedTuple):
    """Keys with position and without."""

    key: Tensor  # (rope, d)
    asked: Tensor  # (Hq, rope, d): the queries that meet it
    turns: Tensor  # (rope / 2,)
    still: Tensor  # (Hkv, nope, d)
    alive: Tensor  # (nope,): the channels of a head in which something remains


class LatentFactors(NamedTuple):
    """The matrices of a latent module before it is cut to a rank. Float64; d is d_model + 1."""

    q: Tensor  # (Hq, nope + rope, d)
    key: Tensor  # (rope, d)
    turns: Tensor  # (rope / 2,)
    down: Tensor  # (all, d): the latent's channels, the most important first
    up: Tensor  # (Hkv, nope + Dv, all)
    energy: Tensor  # (Hkv, all): of each head's keys and values in each channel
    nope: int


def to_latent(
    module: nn.Module, rank: int | None = None, rope_dims: int | None = None, *, calibration: Tensor,
    held_out: Tensor | None = None, tolerance: float = 0.05,
) -> tuple[LatentAttention, Report]:  # fmt: skip
    """Multi-head latent attention whose cache holds `rank + rope_dims` numbers for each token, and a report.

    Args:
        module: `regard.nn.Attention` with rotary embeddings or without, or a `MultiheadAttention` of
            self-attention. It stays as it is.
        rank: channels of the compressed vector. Default: as many as leave nothing out.
        rope_dims: channels of the shared rotary key, even. Default: as many as leave nothing out, which is
            kv_heads times those that turn in a head.
        calibration: (B, L, d_model): tokens as the module meets them.
        held_out: other tokens for the report. Default: the last quarter of the calibration samples.
        tolerance: the relative error of the result, on held-out tokens, that needs no training.
    """
    before = source(module)
    names = ("position other than Rotary", "qk_norm", "gate", "sink", "softcap")
    refuse(before, names, ", which a latent of all heads cannot keep")
    seen, unseen = split(before, calibration, held_out)
    root, L = root_moment(seen), seen.shape[1]
    rope_dims = _checked_rope(before, rope_dims)
    full = _full(before, rope_dims)
    rank = _checked_rank(full if rank is None else rank, full)
    found = _latent(before, rope_dims, root, L)
    after, cut = _made(before, found, rank), _made(before, found, full)
    whole, wide = _checked_rope(before, None), widened(before)
    same = _made(wide, _latent(wide, whole, root, L), _full(before, whole))
    steps = {f"rotary keys of {rope_dims} of {whole} channels": cut, f"rank {rank} of {full}": after}
    return after, report(
        module, before, after, list(range(before.heads)), seen, unseen, unseen,
        title=f"{before.kv_heads} key heads -> a latent of {rank} + {rope_dims} (all: {full} + {rope_dims})",
        proof=(wide, same), steps=steps, made=lambda n: _made(before, found, n), tolerance=tolerance,
        sizes=sorted({max(1, full * i // POINTS) for i in range(1, POINTS + 1)} | {rank}),
        spectrum=_spectrum(found.energy, rank), absorbed_from=_absorbed_from(after),
    )  # fmt: skip


# Arguments


def _checked_rope(module: Attention, rope_dims: int | None) -> int:
    turning = module.position.dims if isinstance(module.position, Rotary) else 0
    most = module.kv_heads * turning
    dims = most if rope_dims is None else count("rope_dims", rope_dims)
    if dims > most or dims % 2:
        raise ValueError(
            f"rope_dims: expected an even number up to {most} = kv_heads x {turning} turning channels, "
            f"got {dims}"
        )
    return dims


def _full(module: Attention, rope_dims: int) -> int:
    """The rank that leaves nothing out: of all keys without rotation and values, but no more than x has."""
    left = module.kv_heads * (module.head_dim + module.value_dim) - rope_dims
    return min(left, module.d_model + (module.qkv.bias is not None))


def _checked_rank(rank: int, full: int) -> int:
    if count("rank", rank, 1) > full:
        raise ValueError(f"rank: expected at most {full}, which leaves nothing out, got {rank}")
    return rank


# The latent


def _latent(module: Attention, rope_dims: int, root: Tensor, L: int) -> LatentFactors:
    parts, turning = parts_of(module), channels(module)
    found = _turning(module, parts, turning, rope_dims, root, L)
    q = parts.q[:, found.alive]
    down, up, energy = _components(q, found.still, parts, root)
    q = torch.cat((q, found.asked), 1)
    return LatentFactors(q, found.key, found.turns, down, up, energy, len(found.alive))


def _turning(
    module: Attention, parts: Parts, turning: Channels, rope_dims: int, root: Tensor, L: int
) -> Turning:
    found, gain = _components_of_pairs(parts, turning, root), _mean_rotation(module, turning, L)
    pair, component = _most(found.energy * (1 - gain.abs().square())[:, None], rope_dims // 2)
    dropped = torch.ones_like(found.energy, dtype=torch.bool)
    dropped[pair, component] = False
    left = torch.einsum("pgc,pcd->gpd", found.seen * dropped[:, None], found.keys)
    left = left * gain[:, None] * _factor(module) ** 2
    still = parts.k.clone()
    still[:, turning.first], still[:, turning.second] = left.real, left.imag
    remain = dropped.any(1)
    alive = torch.cat((turning.first[remain], turning.second[remain], turning.still))
    by_head = found.seen[pair, :, component].conj().T.repeat_interleave(len(parts.q) // len(parts.k), 0)
    asked = by_head[..., None] * turning.complex(parts.q)[:, pair]  # (Hq, rope / 2, d)
    keys = found.keys[pair, component]
    return Turning(_real(keys), _real(asked), turning.turns[pair], still[:, alive], alive)


def _components_of_pairs(parts: Parts, turning: Channels, root: Tensor) -> Components:
    z, zq = turning.complex(parts.k), turning.complex(parts.q)  # (Hkv, pairs, d), (Hq, pairs, d)
    R = root.to(z.dtype)
    met = (zq @ R).abs().square().sum(-1).unflatten(0, (len(z), -1)).sum(1)  # (Hkv, pairs)
    size = met.clamp_min(max(1e-12 * float(met.sum()), 1e-300)).sqrt()
    weighed = (z * size[..., None]).transpose(0, 1)  # (pairs, Hkv, d)
    felt = weighed @ R
    energy, U = torch.linalg.eigh(felt @ felt.mH)
    return Components(energy.clamp_min(0), U.mH @ weighed, U / size.T[..., None])


def _mean_rotation(module: Attention, turning: Channels, L: int) -> Tensor:
    """(pairs,): the mean of exp(-i turns (p - j)) over queries p and keys j that the mask lets meet."""
    L = min(L, LONGEST)
    at = torch.arange(L)
    meet = torch.ones(1, L, L) if module.mask is None else module.mask.to_dense(L, L).reshape(-1, L, L)
    steps = (at[:, None] - at + L - 1).flatten()  # 0 to 2 L - 2
    pairs = torch.bincount(steps, weights=meet.double().sum(0).flatten(), minlength=2 * L - 1)
    phases = torch.exp(-1j * turning.turns[:, None] * torch.arange(1 - L, L))
    return phases @ (pairs / pairs.sum()).to(phases.dtype)


def _most(cost: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The row and the column of the n largest numbers."""
    flat = cost.flatten().argsort(descending=True, stable=True)[:n]
    return flat // cost.shape[1], flat % cost.shape[1]


def _real(z: Tensor) -> Tensor:
    """(..., n, d) complex -> (..., 2 n, d): real and imaginary rows in turn, the interleaved layout."""
    return torch.stack((z.real, z.imag), -2).flatten(-3, -2)


def _components(q: Tensor, still: Tensor, parts: Parts, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maps from tokens to principal components (all, d), and on to keys and values (Hkv, nope + Dv, all).

    And the energy of each head in each component, (Hkv, all).
    """
    G, nope, _ = still.shape
    asked = (q @ root).unflatten(0, (G, -1)).transpose(1, 2).flatten(2)  # (Hkv, nope, heads of a group x d)
    read = parts.out.mT.unflatten(0, (G, -1)).transpose(1, 2).flatten(2)  # (Hkv, Dv, ...)
    felt_k, back_k = _balanced(still, asked @ asked.mT, root)
    felt_v, back_v = _balanced(parts.v, read @ read.mT, root)
    y = torch.cat((felt_k.flatten(0, 1), felt_v.flatten(0, 1)))
    P, sizes, _ = torch.linalg.svd(y @ root, full_matrices=False)
    by_head_k, by_head_v = P[: G * nope].unflatten(0, (G, nope)), P[G * nope :].unflatten(0, (G, -1))
    energy = torch.cat((by_head_k, by_head_v), 1).square().sum(1) * sizes.square()
    return P.T @ y, torch.cat((back_k @ by_head_k, back_v @ by_head_v), 1), energy


def _balanced(x: Tensor, metric: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """x (Hkv, n, d) scaled so that all errors are felt alike, of size 1; and the way back (Hkv, n, n)."""
    n = x.shape[1]
    if not n:
        return x, metric
    level = metric.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-300)
    values, Q = torch.linalg.eigh(metric / level + RIDGE * torch.eye(n, dtype=x.dtype))
    stretch = values.clamp_min(RIDGE).sqrt()
    felt = (Q * stretch[:, None]) @ Q.mT @ x
    size = (felt @ root).norm().clamp_min(1e-300)
    return felt / size, (Q / stretch[:, None]) @ Q.mT * size


def _spectrum(energy: Tensor, rank: int) -> Spectrum:
    shares, together = (x / x.sum(-1, keepdim=True).clamp_min(1e-300) for x in (energy, energy.sum(0)))
    return Spectrum(rank, tuple(tuple(head) for head in shares.tolist()), tuple(together.tolist()))


def _absorbed_from(module: LatentAttention) -> int | None:
    """Both ways cost a constant and so much for each cached token."""
    start, one = module.operations(1, 0), module.operations(1, 1)
    ahead = start.absorbed - start.expanded
    gain = (one.expanded - start.expanded) - (one.absorbed - start.absorbed)
    return ahead // gain + 1 if gain > 0 else None


# The module


def _made(module: Attention, found: LatentFactors, rank: int) -> LatentAttention:
    """The module that keeps the first `rank` channels of the latent."""
    Hkv, rows, _ = found.up.shape
    weight, rope = module.out.weight, len(found.key)
    frequencies = Frequencies(tuple(found.turns.tolist()), _factor(module))
    made = LatentAttention(
        module.d_model, module.heads, rank=rank, nope_dim=found.nope, rope_dim=rope,
        value_dim=module.value_dim, bias=module.qkv.bias is not None, out_bias=module.out.bias is not None,
        norm=None, position=Rotary(rope, layout="interleaved", scaling=frequencies) if rope else None,
        mask=module.mask, scale=module.head_dim**-0.5 if module.scale is None else module.scale,
        dropout=module.dropout, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    made.q = linear(found.q.flatten(0, 1), module.qkv)
    made.kv_down = linear(torch.cat((found.down[:rank], found.key)), module.qkv)
    up = found.up[..., :rank].repeat_interleave(module.heads // Hkv, 0)
    with torch.no_grad():
        made.kv_up.weight.copy_(up.reshape(module.heads * rows, rank))
    made.out.load_state_dict(module.out.state_dict())
    return made.train(module.training)


def _factor(module: Attention) -> float:
    return module.position.attention_factor if isinstance(module.position, Rotary) else 1.0
