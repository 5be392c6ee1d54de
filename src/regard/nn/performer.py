"""Performer (FAVOR+): softmax attention approximated with random features, in linear time."""

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
from ._padding import finite_padding
from ._projected import Projected

CHUNK = 1024  # tokens per chunk; only one chunk's features are in memory
Kernel = Literal["softmax"] | Callable[[Tensor], Tensor]


class PerformerAttention(Projected):
    """Performer self-attention (FAVOR+): (B, L, d_model) -> (B, L, d_model).

    Approximates exp(q.k / sqrt(D)) by phi(q).phi(k) with positive orthogonal random features phi.
    Time is O(L * features). The error falls as the number of features grows.

    Args:
        d_model: width of the input and of the output.
        heads: number of heads H.
        features: number m of random features. Default: D * log(D), rounded down, as in the proof
            of the Performer paper.
        kernel: "softmax", or, for generalised attention, a function that maps the products w.x
            with the random vectors w to features. Example: `torch.relu`.
        causal: if True, a token attends to itself and to earlier tokens.
        redraw: new random features are drawn after every `redraw` calls in training. None: never.
        seed: seed of the random features. Default: drawn from PyTorch's generator.
        eps: added to the features of keys, relative to the largest feature, so that no sum of
            weights is 0. If `kernel` is a function, eps is absolute and is added to the features of
            queries and keys. Default: 1e-6 for "softmax", 1e-3 for a function.
        head_dim: D, the width of a head. Default: d_model / heads.
        bias: if True, the projections of queries, keys and values have biases.
        out: if True, the module has an output projection.

    Example:
        >>> attend = regard.nn.PerformerAttention(512, 8, features=256, causal=True, seed=0)
        >>> attend(torch.randn(1, 4096, 512)).shape
        torch.Size([1, 4096, 512])
    """

    projection: Tensor  # (m, D)
    schedule: Tensor  # (3,) integers: seed, number of draws, number of training calls

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
        seed = int(torch.randint(2**31, ())) if seed is None else count("seed", seed)
        self.register_buffer("schedule", torch.tensor([seed, 0, 0], device=device))
        projection = torch.empty(self.features, self.head_dim, device=device, dtype=dtype)
        self.register_buffer("projection", projection)
        self.redraw()

    def forward(self, x: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Computes self-attention over x. The output has x's shape.

        Args:
            x: (B, L, d_model).
            lengths: (B,), the number of real tokens of each sample. The rest is padding.
        """
        self._check(x)
        if self.training and self.redraw_every is not None and not self.schedule.is_meta:
            self._count_call(self.redraw_every)
        return self._output(self.attend(*self._projected(finite_padding(x, lengths)), lengths=lengths))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Computes attention without projections.

        q (B, H, L, D), k (B, H, Lk, D), v (B, H, Lk, Dv) -> (B, H, L, Dv). If causal, Lk must be L.
        """
        self._check_heads(q, k, v, same_tokens=self.causal)
        lengths = checked_lengths(lengths, k)
        if not q.shape[2] or not k.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        if self.causal:
            return self._attend_causally(q, k, v, lengths)
        sums = self._sums(k, v, lengths)
        outputs = [_divided(self._query_features(chunk) @ sums).to(q.dtype) for chunk in q.split(CHUNK, 2)]
        return torch.cat(outputs, 2)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draws new random features and replaces the old ones.

        The seed and the number of earlier draws determine the result. Does nothing on the meta
        device.
        """
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

    def _query_features(self, q: Tensor) -> Tensor:
        """Returns the features of queries: (B, H, L, D) -> (B, H, L, m).

        For the softmax kernel, the features are exp(w.q - |q|^2 / 2), and each query's features are
        normalised to sum to 1.
        """
        if isinstance(self.kernel, str):
            return self._mapped(q, partial(torch.softmax, dim=-1))
        return self._mapped(q, self.kernel) + self.eps

    def _mapped(self, x: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
        return generalized_features(_wide(x), self.projection, kernel, scale=self.head_dim**-0.5)

    def _sums(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns (B, H, m, Dv + 1): the sum of phi(k) v^T over all keys, then the sum of phi(k).

        Keys are processed in chunks, so that their features stay in the CPU caches. The sums are
        divided by exp(top), the largest feature of any key, so that they do not overflow. This
        factor cancels in `_divided`. eps is added after the division by exp(top), so it is relative
        to the largest feature.
        """
        sums, top, total = _wide(k.new_zeros(())), _wide(k.new_full((), -torch.inf)), _wide(k.new_zeros(()))
        for chunk, padding in _chunks(k, lengths):
            phi, chunk_top = self._key_features(k[:, :, chunk], padding)
            values = F.pad(_wide(v[:, :, chunk]), (0, 1), value=1.0)
            values = values if padding is None else values.masked_fill(padding, 0)
            new_top = torch.maximum(top, chunk_top)
            sums = sums * (top - new_top).exp() + phi.mT @ values * (chunk_top - new_top).exp()
            top, total = new_top, total + values.sum(-2, keepdim=True)
        return sums + self.eps * total

    def _key_features(self, k: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the features of keys (B, H, L, m), divided by exp(top), and top.

        For the softmax kernel, top (B, H, 1, 1) is the largest exponent of all keys of a head. For
        other kernels, it is the scalar 0.
        """
        if not isinstance(self.kernel, str):
            phi = self._mapped(k, self.kernel)
            return phi if padding is None else phi.masked_fill(padding, 0), phi.new_zeros(())
        exponents = self._exponents(k, padding)
        top = _largest(exponents).amax(-1, keepdim=True).unsqueeze(-1)
        return exponents.sub_(top).exp_(), top

    def _exponents(self, k: Tensor, padding: Tensor | None) -> Tensor:
        exponents = positive_exponents(_wide(k), self.projection, scale=self.head_dim**-0.5)
        return exponents if padding is None else exponents.masked_fill(padding, -torch.inf)

    def _attend_causally(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns the causal attention (B, H, L, Dv), computed chunk by chunk.

        Each key's features are divided by the running maximum, the largest feature of this and all
        earlier keys. When the maximum grows by a factor, the state is divided by the same factor.
        """
        state, top, outputs = None, None, []
        for chunk, padding in _chunks(k, lengths):
            phi, log_decay, top = self._causal_key_features(k[:, :, chunk], padding, top)
            real = _chunk_lengths(lengths, chunk.start, phi.shape[2])
            out, state = linear_attention(
                self._query_features(q[:, :, chunk]).to(q.dtype), (phi + self.eps).to(k.dtype),
                v[:, :, chunk], causal=True, normalize=True, lengths=real, log_decay=log_decay, state=state,
                return_state=True,
            )  # fmt: skip
            outputs.append(out)
        return torch.cat(outputs, 2)

    def _causal_key_features(
        self, k: Tensor, padding: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns a chunk's key features (B, H, L, m), log decay (B, H, L) and last top (B, H, 1).

        `top` at a key is the largest exponent of this and all earlier keys. The features are
        divided by exp(top). The log decay at a key is `top` at the previous key minus `top` at this
        key. `before` (B, H, 1) is the last top of the previous chunk. If `kernel` is a function,
        the log decay and the last top are None.
        """
        if not isinstance(self.kernel, str):
            return self._key_features(k, padding)[0], None, None
        exponents = self._exponents(k, padding)
        top = _largest(exponents)
        before = top[..., :1] if before is None else before
        top = torch.cat((before, top), -1).cummax(-1).values
        phi = exponents.sub_(top[..., 1:, None]).exp_()
        return phi, -top.diff(dim=-1), top[..., -1:]

    def extra_repr(self) -> str:
        kernel = getattr(self.kernel, "__name__", self.kernel)
        seed = None if self.schedule.is_meta else int(self.schedule[0])
        return (
            f"heads={self.heads}, head_dim={self.head_dim}, features={self.features}, kernel={kernel}, "
            f"causal={self.causal}, redraw={self.redraw_every}, seed={seed}, eps={self.eps:g}"
        )


def _chunks(k: Tensor, lengths: Tensor | None) -> list[tuple[slice, Tensor | None]]:
    """Splits the L tokens of keys (B, H, L, D) into chunks.

    Returns a pair (slice, padding) for each chunk. `padding` is a bool mask (B, 1, chunk, 1) that
    is True for padding, or None if `lengths` is None.
    """
    slices = [slice(first, first + CHUNK) for first in range(0, k.shape[2], CHUNK)]
    padding = None if lengths is None else ~real_tokens(lengths, k)
    return [(chunk, None if padding is None else padding[:, :, chunk]) for chunk in slices]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _largest(exponents: Tensor) -> Tensor:
    """Returns the largest exponent of each key: (B, H, L, m) -> (B, H, L).

    The result is finite even for padding, whose exponents are -inf.
    """
    return exponents.detach().amax(-1).clamp(min=torch.finfo(exponents.dtype).min)


def _chunk_lengths(lengths: Tensor | None, first: int, L: int) -> Tensor | None:
    """Returns (B,): how many of the tokens first, ..., first + L - 1 are not padding."""
    return None if lengths is None else (lengths - first).clamp(0, L)


def _divided(sums: Tensor) -> Tensor:
    """Divides each row by its last entry, the sum of weights: (..., Dv + 1) -> (..., Dv).

    If the sum is 0, the row is not divided.
    """
    weights = sums[..., -1:]
    return sums[..., :-1] / weights.masked_fill(weights == 0, 1)


def _kernel(kernel: Kernel) -> Kernel:
    if kernel != "softmax" and not callable(kernel):
        raise TypeError(f"kernel: expected 'softmax' or a function of a tensor, got {describe(kernel)}")
    return kernel


def _epsilon(eps: float | None, kernel: Kernel) -> float:
    if eps is None:
        return 1e-6 if kernel == "softmax" else 1e-3
    if not number("eps", eps) >= 0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}")
    return eps
