"""Continuous batching generates the tokens of one request at a time and reads pages in place."""

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


def in_a_batch(model: Any, requests: list[list[int]], page: int = 16, new_tokens: int = NEW) -> list[Any]:
    """Generates with continuous batching.

    Prompts longer than 32 tokens are prefilled in chunks, next to requests that decode.
    """
    results = model.generate_batch(
        requests,
        generation_config=hf.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=64, max_batch_tokens=32, return_logprobs=True
        ),
    )
    assert len(results) == len(requests)
    return [results[key] for key in sorted(results, key=lambda key: int(key.rsplit("_", 1)[1]))]


@torch.no_grad()
def one_by_one(
    model: Any, requests: list[list[int]], new_tokens: int = NEW
) -> list[tuple[list[int], list[float]]]:
    results = []
    for prompt in requests:
        out = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        chosen = out.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(out.logits).log_softmax(-1)
        results.append((chosen, [float(row[token]) for row, token in zip(logits, chosen, strict=True)]))
    return results


@models(["gemma3", "llama", "mistral", "gpt_oss", "gemma2", "qwen3"], {"gemma3"})
def test_a_batch_generates_the_tokens_of_single_requests(name: str) -> None:
    """Requests in different stages, prefill and decode, share a batch. Some models have windows."""
    model, requests = build_varied(name, "eager"), prompts()
    expected = one_by_one(model, requests)
    model.set_attn_implementation("regard")
    for result, (generated, logprobs) in zip(in_a_batch(model, requests), expected, strict=True):
        assert result.error is None
        assert result.generated_tokens == generated
        assert max(abs(a - b) for a, b in zip(result.logprobs, logprobs, strict=True)) <= 1e-4
    assert model.config._attn_implementation == "regard"


def test_decoding_reads_pages_in_place_and_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, masks = [], []
    original_dense = Stored.dense
    monkeypatch.setattr(
        Stored, "dense", lambda self, dtype: gathered.append(self) or original_dense(self, dtype)
    )
    monkeypatch.setattr(MaskTensor, "dense", lambda self: masks.append(self))
    steps = []
    original_planned = _paged._planned
    monkeypatch.setattr(_paged, "_planned", lambda *args: steps.append(original_planned(*args)) or steps[-1])
    in_a_batch(build_varied("llama", "regard"), prompts())
    assert sum(plan.table.shape[0] for plan in steps) >= len(LENGTHS) * (NEW - 1)
    assert max(plan.table.shape[0] for plan in steps) > 1  # some call has several sequences
    chunks = sum(sequence.Lk > sequence.Lq for plan in steps for sequence in plan.others)
    assert len(gathered) <= 2 * chunks  # two layers; only chunks of long prompts
    assert not masks


def test_pages_that_no_kernel_supports_are_gathered() -> None:
    """Pages of 24 tokens, not a power of two, are gathered before attention."""
    model, requests = build_varied("llama", "regard"), prompts()[:3]
    first, second = (in_a_batch(model, requests, page, 4) for page in (16, 24))
    assert [x.generated_tokens for x in first] == [x.generated_tokens for x in second]


def test_other_implementations_raise_as_before() -> None:
    regard.hf.register()  # a second registration changes nothing
    model = build_varied("llama", "regard")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        in_a_batch(model, prompts())


def test_the_deprecated_prefix_is_accepted() -> None:
    model = build_varied("llama", "eager")
    with pytest.warns(FutureWarning, match="prefix is no longer needed"):
        model.set_attn_implementation("paged|regard")
    assert model.config._attn_implementation == "regard"
