"""Models from the `config.json` of Hugging Face. A field that is not known raises: it may matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._tools.arguments import describe
from ..masks import Causal
from ._layers import Heads, Latent, Layer
from ._model import Block, FeedForward, Model

CAUSAL = Causal()

# What changes neither sizes nor which tokens see which.
HARMLESS = frozenset([
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures", "attention_dropout",
    "attention_probs_dropout_prob", "attn_logit_softcapping", "attn_pdrop", "auto_map", "aux_loss_alpha",
    "bad_words_ids", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "classifier_dropout", "decoder_start_token_id", "dropout", "dtype", "embd_pdrop", "eos_token_id",
    "ep_size", "experts_implementation", "final_logit_softcapping", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_act",
    "hidden_activation", "hidden_dropout_prob", "id2label", "init_std", "initializer_range",
    "keys_to_ignore_at_inference", "label2id", "layer_norm_eps", "layer_norm_epsilon", "layerdrop", "n_ctx",
    "n_group", "norm_topk_prob", "num_mtp_layers", "num_nextn_predict_layers", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "query_pre_attn_scalar", "reorder_and_upcast_attn", "resid_pdrop", "return_dict",
    "rms_norm_eps", "rope_interleave", "rope_local_base_freq", "rope_parameters", "rope_scaling",
    "rope_theta", "routed_scaling_factor", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
    "scoring_func", "sep_token_id", "seq_aux", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class",
    "topk_group", "topk_method", "torch_dtype", "torchscript", "transformers_version", "use_cache",
])  # fmt: skip
REQUIRED = object()
LAYERS, MAX_LAYERS = ("num_hidden_layers", "n_layer"), 2**14  # each becomes an object
PERIODS = {"gemma2": 2, "gemma3_text": 6}  # every so many layers one sees all tokens


class Fields:
    """Fields of a config that are read; in the end none may be left over."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.read = given, {"model_type"}

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """None counts as not given."""
        self.read.add(name)
        value = self.given.get(name)
        if value is None and default is REQUIRED:
            raise ValueError(f"config: expected a field {name!r}, got none")
        return default if value is None else value

    def stated(self, name: str) -> Any:
        """A field that must be there, though it may be null: without it the family has a size of its own."""
        if name not in self.given:
            raise ValueError(f"config: expected a field {name!r}, a number or null, got none")
        return self.take(name, None)

    def size(self, name: str, default: Any = REQUIRED, least: int = 1) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"config: expected an integer from {least} on as {name!r}, got {describe(value)}"
            )
        if name in LAYERS and value > MAX_LAYERS:
            raise ValueError(f"config: expected at most {MAX_LAYERS:,} layers, got {name} = {value:,}")
        return value

    def expect(self, name: str, value: Any) -> None:
        """A field that would mean another model."""
        if (found := self.take(name, value)) != value:
            raise ValueError(f"config: expected {name} = {value!r}, the only form known, got {found!r}")

    def check_all_read(self) -> None:
        left = {name: value for name, value in self.given.items() if name not in self.read | HARMLESS}
        unknown = sorted(name for name, value in left.items() if value is not None)
        if unknown:
            raise ValueError(
                f"config: expected fields that are known for model_type {self.given.get('model_type')!r}, "
                f"got also {', '.join(unknown)}; remove them if they change neither sizes nor masks"
            )


def from_config(config: str | Path | Mapping[str, Any]) -> Model:
    """The model that a `config.json` describes: the file, its directory, or its content.

    Prediction layers beyond `num_hidden_layers` (DeepSeek's MTP) are not counted.
    """
    given = config if isinstance(config, Mapping) else _loaded(Path(config))
    kind = given.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"config: expected model_type to be one of {', '.join(FAMILIES)}, got {kind!r}")
    fields = Fields(given)
    fields.expect("is_encoder_decoder", False)
    fields.expect("add_cross_attention", False)
    model = FAMILIES[kind](fields)
    fields.check_all_read()
    return model


