"""Small random Hugging Face Transformers models, and inputs for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import regard.hf

hf.utils.logging.set_verbosity_error()
regard.hf.register()

VOCABULARY, LENGTH = 97, 23
WIDE = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "max_position_embeddings": 512}
DECODER = {
    **WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "head_dim": 8}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "head_dim": 8, "sliding_window": 7}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**DECODER, **MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, **MIXED, "query_pre_attn_scalar": 8}),
    "gemma4": (
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        {**DECODER, **MIXED, "num_hidden_layers": 4, "layer_types": 2 * MIXED["layer_types"],
         "global_head_dim": 16, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY,
         "hidden_size_per_layer_input": 8},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {**DECODER, **MIXED, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**DECODER, "head_dim": 8, "attention_chunk_size": 5, "num_local_experts": 2,
         "intermediate_size_mlp": 40, "layer_types": ["chunked_attention", "full_attention"],
         "no_rope_layers": [1, 0]},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**DECODER, "num_key_value_heads": 6, "moe_intermediate_size": 16, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
         "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
         "first_k_dense_replace": 1},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 48, "n_layer": 2, "n_head": 6,
        "pad_token_id": 0,
    }),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6,
    }),
    "bert": ("BertForMaskedLM", "BertConfig", {**WIDE, **TOWER}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {
        **WIDE, **TOWER, "num_hidden_layers": 3, "local_attention": 6, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    }),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": 48, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6,
        "decoder_start_token_id": 0,
    }),
    "vit": ("ViTModel", "ViTConfig", {**TOWER, "image_size": 32, "patch_size": 8}),
    "clip": ("CLIPModel", "CLIPConfig", {
        "text_config": {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
        "vision_config": {**TOWER, "image_size": 32, "patch_size": 8}, "projection_dim": 32,
    }),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8,
        "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40, "max_source_positions": 50, "max_target_positions": 64,
        "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }),
}  # fmt: skip
DECODERS = [
    "llama", "mistral", "qwen3", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama4", "deepseek_v3", "gpt2",
]  # fmt: skip
SWITCHED = sorted(set(MADE) - {"bloom"})
# Models with unscaled, hence large scores: eager attention's gradients, weights and 16-bit results
# are inaccurate.
SHARP = {"gemma4"}
QUICK = {"llama", "gemma3", "gpt_oss", "t5"}


def models(names: list[str], quick: set[str] = QUICK) -> pytest.MarkDecorator:
    """Parametrizes `name`. Models outside `quick` run only in `make test-all`."""
    marks = [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in names]
    return pytest.mark.parametrize("name", marks)


@functools.cache
def _cached(name: str) -> Any:
    model_class, config_class, options = MADE[name]
    torch.manual_seed(0)
    config = getattr(hf, config_class)(**options)
    model = getattr(hf, model_class)._from_config(config, attn_implementation="eager").eval()
    if model.can_generate():
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def build(name: str, implementation: str) -> Any:
    """Returns a new model. Its weights do not depend on the implementation."""
    model = copy.deepcopy(_cached(name))
    model.set_attn_implementation(implementation)
    return model


def build_varied(name: str, implementation: str) -> Any:
    """Returns a model with larger weights, so that generated tokens differ from each other."""
    model = build(name, implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def tokens(B: int = 2, L: int = LENGTH) -> Tensor:
    """Returns random token ids (B, L)."""
    return torch.randint(3, VOCABULARY, (B, L))


def padding(B: int, L: int, side: str) -> Tensor:
    """Returns an attention mask (B, L). Sample b has 5 * b padding tokens; "none": no padding."""
    keep = torch.ones(B, L, dtype=torch.int64)
    for b in range(B):
        at = {"left": slice(0, 5 * b), "right": slice(L - 5 * b, L), "none": slice(0, 0)}[side]
        keep[b, at] = 0
    return keep


def inputs(name: str, side: str = "right") -> dict[str, Tensor]:
    ids, keep = tokens(), padding(2, LENGTH, side)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 100), "decoder_input_ids": ids}
    if name == "clip":
        return {"input_ids": ids, "attention_mask": keep, "pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "t5":
        return {"input_ids": ids, "attention_mask": keep, "decoder_input_ids": tokens(2, 11)}
    return {"input_ids": ids, "attention_mask": keep}
