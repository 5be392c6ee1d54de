"""Layers that leave pairs out, or do without the softmax, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .._call.linear import SEGMENT
from ..masks import Blocks, Dilated, Documents, Lengths, Mask, Window
from ..nn import block_table
from ..nn._sizes import sizes
from ..nn.linear import Decay
from ..nn.linformer import Sharing
from ._call import Call
from ._layers import Grouped, Layer, Product, Work, refuse


@dataclass(frozen=True)
class Projected(Layer):
    """`query`, `key` and `value` of all heads, and `out`."""

    head_dim: int | None = None
    bias: bool = True
    out: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.D  # checked there

    @property
    def D(self) -> int:
        return sizes(self.d_model, self.heads, head_dim=self.head_dim).head_dim

    def check(self, work: Work) -> None:
        refuse(self, work, "past")

    @property
    def inner(self) -> int:
        return self.heads * self.D

    @property
    def parameters(self) -> int:
        return self._projections(3) + self.out * (self.inner + 1) * self.d_model

    def _projections(self, n: int) -> int:
        return n * self.inner * (self.d_model + self.bias)

    def products(self, work: Work) -> list[Product]:
        out = [Product("out", work.rows, self.inner, self.d_model)] * self.out
        return [Product("q, k, v", work.rows, self.d_model, 3 * self.inner), *out]

    def _call(self, work: Work, mask: Mask | None, Lq: int | None = None) -> Call:
        L = work.L if Lq is None else Lq
        return Call(work.B, self.heads, L, self.D, self.heads, work.L, self.D, work.dtype, mask)


@dataclass(frozen=True)
class Longformer(Projected):
    """Windows of `window` tokens on each side and `globals` tokens that see all and are seen by all.

    Global rows are counted as in training: with keys and values of their own projections.
    """

    window: int | tuple[int, int] = 256
    dilation: int = 1
    globals: int = 0

    def check(self, work: Work) -> None:
        super().check(work)
        if self.globals > work.L:
            raise ValueError(f"globals: expected at most the {work.L} tokens, got {self.globals}")
        if self.globals and not isinstance(work.mask, Lengths | None):
            raise ValueError(f"mask: expected Lengths with global tokens, got {work.mask!r}")

    @property
    def parameters(self) -> int:
        return super().parameters + self._projections(3)

    def products(self, work: Work) -> list[Product]:
        if not self.globals:
            return super().products(work)
        own = [
            Product("global q", work.B * self.globals, self.d_model, self.inner),
            Product("global k, v", work.rows, self.d_model, 2 * self.inner),
        ]
        return [*own, *super().products(work)]

    def calls(self, work: Work) -> list[Call]:
        left, right = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        band: Mask = Window(left * self.dilation, right * self.dilation)
        band = band if self.dilation == 1 else band & Dilated(self.dilation)
        if not self.globals:
            return [self._call(work, work.narrowed(band))]
        rows = self._call(work, work.mask, self.globals)
        if self.dilation == 1:
            return [self._call(work, work.narrowed(band | self._seen_by_all(work.L))), rows]
        far = Call(work.B, self.heads, work.L, self.D, self.heads, self.globals, self.D, work.dtype)
        return [self._call(work, work.narrowed(band & ~self._seen_by_all(work.L))), far, rows]

    def _seen_by_all(self, L: int) -> Mask:
        """The first tokens stand for all that could be chosen."""
        return Documents([0] * L, [0] * self.globals + [1] * (L - self.globals))


@dataclass(frozen=True)
class BigBird(Projected):
    """Blocks that see those around them, random ones and global ones."""

    block: int = 64
    window: int = 3
    random: int = 3
    global_blocks: tuple[int, ...] = (0, -1)
    seed: int = 0

    def calls(self, work: Work) -> list[Call]:
        table = block_table(
            -(-work.L // self.block), self.heads, window=self.window, random=self.random,
            global_blocks=self.global_blocks, seed=self.seed,
        )  # fmt: skip
        return [self._call(work, work.narrowed(Blocks(table, self.block)))]


@dataclass(frozen=True)
class Linformer(Projected):
    """Attention to `rank` mixtures of up to `max_length` keys and values."""

    max_length: int = 512
    rank: int = 256
    sharing: Sharing = "heads"

    def check(self, work: Work) -> None:
        refuse(self, work, "past", "mask")
        if self.max_length < work.L:
            raise ValueError(f"tokens: expected at most max_length = {self.max_length}, got {work.L}")

    @property
    def parameters(self) -> int:
        matrices = 1 if self.sharing == "key-value" else 2
        heads = self.heads if self.sharing == "none" else 1
        return super().parameters + matrices * heads * self.max_length * self.rank

    def products(self, work: Work) -> list[Product]:
        mixed = Product("mixtures of keys and values", self.rank, work.L, 2 * self.D, work.B * self.heads)
        return [mixed, *super().products(work)]

    def calls(self, work: Work) -> list[Call]:
        return [Call(work.B, self.heads, work.L, self.D, self.heads, self.rank, self.D, work.dtype)]

    def inputs(self, work: Work) -> int:
        """x, and keys and values before they are mixed."""
        return work.rows * (self.d_model + 2 * self.inner)


@dataclass(frozen=True)
class Performer(Projected):
    """Random features in place of the softmax, causal or not."""

    features: int = 256

    def check(self, work: Work) -> None:
        refuse(self, work, "past", "mask")

    def products(self, work: Work) -> list[Product]:
        each = work.B * self.heads
        own = [
            Product("features of q and k", 2 * work.L, self.D, self.features, each),
            Product("keys into the state", self.features, work.L, self.D + 1, each),
            Product("queries to the state", work.L, self.features, self.D + 1, each),
        ]
        return [*own, *super().products(work)]

    def inputs(self, work: Work) -> int:
        """x, q, k and v, and the features of q and k."""
        return work.rows * (self.d_model + self.heads * (3 * self.D + 2 * self.features))


@dataclass(frozen=True)
class Linear(Grouped):
    """Linear attention as in `nn.LinearAttention`: a state (D, Dv) for each key head.

    FLOPs are those of the recurrence: 2 D Dv for a token to enter the state and for a query to ask it.
    """

    bias: bool = False
    normalize: bool = True
    decay: Decay | None = None
    delta: bool = False
    gate: bool = False
    features: int | None = None  # channels of a key after the feature map; default head_dim
    others: int = 0  # parameters of a norm of the result

    def check(self, work: Work) -> None:
        refuse(self, work, "mask")

    @property
    def parameters(self) -> int:
        Hkv, D, Dv = self.sizes
        made, out = self.heads * D + Hkv * (D + Dv), self.heads * Dv
        gates = {None: 0, "head": Hkv, "token": Hkv * (self.d_model + 1)}[self.decay]
        gates += self.delta * Hkv * (self.d_model + 1) + self.gate * self.d_model * out
        return self.d_model * (made + out) + self.bias * (made + self.d_model) + gates + self.others

    def products(self, work: Work) -> list[Product]:
        Hkv, D, Dv = self.sizes
        out, each, F = self.heads * Dv, work.B * Hkv, self.state_rows
        gates = Hkv * ((self.decay == "token") + self.delta)
        held = Dv + self.normalize
        return [
            Product("q, k, v", work.rows, self.d_model, self.heads * D + Hkv * (D + Dv)),
            *[Product("gates", work.rows, self.d_model, gates)] * (gates > 0),
            *[Product("what the state holds of k", work.L, F, Dv, each)] * self.delta,
            Product("keys into the state", F, work.L, held, each),
            Product("queries to the state", work.L, F, held, work.B * self.heads),
            *[Product("gate", work.rows, self.d_model, out)] * self.gate,
            Product("out", work.rows, out, self.d_model),
        ]

    def inputs(self, work: Work) -> int:
        """x, q, k and v, the result, the delta rule's errors, and the state before each segment."""
        Hkv, _, Dv = self.sizes
        F = self.state_rows
        tokens = self.d_model + self.heads * (F + Dv) + Hkv * (F + Dv) + self.delta * Hkv * Dv
        wide = max(1, 4 // work.dtype.itemsize)  # states are in float32 at least
        return work.rows * tokens + work.B * -(-work.L // SEGMENT) * self.state * wide

    @property
    def state(self) -> int:
        Hkv, _, Dv = self.sizes
        return Hkv * self.state_rows * (Dv + self.normalize)

    @property
    def state_rows(self) -> int:
        return self.sizes[1] if self.features is None else self.features
