"""xFormers: `memory_efficient_attention` and the classes of its argument `attn_bias`.

Letters of shapes are those of xFormers: B is the batch size, M the length, H the number of heads, K
the channels of a head, and G the number of groups of heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .._api.attention import attention
from .._tools.arguments import describe
from ..masks import Causal, Documents, Lengths, Mask, Window

__all__ = [
    "AttentionBias", "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask", "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask", "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask", "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "memory_efficient_attention",
]  # fmt: skip

Options = dict[str, Any]  # keyword arguments of `attention`
Device = torch.device | str
CAUSAL: Mask = Causal()


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0, scale: float | None = None, *, op: object = None,
) -> Tensor:  # fmt: skip
    """Computes attention like `xformers.ops.memory_efficient_attention`.

    Args:
        query: (B, Mq, H, K), (B, Mq, K) for one head, or (B, Mq, G, H, K) for G groups of H heads.
        key: (B, Mk, H, K), like query. In five dims it may have one head for each group, as
            (B, Mk, G, 1, K) or expanded to H heads.
        value: like key, with Kv channels.
        attn_bias: an `AttentionBias`, or a tensor that is added to the scores, broadcastable to
            (B, H, Mq, Mk), (B, Mq, Mk) or (B, G, H, Mq, Mk).
        p: the probability of dropout.
        scale: multiplies the scores. Default 1 / sqrt(K).
        op: the kernels that xFormers would use. It has no effect.

    Returns:
        The output, in the shape of query with Kv channels. A query that may attend to no key has an
        output of zeros.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.ndim not in (3, 4, 5) or x.ndim != query.ndim:
            raise ValueError(
                f"{name}: expected (B, M, K), (B, M, H, K) or (B, M, G, H, K), got {describe(x)}"
            )
    tensor = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
    options: Options = {"bias": _bias_of_heads(tensor, query), "dropout": p, "scale": scale}
    q, k, v = _heads_first(query), _heads_first(key), _heads_first(value)
    if isinstance(attn_bias, AttentionBias):
        out = attn_bias._attend(q, k, v, options)
    elif attn_bias is None or isinstance(attn_bias, Tensor):
        out = attention(q, k, v, **options)
    else:
        expected = "a float tensor or an AttentionBias of regard.compat.xformers"
        raise TypeError(f"attn_bias: expected {expected}, got {describe(attn_bias)}")
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _heads_first(x: Tensor) -> Tensor:
    """Transposes x to (B, heads, length, channels). Heads expanded from one become one head."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4:
        return x.transpose(1, 2)
    # A leaf gets a gradient for each of its expanded heads; other tensors get their sum.
    expanded = x.stride(3) == 0 and not (x.is_leaf and x.requires_grad)
    return (x[:, :, :, 0] if x.shape[3] == 1 or expanded else x.flatten(2, 3)).transpose(1, 2)


def _bias_of_heads(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns the bias as (B, H, queries, keys). Dims of size 1 broadcast."""
    if bias is None:
        return None
    if bias.ndim != query.ndim:
        shape = {3: "(B, Mq, Mk)", 4: "(B, H, Mq, Mk)", 5: "(B, G, H, Mq, Mk)"}[query.ndim]
        raise ValueError(f"attn_bias: expected {shape} for query {tuple(query.shape)}, got {describe(bias)}")
    if query.ndim == 5:
        return bias.expand(-1, *query.shape[2:4], -1, -1).flatten(1, 2)
    return bias[:, None] if query.ndim == 3 else bias


# Biases of whole samples


