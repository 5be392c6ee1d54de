"""Checks a call of additive attention and converts it to canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from .check import fail
from .layout import canonical
from .make import make
from .spec import QKV, Options, Spec


class AdditiveCall(NamedTuple):
    """A checked call of additive attention in canonical form: the arguments of its operators.

    Rows of q, k and v with a NaN or an infinity are replaced by zeros. `bad_q` and `bad_k` say
    which rows. The first four fields are differentiable.
    """

    q: Tensor  # (B, 1, Lq, hidden)
    k: Tensor  # (B, 1, Lk, hidden)
    v: Tensor  # (B, 1, Lk, Dv)
    score: Tensor  # (hidden,), the vector that maps tanh(q + k) to a score
    bad_q: Tensor  # bool (B, 1, Lq, 1)
    bad_k: Tensor  # bool (B, 1, 1, Lk): the key or its value is not finite
    tensors: Sequence[Tensor]  # the tensors of the mask program, (1 or B, ...)
    seed: Tensor | None  # () int64, with dropout
    code: Sequence[int]  # the mask program
    dropout: float
    weights: bool  # whether to return the weights too

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes B, Lq, Lk and hidden."""
        (B, _, Lq, hidden), Lk = self.q.shape, self.k.shape[2]
        return B, Lq, Lk, hidden


def check(
    qkv: QKV, score: Tensor, mask: Mask | Tensor | None, dropout: float, weights: bool
) -> tuple[AdditiveCall, Spec]:
    """Checks a call of additive attention. Returns its canonical form and its Spec.

    q (..., 1, Lq, hidden), k (..., 1, Lk, hidden) and v (..., 1, Lk, Dv) have one head. The Spec
    has the caller's layout.
    """
    problem = make(*qkv, Options(mask, dropout=dropout))
    for name, x in zip("qk", qkv, strict=False):
        if x.shape[-3:-2] not in ((), (1,)) or x.shape[-1] != len(score):
            fail(ValueError, name, f"(..., 1, L, hidden = {len(score)}), one head", tuple(x.shape))
    p = canonical(problem)
    program = None if problem.mask is None else problem.mask.lower()
    seed = None
    if dropout:
        seed = p.seed if isinstance(p.seed, Tensor) else torch.tensor(p.seed)
    good_q, good_k = _finite(p.q), _finite(p.k) & _finite(p.v)
    q, k, v = torch.where(good_q, p.q, 0.0), torch.where(good_k, p.k, 0.0), torch.where(good_k, p.v, 0.0)
    code = () if program is None else program.code
    call = AdditiveCall(q, k, v, score, ~good_q, ~good_k.mT, p.tensors, seed, code, dropout, weights)
    return call, problem.spec


def _finite(x: Tensor) -> Tensor:
    """Returns whether all channels of a row are finite: (..., L, D) -> (..., L, 1)."""
    return x.isfinite().all(-1, keepdim=True)
