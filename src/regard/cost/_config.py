"""Reads model specs from the `config.json` of Hugging Face models.

A field that this module does not know raises an error, because it may change sizes or masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._tools.arguments import describe, existing_file
from ..masks import Causal
from ._layers import AttentionSpec, LatentSpec
from ._model import BlockSpec, FeedForwardSpec, ModelSpec

CAUSAL = Causal()

# Fields that change neither sizes nor masks.
HARMLESS = """
_attn_implementation_autoset _commit_hash _name_or_path activation_function architectures attention_dropout
attention_probs_dropout_prob attn_logit_softcapping attn_pdrop auto_map aux_loss_alpha bad_words_ids
bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout decoder_start_token_id dropout
dtype embd_pdrop eos_token_id experts_implementation final_logit_softcapping finetuning_task
forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_act hidden_activation
hidden_dropout_prob id2label init_std initializer_range keys_to_ignore_at_inference label2id layer_norm_eps
layer_norm_epsilon layerdrop norm_topk_prob output_attentions output_hidden_states output_router_logits
pad_token_id prefix pretraining_tp problem_type
query_pre_attn_scalar reorder_and_upcast_attn resid_pdrop return_dict rms_norm_eps rope_interleave
rope_local_base_freq rope_parameters rope_scaling rope_theta routed_scaling_factor
scale_attn_by_inverse_layer_idx scale_attn_weights scoring_func sep_token_id seq_aux summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
tokenizer_class topk_method torch_dtype torchscript transformers_version use_cache
"""
# Numbers that change neither sizes nor masks.
COUNTS = ("ep_size", "n_ctx", "n_group", "num_mtp_layers", "num_nextn_predict_layers", "topk_group")
REQUIRED = object()
WIDTHS = ("hidden_size", "num_attention_heads", "num_hidden_layers")
LAYERS, MAX_LAYERS = ("num_hidden_layers", "n_layer"), 2**14  # the limit bounds memory: a layer is an object
MAX_SIZE = 2**28
MAX_BITS = 1000  # Python does not print integers of more than 4,300 digits
TYPES = ("full_attention", "sliding_attention")  # the possible entries of `layer_types`
PERIODS = {"gemma2": 2, "gemma3_text": 6}  # 6: every 6th layer has full attention, the others a window


def unexpected(expected: str) -> ValueError:
    return ValueError(f"config: expected {expected}")


class Fields:
    """The fields of a config. Records which fields were read, to report the others."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.read = config, {"model_type"}

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the field `name`, or the default if the field is missing or null."""
        self.read.add(name)
        value = self.config.get(name)
        if value is None and default is REQUIRED:
            raise unexpected(f"a field {name!r}, got none")
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise unexpected(f"{name!r} to have at most {MAX_BITS} bits, got {value.bit_length()}")
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.take(name, default))

    def stated(self, name: str) -> int | None:
        """Returns the size `name`, or None if it is null. Raises if the field is missing.

        There is no default, because model families have different defaults for this field.
        """
        if name not in self.config:
            raise unexpected(f"a field {name!r}, a number or null, got none")
        return self.optional(name)

    def optional(self, name: str) -> int | None:
        """Returns the size `name`, or None if the field is missing or null."""
        return None if self.take(name, None) is None else self.size(name)

    def size(self, name: str, default: Any = REQUIRED, least: int = 1) -> int:
        """Returns the field `name`. Raises unless it is an integer from `least` to `MAX_SIZE`."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise unexpected(f"{name!r} to be an integer of at least {least}, got {describe(value)}")
        if name in LAYERS and value > MAX_LAYERS:
            raise unexpected(f"at most {MAX_LAYERS:,} layers, got {name} = {value:,}")
        if value > MAX_SIZE:
            raise unexpected(f"{name!r} to be an integer of at most {MAX_SIZE}, got {describe(value)}")
        return value

    def sizes(self, *names: str) -> list[int]:
        return [self.size(name) for name in names]

    def expect(self, **values: Any) -> None:
        """Raises ValueError if a named field is present with a value other than the given one."""
        for name, value in values.items():
            if (actual := self.take(name, value)) != value:
                raise unexpected(f"{name} = {value!r}, the only supported value, got {actual!r}")

    def check_all_read(self) -> None:
        """Raises ValueError if a field was not read, unless it is known not to affect costs."""
        present = {name for name, value in self.config.items() if value is not None}
        if unknown := sorted(present - self.read - set(HARMLESS.split())):
            raise unexpected(
                f"only known fields for model_type {self.config.get('model_type')!r}, "
                f"got also {', '.join(unknown)}; remove them if they change neither sizes nor masks"
            )


