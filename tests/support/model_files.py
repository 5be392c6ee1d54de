"""Writes small model files for tests: CTranslate2, GGUF, Transformers directories, WAV."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CT2_CODES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def ct2_name(name: str) -> bytes:
    raw = name.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def ct2_variable(name: str, value: np.ndarray[Any, Any]) -> bytes:
    shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
    return (
        ct2_name(name)
        + shape
        + struct.pack("<BI", CT2_CODES[value.dtype.name], value.nbytes)
        + value.tobytes()
    )


def ct2_bytes(
    variables: dict[str, np.ndarray[Any, Any]],
    aliases: dict[str, str] | None = None,
    *,
    spec: str = "WhisperSpec",
    version: int = 6,
) -> bytes:
    aliases = aliases or {}
    head = struct.pack("<I", version) + ct2_name(spec) + struct.pack("<II", 3, len(variables))
    tail = struct.pack("<I", len(aliases)) + b"".join(ct2_name(a) + ct2_name(b) for a, b in aliases.items())
    return head + b"".join(ct2_variable(name, value) for name, value in variables.items()) + tail


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_bytes(
    values: bytes = b"", tensors: bytes = b"", data: bytes = b"", *, counts: tuple[int, int] = (0, 0)
) -> bytes:
    """Returns a GGUF file built from raw parts.

    `counts` are the numbers of tensors and metadata values.
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + values + tensors
    return head + bytes(-len(head) % 32) + data


def gguf_tensor(name: str, shape: tuple[int, ...], kind: int, begin: int) -> bytes:
    return gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, begin)


def byte_words() -> list[str]:
    """Returns a vocabulary of special tokens and all bytes, spelled as in byte-level tokenizers."""
    from tokenizers import pre_tokenizers

    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]


def tiny_llama(words: int, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "rms_norm_eps": 2.0**-17, "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=words, **(sizes | options))
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that generated tokens differ
    return model


def gguf_rows(weight: Tensor, heads: int) -> Tensor:
    """Permutes query or key weights to the row order of llama.cpp's converter."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_llama_gguf(path: Path, model: Any, words: list[str]) -> None:
    """Writes a Transformers model as llama.cpp does, with the writer of the `gguf` package."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIALS else 1 for word in words])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in model.state_dict().items():
        _add_gguf_tensor(writer, name, weight, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gguf_tensor(writer: Any, name: str, weight: Tensor, config: Any) -> None:
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    if name == "lm_head.weight":  # tied to the embedding
        return
    if "q_proj" in name:
        weight = gguf_rows(weight, config.num_attention_heads)
    if "k_proj" in name:
        weight = gguf_rows(weight, config.num_key_value_heads)
    writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = byte_words()
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIALS[2], chat_template=CHAT_TEMPLATE
    )


def write_llama_directory(path: Path) -> Any:
    """Saves a random model and its tokenizer with Transformers. Returns the model."""
    model = tiny_llama(len(byte_words()))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return model


def tiny_whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(4)
    config = WhisperConfig(
        vocab_size=51864, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=20, num_mel_bins=80,
        max_source_positions=1500, max_target_positions=24, attn_implementation="eager",
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


def whisper_variables(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the model's weights under CTranslate2's names.

    The name mapping is independent of the library's.
    """
    state = {name.removeprefix("model."): value.numpy() for name, value in model.state_dict().items()}
    width = model.config.d_model
    out: dict[str, np.ndarray[Any, Any]] = {}

    def put(name: str, *sources: str) -> None:
        out[f"{name}/weight"] = np.concatenate([state[f"{source}.weight"] for source in sources])
        out[f"{name}/bias"] = np.concatenate([state.get(f"{s}.bias", np.zeros(width, "f4")) for s in sources])

    def put_norm(name: str, source: str) -> None:
        out[f"{name}/gamma"], out[f"{name}/beta"] = state[f"{source}.weight"], state[f"{source}.bias"]

    for part, layers in (("encoder", 1), ("decoder", 2)):
        out[f"{part}/num_heads"] = np.int16(2)[None].reshape(())
        out[f"{part}/position_encodings/encodings"] = state[f"{part}.embed_positions.weight"]
        put_norm(f"{part}/layer_norm", f"{part}.layer_norm")
        for i in range(layers):
            a, b = f"{part}/layer_{i}", f"{part}.layers.{i}"
            put(f"{a}/self_attention/linear_0", *(f"{b}.self_attn.{x}_proj" for x in "qkv"))
            put(f"{a}/self_attention/linear_1", f"{b}.self_attn.out_proj")
            put_norm(f"{a}/self_attention/layer_norm", f"{b}.self_attn_layer_norm")
            if part == "decoder":
                put(f"{a}/attention/linear_0", f"{b}.encoder_attn.q_proj")
                put(f"{a}/attention/linear_1", f"{b}.encoder_attn.k_proj", f"{b}.encoder_attn.v_proj")
                put(f"{a}/attention/linear_2", f"{b}.encoder_attn.out_proj")
                put_norm(f"{a}/attention/layer_norm", f"{b}.encoder_attn_layer_norm")
            put(f"{a}/ffn/linear_0", f"{b}.fc1")
            put(f"{a}/ffn/linear_1", f"{b}.fc2")
            put_norm(f"{a}/ffn/layer_norm", f"{b}.final_layer_norm")
    for conv in ("conv1", "conv2"):
        out[f"encoder/{conv}/weight"] = state[f"encoder.{conv}.weight"]
        out[f"encoder/{conv}/bias"] = state[f"encoder.{conv}.bias"]
    out["decoder/embeddings/weight"] = state["decoder.embed_tokens.weight"]
    settings = {
        "pre_norm": 1,
        "scale_embeddings": 0,
        "start_from_zero_embedding": 0,
        "alibi": 0,
        "activation": 3,
    }
    return out | {f"decoder/{name}": np.array(value, np.int8) for name, value in settings.items()}


def write_whisper_directory(path: Path, model: Any) -> None:
    import json

    from tokenizers import Tokenizer, models

    special = {"<|endoftext|>": 50256, "<|startoftranscript|>": 50257, "<|startofprev|>": 50360}
    special["<|notimestamps|>"] = 50362
    taken = set(special.values())
    vocabulary = {f"Ġw{i}" if i % 3 else f"w{i}": i for i in range(51864) if i not in taken} | special
    path.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>")).save(str(path / "tokenizer.json"))
    about = {"alignment_heads": [[0, 1], [1, 0]], "suppress_ids": [1, 2], "suppress_ids_begin": [220, 50256]}
    (path / "config.json").write_text(json.dumps(about))
    (path / "model.bin").write_bytes(ct2_bytes(whisper_variables(model)))


def write_wav(path: Path, samples: np.ndarray[Any, Any], *, rate: int = 16000, width: int = 2) -> None:
    """Writes samples (L,) or (L, channels) in [-1, 1) as a WAV file."""
    columns = samples.reshape(len(samples), -1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(columns.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(_pcm(columns, width))


def _pcm(samples: np.ndarray[Any, Any], width: int) -> bytes:
    if width == 1:
        return (np.round(samples * 128) + 128).astype(np.uint8).tobytes()
    integers = np.round(samples * 2.0 ** (8 * width - 1)).astype("<i4")
    return integers.reshape(-1, 1).view(np.uint8)[:, :width].tobytes()


def tone(seconds: float = 0.5, rate: int = 16000, pitch: float = 440.0) -> np.ndarray[Any, Any]:
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)
