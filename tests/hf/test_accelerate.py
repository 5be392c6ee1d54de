"""regard.hf.accelerate and restore, on small random models of several families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import regard
from regard._api import projection
from support import assert_close
from support.hf import QUICK, build, build_varied, inputs, padding, tokens
from support.hf_families import deepseek_v4, gemma4_audio

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"max_new_tokens": 12, "do_sample": False}
FAMILIES = sorted(QUICK | {"gpt2", "bert", "whisper"})


def linears(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**batch).logits
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_and_restore_undoes_everything(name: str) -> None:
    model = build(name, "eager")
    before, parameters = linears(model), dict(model.named_parameters())
    batch = inputs(name, "none")
    expected = logits(model, batch)
    report = regard.hf.accelerate(model)
    assert model.config._attn_implementation == "regard"
    assert set(linears(model).values()) == {regard.nn.Linear} or name == "gpt2"
    assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert set(report.accelerated) >= set(before)
    regard.hf.restore(model)
    assert linears(model) == before
    assert model.config._attn_implementation == "eager"
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[key] is parameters[key] for key in after)
    assert torch.equal(logits(model, batch), expected)
    assert not [m for m in model.modules() if any("_regard" in key for key in vars(m))]


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
@pytest.mark.parametrize("options", [
    {}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"use_cache": False},
])  # fmt: skip
def test_generated_tokens_are_the_same(name: str, options: dict[str, Any]) -> None:
    model = build_varied(name, "eager")
    ids, keep = tokens(), padding(2, 23, "none" if name == "t5" else "left")
    batch = {"input_ids": ids, "attention_mask": keep}
    expected = model.generate(**batch, **GREEDY, **options)
    regard.hf.accelerate(model)
    assert torch.equal(model.generate(**batch, **GREEDY, **options), expected)


def test_assisted_generation() -> None:
    model, assistant = build_varied("llama", "eager"), build_varied("llama", "eager")
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.1 * torch.randn_like(assistant.lm_head.weight))
    ids = tokens(1)
    expected = model.generate(ids, **GREEDY)
    for m in (model, assistant):
        regard.hf.accelerate(m)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **GREEDY), expected)


def test_a_decode_step_runs_every_linear_layer_natively() -> None:
    model = build("llama", "eager")
    regard.hf.accelerate(model)
    with torch.no_grad(), patch.object(projection, "project", wraps=projection.project) as project:
        model(tokens(1, 1))
    assert project.call_count == len(linears(model))


def test_training_after_acceleration_is_the_same() -> None:
    batch = {"input_ids": tokens()}
    grads = []
    for accelerated in (False, True):
        model = build("llama", "regard").train()
        if accelerated:
            regard.hf.accelerate(model)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_save_pretrained_saves_the_same_files(tmp_path: Path) -> None:
    model = build("llama", "sdpa")
    model.save_pretrained(tmp_path / "before")
    regard.hf.accelerate(model)
    model.save_pretrained(tmp_path / "after")
    files = [sorted(path.name for path in (tmp_path / side).iterdir()) for side in ("before", "after")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def test_tied_weights_hooks_and_copies() -> None:
    model = build("gemma3", "eager")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    seen: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    regard.hf.accelerate(model)
    regard.hf.accelerate(model)  # the second call changes nothing
    twin = copy.deepcopy(model)
    logits(model, {"input_ids": tokens(1, 3)})
    assert seen == ["head"]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for m in (model, twin):
        regard.hf.restore(m)
        assert m.config._attn_implementation == "eager"
        assert set(linears(m).values()) == {nn.Linear}


def test_the_report_says_why_layers_do_not_change() -> None:
    model = build("gpt2", "eager")
    report = regard.hf.accelerate(model)
    assert "8 x linear Conv1D: unchanged, its weight is transposed" in str(report)
    assert "1 x linear Linear: Regard" in str(report)
    assert "attention GPT2LMHeadModel: Regard" in str(report)
    assert "lm_head" in report.accelerated

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = build("llama", "eager")
    layer = model.model.layers[0].mlp
    layer.up_proj.__class__ = Scaled
    layer.down_proj.forward = layer.down_proj.forward
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.int(), requires_grad=False)
    reasons = {x.name: x.reason for x in regard.hf.accelerate(model).layers}
    assert reasons["model.layers.0.mlp.up_proj"] == "its class may compute something else"
    assert reasons["model.layers.0.mlp.down_proj"] == "its method forward was replaced"
    assert reasons["lm_head"] == "its weight is torch.int32"
    assert reasons["model.layers.0.mlp.gate_proj"] is None
    assert type(layer.up_proj) is Scaled


def test_models_that_keep_their_attention_still_get_linear_layers() -> None:
    model, batch = deepseek_v4()
    expected = logits(model, batch)
    report = regard.hf.accelerate(model)
    reason = next(x.reason for x in report.layers if x.kind == "attention")
    assert reason is not None
    assert "appends to its mask" in reason
    assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    model, _ = gemma4_audio()
    reasons = {x.name: x.reason for x in regard.hf.accelerate(model).layers if x.kind == "attention"}
    assert reasons["model.audio_tower"] == "the model keeps attn_implementation='eager'"
    assert reasons["model.language_model"] is None


@pytest.mark.parametrize("function", [regard.hf.accelerate, regard.hf.restore])
def test_other_models_raise(function: Any) -> None:
    with pytest.raises(TypeError, match="model: expected a model of Transformers, got"):
        function(nn.Linear(2, 2))
