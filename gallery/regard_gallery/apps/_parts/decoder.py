"""A causal language model of today's parts: rotary positions, grouped heads, gated layers."""

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
    """Tokens (B, L) -> scores of each token as the next one, (B, L, vocabulary).

    With `near` every second layer, from the first, sees only that many tokens before its own. A new model's
    layers add nothing yet, which makes its first steps faster.
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
        """With caches, `tokens` are those that are new."""
        scores: Tensor = self.stack(self.words(tokens), caches=caches) @ self.words.weight.T
        return scores


@torch.inference_mode()
def write(model: Decoder, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """New tokens behind the prompt, which is read once into a cache of each layer."""
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.stack.new_caches(1, len(prompt) + sampling.max_tokens)
    new = list(prompt)
    for _ in range(sampling.max_tokens):
        scores = model(torch.tensor([new]), caches)[0, -1]
        new = [sampling.choose(scores, generator)]
        yield new[0]