class AttentionBias:
    """The base class of all values of `attn_bias` except tensors.

    `_window` is a mask that depends on distances only, or None. If `_bottom_right`, the last query
    is aligned to the last key, else the first query to the first key.
    """

    _window: Mask | None = None
    _bottom_right: ClassVar[bool] = False

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        """Returns the bias as a tensor of `shape` (..., queries, keys): 0, or -inf if masked."""
        keep = self._keep(*shape[-2:]).to(device)
        return torch.zeros(tuple(shape), dtype=dtype, device=device).masked_fill(~keep, float("-inf"))

    def to(self, device: Device) -> Self:
        """Returns the bias itself: the mask is made on the device of the call."""
        return self

    def _keep(self, Mq: int, Mk: int) -> Tensor:
        """Returns a bool mask (Mq, Mk), True = may attend."""
        if self._window is None:
            return torch.ones(Mq, Mk, dtype=torch.bool)
        return self._window.to_dense(Mq, Mk, self._offset(Mq, Mk))

    def _offset(self, Mq: int, Mk: int) -> int:
        return Mk - Mq if self._bottom_right else 0

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        offset = self._offset(q.shape[2], k.shape[2])
        return attention(q, k, v, mask=self._window, offset=offset, **options)


class LowerTriangularMask(AttentionBias):
    """A causal mask that aligns the first query to the first key."""

    _window = CAUSAL

    def __init__(self, *, device: Device = "cpu") -> None: ...

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Returns this mask together with a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """A causal mask and a tensor that is added to the scores. Gradients flow to the tensor."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias.to(device, dtype)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """A causal mask that aligns the last query to the last key."""

    _window = CAUSAL
    _bottom_right = True

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Returns a mask that also excludes keys at distances of `window_size` or more."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """A causal mask of at most `_window_size` keys per query, aligned to the bottom right."""

    _window_size: int

    def __post_init__(self) -> None:
        self._window = _causal_window(self._window_size)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A mask that allows keys from `window_left` before the query to `window_right` after it.

    The last query is aligned to the last key.
    """

    window_left: int
    window_right: int
    _bottom_right = True

    def __post_init__(self) -> None:
        self._window = Window(self.window_left, self.window_right)


def _causal_window(window_size: int) -> Window:
    """Returns a window of `window_size` keys, of which the last is at the query's position."""
    if window_size <= 0:
        raise ValueError(f"window_size: expected a number of keys above 0, got {window_size}")
    return Window(window_size - 1, 0)


# Lengths of packed sequences