def _loaded(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config: expected JSON in {file}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config: expected an object in {file}, got {describe(found)}")
    return found


# Families


def _llama(fields: Fields) -> Model:
    """Llama, Mistral, Qwen and Gemma: grouped heads, gated feed-forward, RMS norms."""
    kind = fields.take("model_type")
    d, H, n = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    D = fields.size("head_dim", d // H if kind in ("llama", "mistral", "qwen2") else REQUIRED)
    normed = kind in ("qwen3", "gemma3_text")
    bias = kind == "qwen2" or bool(fields.take("attention_bias", False))
    Hkv = fields.size("num_key_value_heads", H if kind == "llama" else REQUIRED)
    out_bias, others = bias and kind != "qwen2", 2 * D * normed
    fields.expect("use_bidirectional_attention", False)
    bias_up = bool(fields.take("mlp_bias", False))
    feed_forward = FeedForward(d, fields.size("intermediate_size"), gated=True, bias=bias_up)
    fields.take("max_position_embeddings", 0)
    norms = (4 if kind.startswith("gemma") else 2) * d
    layers = [
        Heads(d, H, Hkv, D, bias=bias, out_bias=out_bias, mask=CAUSAL, window=window, others=others)
        for window in _windows(fields, kind, n)
    ]
    tied = bool(fields.take("tie_word_embeddings", kind.startswith("gemma")))
    blocks = tuple(Block(layer, feed_forward, norms) for layer in layers)
    return Model(blocks, fields.size("vocab_size"), d, tied=tied, others=d)


def _windows(fields: Fields, kind: str, n: int) -> list[int | None]:
    """Of each layer. `layer_types` says it, or what stood for it before there was that field."""
    types = fields.take("layer_types", None)
    period = fields.take("sliding_window_pattern", fields.take("_sliding_window_pattern", PERIODS.get(kind)))
    qwen = kind.startswith("qwen")
    used = bool(fields.take("use_sliding_window", not qwen))
    first = fields.size("max_window_layers", REQUIRED if qwen and used and types is None else n, 0)
    if kind == "llama":
        fields.expect("sliding_window", None)
        return [None] * n
    window = fields.stated("sliding_window") if used else fields.take("sliding_window", None)
    if types is not None:
        if len(types) != n:
            raise ValueError(f"config: expected {n} layer_types, as num_hidden_layers, got {len(types)}")
        return [_window(kind_of, window) for kind_of in types]
    if window is None or not used:
        return [None] * n
    if qwen:
        return [None if i < first else window for i in range(n)]
    return [None if period and (i + 1) % period == 0 else window for i in range(n)]


def _window(kind: str, window: int | None) -> int | None:
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"config: expected layer_types of full_attention and sliding_attention, got {kind!r}"
        )
    if kind == "full_attention":
        return None
    if window is None:
        raise ValueError("config: expected sliding_window with layers of sliding_attention, got none")
    return window


def _deepseek(fields: Fields) -> Model:
    """DeepSeek-V2 and V3: latent attention, experts."""
    d, H, n = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    fields.take("num_key_value_heads", H)
    fields.take("head_dim", 0)  # that of the rotary channels
    fields.take("max_position_embeddings", 0)
    fields.expect("mlp_bias", False)
    fields.expect("moe_layer_freq", 1)
    bias = bool(fields.take("attention_bias", False))
    attention = Latent(
        d, H, fields.size("kv_lora_rank"), fields.size("qk_nope_head_dim"),
        fields.size("qk_rope_head_dim", least=0),
        fields.size("v_head_dim"), fields.stated("q_lora_rank"), bias=bias, out_bias=bias, mask=CAUSAL,
    )  # fmt: skip
    fields.take("qk_head_dim", 0)  # the sum of two that were read
    wide = FeedForward(d, fields.size("intermediate_size"), gated=True)
    hidden = fields.size("moe_intermediate_size")
    experts = FeedForward(
        d, hidden, gated=True, experts=fields.size("n_routed_experts"),
        active=fields.size("num_experts_per_tok"), shared=hidden * fields.size("n_shared_experts", least=0),
    )  # fmt: skip
    dense = fields.size("first_k_dense_replace", least=0)
    blocks = tuple(Block(attention, wide if i < dense else experts, 2 * d) for i in range(n))
    tied = bool(fields.take("tie_word_embeddings", False))
    return Model(blocks, fields.size("vocab_size"), d, tied=tied, others=d)


def _gpt2(fields: Fields) -> Model:
    """With biases; nanoGPT's `bias=False` is `bias: false`."""
    d, H, n = (fields.size(name) for name in ("n_embd", "n_head", "n_layer"))
    bias = bool(fields.take("bias", True))
    hidden, norm = fields.size("n_inner", 4 * d), d * (1 + bias)
    return _stacked(
        Heads(d, H, bias=bias, out_bias=bias, mask=CAUSAL), FeedForward(d, hidden, bias=bias), n, norm,
        fields, embeddings=fields.size("n_positions"),
    )  # fmt: skip


def _opt(fields: Fields) -> Model:
    """Positions begin at 2."""
    d, H, n = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    for name, value in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False),
                        ("enable_bias", True), ("layer_norm_elementwise_affine", True),
                        ("word_embed_proj_dim", d)):  # fmt: skip
        fields.expect(name, value)
    fields.take("activation_function", "relu")
    return _stacked(
        Heads(d, H, bias=True, out_bias=True, mask=CAUSAL), FeedForward(d, fields.size("ffn_dim"), bias=True),
        n, 2 * d, fields, embeddings=fields.size("max_position_embeddings") + 2,
    )  # fmt: skip


def _stacked(
    attention: Layer, feed_forward: FeedForward, n: int, norm: int, fields: Fields, *, embeddings: int
) -> Model:
    """Two norms in a block and one at the end, a table of positions, the head tied to that of tokens."""
    fields.take("activation_function", "")
    tied = bool(fields.take("tie_word_embeddings", True))
    blocks = (Block(attention, feed_forward, 2 * norm),) * n
    return Model(blocks, fields.size("vocab_size"), attention.d_model, embeddings, tied=tied, others=norm)


def _bert(fields: Fields) -> Model:
    """An encoder without a head, with a pooler."""
    d, H, n = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    fields.expect("is_decoder", False)
    fields.expect("position_embedding_type", "absolute")
    fields.take("tie_word_embeddings", True)
    rows = fields.size("max_position_embeddings") + fields.size("type_vocab_size", 2, least=0)
    feed_forward = FeedForward(d, fields.size("intermediate_size"), bias=True)
    block = Block(Heads(d, H, bias=True, out_bias=True), feed_forward, 4 * d)
    pooler = d * (d + 1)
    return Model((block,) * n, fields.size("vocab_size"), d, rows, head=False, others=2 * d + pooler)


FAMILIES: dict[str, Callable[[Fields], Model]] = {
    "bert": _bert, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "gemma2": _llama,
    "gemma3_text": _llama, "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "opt": _opt,
    "qwen2": _llama, "qwen3": _llama,
}  # fmt: skip
