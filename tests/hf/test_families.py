"""Families of Transformers models that need more than the attention function of one decoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils import _pytree as tree

import regard
from regard.hf import _attention
from regard.hf._sources import APPENDING
from support import assert_close
from support.hf import build, inputs, tokens
from support.hf_families import AGREE, deepseek_v4, gemma4_audio, qwen2_moe

pytestmark = pytest.mark.usefixtures("one_thread")


def implementations(model: nn.Module) -> dict[str, str]:
    models = {n: m for n, m in model.named_modules() if hasattr(m, "set_attn_implementation")}
    return {name: m.config._attn_implementation for name, m in models.items()}  # type: ignore[union-attr]


def results(model: Any, batch: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        leaves = tree.tree_leaves(tuple(model(**batch).values()))
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


# Keywords that have nothing to do with attention


@pytest.mark.parametrize("name", AGREE)
def test_families_match_eager(name: str) -> None:
    model, batch = AGREE[name]()
    expected = results(model, batch)
    model.set_attn_implementation("regard")
    for out, right in zip(results(model, batch), expected, strict=True):
        assert_close(out, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("hubert", {"labels": torch.tensor([[3, 4], [5, 6]]), "return_dict": True}),
        ("llava_onevision", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
        ("got_ocr2", {"labels": tokens(1, 23), "output_hidden_states": True}),
        ("video_llava", {"image_sizes": torch.tensor([[16, 16]]), "logits_to_keep": 3}),
        ("janus", {"logits_to_keep": 3, "return_dict": True, "generation_mode": "text"}),
        ("colpali", {"return_dict": True, "image_sizes": torch.tensor([[16, 16]])}),
        ("qwen2_moe", {"labels": tokens(), "task": "a user's own keyword"}),
    ],
)
def test_keywords_of_models_match_eager(name: str, keywords: dict[str, Any]) -> None:
    model, batch = AGREE[name]()
    expected = results(model, batch | keywords)
    model.set_attn_implementation("regard")
    for out, right in zip(results(model, batch | keywords), expected, strict=True):
        assert_close(out, right, rtol=1e-4, atol=1e-5)


class Passing(nn.Module):
    def forward(self, *qkv: Tensor, **kwargs: Any) -> Tensor:
        return _attention.attention_forward(self, *qkv, None, **kwargs)[0]


class Choosing(nn.Module):
    def forward(self, *qkv: Tensor, **kwargs: Any) -> Tensor:
        return _attention.attention_forward(self, *qkv, None, chosen_keys=3, **kwargs)[0]


class Inherited(Choosing):
    pass


class Reading(nn.Module):
    def forward(self, *qkv: Tensor, **kwargs: Any) -> Tensor:
        return _attention.attention_forward(self, *qkv, None, novel=kwargs.pop("novel"))[0]


def test_keywords_that_the_attention_module_only_passes_on_are_ignored() -> None:
    q = torch.randn(1, 2, 4, 8)
    assert_close(Passing()(q, q, q, novel=1, pixel_values=q), Passing()(q, q, q))


@pytest.mark.parametrize(
    ("kind", "name"), [(Choosing, "chosen_keys"), (Inherited, "chosen_keys"), (Reading, "novel")]
)
def test_keywords_of_the_attention_module_itself_raise(kind: type[nn.Module], name: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=f"passes {name}, which regard does not know"):
        kind()(q, q, q, novel=1)


@pytest.mark.parametrize("options", [{"output_attentions": True}, {"dropout": 0.1}, {"position_bias": 1}])
def test_options_that_continuous_batching_does_not_support_raise(options: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=f"passes {next(iter(options))}, which"):
        Passing()(q, q, q, cache=object(), **options)


def test_keywords_in_a_compiled_module() -> None:
    q = torch.randn(1, 2, 4, 8)
    compiled = torch.compile(Passing(), backend="eager", fullgraph=True)
    assert_close(compiled(q, q, q, novel=1, output_attentions=False), Passing()(q, q, q))


# Masks and windows


@pytest.mark.parametrize("Lq", [1, 6])
@pytest.mark.parametrize("window", [1, 3, None])
def test_the_window_of_a_causal_call_without_a_mask(Lq: int, window: int | None) -> None:
    q, k, v = torch.randn(1, 2, Lq, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    out, _ = _attention.attention_forward(nn.Module(), q, k, v, None, sliding_window=window)
    rows, keys = torch.arange(6 - Lq, 6)[:, None], torch.arange(6)
    keep = (keys <= rows) & (keys > rows - (6 if window is None else window))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, keep)
    assert_close(out.transpose(1, 2), expected)


def test_a_window_of_zero_is_no_window() -> None:
    q = torch.randn(1, 2, 6, 8)
    out, _ = _attention.attention_forward(nn.Module(), q, q, q, None, sliding_window=0)
    assert_close(out, _attention.attention_forward(nn.Module(), q, q, q, None)[0])


def test_a_bidirectional_call_without_a_mask_has_no_window() -> None:
    """Transformers omits the mask of a bidirectional layer only if nothing is masked."""
    q = torch.randn(1, 2, 6, 8)
    out, _ = _attention.attention_forward(nn.Module(), q, q, q, None, is_causal=False, sliding_window=2)
    assert_close(out.transpose(1, 2), nn.functional.scaled_dot_product_attention(q, q, q))


def test_generation_of_a_model_whose_window_is_zero() -> None:
    model, batch = qwen2_moe()
    expected = model.generate(**batch, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("regard")
    cache = regard.hf.Cache(model.config)
    assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
    assert torch.equal(
        model.generate(**batch, max_new_tokens=8, do_sample=False, past_key_values=cache), expected
    )


# Models that are not switched


def test_models_that_append_to_their_mask_are_refused() -> None:
    """DeepSeek-V4 would cast a float bias to the dtype of our bool mask, which inverts the bias."""
    model, batch = deepseek_v4()
    before, expected = implementations(model), results(model, batch)
    message = "attn_implementation: expected 'eager' for DeepseekV4ForCausalLM, which appends to its mask"
    with pytest.raises(TypeError, match=message):
        model.set_attn_implementation("regard")
    with pytest.raises(TypeError, match=message):
        type(model)._from_config(model.config, attn_implementation="regard")
    model.config._attn_implementation = "eager"
    with pytest.raises(TypeError, match="DeepseekV4ForCausalLM at 'the top' stays with 'eager'"):
        regard.convert.replace_attention(model)
    assert implementations(model) == before
    assert all(torch.equal(a, b) for a, b in zip(results(model, batch), expected, strict=True))


def test_only_known_models_append_to_their_mask() -> None:
    """Other models of the installed Transformers that append to their mask would be noticed here."""
    found = set()
    for file in (Path(hf.__file__).parent / "models").glob("*/modeling_*.py"):
        for code in re.split(r"^(?=class )", file.read_text("utf-8"), flags=re.M):
            if "attention_interface(" in code and APPENDING.search(code):
                found.add(file.parent.name)
    assert found == {"deepseek_v4", "granite_speech5"}  # the latter pads a bool mask (B, L), before attention


def test_models_without_attention_backends_are_not_switched() -> None:
    model, batch = gemma4_audio()
    tower = model.model.audio_tower
    expected = results(tower, batch)
    model.set_attn_implementation("regard")
    switched = implementations(model)
    assert switched.pop("model.audio_tower") == "eager"
    assert set(switched.values()) == {"regard"}
    assert all(torch.equal(a, b) for a, b in zip(results(tower, batch), expected, strict=True))
    new = type(model)._from_config(model.config, attn_implementation="regard")
    assert implementations(new) == implementations(model)


def test_replacing_skips_models_without_attention_backends() -> None:
    model, _ = gemma4_audio()
    names = ("", "model", "model.vision_tower", "model.language_model")
    assert regard.convert.replace_attention(model) == names
    assert regard.convert.restore_attention(model) == names
    before = implementations(model)
    assert before == dict.fromkeys(names, "sdpa") | {"model.audio_tower": "eager"}
    with regard.convert.replaced_attention(model) as replaced:
        assert replaced == names
    assert implementations(model) == before
    with pytest.raises(TypeError, match="Gemma4AudioModel at 'the top' stays with 'eager'"):
        regard.convert.replace_attention(model.model.audio_tower)


# Experts


@pytest.mark.parametrize("name", ["qwen2_moe", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_verify_with_experts_that_have_no_float64(name: str) -> None:
    model = qwen2_moe()[0] if name == "qwen2_moe" else build(name, "eager")
    regard.convert.replace_attention(model)
    differences = regard.convert.verify(model, inputs("llama", "none"))
    assert 0 < differences.output < 1e-5
    assert 0 < differences.gradient < 1e-5
    assert model.config._experts_implementation == "grouped_mm"
