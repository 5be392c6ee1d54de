"""A causal language model with rotary positions, grouped-query attention and SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from regard.masks import Causal, Window
from regard.nn import Attention, Block, CacheLike, Stack, SwiGLU
from regard.positions import Rotary

from ...models.generate import Sampling


class Decoder(nn.Module):
    """Maps tokens (B, L) to next-token logits (B, L, vocabulary).

    With `near`, queries in layers 0, 2, ... attend only to their own token and the `near` tokens
    before it. The output projections are initialised to zero, which speeds up the first training
    steps.
    """

    def __init__(self, vocabulary: int, *, layers: int = 4, near: int | None = None) -> None:
        super().__init__()
        d_model, heads = 128, 4
        self.words = nn.Embedding(vocabulary, d_model)
        nn.init.normal_(self.words.weight, std=0.02)
        masks = [Causal() if near is None or i % 2 else Window(near, 0) for i in range(layers)]
        position = Rotary(d_model // heads)
        attention = partial(Attention, d_model, heads, kv_heads=2, bias=False, position=position)
        blocks = (Block(attention(mask=mask), SwiGLU(d_model)) for mask in masks)
        self.stack = Stack(blocks, nn.LayerNorm(d_model))
        for name, weight in self.stack.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, caches: Sequence[CacheLike] | None = None) -> Tensor:
        """Returns logits (B, L, vocabulary). With caches, `tokens` holds only the new tokens."""
        scores: Tensor = self.stack(self.words(tokens), caches=caches) @ self.words.weight.T
        return scores


@torch.inference_mode()
def write(model: Decoder, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Yields the tokens that the model generates after `prompt`. Uses one cache per layer."""
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.stack.new_caches(1, len(prompt) + sampling.max_tokens)
    new = list(prompt)
    for _ in range(sampling.max_tokens):
        scores = model(torch.tensor([new]), caches)[0, -1]
        new = [sampling.choose(scores, generator)]
        yield new[0]
