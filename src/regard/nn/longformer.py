"""Longformer: attention within a sliding window, and global tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import Device

from .._api.attention import attention
from .._api.merge import merge
from .._api.projection import Linear
from .._call.spec import QKV
from .._tools.arguments import count, describe, readable, tensor_of
from ..masks import Dense, Documents, Global, Lengths, Mask, Not, PerHead, longformer
from ..masks._both import both
from ..masks._patterns import distances
from ._lengths import checked_lengths
from ._padding import finite_padding
from ._projected import Projected
from ._sizes import split_heads

Tokens = Tensor | Sequence[int]


class GlobalTokens(NamedTuple):
    """The global tokens of a call. n is the largest number of global tokens of a sample."""

    positions: Tensor  # (B, n), padded with -1
    marks: Tensor  # (B, L) bool, True = global

    @property
    def real(self) -> Tensor:
        """A bool mask (B, n) that is False for the padding of `positions`."""
        return self.positions >= 0

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows of x at `positions`: (B, H, L, D) -> (B, H, n, D). -1 gives row 0."""
        index = self.positions.clamp(min=0)[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

    def scatter(self, rows: Tensor, x: Tensor) -> Tensor:
        """Returns x (B, H, L, D) with the global tokens' rows replaced by `rows` (B, H, n, D)."""
        sample, column = self.real.nonzero(as_tuple=True)
        index = sample, self.positions[sample, column]
        tokens, rows = x.transpose(1, 2), rows.transpose(1, 2)[sample, column]
        # Without autograd, x is overwritten in place: no backward needs the old x, and no caller uses it.
        put = tokens.index_put if torch.is_grad_enabled() else tokens.index_put_
        return put(index, rows.to(x.dtype)).transpose(1, 2)  # autocast may have changed the dtype of rows


class LongformerAttention(Projected):
    """Longformer self-attention: (B, L, d_model) -> (B, L, d_model).

    Each token attends to a window of neighbours and to the global tokens. Global tokens attend to
    all tokens, with separate projections. Time and memory are O(L * (window + global tokens)).

    Args:
        d_model: width of the input and of the output.
        heads: number of heads H.
        window: number of keys in the window, the token's own included: an odd number, centred on
            the token. Or distances (left, right). Transformers' `attention_window=512` is
            (256, 256).
        dilation: step between neighbours: an int, or one int per head. A dilation d does not
            change the number of neighbours. The farthest are left * d and right * d tokens away.
        head_dim: D, the width of a head. Default: d_model / heads.
        bias: if True, the projections of queries, keys and values have biases.
        out: if True, the module has an output projection. With `out=False` the module loads the
            state_dict of Hugging Face's `LongformerSelfAttention`.
        dropout: dropout probability of the attention weights in training.

    Example:
        >>> attend = regard.nn.LongformerAttention(512, 8, window=(256, 256))
        >>> attend(torch.randn(1, 4096, 512), global_tokens=[0]).shape
        torch.Size([1, 4096, 512])
    """

    _shown = ("heads", "head_dim", "window", "dilation", "dropout")

    def __init__(
        self, d_model: int, heads: int, *, window: int | tuple[int, int], dilation: int | Sequence[int] = 1,
        head_dim: int | None = None, bias: bool = True, out: bool = True, dropout: float = 0.0,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, heads, head_dim, bias, out, dropout, device, dtype)
        self.query_global, self.key_global, self.value_global = (
            Linear(d_model, heads * self.head_dim, bias, device, dtype) for _ in range(3)
        )
        self.window, self.dilation = distances("window", window), _steps(dilation, heads)
        self.mask = _local_mask(self.window, self.dilation)

    def forward(
        self, x: Tensor, *, global_tokens: Tokens | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Computes self-attention over x. The output has x's shape.

        Args:
            x: (B, L, d_model).
            global_tokens: a bool mask (B, L) or (L,), or positions (B, n) or (n,) padded with -1.
            lengths: (B,), the number of real tokens of each sample. The rest is padding.
        """
        self._check(x)
        x = finite_padding(x, lengths)
        qkv = self._projected(x)
        chosen, padding = _globals_and_padding(qkv[0], global_tokens, lengths)
        out = self._local(qkv, chosen, padding)
        return self._output(out if chosen is None else chosen.scatter(self._global(x, chosen, padding), out))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, global_tokens: Tokens | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention without projections: q, k, v (B, H, L, D) -> (B, H, L, D).

        There are no separate projections here: rows of global tokens come from the same q, k and
        v as all other rows.
        """
        self._check_heads(q, k, v)
        chosen, padding = _globals_and_padding(q, global_tokens, lengths)
        out = self._local((q, k, v), chosen, padding)
        if chosen is None:
            return out
        rows = attention(chosen.gather(q), k, v, mask=padding, dropout=self._call_dropout())
        return chosen.scatter(rows, out)

    def _local(self, qkv: QKV, chosen: GlobalTokens | None, padding: Mask | None) -> Tensor:
        """Returns the attention (B, H, L, D) of all tokens to their windows and to the global keys.

        With dilation, one call attends to the windows, another to the global keys, and the results
        are merged. The reason: a dilated window is contiguous among the positions that are equal
        modulo the dilation, and the kernels exploit this. They could not if the mask also
        contained the global keys.
        """
        dropout = self._call_dropout()
        if chosen is None:
            return attention(*qkv, mask=both(self.mask, padding), dropout=dropout)
        marks = chosen.marks.long()
        global_keys = Documents(torch.ones_like(marks[:1]), marks)
        if max(self.dilation) == 1:
            return attention(*qkv, mask=both(self.mask | global_keys, padding), dropout=dropout)
        q, k, v = qkv
        windows = both(self.mask & Not(global_keys), padding)  # torch.compile does not trace ~
        near = attention(q, k, v, mask=windows, dropout=dropout, return_lse=True)
        real = Dense(chosen.real[:, None, None])
        far = attention(q, chosen.gather(k), chosen.gather(v), mask=real, dropout=dropout, return_lse=True)
        return merge(*zip(near, far, strict=True))[0]

    def _global(self, x: Tensor, chosen: GlobalTokens, padding: Mask | None) -> Tensor:
        """Returns the attention (B, H, n, D) of global tokens to all tokens of x (B, L, d_model).

        Uses the separate projections of global tokens.
        """
        q = split_heads(self.query_global(chosen.gather(x[:, None])[:, 0]), self.heads)
        if self._absorbs(q.shape[2]):
            return self._absorbed(q, x[:, None], padding)
        k, v = split_heads(self.key_global(x), self.heads), split_heads(self.value_global(x), self.heads)
        return attention(q, k, v, mask=padding, dropout=self._call_dropout())

    def _absorbs(self, n: int) -> bool:
        """Returns whether to use the absorbed form (`_absorbed`), which needs no keys and values.

        In evaluation, it is used if the projections are plain `Linear` layers and it is cheaper
        for n global tokens. Per token and head, the absorbed form takes 2 * n * d_model
        multiplications; the usual form takes 2 * d_model * D for keys and values and 2 * n * D for
        attention. Training always uses the usual form, because `_absorbed` has no dropout and does
        not run hooks on the projections.
        """
        is_linear = type(self.key_global) is type(self.value_global) is Linear
        is_cheaper = n * (self.d_model - self.head_dim) < self.d_model * self.head_dim
        return is_linear and is_cheaper and not self.training

    def _absorbed(self, q: Tensor, x: Tensor, padding: Mask | None) -> Tensor:
        """Computes attention from q (B, H, n, D) to x (B, 1, L, d_model): (B, H, n, D).

        Keys and values are not computed. Since q . (W_k x) = (q W_k) . x, the queries are
        multiplied by W_k and the output by W_v. The key bias is omitted: it adds a constant to all
        scores of a row, which softmax ignores. The weights sum to 1, so the value bias is added
        once.
        """
        W_k, W_v = (p.weight.unflatten(0, (self.heads, -1)) for p in (self.key_global, self.value_global))
        out: Tensor = attention(q @ W_k, x, x, mask=padding, scale=self.head_dim**-0.5) @ W_v.mT
        if self.value_global.bias is not None:
            out = out + self.value_global.bias.unflatten(0, (self.heads, 1, -1))
        return out


def _local_mask(window: tuple[int, int], dilation: tuple[int, ...]) -> Mask:
    if len(set(dilation)) == 1:
        return longformer(window, dilation=dilation[0])
    return PerHead([longformer(window, dilation=step) for step in dilation])


# Arguments


def _steps(dilation: int | Sequence[int], heads: int) -> tuple[int, ...]:
    if not isinstance(dilation, Sequence):
        return (count("dilation", dilation, 1),) * heads
    if len(dilation) != heads:
        raise ValueError(f"dilation: expected an int or one for each of heads = {heads}, got {dilation}")
    return tuple(count(f"dilation[{head}]", step, 1) for head, step in enumerate(dilation))


def _globals_and_padding(
    x: Tensor, tokens: Tokens | None, lengths: Tensor | None
) -> tuple[GlobalTokens | None, Mask | None]:
    """Returns the global tokens and the padding mask of a call with x (B, H, L, D).

    Raises if the options are invalid.
    """
    lengths = checked_lengths(lengths, x)
    return _global_tokens(tokens, x, lengths), None if lengths is None else Lengths(lengths)


def _global_tokens(tokens: Tokens | None, x: Tensor, lengths: Tensor | None) -> GlobalTokens | None:
    """Returns the `global_tokens` argument of a call with x (B, H, L, D) as `GlobalTokens`.

    Returns None if no token is global.
    """
    if tokens is None:
        return None
    B, L = len(x), x.shape[2]
    positions = Global(tokens).tokens.to(x.device)
    _check_tokens(tokens, L)
    if positions.dim() > 2 or (positions.dim() == 2 and positions.shape[0] not in (1, B)):
        shape = f"(L = {L},), (B = {B}, L), or positions (n,) or (B, n)"
        raise ValueError(f"global_tokens: expected {shape}, got {describe(positions)}")
    positions = positions.expand(B, -1)
    if not positions.shape[1]:
        return None
    _check_inside(positions, L, lengths)
    columns = torch.where(positions < 0, L, positions)  # padding (-1) marks column L, which is cut off
    marks = torch.zeros(B, L + 1, dtype=torch.bool, device=x.device).scatter(1, columns, True)
    return GlobalTokens(positions, marks[:, :L])


def _check_tokens(tokens: Tokens, L: int) -> None:
    """Raises ValueError if the last dim of a bool mask is not L, or if L integers are all 0 or 1.

    Such integers are probably meant as a mask, but would be read as positions.
    """
    x = tensor_of("global_tokens", tokens)
    if x.dtype == torch.bool:
        if x.shape[-1] != L:
            raise ValueError(f"global_tokens: expected marks of all L = {L} tokens, got {describe(x)}")
    elif L > 2 and x.shape[-1] == L and readable(x) and bool(((x == 0) | (x == 1)).all()):
        got = f"{describe(x)} of 0 and 1; pass `mask.bool()` if 1 means global"
        raise ValueError(f"global_tokens: expected bool marks or positions, got {got}")


def _check_inside(positions: Tensor, L: int, lengths: Tensor | None) -> None:
    ends = torch.full((positions.shape[0],), L) if lengths is None else lengths
    if not readable(positions) or not readable(ends):
        return
    beyond = (positions >= ends.to(positions.device)[:, None]).nonzero()
    if len(beyond):
        sample, column = beyond[0].tolist()
        below, position = f"the length {int(ends[sample])} of sample {sample}", int(positions[sample, column])
        raise ValueError(f"global_tokens: expected positions below {below}, got {position}")
