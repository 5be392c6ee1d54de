"""Tests of `compare_to_exact` and the crossover against their definitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import masks as M
from regard.crossover import Crossover, Measurement, measure
from regard.nn import (
    LinformerAttention,
    LinformerProjection,
    LongformerAttention,
    PerformerAttention,
)
from support import HAVE_CORE

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
B, H, L, D = 2, 4, 53, 8


def qkv(heads: int = H, Lk: int = L) -> list[Tensor]:
    return [torch.randn(B, n, length, D) for n, length in ((H, L), (heads, Lk), (heads, Lk))]


def definition(q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: M.Mask | None = None) -> tuple[float, ...]:
    """Computes error, KL and top-1 agreement of weights (B, H, Lq, Lk) in float64."""
    p, w = regard.weights(q, k, v, mask=mask).double(), w.double()
    error = float((w @ v.double() - p @ v.double()).norm() / (p @ v.double()).norm())
    terms = torch.where(w > 0, w * (w.log() - p.log()), 0.0)
    return error, float(terms.sum(-1).mean()), float((w.argmax(-1) == p.argmax(-1)).double().mean())


def test_exact_attention_has_no_error() -> None:
    result = regard.compare_to_exact(regard.attention, *qkv())
    assert result.error < 1e-6
    assert result.kl is not None
    assert result.kl < 1e-6
    assert result.top1 == 1.0
    assert result.rows == B * H * L


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv())
    result = regard.compare_to_exact(regard.attention, q, k, v)
    assert result.error == 0
    assert result.kl is not None
    assert result.kl < 1e-4
    assert result.top1 is not None
    assert result.top1 > 0.95  # two keys may round to the same weight


def test_results_match_the_definition() -> None:
    """Unit vectors as values show the weights of D keys at a time. D does not divide L."""
    q, k, v = qkv()
    w = torch.randn(B, H, L, L).softmax(-1)
    result = regard.compare_to_exact(lambda q, k, v: w @ v, q, k, v)
    error, kl, top1 = definition(q, k, v, w)
    assert result.error == pytest.approx(error, rel=1e-5)
    assert result.kl == pytest.approx(kl, rel=1e-5)
    assert result.top1 == pytest.approx(top1)


def test_kl_of_a_sparse_pattern() -> None:
    q, k, v = qkv()
    module = LongformerAttention(H * D, H, window=(5, 5))
    result = regard.compare_to_exact(module, q, k, v, global_tokens=[0, 9])
    visible = M.longformer((5, 5), [0, 9]).to_dense(L, L)
    mass = (regard.weights(q, k, v) * visible).sum(-1)
    assert result.kl == pytest.approx(float(-mass.log().mean()), rel=1e-4)


@pytest.mark.parametrize("Lk", [L, L + 20])
def test_causal(Lk: int) -> None:
    q, k, v = qkv(Lk=Lk)
    w = regard.weights(q, k, v, mask=M.Window(3, 0))
    result = regard.compare_to_exact(
        lambda q, k, v: regard.attention(q, k, v, mask=M.Window(3, 0)), q, k, v, causal=True
    )
    error, kl, top1 = definition(q, k, v, w, M.Causal())
    assert result.error == pytest.approx(error, rel=1e-4)
    assert result.kl == pytest.approx(kl, rel=1e-4)
    assert result.top1 == pytest.approx(top1)


def test_kl_is_infinite_if_a_masked_key_has_weight() -> None:
    result = regard.compare_to_exact(regard.attention, *qkv(), causal=True)
    assert result.kl == math.inf


def test_a_module_says_whether_it_is_causal() -> None:
    q, k, v = qkv()
    tensors = q / 2, k / 2, v
    module = PerformerAttention(H * D, H, features=2000, causal=True, seed=0)
    result = regard.compare_to_exact(module, *tensors, weights=False)
    assert result.error < 0.25
    assert regard.compare_to_exact(module, *tensors, causal=False, weights=False).error > 2 * result.error
    assert result.kl is None
    assert result.top1 is None


def test_grouped_heads() -> None:
    result = regard.compare_to_exact(regard.attention, *qkv(heads=2))
    assert result.error < 1e-6
    assert result.top1 == 1.0


def test_padding_does_not_count() -> None:
    q, k, v = qkv()
    lengths = torch.tensor([L, 20])

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        out = regard.attention(q, k, v, mask=M.Lengths(lengths))
        return out + (torch.arange(L) >= lengths[:, None])[:, None, :, None]

    result = regard.compare_to_exact(attend, q, k, v, lengths=lengths)
    assert result.error < 1e-6
    assert result.rows == H * (L + 20)
    assert result.top1 == 1.0


def test_modules_not_linear_in_v_have_no_kl_and_top1() -> None:
    result = regard.compare_to_exact(lambda q, k, v: F.normalize(regard.attention(q, k, v), dim=-1), *qkv())
    assert (result.kl, result.top1) == (None, None)
    assert result.error > 0.1


def test_unnormalised_weights_have_no_kl() -> None:
    module = LinformerAttention(H * D, H, LinformerProjection(L, 7))
    result = regard.compare_to_exact(module, *qkv())
    assert result.kl is None
    assert result.top1 is not None


def test_modules_are_compared_in_eval_mode_and_restored() -> None:
    module = LongformerAttention(H * D, H, window=(L, L), dropout=0.5)
    module.out.eval()
    assert regard.compare_to_exact(module, *qkv()).error < 1e-6
    assert module.training
    assert not module.out.training


def test_it_prints_as_a_table() -> None:
    text = repr(regard.Comparison(0.0123456, 0.5, 0.875, 1234))
    assert text.splitlines() == [
        "relative output error   0.0123",
        "KL of the weights       0.5 nats",
        "top-1 agreement         87.5%",
        "query rows              1,234",
    ]
    assert "not defined" in repr(regard.Comparison(1.0, None, None, 1))


def test_wrong_arguments() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"a module with `attend\(q, k, v\)`, got Linear"):
        regard.compare_to_exact(torch.nn.Linear(D, D), q, k, v)
    with pytest.raises(
        ValueError, match=r"k: expected \(B, H, L, D\), got float32 tensor of shape \(53, 8\)"
    ):
        regard.compare_to_exact(regard.attention, q, k[0, 0], v)
    with pytest.raises(ValueError, match="approximation: expected a result of shape"):
        regard.compare_to_exact(lambda q, k, v: v[..., :3], q, k, v)
    with pytest.raises(TypeError, match="approximation: expected a function or a module, got int 3"):
        regard.compare_to_exact(3, q, k, v)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lengths: expected an integer tensor \(B,\), got list \[5\]"):
        regard.compare_to_exact(regard.attention, q, k, v, lengths=[5])  # type: ignore[arg-type]


# The crossover


def table(**curves: list[float]) -> Crossover:
    lengths = [256, 512, 1024, 2048]
    return Crossover(
        tuple(
            Measurement(name, work, n, time, None if name == "unknown" else int(1e6 * time))
            for name, times in curves.items()
            for work in ("forward", "training")
            for n, time in zip(lengths, times, strict=True)
        )
    )


def test_every_length_from_the_crossover_on_wins() -> None:
    curves = table(
        exact=[1, 2, 4, 8], late=[2, 2, 2, 2], never=[2, 4, 8, 16], always=[0.1] * 4, odd=[0.1, 3, 1, 1]
    )
    assert [curves.first(name, "forward", "time") for name in curves.mechanisms] == [1024, None, 256, 1024]
    assert curves.verdict("late", "forward", "time") == "from 1,024 on (4 x)"
    assert curves.verdict("never", "training", "memory") == "never up to 2,048 (0.5 x)"
    close = table(exact=[1, 1, 1, 1], close=[0.95] * 4)
    assert close.first("close", "forward", "time") is None


def test_memory_may_be_unknown() -> None:
    points = table(exact=[1, 1, 1, 1], other=[1, 1, 1, 1]).points
    curves = Crossover(tuple(point._replace(memory=None) for point in points))
    assert curves.verdict("other", "forward", "memory") == "not measured"


@pytest.mark.parametrize("causal", [False, True])
def test_measuring(causal: bool) -> None:
    progress_lines: list[str] = []
    curves = measure([16], causal=causal, heads=1, dim=4, seconds=0, progress=progress_lines.append)
    names = ["window", "performer", "linear"]
    assert curves.mechanisms == (names if causal else [*names, "longformer", "bigbird", "linformer"])
    assert curves.lengths == [16]
    assert "time, forward, 16 tokens" in progress_lines
    assert all(point.time > 0 for point in curves.points)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    figure = table(exact=[1, 2, 4, 8], late=[2, 2, 2, 2]).plot(str(path))
    assert [axes.get_title() for axes in figure.axes] == [
        "time, forward", "memory, forward", "time, training", "memory, training",
    ]  # fmt: skip
    assert path.stat().st_size > 1000


def test_missing_plot_dependency_raises_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("typer.testing")
    from regard.cli._app import app

    monkeypatch.setattr("regard.cli.console.find_spec", lambda name: None)
    result: Any = testing.CliRunner().invoke(app, ["crossover", "--plot", "x.png"])
    assert result.exit_code == 1
    assert "pip install 'regard[plot]'" in result.output


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    testing = pytest.importorskip("typer.testing")
    from regard.cli._app import app

    path = tmp_path / "curves.png"
    result: Any = testing.CliRunner().invoke(app, ["crossover", "--quick", "--causal", "--plot", str(path)])
    assert result.exit_code == 0, result.output
    for word in ("window", "performer", "linear", "time, forward"):
        assert word in result.output
    assert path.exists()
