"""Continuous batching: the same tokens as one request at a time, with pages read where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import regard.hf
from regard._call.stored import Stored
from regard.hf import _paged
from regard.hf._standin import MaskTensor
from support.hf import build_varied, models

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (3, 17, 40, 5, 33, 8, 21, 60)
NEW = 12


def prompts() -> list[list[int]]:
    return [torch.randint(3, 97, (n,)).tolist() for n in LENGTHS]


def in_a_batch(model: Any, asked: list[list[int]], page: int = 16, new: int = NEW) -> list[Any]:
    """Prompts longer than 32 tokens come in parts, beside requests that are decoding."""
    found = model.generate_batch(
        asked,
        generation_config=hf.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=64, max_batch_tokens=32, return_logprobs=True
        ),
    )
    assert len(found) == len(asked)
    return [found[key] for key in sorted(found, key=lambda key: int(key.rsplit("_", 1)[1]))]


@torch.no_grad()
def one_by_one(model: Any, asked: list[list[int]], new: int = NEW) -> list[tuple[list[int], list[float]]]:
    found = []
    for prompt in asked:
        out = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=new, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        chosen = out.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(out.logits).log_softmax(-1)
        found.append((chosen, [float(row[token]) for row, token in zip(logits, chosen, strict=True)]))
    return found


@models(["gemma3", "llama", "mistral", "gpt_oss", "gemma2", "qwen3"], {"gemma3"})
def test_a_batch_gives_the_tokens_of_one_by_one(name: str) -> None:
    """Layers with a window and layers without, prompts and decoding mixed."""
    model, asked = build_varied(name, "eager"), prompts()
    expected = one_by_one(model, asked)
    model.set_attn_implementation("regard")
    for found, (chosen, log) in zip(in_a_batch(model, asked), expected, strict=True):
        assert found.error is None
        assert found.generated_tokens == chosen
        assert max(abs(a - b) for a, b in zip(found.logprobs, log, strict=True)) <= 1e-4
    assert model.config._attn_implementation == "regard"


def test_decoding_reads_pages_in_place_and_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, masks = [], []
    dense = Stored.dense
    monkeypatch.setattr(Stored, "dense", lambda self, dtype: gathered.append(self) or dense(self, dtype))
    monkeypatch.setattr(MaskTensor, "dense", lambda self: masks.append(self))
    steps = []
    planned = _paged._planned
    monkeypatch.setattr(_paged, "_planned", lambda *given: steps.append(planned(*given)) or steps[-1])
    in_a_batch(build_varied("llama", "regard"), prompts())
    assert sum(plan.table.shape[0] for plan in steps) >= len(LENGTHS) * (NEW - 1)
    assert max(plan.table.shape[0] for plan in steps) > 1  # several sequences in one call
    parts = sum(sequence.Lk > sequence.Lq for plan in steps for sequence in plan.others)
    assert len(gathered) <= 2 * parts  # two layers; only prompts that come in parts
    assert not masks


def test_pages_that_no_kernel_reads_are_collected() -> None:
    """24 is not a power of two."""
    model, asked = build_varied("llama", "regard"), prompts()[:3]
    first, second = (in_a_batch(model, asked, page, 4) for page in (16, 24))
    assert [x.generated_tokens for x in first] == [x.generated_tokens for x in second]


def test_other_names_are_treated_as_before() -> None:
    regard.hf.register()  # again changes nothing
    model = build_varied("llama", "regard")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        in_a_batch(model, prompts())


def test_the_old_prefix_means_the_same() -> None:
    model = build_varied("llama", "eager")
    with pytest.warns(FutureWarning, match="prefix is no longer needed"):
        model.set_attn_implementation("paged|regard")
    assert model.config._attn_implementation == "regard"
