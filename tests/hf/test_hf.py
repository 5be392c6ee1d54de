"""Compares Transformers models with attn_implementation="regard" and "eager"."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import masking_utils

import regard
from regard.hf import _attention
from support import assert_close
from support.hf import DECODERS, LENGTH, SHARP, SWITCHED, VOCABULARY, build, inputs, models, padding, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
RESULTS = ("logits", "last_hidden_state", "logits_per_image")
WEIGHTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def at_real_tokens(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Returns x (B, L, ...) at real tokens. Results at padding are undefined."""
    keep = batch.get("attention_mask")
    return x if keep is None or x.shape[:2] != keep.shape else x[keep.bool()]


# Results of models


@models(SWITCHED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_and_gradients_match_eager(name: str, side: str) -> None:
    """Logits and gradients agree within the tolerance of Transformers' tests."""
    if name in ("clip", "t5") and side == "left":
        pytest.skip("pools or crosses over to tokens that are padding here")
    batch = inputs(name, side)
    results = {}
    for implementation in ("eager", "regard"):
        model = build(name, implementation)
        out = model(**batch)
        result = at_real_tokens(next(out[key] for key in RESULTS if key in out), batch)
        factors = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        (result * factors).sum().backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results[implementation] = result.detach(), grads
    (expected, expected_grads), (result, grads) = results["eager"], results["regard"]
    assert_close(result, expected, rtol=1e-4, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for key, grad in grads.items() if name not in SHARP else ():
        assert_close(
            grad, expected_grads[key], rtol=1e-4, atol=1e-6 * max(1.0, float(expected_grads[key].abs().max()))
        )


@models([name for name in SWITCHED if name not in {"clip"} | SHARP])
def test_requested_weights_match_eager(name: str) -> None:
    batch = inputs(name)
    with torch.no_grad():
        expected = build(name, "eager")(**batch, output_attentions=True)
        out = build(name, "regard")(**batch, output_attentions=True)
    keys = [key for key in WEIGHTS if expected.get(key)]
    assert keys
    for key in keys:
        assert len(out[key]) == len(expected[key])
        for a, b in zip(out[key], expected[key], strict=True):
            assert_close(
                at_real_tokens(a.transpose(1, 2), batch),
                at_real_tokens(b.transpose(1, 2), batch),
                rtol=0,
                atol=1e-6,
            )


def test_no_weights_without_request() -> None:
    assert build("llama", "regard")(**inputs("llama")).attentions is None


@models(
    ["llama", "gemma3", "gpt_oss", "mistral", "llama4", "gpt2", "qwen3", "deepseek_v3", "bert", "modernbert"]
)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_match_rows_alone(name: str, side: str) -> None:
    model, ids = build(name, "regard"), tokens(3)
    keep = padding(3, LENGTH, side)
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    position_options = {} if name in ("modernbert", "bert") else {"position_ids": positions}
    if name in ("modernbert", "bert") and side == "left":
        pytest.skip("counts positions from the first token of the row")
    logits = model(input_ids=ids, attention_mask=keep, **position_options).logits
    for row, row_ids, mask in zip(logits, ids, keep.bool(), strict=True):
        alone = model(input_ids=row_ids[mask][None]).logits[0]
        assert_close(row[mask], alone, rtol=1e-5, atol=1e-5)


@models([name for name in DECODERS if name not in SHARP], {"llama"})
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 1e-2), (torch.float16, 5e-3)])
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype, atol: float) -> None:
    batch = inputs(name)
    expected, out = (
        at_real_tokens(build(name, implementation).to(dtype)(**batch).logits, batch)
        for implementation in ("eager", "regard")
    )
    assert_close(out, expected, rtol=0, atol=atol)


def test_dropout_in_training() -> None:
    model = build("llama", "regard").train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    torch.manual_seed(3)
    first = model(**inputs("llama", "none"), output_attentions=True).attentions[0]
    assert 0.4 < float((first == 0)[:, :, -1].float().mean()) < 0.6


def test_bloom_is_not_supported() -> None:
    """BLOOM does not use AttentionInterface: Transformers warns and keeps its own attention."""
    model = build("bloom", "regard")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(TypeError, match="BloomForCausalLM at 'the top' stays with 'eager'"):
        regard.convert.replace_attention(model)


