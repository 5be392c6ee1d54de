"""Specs of sparse, low-rank and linear attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._call.linear import SEGMENT
from ..masks import Blocks, Documents, Lengths, Mask, longformer
from ..nn import block_table
from ..nn._sizes import sizes
from ..nn.linear import Decay
from ..nn.linformer import Sharing
from ._call import CallSpec
from ._layers import GroupedSpec, LayerSpec, Product, Work


@dataclass(frozen=True)
class ProjectedSpec(LayerSpec):
    """Base of the specs of layers with separate query, key, value and output projections."""

    head_dim: int | None = None
    bias: bool = True
    out: bool = True
    refused: ClassVar[tuple[str, ...]] = ("past",)

    def __post_init__(self) -> None:
        _ = self.D  # raises if the sizes are invalid

    @property
    def D(self) -> int:
        return sizes(self.d_model, self.heads, head_dim=self.head_dim).head_dim

    @property
    def inner(self) -> int:
        return self.heads * self.D

    @property
    def parameters(self) -> int:
        return self._projections(3) + self.out * (self.inner + 1) * self.d_model

    def _projections(self, n: int) -> int:
        """Returns the number of parameters of n projections from d_model to heads * D channels."""
        return n * self.inner * (self.d_model + self.bias)

    def products(self, work: Work) -> list[Product]:
        out = [Product("out", work.rows, self.inner, self.d_model)] * self.out
        return [Product("q, k, v", work.rows, self.d_model, 3 * self.inner), *out]

    def _call(self, work: Work, mask: Mask | None, Lq: int | None = None, Lk: int | None = None) -> CallSpec:
        """Returns the spec of an attention call of this layer. Lq and Lk default to `work.L`."""
        Lq, Lk = (work.L if L is None else L for L in (Lq, Lk))
        return CallSpec(work.B, self.heads, Lq, self.D, Lk=Lk, dtype=work.dtype, mask=mask)


@dataclass(frozen=True)
class LongformerSpec(ProjectedSpec):
    """Longformer attention: `window` and `dilation` as in `masks.longformer`, and global tokens.

    The layer has `globals` global tokens. They attend to all tokens, and all tokens attend to them.
    Attention of global tokens has separate query, key and value projections. The cost includes the
    products of these projections, as in training. In evaluation, the module may skip the products
    of the key and value projections.
    """

    window: int | tuple[int, int] = (256, 256)
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
        of_globals = [
            Product("global q", work.B * self.globals, self.d_model, self.inner),
            Product("global k, v", work.rows, self.d_model, 2 * self.inner),
        ]
        return [*of_globals * (self.globals > 0), *super().products(work)]

    def calls(self, work: Work) -> list[CallSpec]:
        band = longformer(self.window, dilation=self.dilation)
        if not self.globals:
            return [self._call(work, work.narrowed(band))]
        # The cost does not depend on which tokens are global: assume the first ones.
        global_keys = Documents([0] * work.L, [0] * self.globals + [1] * (work.L - self.globals))
        global_rows = self._call(work, work.mask, self.globals)
        if self.dilation == 1:
            return [self._call(work, work.narrowed(band | global_keys)), global_rows]
        to_globals = self._call(work, None, Lk=self.globals)
        return [self._call(work, work.narrowed(band & ~global_keys)), to_globals, global_rows]


@dataclass(frozen=True)
class BigBirdSpec(ProjectedSpec):
    """BigBird attention: blocks attend to neighbouring, random and global blocks."""

    block: int = 64
    window: int = 3
    random: int = 3
    global_blocks: tuple[int, ...] = (0, -1)
    seed: int = 0

    def calls(self, work: Work) -> list[CallSpec]:
        table = block_table(
            -(-work.L // self.block), self.heads, window=self.window, random=self.random,
            global_blocks=self.global_blocks, seed=self.seed,
        )  # fmt: skip
        return [self._call(work, work.narrowed(Blocks(table, self.block)))]


@dataclass(frozen=True)
class LinformerSpec(ProjectedSpec):
    """Linformer attention: `rank` keys and values are computed from up to `max_length` tokens."""

    max_length: int = 512
    rank: int = 256
    sharing: Sharing = "heads"
    refused: ClassVar[tuple[str, ...]] = ("past", "mask")

    def check(self, work: Work) -> None:
        super().check(work)
        if self.max_length < work.L:
            raise ValueError(f"tokens: expected at most max_length = {self.max_length}, got {work.L}")

    @property
    def parameters(self) -> int:
        matrices = {"none": 2 * self.heads, "heads": 2, "key-value": 1}[self.sharing]
        return super().parameters + matrices * self.max_length * self.rank

    def products(self, work: Work) -> list[Product]:
        low_rank = Product("k, v to the rank", self.rank, work.L, 2 * self.D, work.B * self.heads)
        return [low_rank, *super().products(work)]

    def calls(self, work: Work) -> list[CallSpec]:
        return [self._call(work, None, Lk=self.rank)]

    def inputs(self, work: Work) -> int:
        """Counts the elements saved for backward: x, and k and v before Linformer's projection.

        q and the projected keys and values are not included, because the cost of the attention call
        already includes them.
        """
        return work.rows * (self.d_model + 2 * self.inner)


@dataclass(frozen=True)
class PerformerSpec(ProjectedSpec):
    """Performer attention, causal or not: random features approximate the softmax."""

    features: int = 256
    refused: ClassVar[tuple[str, ...]] = ("past", "mask")

    def products(self, work: Work) -> list[Product]:
        heads = work.B * self.heads
        return [
            Product("features of q and k", 2 * work.L, self.D, self.features, heads),
            Product("state update", self.features, work.L, self.D + 1, heads),
            Product("state readout", work.L, self.features, self.D + 1, heads),
            *super().products(work),
        ]

    def inputs(self, work: Work) -> int:
        """Counts the elements saved for backward: x, q, k, v, and the features of q and k."""
        return work.rows * (self.d_model + self.heads * (3 * self.D + 2 * self.features))


@dataclass(frozen=True)
class LinearSpec(GroupedSpec):
    """Linear attention, as in `nn.LinearAttention`, with a state (D, Dv) per key head.

    FLOPs are counted as in the recurrent form: 2 D Dv to add a token to a state, and 2 D Dv for a
    query to read a state.
    """

    bias: bool = False
    normalize: bool = True
    decay: Decay | None = None
    delta: bool = False
    gate: bool = False
    features: int | None = None  # number of channels of a key after the feature map. Default: head_dim
    others: int = 0  # number of parameters of the output norm
    refused: ClassVar[tuple[str, ...]] = ("mask",)

    @property
    def parameters(self) -> int:
        d, Hkv, (q, kv, out) = self.d_model, self.sizes[0], self.widths
        gates = {None: 0, "head": Hkv, "token": Hkv * (d + 1)}[self.decay]
        gates += self.delta * Hkv * (d + 1) + self.gate * d * out
        return d * (q + kv + out) + self.bias * (q + kv + d) + gates + self.others

    def products(self, work: Work) -> list[Product]:
        d, (Hkv, _, Dv), (q, kv, out) = self.d_model, self.sizes, self.widths
        kv_heads, F, columns = work.B * Hkv, self.state_rows, Dv + self.normalize
        gates = Hkv * ((self.decay == "token") + self.delta)
        return [
            Product("q, k, v", work.rows, d, q + kv),
            *[Product("gates", work.rows, d, gates)] * (gates > 0),
            *[Product("delta rule readout", work.L, F, Dv, kv_heads)] * self.delta,
            Product("state update", F, work.L, columns, kv_heads),
            Product("state readout", work.L, F, columns, work.B * self.heads),
            *[Product("gate", work.rows, d, out)] * self.gate,
            Product("out", work.rows, out, d),
        ]

    def inputs(self, work: Work) -> int:
        """Counts the elements saved for backward: x, q, k, v, output, delta-rule errors, states.

        Of the states, only the state before each segment of 512 tokens is saved.
        """
        (Hkv, _, Dv), F = self.sizes, self.state_rows
        per_token = self.d_model + (self.heads + Hkv) * (F + Dv) + self.delta * Hkv * Dv
        # States are at least float32, so one element of a state counts as two 16-bit elements.
        widening = max(1, 4 // work.dtype.itemsize)
        return work.rows * per_token + work.B * -(-work.L // SEGMENT) * self.state * widening

    @property
    def state(self) -> int:
        return self.sizes[0] * self.state_rows * (self.sizes[2] + self.normalize)

    @property
    def state_rows(self) -> int:
        return self.sizes[1] if self.features is None else self.features
