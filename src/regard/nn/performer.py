"""Performer: softmax attention estimated by random features, in linear time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .._arguments import count, describe
from .._linear import linear_attention
from ..features import generalized_features, orthogonal_gaussian, positive_exponents
from ._projected import Projected, real_tokens

Kernel = Literal["softmax"] | Callable[[Tensor], Tensor]


class PerformerAttention(Projected):
    """FAVOR+: phi(q).phi(k) in place of exp(q.k / sqrt(D)), with positive orthogonal random features phi.

    Time and memory are O(L * features). It is an approximation; its error falls as features grow.

    Args:
        d_model: the width of the tokens.
        heads: the number of heads H.
        features: random features m. Default D * log(D), rounded down, as the paper's proof has it.
        kernel: "softmax", or a function of w.x, such as `torch.relu`, for generalised attention.
        causal: each token sees itself and those before it.
        redraw: new random features after so many calls in training; None: never.
        seed: of the random features. Default: drawn from PyTorch's generator.
        eps: added to the features of keys, so that no sum of weights is 0, relative to the largest of them.
            Default 1e-6. For a function it is added to those of queries and keys; default 1e-3.
        head_dim: D. Default d_model / heads.
        bias: whether the projections of queries, keys and values have biases.
        out: whether there is a last projection.

    Example:
        >>> attend = regard.nn.PerformerAttention(512, 8, features=256, causal=True, seed=0)
        >>> attend(torch.randn(1, 4096, 512)).shape
        torch.Size([1, 4096, 512])
    """

    projection: Tensor  # (m, D)
    schedule: Tensor  # (3,) integers: seed, draws so far, calls in training

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        features: int | None = None,
        kernel: Kernel = "softmax",
        causal: bool = False,
        redraw: int | None = 1000,
        seed: int | None = None,
        eps: float | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(d_model, heads, head_dim=head_dim, bias=bias, out=out, dropout=0.0, made=made)
        default = max(1, int(self.head_dim * math.log(self.head_dim)))
        self.features = default if features is None else count("features", features, 1)
        self.kernel, self.causal, self.eps = _kernel(kernel), causal, _epsilon(eps, kernel)
        self.redraw_every = None if redraw is None else count("redraw", redraw, 1)
        first = int(torch.randint(2**31, ())) if seed is None else count("seed", seed)
        self.register_buffer("schedule", torch.tensor([first, 0, 0], device=device))
        self.register_buffer("projection", torch.empty(self.features, self.head_dim, **made))
        self.redraw()

    def forward(self, x: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Attention of x (B, L, d_model) to itself.

        `lengths` (B,): the first n tokens of each sample are real, the rest is padding.
        """
        self._check(x)
        if self.training and self.redraw_every is not None:
            self._count_call(self.redraw_every)
        return self._finished(self.attend(*self._projected(x), lengths=lengths))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """The attention apart from the projections.

        q (B, H, L, D), k (B, H, Lk, D), v (B, H, Lk, Dv) -> (B, H, L, Dv); with `causal` Lk is L.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        find = self._softmax_features if self.kernel == "softmax" else self._generalized
        phi_q, phi_k, log_decay = find(q.to(wide), k.to(wide), lengths)
        return linear_attention(
            phi_q.to(q.dtype), phi_k.to(k.dtype), v, causal=self.causal, normalize=True, lengths=lengths,
            log_decay=log_decay,
        )  # fmt: skip

    @torch.no_grad()
    def redraw(self) -> None:
        """New random features, the next ones of the seed."""
        seed, draws, _ = self.schedule.tolist()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + draws)
        self.projection.copy_(orthogonal_gaussian(self.features, self.head_dim, generator=generator))
        self.schedule[1] += 1

    def _count_call(self, every: int) -> None:
        calls = int(self.schedule[2])
        if calls and calls % every == 0:
            self.redraw()
        self.schedule[2] += 1

    def _softmax_features(
        self, q: Tensor, k: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features divided by a factor that the normalisation cancels.

        Those of a query sum to 1: exp(w.q - |q|^2 / 2) over the sum is a softmax. Of the keys' features that
        a query sees the largest is 1. In a causal call it is the largest so far, and the state that came
        before is made smaller as the factor grows.
        """
        scale = self.head_dim**-0.5
        phi_q = generalized_features(q, self.projection, partial(torch.softmax, dim=-1), scale=scale)
        held = positive_exponents(k, self.projection, scale=scale)
        if lengths is not None:
            held = held.masked_fill(~real_tokens(lengths, k), -torch.inf)
        top = held.detach().amax(-1).clamp(min=torch.finfo(held.dtype).min)  # also if there is no token
        if self.causal:
            top = top.cummax(-1).values
            log_decay = -top.diff(dim=-1, prepend=top[..., :1])
        else:
            top, log_decay = top.amax(-1, keepdim=True), None
        return phi_q, self._features_of_keys(held.sub_(top.unsqueeze(-1))), log_decay

    def _features_of_keys(self, exponents: Tensor) -> Tensor:
        """In place where no gradient needs the steps."""
        return exponents.exp() + self.eps if exponents.requires_grad else exponents.exp_().add_(self.eps)

    def _generalized(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, None]:
        scale = self.head_dim**-0.5
        phi_q, phi_k = (
            generalized_features(x, self.projection, self.kernel, scale=scale) + self.eps  # type: ignore[arg-type]
            for x in (q, k)
        )
        return phi_q, phi_k, None

    def extra_repr(self) -> str:
        named = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", self.kernel)
        return (
            f"heads={self.heads}, head_dim={self.head_dim}, features={self.features}, kernel={named}, "
            f"causal={self.causal}, redraw={self.redraw_every}, seed={int(self.schedule[0])}, "
            f"eps={self.eps:g}"
        )


def _kernel(kernel: Kernel) -> Kernel:
    if kernel != "softmax" and not callable(kernel):
        raise TypeError(f"kernel: expected 'softmax' or a function of a tensor, got {describe(kernel)}")
    return kernel


def _epsilon(eps: float | None, kernel: Kernel) -> float:
    if eps is None:
        return 1e-6 if kernel == "softmax" else 1e-3
    if not eps >= 0:
        raise ValueError(f"eps: expected a number from 0 on, got {eps}")
    return eps
