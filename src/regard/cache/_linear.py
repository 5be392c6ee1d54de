"""The cache of linear attention: a state of constant size."""

from __future__ import annotations

import copy
from typing import NoReturn

import torch
from torch import Tensor

from .._api.linear_attention import FeatureMap, linear_attention
from .._call.linear import LinearState
from .._tools.arguments import count, describe
from .._tools.words import hide_unknown, unknown_keyword
from . import _checks as checks
from ._checks import Integers, Lengths, State
from ._counts import Count, as_tensor, formatted, largest, of_samples, per_sample, plus, shared
from ._rows import layout_of


class LinearCache:
    """A cache for linear attention: a state (B, Hkv, D, Dv) that does not grow with the length.

    Args:
        B, Hkv, D, Dv: batch size, key heads, size of a key after the feature map, size of a value
            (default D).
        normalize: if True, `attend` divides the output by the sum of the weights, and the state
            also includes the sum of the keys (B, Hkv, D).
        dtype: dtype of queries, keys and values. The state is float64 if dtype is float64, else
            float32.
        device: device of the state.

    Example:
        >>> cache = LinearCache(1, 8, 64, normalize=True)
        >>> out = cache.attend(q, k, v, feature_map="elu+1")       # prefill
        >>> out = cache.attend(q1, k1, v1, feature_map="elu+1")    # decode step
    """

    def __init__(
        self, B: int, Hkv: int, D: int, Dv: int | None = None, *, normalize: bool = False,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.B, layout = count("B", B, 1), layout_of(Hkv, D, Dv, "float", dtype, device)
        self.Hkv, self.D, self.Dv, _, self.dtype, self.device = layout
        if not isinstance(normalize, bool):
            raise TypeError(f"normalize: expected a bool, got {describe(normalize)}")
        self.normalize = normalize
        self._lengths: Count = 0
        self.reset()

    def reset(self) -> None:
        """Removes all tokens."""
        dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        outer = (self.B, self.Hkv, self.D)
        S = torch.zeros(*outer, self.Dv, dtype=dtype, device=self.device)
        z = torch.zeros(outer, dtype=dtype, device=self.device) if self.normalize else None
        self._state, self._lengths = LinearState(S, z), 0

    @property
    def state(self) -> LinearState:
        """The state, in the form that `linear_attention` takes as its argument `state`.

        Later calls of `attend` create a new state and leave this object unchanged.
        """
        return self._state

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sample, (B,) int64."""
        return as_tensor(self._lengths, self.B, self.device)

    def __len__(self) -> int:
        """The number of tokens of the longest sample."""
        return largest(self._lengths)

    @property
    def nbytes(self) -> int:
        """The size of the state in bytes."""
        return sum(x.nbytes for x in self._state if x is not None)

    def positions(self, L: int = 1) -> Tensor:
        """Returns the positions of the next L tokens, (B, L) int64."""
        return self.lengths[:, None] + torch.arange(count("L", L), device=self.device)

    def __repr__(self) -> str:
        held = formatted(per_sample(self._lengths, self.B))
        sizes = f"B={self.B}, Hkv={self.Hkv}, D={self.D}, Dv={self.Dv}"
        return f"LinearCache({sizes}, lengths={held}, normalize={self.normalize}, dtype={self.dtype})"

    @hide_unknown
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Lengths = None,
        feature_map: str | FeatureMap | None = None, log_decay: Tensor | float | None = None,
        beta: Tensor | float | None = None, scale: float | None = None, impl: str = "auto",
        **unknown: NoReturn,
    ) -> Tensor:  # fmt: skip
        """Appends k and v, then attends linearly. If the call raises, the cache is unchanged.

        Args:
            q, k, v: (B, Hq, L, D), (B, Hkv, L, D) and (B, Hkv, L, Dv).
            lengths: (B,): only the first lengths[b] tokens of sample b are real.
            feature_map, log_decay, beta, scale, impl: as in `linear_attention`.

        Returns:
            out (B, Hq, L, Dv).
        """
        if unknown:
            raise unknown_keyword(LinearCache.attend, unknown)
        L = v.shape[2] if isinstance(v, Tensor) and v.ndim == 4 else 0
        checks.check_new("v", v, (self.B, self.Hkv, L, self.Dv), self.dtype, self.device)
        for name, x, heads in (("q", q, None), ("k", k, self.Hkv)):
            checks.check_new(name, x, self._shape_of(x, heads, L), self.dtype, self.device)
        for name, gate in (("log_decay", log_decay), ("beta", beta)):
            if isinstance(gate, Tensor):
                checks.check_no_grad(name, gate)
        chunk = checks.chunk_of(L, lengths, self.B)
        real = None if isinstance(chunk.new, int) else torch.tensor(chunk.new, device=self.device)
        out, state = linear_attention(
            q, k, v, feature_map=feature_map, normalize=self.normalize, log_decay=log_decay, beta=beta,
            scale=scale, lengths=real, state=self._state, return_state=True, impl=impl,
        )  # fmt: skip
        self._state, self._lengths = state, plus(self._lengths, chunk.new)
        return out

    def _shape_of(self, x: object, heads: int | None, L: int) -> tuple[int, ...]:
        """Returns the shape (B, heads, L, D) that x, the queries or keys of a call, must have.

        If `heads` is None, the number of heads is taken from x. D is always taken from x, because a
        feature map may change it.
        """
        shape = tuple(x.shape) if isinstance(x, Tensor) and x.ndim == 4 else (0, 1, 0, self.D)
        return self.B, shape[1] if heads is None else heads, L, shape[3]

    def crop(self, n: Integers) -> NoReturn:
        """Raises NotImplementedError, because tokens cannot be removed from a sum over all tokens.

        To be able to go back, keep a `fork()` of the cache.
        """
        raise NotImplementedError(
            f"crop({n!r}): a LinearCache stores a sum over its tokens and cannot drop any; keep a fork()"
        )

    def reorder(self, index: Integers) -> None:
        """Replaces sample i by sample index[i], for beam search. B becomes len(index)."""
        samples = checks.sample_indices(index, self.B)
        S, z = self._state
        self._state = LinearState(S[samples], None if z is None else z[samples])
        self.B, self._lengths = len(samples), of_samples(self._lengths, samples)

    def fork(self) -> LinearCache:
        """Returns an independent copy of the cache."""
        return copy.copy(self)

    def state_dict(self) -> State:
        """Returns the tensors of the state and the lengths (B,) as a dict."""
        S, z = self._state
        return {"S": S.clone()} | ({} if z is None else {"z": z.clone()}) | {"lengths": self.lengths}

    def load_state_dict(self, state: State) -> None:
        """Loads a `state_dict` of a cache with the same B, sizes and dtype."""
        names = ("S", "z") if self.normalize else ("S",)
        state = checks.checked_state(state, {*names, "lengths"}, self.device)
        held = checks.integers("lengths", state["lengths"], self.B)
        checks.check_saved_lengths(held)
        for name, x in zip(names, self._state, strict=False):
            assert x is not None
            checks.check_saved(name, state[name], tuple(x.shape), x.dtype)
        self._state = LinearState(*(state[name].clone() for name in names))
        self._lengths = shared(held)
