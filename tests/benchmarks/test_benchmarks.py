"""Benchmarks run on tiny shapes, print the expected rows, and refuse wrong results."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support import HAVE_CORE, ROOT

BENCHMARKS = ROOT / "benchmarks"
pytest.importorskip("rich")
pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(quick=True, only=[], threads=1, seconds=0.0, shrink=32)


def measured_rows(bench: Any, name: str, options: argparse.Namespace, L: int = 32) -> list[Any]:
    (case,) = (c for c in bench.cases.CASES if c.name == name)
    with torch.no_grad():
        rows: list[Any] = bench.run.measure_case(case.shrunk(L), options)
    return rows


def test_every_case_is_correct_and_timed(bench: Any, options: argparse.Namespace) -> None:
    for case in bench.cases.CASES:
        for row in measured_rows(bench, case.name, options):
            assert not row.fault
            assert row.ours > 0
            assert row.theirs > 0
            assert row.speed > 0


def test_names_of_cases_are_unique(bench: Any) -> None:
    names = [case.name for case in bench.cases.CASES]
    assert len(set(names)) == len(names)
    assert set(bench.report.HEADLINES) <= set(names)


@pytest.mark.parametrize("damage", [1e-3, float("nan")])
def test_a_wrong_result_is_refused(
    bench: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, damage: float
) -> None:
    right = bench.peers.regard.attention

    def wrong(*args: Any, impl: str = "auto", **kwargs: Any) -> Any:
        out = right(*args, impl=impl, **kwargs)
        if impl == "auto":
            out[0, -1, -1, -1] += damage
        return out

    monkeypatch.setattr(bench.peers.regard, "attention", wrong)
    (row,) = measured_rows(bench, "causal-512-64", options)
    assert "against float64" in row.fault
    assert "refused" in bench.report.markdown_rows([row])
    assert " ms" not in bench.report.markdown_rows([row])


def test_a_wrong_peer_is_refused(
    bench: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.peers.SIDES, "sdpa", lambda case, inputs: lambda: torch.zeros_like(inputs.q))
    (row,) = measured_rows(bench, "dense-512-64", options)
    assert row.fault.startswith("sdpa")


def test_the_note_names_the_math_path_of_sdpa(bench: Any, options: argparse.Namespace) -> None:
    (dense,), (other,) = (measured_rows(bench, n, options) for n in ("dense-512-64", "value-size-1024"))
    assert "math path" not in dense.note
    assert "math path" in other.note


def test_the_machine_is_measured(bench: Any) -> None:
    machine = bench.measure.machine(1, repeats=1)
    assert machine.fma[0] > 1e8
    assert machine.read[0] > 1e8
    assert bench.measure.looked_again(machine).fma[0] >= machine.fma[0]
    assert {"date", "CPU", "torch", "regard"} <= machine.facts.keys()
    assert 0 <= bench.measure.Load().others() <= 1


def test_insert_keeps_the_text_around_the_markers(bench: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"a\n{bench.report.BEGIN}\nold\n{bench.report.END}\nb\n", encoding="utf-8")
    bench.report.insert(page, "new")
    assert page.read_text(encoding="utf-8") == f"a\n{bench.report.BEGIN}\nnew\n{bench.report.END}\nb\n"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the lines"):
        bench.report.insert(page, "new")


def test_the_docs_page_has_the_markers(bench: Any) -> None:
    text = bench.run.PAGE.read_text(encoding="utf-8")
    assert text.count(bench.report.BEGIN) == text.count(bench.report.END) == 1
    assert "PyTorch path" in text


def test_the_chart_of_the_readme_shows_the_stored_results(bench: Any, tmp_path: Path) -> None:
    page = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    ratios = bench.headlines.ratios(page)
    assert len(ratios) == 8
    window = [
        line.split("|")[6] for line in page.splitlines() if line.startswith("| window of 256, causal |")
    ]
    assert ratios["sliding window of 256"] == min(map(float, window))
    bench.headlines.draw(ratios, tmp_path / "headlines.png")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in bench.headlines.THEMES:
        assert f"benchmarks/{name}" in readme
        assert (BENCHMARKS / name).exists()


def test_the_page_and_the_chart_are_made(bench: Any, options: argparse.Namespace, tmp_path: Path) -> None:
    rows = measured_rows(bench, "dense-512-64", options) + measured_rows(bench, "dropout-1024", options)
    page = bench.report.results_page(rows, [bench.scaling.Fact("c", "m")], "where")
    assert page.count("\n| d") == 2
    bench.report.chart(rows, tmp_path / "chart.png", "where")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_the_result_files_are_written(
    bench: Any, options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"{bench.report.BEGIN}{bench.report.END}", encoding="utf-8")
    monkeypatch.setattr(bench.run, "HERE", tmp_path)
    monkeypatch.setattr(bench.run, "PAGE", page)
    machine = bench.measure.Machine(bench.measure.facts(1), 1, (1e9, 1e9), (1e9, 1e9))
    (row,) = measured_rows(bench, "dense-2048-64", options)
    row = dataclasses.replace(row, shape=next(c.shape for c in bench.cases.CASES if c.name == row.name))
    bench.run.write([row], [], machine, "where")
    assert "| dense |" in page.read_text(encoding="utf-8")
    assert "| dense |" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    for name in ("results.png", "headlines.png", "headlines-dark.png"):
        assert (tmp_path / name).exists()


def test_hunt_draws_different_cases(bench: Any) -> None:
    import random

    cases = list(bench.hunt.random_cases(random.Random(0), 20))
    assert len(cases) == 20
    assert len({c.name for c in cases}) > 3


def test_linear_attention_is_timed(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--threads", "1", "--seconds", "0", "--tokens", "40", "70", "--training", "40"]
    assert bench.linear.main(tiny) == 0
    printed = capsys.readouterr().out
    assert "| 70 |" in printed
    assert "| gated delta |" in printed
    assert "| 70 tokens |" in printed


def test_models_of_transformers_are_timed(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--random 1 --seconds 0 --prompt 20 --padded 10 --context 40 --request 20 --new 3 --threads 1"
    assert bench.hf.main(tiny.split()) == 0
    out = capsys.readouterr().out
    assert "| 20 tokens |" in out
    assert "| regard | ours, int8 |" in out
    assert "| nothing | none |" in out
    assert "| 20 tokens each |" in out


def test_predictions_are_compared(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = bench.cost.cost.Machine(threads=1, fma=1e2, read=((1, 1e2),), call=1e-6)
    monkeypatch.setattr(bench.cost.cost, "measure_machine", lambda threads: slow)
    tiny, few = ["--threads", "1", "--seconds", "0"], ["--only", "causal-512-64", "--only", "train-bias"]
    assert bench.cost.main([*tiny, *few, "--shrink", "32"]) == 0
    printed = capsys.readouterr().out
    assert "| causal-512-64 |" in printed
    assert "0 of 3 within 25%\n- causal-512-64" in printed
    assert bench.cost.main([*tiny, "--only", "tiny-calls"]) == 1


def test_facts_are_measured(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.evidence.main(["--threads", "1", "--seconds", "0", "--tokens", "64", "--tokens", "100"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["tokens", "64", "100"]
    right = bench.evidence.Row(tokens=1, attention=1.0, evidence=2.1, extra=199, inputs=100, row=1e-3)
    assert right.holds
    assert not right._replace(evidence=2.3).holds
    assert not right._replace(extra=201).holds


def test_latent_decoding_is_timed(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    tiny = ["--threads", "1", "--seconds", "0.001", "--tokens", "16", "--chunks", "1", "64"]
    assert bench.latent.main(tiny) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    chosen = {line[1].strip(): line[4].strip() for line in lines[3:]}
    assert chosen == {"1": "absorbed", "64": "expanded"}


def test_startup_is_timed(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seconds = {bench.startup.PROGRAMS["regard"]: 3.0, bench.startup.PROGRAMS["PyTorch"]: 2.0}
    monkeypatch.setattr(
        bench.startup, "timed", lambda *arguments: bench.startup.Seconds(seconds.get(arguments[-1], 0.1), 1.0)
    )
    assert bench.startup.main(["--threads", "1", "--repeats", "3"]) == 0
    assert "ratio regard / PyTorch: 1.50, CPU 1.00\n" in capsys.readouterr().out


def test_the_timed_programs_of_startup_run(bench: Any) -> None:
    for program in bench.startup.PROGRAMS.values():
        assert bench.startup.timed("-c", program).cpu > 0
    with pytest.raises(subprocess.CalledProcessError):
        bench.startup.timed("-c", "raise SystemExit(1)")


def test_additive_attention_is_timed(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--threads", "1", "--seconds", "0", "--tokens", "16", "64"]
    assert bench.additive.main(tiny) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines] == [
        "tokens, forward", "16", "64", "tokens, forward and backward", "16", "64",
    ]  # fmt: skip
    wrong = bench.additive.LIMIT
    bench.additive.LIMIT = -1.0
    with pytest.raises(bench.checks.WrongResult, match="Regard, 16 tokens: relative error"):
        bench.additive.sides(16, training=False)
    bench.additive.LIMIT = wrong


def test_processes_are_compared_with_one(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "70", "--heads", "2", "--seconds", "0"]
    assert bench.ranks.main([*sizes, "--only", "ring, zigzag", "ulysses, contiguous"]) == 0
    lines = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert lines == ["2 ranks", "---", "one process", "ring, zigzag", "ulysses, contiguous"]
    with bench.processes.Processes(1) as processes:
        row = bench.ranks.ROWS["ring, zigzag"]
        processes.run(bench.ranks.prepare, row, 2, 70)
        wrong, results = [torch.ones(1, 2, 70, 64)], processes.run(bench.ranks.shards, row, "forward")
        with pytest.raises(bench.checks.WrongResult, match="ring, zigzag: relative error"):
            bench.processes.agree("ring, zigzag", row.make_layout(70, 1), wrong, results)
        with pytest.raises(RuntimeError, match=r"rank 0: (?s:.*)KeyError"):
            processes.run(bench.ranks.shards, bench.ranks.ROWS["gather, zigzag"], "forward")


def test_costs_over_processes_are_compared(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--seconds", "0", "--ranks", "2", "4", "--tokens", "260", "--heads", "4"]
    assert bench.rank_costs.main(tiny) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "| " in line]
    methods = ["ring", "gather", "ulysses"]
    assert [row[3] for row in rows[1:]] == 2 * methods + 2 * [*methods, "usp"]
    assert "measured / predicted: " in printed
    right = bench.rank_costs.cost.over_ranks
    wrong = [dataclasses.replace(x, total_bytes=1) for x in right(bench.rank_costs.CallSpec(Lq=99), 2)]
    bench.rank_costs.cost.over_ranks = lambda *_, **__: wrong
    try:
        with pytest.raises(bench.checks.WrongResult, match="ring: expected 1 bytes, got"):
            bench.rank_costs.main([*tiny[:2], "--ranks", "2", *tiny[5:]])
    finally:
        bench.rank_costs.cost.over_ranks = right


def test_linear_attention_over_processes_is_compared_with_one(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.linear_ranks.main(["--tokens", "70", "--heads", "2", "--seconds", "0"]) == 0
    lines = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert lines[:4] == ["2 ranks", "---", "normalised, one process", "normalised, contiguous"]
    assert lines[-1] == "delta rule, zigzag"


def test_instruction_sets_are_compared(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.isas.main(["--threads", "1", "--seconds", "0", "--tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(bench.isas.calls(64))
    assert "generic" in lines[0]
    monkeypatch.setattr(bench.isas, "LIMIT", -1.0)
    with pytest.raises(bench.isas.WrongResult, match=r"dense, .*: relative difference"):
        bench.isas.agree("dense", bench.isas.calls(64)["dense"], ["generic", "generic"])


def test_decode_is_compared_with_a_plain_read(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--threads", "1", "--seconds", "0", "--shrink", "32", "--only", "decode-fp32-1-8-4096"]
    assert bench.decode.main(tiny) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| one query")]
    assert [row.split(" | ")[2] for row in rows] == ["4 KiB", "2 MiB"]
    monkeypatch.setattr(bench.decode.core, "read_probe", lambda *tensors, threads: None)
    monkeypatch.setattr(bench.decode, "prepare", lambda side, case, inputs: lambda: inputs.q + 1)
    with pytest.raises(bench.checks.WrongResult):
        bench.decode.main(tiny)


def test_sparse_attention_is_timed(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    tiny = [
        "--threads",
        "1",
        "--seconds",
        "0",
        "--longformer",
        "1024",
        "--bigbird",
        "896",
        "--memory",
        "1024",
    ]
    assert bench.sparse.main(tiny) == 0
    lines = [
        line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")
    ]
    assert [lines.count(name) for name in ("Longformer", "BigBird", "1024")] == [2, 2, 1]


def test_the_slope_of_memory(bench: Any) -> None:
    assert bench.sparse.slope({1: 10, 2: 20, 4: 40}) == pytest.approx(1)
    assert bench.sparse.slope({1: 10, 2: 40, 4: 160}) == pytest.approx(2)


@pytest.mark.full
def test_longformers_memory_is_linear(bench: Any) -> None:
    lines = list(bench.sparse.memory([4096, 8192, 16384, 32768]))
    if "does not report" in lines[0]:
        pytest.skip(lines[0])
    assert 0.9 < float(lines[-1].split()[-1].rstrip(".")) < 1.1


@pytest.mark.parametrize("script", ["run.py", "hunt.py", "modules.py"])
def test_the_commands_run(script: str) -> None:
    tiny = {
        "run.py": ["--shrink", "32", "--seconds", "0.001", "--only", "causal-512", "--markdown"],
        "hunt.py": ["--count", "2", "--seconds", "0.001"],
        "modules.py": ["--length", "16", "--seconds", "0.001"],
    }
    command = [sys.executable, str(BENCHMARKS / script), "--threads", "1", *tiny[script]]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    expected = {
        "run.py": "| causal |",
        "hunt.py": "PyTorch was faster in",
        "modules.py": "| training, dropout 0.1 |",
    }
    assert expected[script] in result.stdout


def test_every_row_of_a_side_is_correct(bench: Any) -> None:
    side = bench.side.Side()
    with torch.no_grad():
        faults = {name: side.prepare(name, 32, checked=True) for name in bench.side.ROWS}
        assert side.time(0) > 0
    assert {name: fault for name, fault in faults.items() if fault} == {}
    assert {case.name for case in bench.cases.CASES} < set(faults)


def test_this_tree_is_compared_with_a_copy(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    bench.against.copy_core(ROOT, site)
    monkeypatch.setattr(bench.against, "git", lambda *arguments: "0" * 40)
    monkeypatch.setattr(bench.against, "built", lambda sha, console: site)
    monkeypatch.setattr(bench.against, "TURN", 0.001)
    rows = ["--only", "causal-512-64", "--only", "tiny-lse", "--only", "step of KVCache"]
    tiny = ["--shrink", "32", "--passes", "1", "--seconds", "0.001", "--threads", "1"]
    assert bench.against.main(["HEAD", *rows, *tiny, "--limit", "inf", "--small-limit", "inf"]) == 0
    printed = capsys.readouterr().out
    assert "No row is slower." in printed
    row_lines = [line.split() for line in printed.splitlines() if " to " in line]
    assert [line[0] for line in row_lines] == ["causal-512-64", "backward-causal-512-64", "tiny-lse", "step"]
    assert all(float(line[line.index("to") - 2]) >= 0 for line in row_lines)
    kernels = printed.split("kernels ")
    assert kernels[1].split(";")[0] == kernels[2].split()[0] != "none"


def test_sides_take_turns(bench: Any) -> None:
    order = []

    def turn(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    pairs = bench.against.take_turns(partial(turn, "A"), partial(turn, "B"), 0)
    assert "".join(order) == "ABBA"
    assert pairs == [(bench.against.TURN, bench.against.TURN)] * 2


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([(1.04, 1.0)] * 4, "slower"),
        ([(1.02, 1.0)] * 4, ""),
        ([(1.0, 1.04)] * 4, ""),
        ([(1.0, 1.0), (1.4, 1.0), (1.4, 1.0)], ""),  # slower only in disturbed turns
        ([(1.04, 1.04), (1.04, 1.04), (1.04, 1.0)], ""),  # the other commit: one fast turn
        ([(1.1, 1.0), (1.3, 1.0), (1.3, 1.0), (1.1, 1.4)], "unclear"),
    ],
)
def test_verdicts_on_timings(bench: Any, pairs: list[tuple[float, float]], verdict: str) -> None:
    assert bench.against.Row("row", pairs).verdict(1.03) == verdict


def test_a_slower_row_is_measured_again_and_fails(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = []

    def add_pass(rows: dict[str, Any], names: list[str], *others: Any) -> list[str]:
        passes.append(names)
        for name in names:
            pair = (2.0, 1.0) if name == "tiny-lse" else (1.0, 1.0)
            rows[name] = bench.against.Row(name, [pair] * 2)
        return ["avx2", "avx2"]

    monkeypatch.setattr(bench.against, "git", lambda *arguments: "0" * 40)
    monkeypatch.setattr(bench.against, "built", lambda sha, console: ROOT)
    monkeypatch.setattr(bench.against, "add_pass", add_pass)
    assert bench.against.main(["HEAD", "--only", "tiny", "--passes", "1"]) == 1
    assert [len(names) for names in passes] == [5] + [1] * bench.against.MORE_PASSES
    assert "Slower: tiny-lse." in capsys.readouterr().out


def test_a_wrong_row_has_no_time(bench: Any) -> None:
    right, wrong = bench.against.Row("right", [(1.0, 1.0)] * 2), bench.against.Row("wrong", (), ("fault", ""))
    options = bench.against.parse(["HEAD"])
    assert bench.against.verdict([right, wrong], options) == ("Wrong: wrong.", 1)
    missing = bench.against.Row("missing", (), ("", "unknown to the other commit"))
    assert bench.against.verdict([right, missing], options)[1] == 0
    assert not wrong.slower(0)
    assert not missing.slower(0)
    assert (right + wrong).faults == ("fault", "")
    assert bench.against.table([wrong, missing], options).row_count == 2


def test_another_commit_must_exist(bench: Any) -> None:
    with pytest.raises(ValueError, match="REF: expected a commit, got 'no such commit'"):
        bench.against.commit("no such commit")
    with pytest.raises(ValueError, match="--only"):
        bench.against.chosen(["no such row"])


def test_an_unknown_case_raises(bench: Any) -> None:
    assert isinstance(bench.run, ModuleType)
    with pytest.raises(ValueError, match="--only"):
        bench.cases.chosen(["no such case"])


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.full), ["--backward"]], ids=str)
def test_packed_runs(options: list[str]) -> None:
    script = BENCHMARKS / "packed.py"
    tiny = ["--most", "32", "--seconds", "0", "--threads", "1", *options]
    result = subprocess.run([sys.executable, str(script), *tiny], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" ms |") == 6 * 4
