"""Names under which Transformers finds Regard's attention."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers as hf

import regard
from support import assert_close
from support.hf import build, inputs, tokens
from support.hf_families import gemma4_audio

FLASH = "flash_attention_2"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def instead_of_flash() -> Iterator[None]:
    regard.hf.register(instead_of=FLASH)
    yield
    regard.hf.register()


def test_import_registers() -> None:
    code = "import regard.hf; from transformers import AttentionInterface as A, AttentionMaskInterface as M\n"
    code += "assert all('regard' in x().valid_keys() for x in (A, M))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("instead_of_flash")
def test_a_requested_flash_attention_is_regard(tmp_path: Path) -> None:
    batch = inputs("mistral")
    eager = build("mistral", "eager")
    eager.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=FLASH).eval()
    switched = build("mistral", FLASH)
    config = hf.MistralConfig.from_pretrained(tmp_path, attn_implementation=FLASH)
    made = hf.MistralForCausalLM(config).eval()
    made.load_state_dict(eager.state_dict())
    keep = batch["attention_mask"].bool()
    for model in (loaded, switched, made):
        assert model.config._attn_implementation == "regard"
        assert_close(model(**batch).logits[keep], eager(**batch).logits[keep], rtol=1e-4, atol=1e-5)
    assert loaded.generate(tokens(1, 5), max_new_tokens=3, do_sample=False).shape == (1, 8)


@pytest.mark.usefixtures("instead_of_flash")
def test_submodels() -> None:
    clip = build("clip", FLASH)
    assert clip.text_model.config._attn_implementation == "regard"
    assert clip.vision_model.config._attn_implementation == "regard"
    model, _ = gemma4_audio()  # the audio tower declines attention implementations
    model.set_attn_implementation(FLASH)
    assert model.config._attn_implementation == "regard"
    assert model.model.audio_tower.config._attn_implementation == "eager"
    made = type(model)._from_config(model.config, attn_implementation=FLASH)
    assert made.model.language_model.config._attn_implementation == "regard"


def test_it_can_be_undone() -> None:
    regard.hf.register(instead_of=FLASH)
    regard.hf.register(instead_of=FLASH)
    regard.hf.register()
    with pytest.raises(ImportError, match="FlashAttention2"):
        build("llama", FLASH)


def test_names_are_checked() -> None:
    with pytest.raises(TypeError, match="instead_of: expected a name such as 'flash_attention_2', got"):
        regard.hf.register(instead_of=2)  # type: ignore[arg-type]
