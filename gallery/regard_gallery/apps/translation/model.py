"""An encoder-decoder with rotary positions. Both languages share one token embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import packing
from regard.masks import Causal, Lengths
from regard.nn import Attention, Block, CrossAttention, EncoderBlock, EncoderDecoder, FeedForward
from regard.positions import Rotary

from .._parts.blocks import Blocks
from .beam import Step, Written, beam_search

START, END = 0, 1
BLOCKS = Blocks(128, dropout=0.1)


class Sentences(NamedTuple):
    """A batch of sentences: padded tokens (B, L) and lengths (B,)."""

    tokens: Tensor
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """A bool tensor (B, L) that is True for tokens and False for padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


def sentences(tokens: list[list[int]]) -> Sentences:
    padded = nn.utils.rnn.pad_sequence([*map(torch.tensor, tokens)], batch_first=True)
    return Sentences(padded, torch.tensor([*map(len, tokens)]))


def _writer(d_model: int, heads: int, *, hidden: int | None, dropout: float, position: Rotary) -> Block:
    attention = Attention(d_model, heads, mask=Causal(), position=position, dropout=dropout)
    cross = CrossAttention(d_model, heads=heads, dropout=dropout)
    return Block(attention, FeedForward(d_model, hidden), cross=cross)


class Translator(nn.Module):
    """Maps source and target sentences to next-token logits (total, words).

    `total` is the number of target tokens without padding, `words` the size of the vocabulary. If
    the attribute `packed` is True, padding is removed before the blocks, which does not change the
    result.
    """

    def __init__(self, words: int, blocks: Blocks = BLOCKS) -> None:
        super().__init__()
        self.packed = True
        self.words = nn.Embedding(words, blocks.d_model)
        nn.init.normal_(self.words.weight, std=blocks.d_model**-0.5)
        position = Rotary(blocks.d_model // blocks.heads)
        encoder, decoder = (blocks.stack(block, position=position) for block in (EncoderBlock, _writer))
        self.stacks = EncoderDecoder(encoder, decoder)

    def forward(self, source: Sentences, target: Sentences) -> Tensor:
        return self.score((self._packed_states if self.packed else self.states)(source, target))

    def states(self, source: Sentences, target: Sentences) -> Tensor:
        """Returns the decoder's states (total, d_model) of the target tokens without padding.

        Self-attention of the target needs no padding mask: it is causal, and padding comes last.
        """
        memory = self.read(source)
        context = Lengths(source.lengths)
        out: Tensor = self.stacks.decoder(self.embed(target.tokens), memory, context_mask=context)
        return out[target.real]

    def _packed_states(self, source: Sentences, target: Sentences) -> Tensor:
        """Returns the same as `states`, computed on packed sequences."""
        context, cu_seqlens = packing.cu_seqlens(source.lengths), packing.cu_seqlens(target.lengths)
        memory = self.stacks.encoder(self.embed(source.tokens[source.real]), cu_seqlens=context)
        x = self.embed(target.tokens[target.real])
        out: Tensor = self.stacks.decoder(x, memory, cu_seqlens=cu_seqlens, context_cu_seqlens=context)
        return out

    def read(self, source: Sentences) -> Tensor:
        """Returns the encoder's states (B, L, d_model) of padded source sentences."""
        out: Tensor = self.stacks.encoder(self.embed(source.tokens), lengths=source.lengths)
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens) * self.words.embedding_dim**0.5
        return x

    def score(self, states: Tensor) -> Tensor:
        """Maps states (..., d_model) to logits (..., words), with the embeddings as weights."""
        return states @ self.words.weight.T

    def writing(self, source: Sentences, width: int) -> Step:
        """Returns the function `step` for `beam_search`.

        The source is encoded once, here. The keys and values of cross-attention are cached.
        """
        memory = self.stacks.decoder.remember(self.read(source).repeat_interleave(width, 0))
        context = Lengths(source.lengths.repeat_interleave(width))
        caches = self.stacks.decoder.new_caches(len(context.n))

        def step(tokens: Tensor, parents: Tensor) -> Tensor:
            for cache in caches:
                cache.reorder(parents)  # type: ignore[attr-defined]
            x = self.embed(tokens[:, None])
            states = self.stacks.decoder(x, memory, caches=caches, context_mask=context)
            return F.log_softmax(self.score(states[:, 0]), -1)

        return step

    def translate(self, source: Sentences, width: int, longest: int, penalty: float = 0.0) -> list[Written]:
        """Returns the best translation of each sentence by beam search. Call `eval()` first."""
        return beam_search(
            self.writing(source, width), len(source.lengths), start=START, end=END, width=width,
            longest=longest, penalty=penalty,
        )  # fmt: skip
