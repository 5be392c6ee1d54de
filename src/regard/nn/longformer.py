"""Longformer: a window for every token, and global tokens that see all and are seen by all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from .._api.attention import attention
from .._api.merge import merge
from .._call.spec import QKV
from .._tools.arguments import count, describe, readable, tensor_of
from ..masks import Dense, Dilated, Documents, Global, Lengths, Mask, Not, PerHead, Window
from ..masks._both import both
from ._lengths import checked_lengths
from ._projected import Projected
from ._sizes import split_heads

Tokens = Tensor | Sequence[int]


class Chosen(NamedTuple):
    """The global tokens of a call."""

    at: Tensor  # (B, n) positions, -1 where a sample has fewer
    marks: Tensor  # (B, L) bool

    @property
    def real(self) -> Tensor:
        """Marks the slots that hold a token, (B, n)."""
        return self.at >= 0

    def rows(self, x: Tensor) -> Tensor:
        """Gathers the global tokens: (B, H, L, D) -> (B, H, n, D)."""
        index = self.at.clamp(min=0)[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

    def put(self, rows: Tensor, x: Tensor) -> Tensor:
        """Writes the rows (B, H, n, D) into x (B, H, L, D)."""
        sample, slot = self.real.nonzero(as_tuple=True)
        places = sample, self.at[sample, slot]
        tokens, rows = x.transpose(1, 2), rows.transpose(1, 2)[sample, slot]
        # Backward keeps x; without it nobody else has seen it.
        put = tokens.index_put if torch.is_grad_enabled() else tokens.index_put_
        return put(places, rows.to(x.dtype)).transpose(1, 2)  # with autocast they may differ


class LongformerAttention(Projected):
    """Each token attends its neighbours and the global tokens; these attend all, by their own projections.

    Exact over that pattern, in time and memory O(L * (window + globals)).

    Args:
        d_model: the width of the tokens.
        heads: the number of heads H.
        window: neighbours on each side, or (left, right). Hugging Face's `attention_window` is twice that.
        dilation: distances are multiples of it: an int, or one for each head. A head with dilation d reaches
            `window * d` tokens far and sees as many.
        head_dim: D. Default d_model / heads.
        bias: whether the projections of queries, keys and values have biases.
        out: whether there is a last projection. Hugging Face's `LongformerSelfAttention` has none, and with
            `out=False` its state_dict fits.
        dropout: of the weights, in training.

    Example:
        >>> attend = regard.nn.LongformerAttention(512, 8, window=256)
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
            nn.Linear(d_model, heads * self.head_dim, bias, device, dtype) for _ in range(3)
        )
        self.window, self.dilation = _sides(window), _steps(dilation, heads)
        self.mask = _local_mask(self.window, self.dilation)

    def forward(
        self, x: Tensor, *, global_tokens: Tokens | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Attends from x (B, L, d_model) to itself.

        Args:
            x: (B, L, d_model).
            global_tokens: bool (B, L) or (L,) that marks them, or their positions (n,) or (B, n), padded with
                -1. They may differ from sample to sample and from call to call.
            lengths: (B,): the first n tokens of each sample are real, the rest is padding.
        """
        self._check(x)
        qkv = self._projected(x)
        chosen, padding = _chosen_and_padding(qkv[0], global_tokens, lengths)
        local = self._local(qkv, chosen, padding)
        return self._finished(local if chosen is None else chosen.put(self._rows(x, chosen, padding), local))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, global_tokens: Tokens | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends without projections; global tokens have the same queries, keys and values as others.

        q, k, v and the result are (B, H, L, D).
        """
        self._check_heads(q, k, v)
        chosen, padding = _chosen_and_padding(q, global_tokens, lengths)
        local = self._local((q, k, v), chosen, padding)
        if chosen is None:
            return local
        return chosen.put(attention(chosen.rows(q), k, v, mask=padding, dropout=self._dropped()), local)

    def _local(self, qkv: QKV, chosen: Chosen | None, padding: Mask | None) -> Tensor:
        """Attends to windows and global keys: (B, H, L, D).

        Dilated windows are dense in their residue classes, but with global keys they are not: two calls.
        """
        dropout = self._dropped()
        if chosen is None:
            return attention(*qkv, mask=both(self.mask, padding), dropout=dropout)
        marks = chosen.marks.long()
        seen_by_all = Documents(torch.ones_like(marks[:1]), marks)
        if max(self.dilation) == 1:
            return attention(*qkv, mask=both(self.mask | seen_by_all, padding), dropout=dropout)
        q, k, v = qkv
        windows = both(self.mask & Not(seen_by_all), padding)  # compilers do not follow ~
        near = attention(q, k, v, mask=windows, dropout=dropout, return_lse=True)
        real = Dense(chosen.real[:, None, None])
        far = attention(q, chosen.rows(k), chosen.rows(v), mask=real, dropout=dropout, return_lse=True)
        return merge(*zip(near, far, strict=True))[0]

    def _rows(self, x: Tensor, chosen: Chosen, padding: Mask | None) -> Tensor:
        """Attends from the global tokens to all tokens by their own projections: (B, H, n, D)."""
        q = split_heads(self.query_global(chosen.rows(x[:, None])[:, 0]), self.heads)
        if self._absorbs(q.shape[2]):
            return self._absorbed(q, x[:, None], padding)
        k, v = split_heads(self.key_global(x), self.heads), split_heads(self.value_global(x), self.heads)
        return attention(q, k, v, mask=padding, dropout=self._dropped())

    def _absorbs(self, n: int) -> bool:
        """Returns whether n global tokens are too few to be worth keys and values of all tokens.

        Multiplications for each token and head: 2 n d_model, or 2 d_model D to make them and 2 n D to use
        them. In training they are made, because dropout and hooks of the projections speak of them.
        """
        plain = type(self.key_global) is type(self.value_global) is nn.Linear
        fewer = n * (self.d_model - self.head_dim) < self.d_model * self.head_dim
        return plain and fewer and not self.training

    def _absorbed(self, q: Tensor, x: Tensor, padding: Mask | None) -> Tensor:
        """Attends from q (B, H, n, D) to x (B, 1, L, d_model): (q W_k).x is q.(W_k x), W_v follows the sum.

        The bias of keys adds the same to all scores of a row, that of values, by weights that sum to 1, once.
        """
        W_k, W_v = (p.weight.unflatten(0, (self.heads, -1)) for p in (self.key_global, self.value_global))
        found: Tensor = attention(q @ W_k, x, x, mask=padding, scale=self.head_dim**-0.5) @ W_v.mT
        if self.value_global.bias is not None:
            found = found + self.value_global.bias.unflatten(0, (self.heads, 1, -1))
        return found


def _local_mask(window: tuple[int, int], dilation: tuple[int, ...]) -> Mask:
    if len(set(dilation)) == 1:
        return _band(window, dilation[0])
    return PerHead([_band(window, step) for step in dilation])


def _band(window: tuple[int, int], step: int) -> Mask:
    left, right = window
    reach = Window(left * step, right * step)
    return reach if step == 1 else reach & Dilated(step)


# Arguments


def _sides(window: int | tuple[int, int]) -> tuple[int, int]:
    if not isinstance(window, tuple):
        return count("window", window), count("window", window)
    if len(window) != 2:
        raise ValueError(f"window: expected an int or (left, right), got {window}")
    return count("window[0]", window[0]), count("window[1]", window[1])


def _steps(dilation: int | Sequence[int], heads: int) -> tuple[int, ...]:
    if not isinstance(dilation, Sequence):
        return (count("dilation", dilation, 1),) * heads
    if len(dilation) != heads:
        raise ValueError(f"dilation: expected an int or one for each of heads = {heads}, got {dilation}")
    return tuple(count(f"dilation[{head}]", step, 1) for head, step in enumerate(dilation))


def _chosen_and_padding(
    x: Tensor, tokens: Tokens | None, lengths: Tensor | None
) -> tuple[Chosen | None, Mask | None]:
    """Checks the options of a call with x (B, H, L, D)."""
    lengths = checked_lengths(lengths, x)
    return _chosen(tokens, x, lengths), None if lengths is None else Lengths(lengths)


def _chosen(tokens: Tokens | None, x: Tensor, lengths: Tensor | None) -> Chosen | None:
    """Finds the global tokens of x (B, H, L, D). Returns None if there are none."""
    if tokens is None:
        return None
    B, L = len(x), x.shape[2]
    at = Global(tokens).tokens.to(x.device)
    _check_tokens(tokens, L)
    if at.dim() > 2 or (at.dim() == 2 and at.shape[0] not in (1, B)):
        shape = f"(L = {L},), (B = {B}, L), or positions (n,) or (B, n)"
        raise ValueError(f"global_tokens: expected {shape}, got {describe(at)}")
    at = at.expand(B, -1)
    if not at.shape[1]:
        return None
    _check_inside(at, L, lengths)
    places = torch.where(at < 0, L, at)
    marks = torch.zeros(B, L + 1, dtype=torch.bool, device=x.device).scatter(1, places, True)
    return Chosen(at, marks[:, :L])


def _check_tokens(tokens: Tokens, L: int) -> None:
    """Raises for marks of the wrong length, and for marks of 0 and 1, which read as the positions 0 and 1."""
    given = tensor_of("global_tokens", tokens)
    if given.dtype == torch.bool:
        if given.shape[-1] != L:
            raise ValueError(f"global_tokens: expected marks of all L = {L} tokens, got {describe(given)}")
    elif L > 2 and given.shape[-1] == L and readable(given) and bool(((given == 0) | (given == 1)).all()):
        found = f"{describe(given)} of 0 and 1; give `mask.bool()` if 1 means global"
        raise ValueError(f"global_tokens: expected bool marks or positions, got {found}")


def _check_inside(at: Tensor, L: int, lengths: Tensor | None) -> None:
    ends = torch.full((at.shape[0],), L) if lengths is None else lengths
    if not readable(at) or not readable(ends):
        return
    beyond = (at >= ends.to(at.device)[:, None]).nonzero()
    if len(beyond):
        sample, slot = beyond[0].tolist()
        below, place = f"the length {int(ends[sample])} of sample {sample}", int(at[sample, slot])
        raise ValueError(f"global_tokens: expected positions below {below}, got {place}")
