"""Tests of Transformers' caches with our attention and of our cache in Transformers' interface."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import cache_utils

from regard._call.stored import Stored
from regard.hf import Cache
from support import assert_close
from support.hf import DECODERS, build, build_varied, inputs, models, padding, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITY = 320


class LosslessQuantizedLayer(cache_utils.QuantizedLayer):  # type: ignore[misc]
    """Transformers' quantised cache layer whose codes are float64 numbers, so nothing is lost."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(residual_length=8)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.double()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor.float()


EXACT: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: hf.DynamicCache(),
    "dynamic sliding": lambda config: hf.DynamicCache(config=config),
    "static": lambda config: hf.StaticCache(config=config, max_cache_len=CAPACITY),
    "quantized": lambda config: cache_utils.Cache(layer_class_to_replicate=LosslessQuantizedLayer),
    "ours": lambda config: Cache(config),
    "ours, with room": lambda config: Cache(config, capacity=CAPACITY),
}
OURS = {
    "bfloat16": ({"dtype": torch.bfloat16}, 0.02),
    "int8": ({"bits": 8}, 0.03),
    "int4": ({"bits": 4}, 0.3),
}


def each_exact_cache() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", EXACT.values(), ids=list(EXACT))


@torch.no_grad()
def by_chunks(model: Any, cache: Any, batch: dict[str, Tensor], sizes: list[int]) -> Tensor:
    """Returns the logits (B, L, V) of a model that gets the tokens in chunks."""
    logits, start = [], 0
    while start < batch["input_ids"].shape[1]:
        end = start + sizes[len(logits) % len(sizes)]
        chunk = {
            "input_ids": batch["input_ids"][:, start:end],
            "attention_mask": batch["attention_mask"][:, :end],
        }
        position_ids = batch["position_ids"][:, start:end]
        logits.append(model(**chunk, position_ids=position_ids, past_key_values=cache).logits)
        start = end
    return torch.cat(logits, 1)


def sequence(L: int) -> dict[str, Tensor]:
    keep = padding(2, L, "left")
    position_ids = (keep.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens(2, L), "attention_mask": keep, "position_ids": position_ids}


