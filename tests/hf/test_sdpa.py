"""`convert.sdpa` with Transformers models whose attn_implementation is "sdpa"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import convert
from regard._tools.listeners import listening
from support import HAVE_CORE, assert_close
from support.hf import build, inputs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
]
# Model -> number of attention calls.
MODELS = {
    "bert": 2, "clip": 4, "deepseek_v3": 2, "gemma3": 2, "gpt2": 2, "llama": 2, "mistral": 2,
    "modernbert": 3, "qwen3": 2, "t5": 6, "vit": 2, "whisper": 6,
}  # fmt: skip
RESULTS = ("logits", "last_hidden_state", "logits_per_image")


def run(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the output of a model and the gradients of its parameters."""
    out = model(**batch)
    result = next(out[key] for key in RESULTS if key in out)
    factors = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        (result * factors).sum(), parameters, allow_unused=True, materialize_grads=True
    )
    return result, list(grads)


@pytest.mark.parametrize("name", MODELS)
def test_models_under_sdpa(name: str) -> None:
    model, batch = build(name, "sdpa"), inputs(name)
    expected, expected_grads = run(model, batch)
    calls: list[Tensor] = []
    with convert.sdpa(), listening(lambda q, k, options: calls.append(q)):
        result, grads = run(model, batch)
    assert len(calls) == MODELS[name]
    assert_close(result, expected, rtol=1e-5, atol=1e-5)
    size = max(1.0, *(float(g.abs().max()) for g in expected_grads))
    for a, b in zip(grads, expected_grads, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5 * size)


def test_generation_with_left_padding() -> None:
    model, batch = build("llama", "sdpa"), inputs("llama", "left")
    expected = model.generate(**batch, max_new_tokens=8, do_sample=False)
    with convert.sdpa():
        assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
