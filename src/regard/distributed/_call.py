"""The value that describes a distributed call, and the problem of each of its rectangles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .._call.dropout import DropoutOrigin
from .._call.layout import canonical
from .._call.make import make
from .._call.spec import Bias, Options, Problem
from ..masks import Mask
from ..masks._cut import cut
from ._pairs import PairCounter, Run, mask_sizes
from .layouts import Layout


@dataclass(frozen=True)
class DistributedCall:
    """A call of `distributed.attention` on one rank, without q, k and v."""

    options: Options  # of the whole call: mask, offset, bias and seed are global
    q_layout: Layout
    k_layout: Layout
    B: int
    Hq: int
    Hkv: int
    impl: str
    head: int = 0  # the first head of the call, if it has some of the heads of a larger one
    all_heads: int = 0  # heads of the larger call; 0: Hq
    latent: int = 0  # channels of a latent, if latents travel instead of keys and values

    @property
    def Lq(self) -> int:
        return self.q_layout.L

    @property
    def Lk(self) -> int:
        return self.k_layout.L

    @property
    def offset(self) -> int | Tensor:
        offset = self.options.offset
        return self.Lk - self.Lq if offset is None else offset

    def counter(self) -> PairCounter:
        offset, mask = self.offset, self.options.mask
        offsets = tuple(offset.reshape(-1).tolist()) if isinstance(offset, Tensor) else (offset,)
        assert mask is None or isinstance(mask, Mask)
        return PairCounter(mask, self.B, self.Hq, self.Lq, self.Lk, offsets)

    def part(self, queries: Run, keys: Run, heads: Run | None = None) -> Options:
        """Returns the options of a call over a rectangle and, optionally, some of the heads."""
        mask = self.options.mask
        assert mask is None or isinstance(mask, Mask)
        mask = None if mask is None else cut(mask, queries, keys, self.Lq, self.Lk, heads)
        offset = self.offset + (queries[0] - keys[0])
        bias = bias_part(self.options.bias, queries, keys, heads)
        sink = self.options.sink if heads is None else of_heads(self.options.sink, slice(*heads))
        return self.options._replace(mask=mask, offset=offset, bias=bias, sink=sink)

    def of_heads(self, heads: Run, Hkv: int) -> DistributedCall:
        """Returns the call of some query heads and their Hkv key heads."""
        options = self.part((0, self.Lq), (0, self.Lk), heads)
        if isinstance(mask := self.options.mask, Mask) and mask_sizes(mask)[1] == 1:
            options = options._replace(mask=mask)  # the same for all heads
        return replace(
            self, options=options, Hq=heads[1] - heads[0], Hkv=Hkv, head=self.head + heads[0],
            all_heads=self.all_heads or self.Hq,
        )  # fmt: skip

    def problem(
        self, queries: Run, keys: Run, q: Tensor, k: Tensor, v: Tensor, options: Options,
        heads: Run | None = None,
    ) -> Problem:  # fmt: skip
        """Returns the problem of a part, which draws the dropout pattern of the whole call."""
        head = self.head + (0 if heads is None else heads[0])
        origin = DropoutOrigin(head, self.all_heads or self.Hq, queries[0], keys[0])
        problem = make(q, k, v, options)
        return problem._replace(origin=origin, watched=False)

    def rectangle(
        self, queries: Run, keys: Run, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
        by_head: Tensor | None,
    ) -> Problem:  # fmt: skip
        """Returns the canonical problem of a rectangle for the kernels, without its sink.

        `bias` is the whole bias tensor. `by_head` holds ALiBi slopes or a relative bias.
        """
        options = self.part(queries, keys)._replace(sink=None, return_lse=False)
        if bias is not None:
            options = options._replace(bias=sliced(bias, queries, keys))
        problem = canonical(self.problem(queries, keys, q, k, v, options))
        return problem._replace(by_head=by_head) if by_head is not None else problem


def bias_part(bias: Bias | None, queries: Run, keys: Run, heads: Run | None) -> Bias | None:
    """Returns the bias of a rectangle. ALiBi and relative biases depend on distances alone."""
    if bias is None or (heads is None and not isinstance(bias, Tensor)):
        return bias
    if isinstance(bias, Tensor):
        bias = sliced(bias, queries, keys)
        return bias if heads is None else bias_of_heads(bias, slice(*heads))
    assert heads is not None
    return bias.of_heads(*heads)


def bias_of_heads(bias: Tensor | None, heads: slice) -> Tensor | None:
    """Returns a bias tensor of some heads. A dim of size 1 broadcasts."""
    by_head = bias is not None and bias.ndim > 2 and bias.shape[-3] > 1
    return bias[..., heads, :, :] if bias is not None and by_head else bias


def of_heads(x: Tensor | None, heads: slice, dim: int = 0) -> Tensor | None:
    """Returns the entries of a tensor for some heads, which are its first dim or dim 1."""
    return None if x is None else x[(slice(None),) * dim + (heads,)]


def sliced(bias: Tensor, queries: Run, keys: Run) -> Tensor:
    """Returns a bias tensor of a rectangle. Dims of size 1 broadcast."""
    for dim, (begin, end) in ((-2, queries), (-1, keys)):
        if bias.ndim >= -dim and bias.shape[dim] != 1:
            bias = bias.narrow(dim, begin, end - begin)
    return bias