def check_steps(name: str, cache: Any, model: Any, L: int, sizes: list[int]) -> None:
    batch = sequence(L)
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    steps = by_chunks(model, cache, batch, sizes)
    real = batch["attention_mask"].bool()
    assert_close(steps[real], expected[real], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@each_exact_cache()
@models(["gemma3", "llama4", *DECODERS[:2], "gpt_oss", "deepseek_v3", "gpt2"], {"gemma3", "llama4"})
@pytest.mark.parametrize("sizes", [[3, 1, 1], [17, 1, 1, 1, 1, 1, 1], [1]], ids=str)
def test_chunked_logits_match_one_call(name: str, make: Callable[[Any], Any], sizes: list[int]) -> None:
    """Chunks of input cross the edges of the window (7) and of chunked attention (5)."""
    model = build_varied(name, "regard")
    check_steps(name, make(model.config), model, 28, sizes)


@each_exact_cache()
@models(["gemma3", "llama", "gpt_oss"], set())
def test_many_decode_steps_match_one_call(name: str, make: Callable[[Any], Any]) -> None:
    model = build_varied(name, "regard")
    check_steps(name, make(model.config), model, 17 + 256, [17, *[1] * 256])


def generated(model: Any, cache: Any, count: int = 64, **options: Any) -> Tensor:
    """Generates tokens without repeats: small models otherwise repeat one token."""
    torch.manual_seed(1)
    arguments = {
        **inputs("llama", "left"),
        "max_new_tokens": count,
        "do_sample": False,
        "no_repeat_ngram_size": 1,
    }
    out: Tensor = model.generate(**arguments, past_key_values=cache, **options)
    return out


@models(DECODERS, {"gemma3"})
def test_greedy_tokens_match_eager_with_every_exact_cache(name: str) -> None:
    model = build_varied(name, "eager")
    expected = generated(model, None)
    assert len(set(expected[0, 23:].tolist())) == 64
    model.set_attn_implementation("regard")
    for title, make in EXACT.items():
        assert torch.equal(generated(model, make(model.config)), expected), title


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_our_cache_works_with_other_implementations(implementation: str) -> None:
    model = build_varied("llama", implementation)
    expected = generated(model, None, 12)
    assert torch.equal(generated(model, Cache(model.config), 12), expected)


def test_beam_search_with_several_sequences() -> None:
    model = build_varied("gemma3", "regard")
    caches = (None, Cache(model.config))
    outs = [generated(model, cache, 10, num_beams=3, num_return_sequences=2) for cache in caches]
    assert torch.equal(*outs)


@pytest.mark.parametrize(("options", "limit"), OURS.values(), ids=list(OURS))
def test_reduced_precision_caches_are_close(options: dict[str, Any], limit: float) -> None:
    model, batch = build_varied("llama", "regard"), sequence(28)
    cache, full = Cache(model.config, **options), Cache(model.config)
    real = batch["attention_mask"].bool()
    steps, expected = (by_chunks(model, past, batch, [20, 1])[real] for past in (cache, full))
    assert 0 < float((steps - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize(("options", "share"), [({"dtype": torch.bfloat16}, 1 / 2), ({"bits": 8}, 34 / 128)])
def test_reduced_precision_caches_take_less_memory(options: dict[str, Any], share: float) -> None:
    config = hf.LlamaConfig(num_hidden_layers=1)
    caches = [Cache(config, capacity=64), Cache(config, capacity=64, **options)]
    for cache in caches:
        cache.update(*torch.randn(2, 1, 3, 5, 64), 0)
    assert caches[1].nbytes == share * caches[0].nbytes


# Storage


def test_decoding_copies_no_stored_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_varied("llama", "regard")
    cache = Cache(model.config, capacity=64)
    batch = sequence(28)
    by_chunks(model, cache, {key: x[:, :20] for key, x in batch.items()}, [20])
    pointers = [tensor.data_ptr() for layer in cache.layers for tensor in layer.held.stored()[:2]]
    monkeypatch.setattr(Stored, "dense", None)  # a call would raise
    next_token = {"input_ids": tokens(2, 1), "past_key_values": cache}
    with torch.no_grad():
        model(**next_token, attention_mask=batch["attention_mask"][:, :21])
    assert [tensor.data_ptr() for layer in cache.layers for tensor in layer.held.stored()[:2]] == pointers
    assert cache.get_seq_length() == 21


def test_a_window_bounds_memory() -> None:
    model = build_varied("gemma3", "regard")
    cache = Cache(model.config)
    by_chunks(model, cache, sequence(200), [1])
    sliding, full = cache.layers
    assert (cache.is_sliding, sliding.held.stored().k.shape[2]) == ([True, False], 7 + 16)
    assert (sliding.get_max_length(), full.get_max_length()) == (7, -1)
    assert sliding.get_mask_sizes(1)[1] > 150


def test_crop_and_deepcopy() -> None:
    model, batch = build_varied("gemma3", "regard"), sequence(28)
    real = batch["attention_mask"].bool()[:, 20:]
    cache = Cache(model.config, rollback=4)
    first = {key: x[:, :24] for key, x in batch.items()}
    by_chunks(model, cache, first, [20, 1])
    cache.crop(-4)
    cache.crop(0)
    copied = copy.deepcopy(cache)
    assert cache.get_seq_length() == 20

    def remaining_logits(past: Any) -> Tensor:
        logits = []
        for i in range(20, 28):
            token = {key: batch[key][:, i : i + 1] for key in ("input_ids", "position_ids")}
            with torch.no_grad():
                out = model(**token, attention_mask=batch["attention_mask"][:, : i + 1], past_key_values=past)
            logits.append(out.logits)
        return torch.cat(logits, 1)[real]

    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits[:, 20:][real]
    for past in (cache, copied):
        assert_close(remaining_logits(past), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or a negative number, got 3"):
        cache.crop(3)


def test_selecting_and_repeating_samples() -> None:
    model = build("llama", "regard")
    cache = Cache(model.config)
    with torch.no_grad():
        model(input_ids=tokens(3, 5), past_key_values=cache)
    keys = cache.layers[0].keys.clone()
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(cache.layers[0].keys.clone(), keys[[0, 2]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].values.clone()[1], cache.layers[0].values.clone()[0])
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    assert torch.equal(cache.layers[0].keys.clone()[0], keys[2])
    cache.reset()
    assert (cache.get_seq_length(), cache.layers[0].get_mask_sizes(3)) == (0, (3, 0))


def test_methods_of_an_empty_cache() -> None:
    cache = Cache(build("gemma3", "eager").config, bits=8)
    assert (cache.nbytes, cache.get_seq_length(), cache.get_mask_sizes(4, 0)) == (0, 0, (4, 0))
    assert cache.layers[0].keys is None
    assert cache.layers[0].values is None
    assert "CacheLayer(empty)" in repr(cache)
    for call in (cache.reset, lambda: cache.crop(-1), lambda: cache.batch_repeat_interleave(2)):
        call()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert "QuantizedCache" in repr(cache)


def test_encoder_decoder_cache() -> None:
    model = build_varied("whisper", "regard")
    features = {"input_features": torch.randn(2, 8, 100)}
    ours = hf.EncoderDecoderCache(Cache(model.config), Cache(model.config))
    options = {**features, "max_new_tokens": 12, "do_sample": False}
    expected, out = (model.generate(**options, past_key_values=cache) for cache in (None, ours))
    assert torch.equal(out, expected)


def test_layers_that_are_not_attention_raise() -> None:
    config = hf.LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(NotImplementedError, match="expected only attention layers, got 'linear_attention'"):
        Cache(config)


def test_weights_and_dropout_with_our_cache() -> None:
    model, batch = build_varied("gemma3", "regard"), sequence(28)
    attentions = []
    for cache in (hf.DynamicCache(config=model.config), Cache(model.config)):
        first = {key: x[:, :20] for key, x in batch.items()}
        by_chunks(model, cache, first, [20])
        token = {key: batch[key][:, 20:21] for key in ("input_ids", "position_ids")}
        with torch.no_grad():
            out = model(
                **token,
                attention_mask=batch["attention_mask"][:, :21],
                past_key_values=cache,
                output_attentions=True,
            )
        attentions.append(out.attentions[1])
    assert_close(attentions[1], attentions[0], rtol=0, atol=1e-6)
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad():
        model(input_ids=tokens(2, 3), past_key_values=Cache(model.config))


@pytest.mark.full
def test_compiled_models() -> None:
    model, batch = build_varied("gemma3", "regard"), inputs("gemma3", "left")
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits[real]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(compiled(**batch, use_cache=False).logits[real], expected)
    expected_tokens = model.generate(**batch, max_new_tokens=6, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    for cache in (hf.StaticCache(config=model.config, max_cache_len=40), Cache(model.config)):
        out = model.generate(**batch, max_new_tokens=6, do_sample=False, past_key_values=cache)
        assert torch.equal(out, expected_tokens)


def test_training_with_our_cache_raises() -> None:
    model = build("llama", "regard")
    with pytest.raises(RuntimeError, match="a cache keeps no gradient"):
        model(input_ids=tokens(1, 4), past_key_values=Cache(model.config))
