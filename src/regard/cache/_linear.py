"""The state of linear attention: a cache that does not grow."""

from __future__ import annotations

import copy
from typing import NoReturn

import torch
from torch import Tensor

from .._api.linear_attention import FeatureMap, linear_attention
from .._call.linear import LinearState
from .._tools.arguments import count, describe
from . import _checks as checks
from ._checks import Integers, Lengths, State
from ._counts import Count, as_tensor, chosen, each, most, plus, shared, shown
from ._rows import layout_of


class LinearCache:
    """What linear attention remembers of the tokens so far, (B, Hkv, D, Dv) numbers whatever their count.

    Args:
        B, Hkv, D, Dv: samples, key heads, size of a key after the feature map, size of a value (default D).
        normalize: whether `attend` divides by the sum of the weights, for which the sum of the keys is kept.
        dtype: of queries, keys and values. The state is in float32, in float64 for float64.
        device: where the state lies.

    Example:
        >>> cache = LinearCache(1, 8, 64, normalize=True)
        >>> out = cache.attend(q, k, v, feature_map="elu+1")       # the prompt
        >>> out = cache.attend(q1, k1, v1, feature_map="elu+1")    # one more token
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
        """Forgets all tokens."""
        dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        outer = (self.B, self.Hkv, self.D)
        S = torch.zeros(*outer, self.Dv, dtype=dtype, device=self.device)
        z = torch.zeros(outer, dtype=dtype, device=self.device) if self.normalize else None
        self._state, self._lengths = LinearState(S, z), 0

    @property
    def state(self) -> LinearState:
        """As `linear_attention` takes it. Not changed by later calls, which make a new one."""
        return self._state

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: the tokens of each sample."""
        return as_tensor(self._lengths, self.B, self.device)

    def __len__(self) -> int:
        """The tokens of the longest sample."""
        return most(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, whatever the number of tokens."""
        return sum(x.nbytes for x in self._state if x is not None)

    def positions(self, L: int = 1) -> Tensor:
        """Returns the positions of the next L tokens, (B, L) int64."""
        return self.lengths[:, None] + torch.arange(count("L", L), device=self.device)

    def __repr__(self) -> str:
        held = shown(each(self._lengths, self.B))
        sizes = f"B={self.B}, Hkv={self.Hkv}, D={self.D}, Dv={self.Dv}"
        return f"LinearCache({sizes}, lengths={held}, normalize={self.normalize}, dtype={self.dtype})"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Lengths = None,
        feature_map: str | FeatureMap | None = None, log_decay: Tensor | float | None = None,
        beta: Tensor | float | None = None, scale: float | None = None, impl: str = "auto",
    ) -> Tensor:  # fmt: skip
        """Appends k (B, Hkv, L, D) and v (B, Hkv, L, Dv), then attends linearly with q (B, Hq, L, D).

        Options as in `linear_attention`; of sample b only the first lengths[b] tokens are real. If anything
        raises, the cache is as it was before.
        """
        L = v.shape[2] if isinstance(v, Tensor) and v.ndim == 4 else 0
        checks.check_new("v", v, (self.B, self.Hkv, L, self.Dv), self.dtype, self.device)
        for name, x, heads in (("q", q, None), ("k", k, self.Hkv)):
            checks.check_new(name, x, self._shape_of(x, heads, L), self.dtype, self.device)
        for name, gate in (("log_decay", log_decay), ("beta", beta)):
            if isinstance(gate, Tensor):
                checks.check_no_grad(name, gate)
        chunk = checks.chunk_of(L, lengths, self.B)
        given = None if isinstance(chunk.new, int) else torch.tensor(chunk.new, device=self.device)
        out, state = linear_attention(
            q, k, v, feature_map=feature_map, normalize=self.normalize, log_decay=log_decay, beta=beta,
            scale=scale, lengths=given, state=self._state, return_state=True, impl=impl,
        )  # fmt: skip
        self._state, self._lengths = state, plus(self._lengths, chunk.new)
        return out

    def _shape_of(self, x: object, heads: int | None, L: int) -> tuple[int, ...]:
        """Returns the shape expected of queries (any number of heads) or keys. A feature map may change D."""
        found = tuple(x.shape) if isinstance(x, Tensor) and x.ndim == 4 else (0, 1, 0, self.D)
        return self.B, found[1] if heads is None else heads, L, found[3]

    def crop(self, n: Integers) -> NoReturn:
        """Raises: a sum of tokens cannot be cut. `fork()` before tokens that may be dropped."""
        raise NotImplementedError(
            f"crop({n!r}): a LinearCache keeps a sum of its tokens and cannot drop some; keep a fork()"
        )

    def reorder(self, index: Integers) -> None:
        """Makes sample i what sample index[i] was, as beams need it; there may be more or fewer than B."""
        samples = checks.sample_indices(index, self.B)
        S, z = self._state
        self._state = LinearState(S[samples], None if z is None else z[samples])
        self.B, self._lengths = len(samples), chosen(self._lengths, samples)

    def fork(self) -> LinearCache:
        """Returns a cache with the same content that goes its own way from here."""
        return copy.copy(self)

    def state_dict(self) -> State:
        """Returns tensors alone: the state and the lengths (B,)."""
        S, z = self._state
        return {"S": S.clone()} | ({} if z is None else {"z": z.clone()}) | {"lengths": self.lengths}

    def load_state_dict(self, state: State) -> None:
        """Takes the content of a `state_dict` of a cache with the same B, sizes and dtype."""
        names = ("S", "z") if self.normalize else ("S",)
        checks.check_names(state, {*names, "lengths"})
        held = checks.integers("lengths", state["lengths"], self.B)
        checks.check_saved_lengths(held)
        for name, x in zip(names, self._state, strict=False):
            assert x is not None
            checks.check_saved(name, state[name], tuple(x.shape), x.dtype)
        self._state = LinearState(*(state[name].to(self.device, copy=True) for name in names))
        self._lengths = shared(held)