# Masks and packed sequences from the user


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_user_masks_are_applied(kind: str) -> None:
    ids, keep = tokens(1), torch.rand(1, 1, LENGTH, LENGTH) < 0.5
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    expected = build("llama", "eager")(input_ids=ids, attention_mask=additive).logits
    out = build("llama", "regard")(input_ids=ids, attention_mask=keep if kind == "bool" else additive).logits
    assert_close(out, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packed_sequences_by_positions_or_cu_seqlens() -> None:
    model, sizes = build("llama", "regard"), [5, 11, 7]
    sequences = [tokens(1, n) for n in sizes]
    row = {
        "input_ids": torch.cat(sequences, 1),
        "position_ids": torch.cat([torch.arange(n) for n in sizes])[None],
    }
    cu_seqlens = torch.tensor([0, 5, 16, 23], dtype=torch.int32)
    alone = torch.cat([model(input_ids=sequence).logits for sequence in sequences], 1)
    packed_options = {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": 11,
        "max_length_k": 11,
    }
    for arguments in (row, row | packed_options):
        assert_close(model(**arguments, use_cache=False).logits, alone, rtol=1e-5, atol=1e-5)


def attend(Lq: int = 4, Lk: int = 4, **options: Any) -> Tensor:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (Lq, Lk, Lk))
    mask = options.pop("attention_mask", None)
    return _attention.attention_forward(torch.nn.Module(), q, k, v, mask, **options)[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"indices": torch.zeros(1)}, NotImplementedError, "indices, which regard does not know"),
        ({"block_indices": 1, "novel": 2}, NotImplementedError, "block_indices, novel"),
        ({"cache": object(), "position_bias": torch.zeros(1, 2, 4, 4)}, NotImplementedError, "position_bias"),
        ({"cache": object(), "dropout": 0.1}, NotImplementedError, "passes dropout, which"),
        ({"cache": object(), "output_attentions": True}, NotImplementedError, "passes output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, ValueError, "cu_seq_lens_k: expected both"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4]), "cu_seq_lens_k": torch.tensor([0, 6]), "Lk": 6},
            NotImplementedError, "differ, with a mask",
        ),
        ({"attention_mask": torch.ones(1, 4)}, TypeError, r"attention_mask: expected a tensor \(B, 1 or Hq"),
        ({"attention_mask": torch.ones(1, 1, 4, 4).int()}, TypeError, "expected bool .* or float"),
        (
            {"attention_mask": _attention.MaskTensor(None, 0, (1, 1, 4, 5), "cpu")},
            ValueError, r"Lq = 4, Lk = 4, got \(1, 1, 4, 5\)",
        ),
    ],
)  # fmt: skip
def test_unsupported_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend(**options)


def test_unknown_arguments_may_be_none() -> None:
    assert attend(indices=None, novel=None).shape == (1, 4, 2, 8)


def test_different_cu_seqlens_without_a_mask() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    cu_seqlens = torch.tensor([0, 1, 4]), torch.tensor([0, 4, 6])
    out, _ = _attention.attention_forward(
        torch.nn.Module(),
        q,
        k,
        k,
        None,
        is_causal=False,
        cu_seq_lens_q=cu_seqlens[0],
        cu_seq_lens_k=cu_seqlens[1],
    )
    expected = [
        regard.attention(q[:, :, :1], k[:, :, :4], k[:, :, :4]),
        regard.attention(q[:, :, 1:], k[:, :, 4:], k[:, :, 4:]),
    ]
    assert_close(out.transpose(1, 2), torch.cat(expected, 2))


def test_a_missing_mask_function_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask function, Transformers silently passes no mask, so our attention raises."""
    monkeypatch.delitem(masking_utils.AttentionMaskInterface._global_mapping, "regard")
    with pytest.raises(RuntimeError, match=r"regard\.hf\.register\(\)"):
        build("llama", "regard")(**inputs("llama", "left"))


# Keyword arguments of all models


def calls_of(name: str, text: str) -> list[ast.Call]:
    calls = []
    for match in re.finditer(rf"(?<!def )\b{name}\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        calls.append(ast.parse(text[match.start() : end], mode="eval").body)
    return [call for call in calls if isinstance(call, ast.Call)]


def test_every_keyword_in_the_installed_transformers_is_known() -> None:
    """Every keyword that models pass to attention functions is handled, harmless or rejected."""
    handled = set(_attention.attention_forward.__annotations__) | _attention.HARMLESS
    refused = {"indices", "block_indices"}  # sparse attention by indices
    files = Path(hf.__file__).parent.glob("models/*/modeling_*.py")
    calls = [call for file in files for call in calls_of("attention_interface", file.read_text("utf-8"))]
    names = {keyword.arg for call in calls for keyword in call.keywords} - {None}
    assert len(calls) > 400
    assert names - handled - refused == set()
    assert not refused & handled


def test_without_transformers_the_message_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import regard.hf"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "regard.hf needs Transformers: pip install 'regard[hf]'" in process.stderr


# Replacing


def test_replace_and_verify(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("gemma3", "eager")
    assert regard.convert.replace_attention(model) == ("", "model")
    assert model.config._attn_implementation == "regard"
    differences = regard.convert.verify(model, inputs("gemma3", "none"))
    assert 0 < differences.output < 1e-5
    assert 0 < differences.gradient < 1e-5
    print(differences)
    assert "from float64" in capsys.readouterr().out
    assert regard.convert.restore_attention(model) == ("", "model")
    assert model.config._attn_implementation == "sdpa"
    assert regard.convert.restore_attention(build("gpt_oss", "regard")) == ("", "model")  # has no sdpa


# Safety


def test_the_implementation_is_never_read_from_a_config(tmp_path: Path) -> None:
    """A name in a config file causes no download and no code to run. The requested name is used."""
    build("llama", "eager").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    evil = {"_attn_implementation_internal": "evil/kernel", "attn_implementation": "evil/kernel"}
    file.write_text(json.dumps(json.loads(file.read_text()) | evil | {"_attn_implementation": "evil/kernel"}))
    events: list[str] = []
    watching = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching[0] and event in ("os.system", "socket.connect", "subprocess.Popen"):
            events.append(event)

    sys.addaudithook(hook)
    model = hf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="regard", local_files_only=True)
    watching[0] = False
    assert model.config._attn_implementation == "regard"
    assert not events
    assert model(input_ids=tokens(1, 5)).logits.shape == (1, 5, VOCABULARY)
