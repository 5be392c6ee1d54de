"""Attention in float64: dropout(softmax(cap(scale * q.k) + bias, masked, with sink)) times v.

Heads of k and v are repeated, so that every query head has its own. The shapes are
q (B, Hq, Lq, D), k (B, Hq, Lk, D), v (B, Hq, Lk, Dv), scores and weights (B, Hq, Lq, Lk). Autograd
computes the gradients in float64 and returns them in the dtypes of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._call.dropout import keep_mask_of
from ..._call.layout import dense_bias, dense_mask, heads_4d, restore_out
from ..._call.spec import Problem
from ..._tools.arguments import readable

INF = float("inf")


def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns a reason for meta tensors, else (): the reference runs every other problem."""
    return ("meta tensors have no values",) if problem.q.is_meta else ()


def forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Computes out (..., Hq, Lq, Dv) in q's dtype, and the LSE (..., Hq, Lq) or None."""
    spec = problem.spec
    visible, probabilities, lse = _softmax(problem)
    v = _per_query_head(problem, problem.v)
    out = _weighted_values(visible, _dropped(problem, probabilities), v)
    return restore_out(spec, out), lse.to(spec.lse_dtype).reshape(spec.lse_shape) if spec.return_lse else None


def weights(problem: Problem) -> Tensor:
    """Computes the weights (..., Hq, Lq, Lk) in q's dtype, after dropout."""
    _, probabilities, _ = _softmax(problem)
    return _dropped(problem, probabilities).to(problem.spec.dtype).reshape(problem.spec.weights_shape)


def _softmax(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Returns visible pairs (bool), probabilities and the LSE.

    The first two are (B, Hq, Lq, Lk), the LSE is (B, Hq, Lq).
    """
    visible, s = _scores(problem)
    s = torch.cat([torch.where(visible, s, -INF), _sink(problem)], -1)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)  # fully masked row
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    fully_masked = total == 0
    safe = torch.where(fully_masked, 1.0, total)
    lse = torch.where(fully_masked, -INF, top + torch.log(safe))
    return visible, (e / safe)[..., :-1], lse[..., 0]


def _scores(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns a bool mask of the visible pairs and the scores, both (B, Hq, Lq, Lk).

    Scores have scale, softcap and bias applied.
    """
    spec = problem.spec
    q, k = _per_query_head(problem, problem.q), _per_query_head(problem, problem.k)
    visible = torch.ones(spec.B, spec.Hq, spec.Lq, spec.Lk, dtype=torch.bool, device=spec.device)
    mask, bias = dense_mask(problem), dense_bias(problem, torch.float64)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -INF)
    s = spec.scale * _inner_products(visible, q, k)
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    return visible, s if bias is None else s + bias


def _sink(problem: Problem) -> Tensor:
    """Returns the sink as a column of logits, (B, Hq, Lq, 1). Without a sink, it is -inf."""
    spec = problem.spec
    if problem.sink is None:
        return torch.full((spec.B, spec.Hq, spec.Lq, 1), -INF, dtype=torch.float64, device=spec.device)
    return problem.sink.double().view(1, spec.Hq, 1, 1).expand(spec.B, -1, spec.Lq, -1)


def _dropped(problem: Problem, probabilities: Tensor) -> Tensor:
    """Returns the probabilities (B, Hq, Lq, Lk) after dropout."""
    spec = problem.spec
    if not spec.dropout:
        return probabilities
    every = (torch.arange(n, device=spec.device) for n in (spec.B, spec.Hq, spec.Lq, spec.Lk))
    keep = keep_mask_of(problem, *every)
    return torch.where(keep, probabilities / max(1 - spec.dropout, 1e-300), 0.0)


def _per_query_head(problem: Problem, x: Tensor) -> Tensor:
    """Returns x as (B, Hq, L, D) in float64, key and value heads repeated Hq / Hkv times."""
    x, Hq = heads_4d(problem.spec, x).double(), problem.spec.Hq
    return x if x.shape[1] == Hq else x.repeat_interleave(Hq // x.shape[1], 1)


# A masked pair contributes nothing, forward and backward, even if k or v is NaN. 0 * NaN is NaN, so masked
# pairs are replaced by zeros before the product. For finite inputs a matrix product gives the same result.


def _inner_products(visible: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if not (readable(q) and readable(k)):
        return _traced_inner_products(q, k)
    if _finite(q) and _finite(k):
        return q @ k.mT
    pair = visible[..., None]
    return (torch.where(pair, q[..., :, None, :], 0.0) * torch.where(pair, k[..., None, :, :], 0.0)).sum(-1)


def _traced_inner_products(q: Tensor, k: Tensor) -> Tensor:
    """Returns q @ k.mT while PyTorch traces, when it cannot be read whether q and k are finite.

    Products with NaN or Inf are computed apart, without gradients.
    """
    finite_q, finite_k = (x.isfinite().all(-1, keepdim=True) for x in (q, k))
    products = torch.where(finite_q, q, 0.0) @ torch.where(finite_k, k, 0.0).mT
    return torch.where(finite_q & finite_k.mT, products, q.detach() @ k.detach().mT)


def _weighted_values(visible: Tensor, w: Tensor, v: Tensor) -> Tensor:
    if _finite(v) and _finite(w):
        return w @ v
    return (w[..., None] * torch.where(visible[..., None], v[..., None, :, :], 0.0)).sum(-2)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