@dataclass
class _SeqLenInfo:
    """The lengths of sequences that follow one another in a dimension.

    `seqstart_py` has the start of each sequence and the end of the dimension.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device | None = None) -> _SeqLenInfo:
        starts = [0, *accumulate(lengths := list(seqlens))]
        tensor = torch.tensor(starts, dtype=torch.int32, device=device)
        return cls(tensor, max(lengths, default=-1), min(lengths, default=-1), starts)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yields the first index of each sequence and the index after its last."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Splits packed x (1, M, ...) into tensors (batch_sizes[n], length, ...).

        Tensor n has the next `batch_sizes[n]` sequences, which must have equal lengths. By default,
        each tensor has one sequence.
        """
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(f"tensor: expected (1, {self.seqstart_py[-1]}, ...), got {tuple(x.shape)}")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        starts = [self.seqstart_py[n] for n in (0, *accumulate(sizes))]
        parts = x[0].split([b - a for a, b in pairwise(starts)])
        return [part.unflatten(0, (n, len(part) // n)) for n, part in zip(sizes, parts, strict=True)]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """The lengths of sequences that are padded to `padding` tokens each."""

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Device | None = None
    ) -> _PaddedSeqLenInfo:
        lengths = list(seqlens)
        if max(lengths, default=0) > padding:
            raise ValueError(f"kv_seqlen: expected lengths up to kv_padding = {padding}, got {lengths}")
        whole = _SeqLenInfo.from_seqlens([padding] * len(lengths), device=device)
        tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
        return cls(whole.seqstart, max(lengths), min(lengths), whole.seqstart_py, tensor, lengths, padding)

    def intervals(self) -> Iterator[tuple[int, int]]:
        yield from ((a, a + n) for a, n in zip(self.seqstart_py, self.seqlen_py, strict=False))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        raise NotImplementedError("split: padded keys cannot be split")


# Biases of packed sequences


class _PackedBias(AttentionBias):
    """A bias of sequences that are packed into one sample: queries attend to their own sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        self._check_lengths(*shape[-2:])
        return super().materialize(shape, dtype, device)

    def _keep(self, Mq: int, Mk: int) -> Tensor:
        keep = torch.zeros(Mq, Mk, dtype=torch.bool)
        for (a, b), (c, d) in self._sequences():
            keep[a:b, c:d] = super()._keep(b - a, d - c)
        return keep

    def _sequences(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Returns (begin, end) of each sequence's queries and of its keys; `end` is exclusive."""
        return list(zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True))

    def _check_lengths(self, Mq: int, Mk: int) -> None:
        expected = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if (Mq, Mk) != expected:
            raise ValueError(f"attn_bias: expected Mq, Mk = {expected}, as in its lengths, got {(Mq, Mk)}")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        if len(q) != 1 or len(k) != 1:
            name = type(self).__name__
            raise ValueError(f"query, key: expected B = 1 with a {name}, got {len(q)} and {len(k)}")
        self._check_lengths(q.shape[2], k.shape[2])
        window, sequences = self._window, self._sequences()
        # The position of query 0 of the row, if keys of the row have their index as position.
        shifts = {c - a + self._offset(b - a, d - c) for (a, b), (c, d) in sequences}
        if window is None or len(shifts) < 2:
            queries, keys = (_ids(x, q.device) for x in (self.q_seqinfo, self.k_seqinfo))
            mask = Documents(queries, keys) if window is None else Documents(queries, keys) & window
            return attention(q, k, v, mask=mask, offset=max(shifts, default=0), **options)
        if isinstance(self.k_seqinfo, _PaddedSeqLenInfo) and len({b - a for (a, b), _ in sequences}) == 1:
            return self._attend_padded(q, k, v, window, options)
        return self._attend_one_by_one(q, k, v, window, options)

    def _attend_padded(self, q: Tensor, k: Tensor, v: Tensor, window: Mask, options: Options) -> Tensor:
        """Computes attention as a padded batch. All sequences have the same number of queries."""
        samples = [(d - c, self._offset(b - a, d - c)) for (a, b), (c, d) in self._sequences()]
        lengths, offsets = torch.tensor(samples, device=q.device).unbind(1)
        q, k, v = (x[0].unflatten(1, (len(samples), -1)).transpose(0, 1) for x in (q, k, v))
        out = attention(q, k, v, mask=Lengths(lengths) & window, offset=offsets, **options)
        return out.transpose(0, 1).flatten(1, 2)[None]

    def _attend_one_by_one(self, q: Tensor, k: Tensor, v: Tensor, window: Mask, options: Options) -> Tensor:
        """Computes attention with one call for each sequence."""
        sequences = self._sequences()
        queries = q.split([b - a for (a, b), _ in sequences], 2)
        spaces = [b - a for a, b in pairwise(self.k_seqinfo.seqstart_py)]
        keys, values = k.split(spaces, 2), v.split(spaces, 2)
        outs = []
        for n, ((a, b), (c, d)) in enumerate(sequences):
            qkv = queries[n], keys[n][:, :, : d - c], values[n][:, :, : d - c]
            offset = self._offset(b - a, d - c)
            outs.append(attention(*qkv, mask=window, offset=offset, **options))
        return torch.cat(outs, 2)


def _ids(info: _SeqLenInfo, device: torch.device) -> Tensor:
    """Returns the index of each token's sequence, and -1 for padding."""
    starts = zip(info.intervals(), info.seqstart_py[1:], strict=True)
    sizes = [size for (start, stop), end in starts for size in (stop - start, end - stop)]
    ids = [n // 2 if n % 2 == 0 else -1 for n in range(len(sizes))]
    total = info.seqstart_py[-1]
    return torch.repeat_interleave(
        torch.tensor(ids, device=device), torch.tensor(sizes, device=device), output_size=total
    )


@dataclass
class BlockDiagonalMask(_PackedBias):
    """A mask for packed sequences: each query attends to all keys of its sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device | None = None
    ) -> Self:
        """Returns the bias of sequences with these numbers of queries and of keys."""
        queries = keys = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is not None and list(q_seqlen) != list(kv_seqlen):
            _check_counts(q_seqlen, kv_seqlen)
            keys = _SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        return cls(queries, keys)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """Packs tensors (B_i, L_i, ...) into one tensor (1, sum of B_i * L_i, ...).

        Returns the bias and the packed tensor.
        """
        bias, packed, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return bias, packed

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """Packs lists of queries, keys and values. Returns the bias and the packed tensors."""
        queries, keys = ([n for x in xs for n in [x.shape[1]] * len(x)] for xs in (tensors_q, tensors_k))
        bias = cls.from_seqlens(queries, keys)
        bias._batch_sizes = [len(x) for x in tensors_q]
        return bias, _pack(tensors_q), _pack(tensors_k), None if tensors_v is None else _pack(tensors_v)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """Splits (1, sum of lengths, ...) into the tensors that were packed as queries."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """Splits (1, sum of lengths, ...) into the tensors that were packed as keys."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Splits (1, sum of lengths, ...) into the tensors that were packed.

        Raises ValueError if queries and keys differ in length.
        """
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("split: queries and keys differ in length; call split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        infos = self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        return BlockDiagonalCausalLocalAttentionMask(*infos, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        infos = self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(*infos, window_size)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


def _check_counts(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(f"kv_seqlen: expected {len(q_seqlen)} lengths as in q_seqlen, got {len(kv_seqlen)}")


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """A causal mask for packed sequences. Aligns the first query of each to its first key."""

    _window = CAUSAL


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """A causal mask for packed sequences. Aligns the last query of each to its last key."""

    _window = CAUSAL
    _bottom_right = True

    def __post_init__(self) -> None:
        for n, ((a, b), (c, d)) in enumerate(self._sequences()):
            if d - c < b - a:
                raise ValueError(
                    f"sequence {n}: expected at least {b - a} keys, as many as queries, got {d - c}"
                )


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """A causal mask for packed sequences: the last `_window_size` keys up to the query."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        self._window = _causal_window(self._window_size)
        for (a, b), (c, d) in self._sequences():
            if b - a - self._window_size >= d - c:
                raise RuntimeError(
                    f"window_size: expected a key for each query, got {b - a} queries, {d - c} keys and "
                    f"a window of {self._window_size}"
                )


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """A causal mask for packed sequences: the last `_window_size` keys up to the query.

    The last query of a sequence is aligned to its last key.
    """

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._window = _causal_window(self._window_size)


@dataclass
class BlockDiagonalPaddedKeysMask(_PackedBias):
    """A mask for packed queries, and for keys padded to `kv_padding` tokens per sequence.

    Each query attends to all keys of its sequence, but not to the padding.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int],
        causal_diagonal: object = None, *, device: Device | None = None,
    ) -> Self:  # fmt: skip
        """Returns the bias of sequences with these lengths. `causal_diagonal` has no effect."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))


def _padded(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Device | None = None
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    _check_counts(q_seqlen, kv_seqlen)
    keys = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
    return _SeqLenInfo.from_seqlens(q_seqlen, device=device), keys


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Like `BlockDiagonalPaddedKeysMask`, but causal.

    The last query of a sequence is aligned to its last key in use.
    """

    causal_diagonal: object = None
    _window = CAUSAL
    _bottom_right = True


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Like `BlockDiagonalPaddedKeysMask`, with a window on both sides of the query.

    The last query of a sequence is aligned to its last key in use.
    """

    window_left: int
    window_right: int
    _bottom_right = True

    def __post_init__(self) -> None:
        self._window = Window(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int,
        window_right: int,
    ) -> Self:  # fmt: skip
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Like `BlockDiagonalPaddedKeysMask`, causal, with at most `_window_size` keys per query.

    The last query of a sequence is aligned to its last key in use.
    """

    _window_size: int
    _bottom_right = True

    def __post_init__(self) -> None:
        self._window = _causal_window(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_size)
