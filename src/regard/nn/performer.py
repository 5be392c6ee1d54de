"""Performer: softmax attention estimated by random features, in linear time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from .._api.linear_attention import linear_attention
from .._tools.arguments import count, describe, number
from ..features import generalized_features, orthogonal_gaussian, positive_exponents
from ._lengths import checked_lengths, real_tokens
from ._projected import Projected

CHUNK = 1024  # tokens whose features are held at a time
Kernel = Literal["softmax"] | Callable[[Tensor], Tensor]


class PerformerAttention(Projected):
    """FAVOR+: phi(q).phi(k) in place of exp(q.k / sqrt(D)), with positive orthogonal random features phi.

    Time is O(L * features). It is an approximation; its error falls as features grow.

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
        self, d_model: int, heads: int, *, features: int | None = None, kernel: Kernel = "softmax",
        causal: bool = False, redraw: int | None = 1000, seed: int | None = None, eps: float | None = None,
        head_dim: int | None = None, bias: bool = True, out: bool = True, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, head_dim, bias, out, 0.0, device, dtype)
        default = max(1, int(self.head_dim * math.log(self.head_dim)))
        self.features = default if features is None else count("features", features, 1)
        self.kernel, self.causal, self.eps = _kernel(kernel), causal, _epsilon(eps, kernel)
        self.redraw_every = None if redraw is None else count("redraw", redraw, 1)
        first = int(torch.randint(2**31, ())) if seed is None else count("seed", seed)
        self.register_buffer("schedule", torch.tensor([first, 0, 0], device=device))
        projection = torch.empty(self.features, self.head_dim, device=device, dtype=dtype)
        self.register_buffer("projection", projection)
        self.redraw()

    def forward(self, x: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Attends from x (B, L, d_model) to itself.

        `lengths` (B,): the first n tokens of each sample are real, the rest is padding.
        """
        self._check(x)
        if self.training and self.redraw_every is not None and not self.schedule.is_meta:
            self._count_call(self.redraw_every)
        return self._finished(self.attend(*self._projected(x), lengths=lengths))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Attends without projections.

        q (B, H, L, D), k (B, H, Lk, D), v (B, H, Lk, Dv) -> (B, H, L, Dv); with `causal` Lk is L.
        """
        self._check_heads(q, k, v, same_tokens=self.causal)
        lengths = checked_lengths(lengths, k)
        if not q.shape[2] or not k.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        if self.causal:
            return self._one_way(q, k, v, lengths)
        sums = self._sums(k, v, lengths)
        parts = [_divided(self._asked(part) @ sums).to(q.dtype) for part in q.split(CHUNK, 2)]
        return torch.cat(parts, 2)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draws the seed's next random features. On the meta device there is nothing to draw."""
        if self.schedule.is_meta:
            return
        seed, draws, _ = self.schedule.tolist()
        generator = torch.Generator().manual_seed((seed * 1_000_003 + draws) % 2**63)
        self.projection.copy_(orthogonal_gaussian(self.features, self.head_dim, generator=generator))
        self.schedule[1] += 1

    def _count_call(self, every: int) -> None:
        calls = int(self.schedule[2])
        if calls and calls % every == 0:
            self.redraw()
        self.schedule[2] += 1

    def _asked(self, q: Tensor) -> Tensor:
        """Returns features of queries. For softmax they sum to 1: normalised exp(w.q - |q|^2 / 2)."""
        if isinstance(self.kernel, str):
            return self._mapped(q, partial(torch.softmax, dim=-1))
        return self._mapped(q, self.kernel) + self.eps

    def _mapped(self, x: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
        return generalized_features(_wide(x), self.projection, kernel, scale=self.head_dim**-0.5)

    def _sums(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Sums phi(k) v^T over keys, and phi(k) in the last column: (B, H, m, Dv + 1).

        Some keys at a time, so that their features stay in the processor's caches. All is divided by the
        largest feature exp(top) so far, which the quotient cancels, and eps is relative to that of all keys.
        """
        sums, top, total = _wide(k.new_zeros(())), _wide(k.new_full((), -torch.inf)), _wide(k.new_zeros(()))
        for some, hidden in _chunks(k, lengths):
            phi, own = self._held(k[:, :, some], hidden)
            values = F.pad(_wide(v[:, :, some]), (0, 1), value=1.0)
            values = values if hidden is None else values.masked_fill(hidden, 0)
            larger = torch.maximum(top, own)
            sums = sums * (top - larger).exp() + phi.mT @ values * (own - larger).exp()
            top, total = larger, total + values.sum(-2, keepdim=True)
        return sums + self.eps * total

    def _held(self, k: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns features of keys (B, H, L, m) divided by exp(top), and top (B, H, 1, 1) or ()."""
        if not isinstance(self.kernel, str):
            phi = self._mapped(k, self.kernel)
            return phi if hidden is None else phi.masked_fill(hidden, 0), phi.new_zeros(())
        exponents = self._exponents(k, hidden)
        top = _largest(exponents).amax(-1, keepdim=True).unsqueeze(-1)
        return exponents.sub_(top).exp_(), top

    def _exponents(self, k: Tensor, hidden: Tensor | None) -> Tensor:
        found = positive_exponents(_wide(k), self.projection, scale=self.head_dim**-0.5)
        return found if hidden is None else found.masked_fill(hidden, -torch.inf)

    def _one_way(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Causal attention. The largest feature so far grows over the tokens; the state decays as much."""
        state, top, parts = None, None, []
        for some, hidden in _chunks(k, lengths):
            phi, log_decay, top = self._growing(k[:, :, some], hidden, top)
            real = _rest(lengths, some.start, phi.shape[2])
            part, state = linear_attention(
                self._asked(q[:, :, some]).to(q.dtype), (phi + self.eps).to(k.dtype), v[:, :, some],
                causal=True, normalize=True, lengths=real, log_decay=log_decay, state=state,
                return_state=True,
            )  # fmt: skip
            parts.append(part)
        return torch.cat(parts, 2)

    def _growing(
        self, k: Tensor, hidden: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns features of keys divided by the running maximum, the log decay, and the last maximum.

        `before` (B, H, 1) is the maximum of the keys before.
        """
        if not isinstance(self.kernel, str):
            return self._held(k, hidden)[0], None, None
        exponents = self._exponents(k, hidden)
        top = _largest(exponents)
        before = top[..., :1] if before is None else before
        top = torch.cat((before, top), -1).cummax(-1).values
        phi = exponents.sub_(top[..., 1:, None]).exp_()
        return phi, -top.diff(dim=-1), top[..., -1:]

    def extra_repr(self) -> str:
        named = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", self.kernel)
        seed = None if self.schedule.is_meta else int(self.schedule[0])
        return (
            f"heads={self.heads}, head_dim={self.head_dim}, features={self.features}, kernel={named}, "
            f"causal={self.causal}, redraw={self.redraw_every}, seed={seed}, eps={self.eps:g}"
        )


def _chunks(k: Tensor, lengths: Tensor | None) -> list[tuple[slice, Tensor | None]]:
    """Cuts keys (B, H, L, D) into chunks of tokens. Returns the slices and their padding (B, 1, L, 1)."""
    slices = [slice(first, first + CHUNK) for first in range(0, k.shape[2], CHUNK)]
    padding = None if lengths is None else ~real_tokens(lengths, k)
    return [(some, None if padding is None else padding[:, :, some]) for some in slices]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _largest(exponents: Tensor) -> Tensor:
    """Returns the largest exponent of each key, (B, H, L, m) -> (B, H, L), finite also for hidden keys."""
    return exponents.detach().amax(-1).clamp(min=torch.finfo(exponents.dtype).min)


def _rest(lengths: Tensor | None, first: int, L: int) -> Tensor | None:
    """Returns how many of the L tokens from `first` on are real."""
    return None if lengths is None else (lengths - first).clamp(0, L)


def _divided(found: Tensor) -> Tensor:
    """Divides by the last column, the sum of weights: (..., Dv + 1) -> (..., Dv). A sum of 0 gives zeros."""
    weights = found[..., -1:]
    return found[..., :-1] / weights.masked_fill(weights == 0, 1)


def _kernel(kernel: Kernel) -> Kernel:
    if kernel != "softmax" and not callable(kernel):
        raise TypeError(f"kernel: expected 'softmax' or a function of a tensor, got {describe(kernel)}")
    return kernel


def _epsilon(eps: float | None, kernel: Kernel) -> float:
    if eps is None:
        return 1e-6 if kernel == "softmax" else 1e-3
    if not number("eps", eps) >= 0:
        raise ValueError(f"eps: expected a number from 0 on, got {eps}")
    return eps