def from_config(config: str | Path | Mapping[str, Any]) -> ModelSpec:
    """Returns the spec of the model that a `config.json` describes.

    Multi-token prediction layers beyond `num_hidden_layers` (DeepSeek) are not counted.

    Args:
        config: the path of the file, the path of its directory, or the parsed content.
    """
    content = config if isinstance(config, Mapping) else _load(Path(config))
    kind = content.get("model_type")
    if kind not in FAMILIES:
        raise unexpected(f"model_type to be one of {', '.join(FAMILIES)}, got {kind!r}")
    fields = Fields(content)
    fields.expect(is_encoder_decoder=False, add_cross_attention=False)
    model = FAMILIES[kind](fields)
    for name in COUNTS:
        fields.size(name, 0, least=0)
    fields.check_all_read()
    return model


def _load(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(existing_file("config", file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise unexpected(f"JSON in {file}, got {error}") from None
    if not isinstance(content, dict):
        raise unexpected(f"an object in {file}, got {describe(content)}")
    return content


def _model(
    fields: Fields, blocks: Sequence[BlockSpec], others: int, *, tied: bool = True, **options: Any
) -> ModelSpec:
    """Returns a `ModelSpec` with these blocks. Reads the vocabulary size and `tie_word_embeddings`.

    `others` is the number of parameters outside the blocks, the embeddings and the head. `tied` is
    the family's default for `tie_word_embeddings`.
    """
    tied = fields.flag("tie_word_embeddings", tied)
    d, vocab = blocks[0].attention.d_model, fields.size("vocab_size")
    return ModelSpec(tuple(blocks), vocab, d, tied=tied, others=others, **options)


# Families


def _llama(fields: Fields) -> ModelSpec:
    """Reads the configs of Llama, Mistral, Qwen and Gemma.

    These models have grouped-query attention, gated feed-forward layers and RMS norms.
    """
    kind, (d, H, n) = fields.take("model_type"), fields.sizes(*WIDTHS)
    gemma = kind.startswith("gemma")
    D = fields.size("head_dim", d // H if kind in ("llama", "mistral", "qwen2") else REQUIRED)
    Hkv = fields.size("num_key_value_heads", H if kind == "llama" else REQUIRED)
    bias = fields.flag("attention_bias", False) or kind == "qwen2"
    norms = 2 * D * (kind in ("qwen3", "gemma3_text"))  # parameters of the norms of queries and keys
    fields.expect(use_bidirectional_attention=False)
    fields.optional("max_position_embeddings")
    bias_up, hidden = fields.flag("mlp_bias", False), fields.size("intermediate_size")
    feed_forward = FeedForwardSpec(d, hidden, gated=True, bias=bias_up)
    options = {"bias": bias, "out_bias": bias and kind != "qwen2", "mask": CAUSAL, "others": norms}
    layers = [AttentionSpec(d, H, Hkv, D, window=w, **options) for w in _windows(fields, kind, n)]
    blocks = [BlockSpec(layer, feed_forward, (4 if gemma else 2) * d) for layer in layers]
    return _model(fields, blocks, d, tied=gemma)


def _windows(fields: Fields, kind: str, n: int) -> list[int | None]:
    """Returns the window of each of n layers. None means that a layer has full attention.

    Reads `layer_types`, or the fields of older configs that have no `layer_types`.
    """
    types = fields.take("layer_types", None)
    periods = [fields.optional(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    period = periods[0] or periods[1] or PERIODS.get(kind)
    qwen = kind.startswith("qwen")
    used = fields.flag("use_sliding_window", not qwen)
    first = fields.size("max_window_layers", REQUIRED if qwen and used and types is None else n, 0)
    if kind == "llama":
        fields.expect(sliding_window=None)
        return [None] * n
    window = fields.stated("sliding_window") if used else fields.optional("sliding_window")
    if types is not None:
        if not isinstance(types, list | tuple):
            raise unexpected(f"layer_types to be a list, got {describe(types)}")
        if len(types) != n:
            raise unexpected(f"{n} layer_types, as num_hidden_layers, got {len(types)}")
        if other := [name for name in types if name not in TYPES]:
            raise unexpected(f"layer_types of {' and '.join(TYPES)}, got {other[0]!r}")
        if window is None and TYPES[1] in types:
            raise unexpected("sliding_window with layers of sliding_attention, got none")
        return [None if name == TYPES[0] else window for name in types]
    if window is None or not used:
        return [None] * n
    if qwen:
        return [None if i < first else window for i in range(n)]
    return [None if period and (i + 1) % period == 0 else window for i in range(n)]


def _deepseek(fields: Fields) -> ModelSpec:
    """Reads the configs of DeepSeek-V2 and V3: latent attention and mixture of experts."""
    d, H, n = fields.sizes(*WIDTHS)
    # These fields are read and ignored. head_dim repeats qk_rope_head_dim, and qk_head_dim is
    # qk_nope_head_dim + qk_rope_head_dim.
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings", "qk_head_dim"):
        fields.optional(name)
    fields.expect(mlp_bias=False, moe_layer_freq=1)
    rank, nope, Dv = fields.sizes("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    rope, q_rank = fields.size("qk_rope_head_dim", least=0), fields.stated("q_lora_rank")
    bias = fields.flag("attention_bias", False)
    attention = LatentSpec(d, H, rank, nope, rope, Dv, q_rank, bias=bias, out_bias=bias, mask=CAUSAL)
    wide, hidden = fields.sizes("intermediate_size", "moe_intermediate_size")
    experts, active = fields.sizes("n_routed_experts", "num_experts_per_tok")
    shared, dense = (fields.size(name, least=0) for name in ("n_shared_experts", "first_k_dense_replace"))
    first = FeedForwardSpec(d, wide, gated=True)
    rest = FeedForwardSpec(d, hidden, True, experts=experts, active=active, shared=hidden * shared)
    blocks = [BlockSpec(attention, first if i < dense else rest, 2 * d) for i in range(n)]
    return _model(fields, blocks, d, tied=False)


def _gpt2(fields: Fields) -> ModelSpec:
    """Reads the config of GPT-2. With nanoGPT's option `bias: false`, there are no biases."""
    d, H, n = fields.sizes("n_embd", "n_head", "n_layer")
    bias = fields.flag("bias", True)
    attention = AttentionSpec(d, H, bias=bias, out_bias=bias, mask=CAUSAL)
    feed_forward, norm = FeedForwardSpec(d, fields.size("n_inner", 4 * d), bias=bias), d * (1 + bias)
    blocks = [BlockSpec(attention, feed_forward, 2 * norm)] * n
    return _model(fields, blocks, norm, embeddings=fields.size("n_positions"))


def _opt(fields: Fields) -> ModelSpec:
    d, H, n = fields.sizes(*WIDTHS)
    fields.expect(do_layer_norm_before=True, _remove_final_layer_norm=False, enable_bias=True)
    fields.expect(layer_norm_elementwise_affine=True, word_embed_proj_dim=d)
    attention = AttentionSpec(d, H, bias=True, out_bias=True, mask=CAUSAL)
    blocks = [BlockSpec(attention, FeedForwardSpec(d, fields.size("ffn_dim"), bias=True), 4 * d)] * n
    positions = fields.size("max_position_embeddings") + 2  # rows 0 and 1 belong to no position
    return _model(fields, blocks, 2 * d, embeddings=positions)


def _bert(fields: Fields) -> ModelSpec:
    """Reads the config of BERT: an encoder with a pooler and without a language-modelling head."""
    d, H, n = fields.sizes(*WIDTHS)
    fields.expect(is_decoder=False, position_embedding_type="absolute")
    rows = fields.size("max_position_embeddings") + fields.size("type_vocab_size", 2, least=0)
    feed_forward = FeedForwardSpec(d, fields.size("intermediate_size"), bias=True)
    blocks = [BlockSpec(AttentionSpec(d, H, bias=True, out_bias=True), feed_forward, 4 * d)] * n
    pooler = d * (d + 1)
    return _model(fields, blocks, 2 * d + pooler, embeddings=rows, head=False)


FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "bert": _bert, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "gemma2": _llama,
    "gemma3_text": _llama, "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "opt": _opt,
    "qwen2": _llama, "qwen3": _llama,
}  # fmt: skip
