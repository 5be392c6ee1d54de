"""An encoder-decoder for translation: one embedding for both languages, rotary places, cross-attention."""

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
    """Tokens (B, L), of which the first n of each are real."""

    tokens: Tensor
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """(B, L)"""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


def sentences(tokens: list[list[int]]) -> Sentences:
    made = [torch.tensor(own) for own in tokens]
    lengths = torch.tensor([len(own) for own in made])
    return Sentences(nn.utils.rnn.pad_sequence(made, batch_first=True), lengths)


def _writer(d_model: int, heads: int, *, hidden: int | None, dropout: float, position: Rotary) -> Block:
    own = Attention(d_model, heads, mask=Causal(), position=position, dropout=dropout)
    cross = CrossAttention(d_model, heads, dropout=dropout)
    return Block(own, FeedForward(d_model, hidden), cross=cross)


class Translator(nn.Module):
    """Source and target -> scores of the token after each real token of the target, (total, words).

    With `packed` both are read without their padding, end to end; the result is the same.
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
        return self.score(self._end_to_end(source, target) if self.packed else self.states(source, target))

    def states(self, source: Sentences, target: Sentences) -> Tensor:
        """(total, d_model): of the real tokens of the target. What is behind them, causal attention omits."""
        memory = self.read(source)
        context = Lengths(source.lengths)
        out: Tensor = self.stacks.decoder(self.embed(target.tokens), memory, context_mask=context)
        return out[target.real]

    def _end_to_end(self, source: Sentences, target: Sentences) -> Tensor:
        """The same without padding."""
        theirs, own = packing.cu_seqlens(source.lengths), packing.cu_seqlens(target.lengths)
        memory = self.stacks.encoder(self.embed(source.tokens[source.real]), cu_seqlens=theirs)
        x = self.embed(target.tokens[target.real])
        out: Tensor = self.stacks.decoder(x, memory, cu_seqlens=own, context_cu_seqlens=theirs)
        return out

    def read(self, source: Sentences) -> Tensor:
        """(B, Ls, d_model)"""
        out: Tensor = self.stacks.encoder(self.embed(source.tokens), lengths=source.lengths)
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens) * self.words.embedding_dim**0.5
        return x

    def score(self, states: Tensor) -> Tensor:
        """(..., d_model) -> (..., words), by the words' own vectors."""
        return states @ self.words.weight.T

    def writing(self, source: Sentences, width: int) -> Step:
        """Steps of `width` beams for each sentence: it is read once, and what was written is cached."""
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
        """The best translation of each sentence that beam search finds; call `eval()` first."""
        return beam_search(
            self.writing(source, width), len(source.lengths), start=START, end=END, width=width,
            longest=longest, penalty=penalty,
        )  # fmt: skip
