"""`make bench-peers` with engines that need no other library: turns, faults, tables, the page."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support import HAVE_CORE

pytest.importorskip("rich")
pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
QUICK = ["--threads", "1", "--rounds", "2", "--seconds", "0", "--shrink", "16"]


@pytest.fixture
def options(bench: Any) -> argparse.Namespace:
    parsed: argparse.Namespace = bench.race.parse(QUICK)
    return parsed


@pytest.fixture
def tiny(bench: Any) -> Any:
    return next(case for case in bench.cases.ENGINE_CASES if case.name == "tiny-calls")


def started(bench: Any, name: str) -> Any:
    turns = bench.turn.Turns()
    assert turns.start(name, 1, "4K") == ""
    return turns


class Played:
    """A runner without a process: it answers from a list of answers, or raises those that are errors."""

    def __init__(self, bench: Any, name: str, *answers: Any) -> None:
        self.engine, self.answers = bench.engines.ENGINES[name], list(answers)

    def ask(self, *command: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


# Engines


def test_packages_of_engines_are_pinned(bench: Any) -> None:
    wanted = {package for engine in bench.engines.ENGINES.values() for package in engine.packages}
    lines = bench.install.PINS.read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert bench.install.pins(sorted(wanted)) == pinned


@pytest.mark.parametrize("name", ["regard", "torch"])
def test_engines_are_right_in_every_case(bench: Any, name: str) -> None:
    turns = started(bench, name)
    with torch.no_grad():
        for case in bench.cases.ENGINE_CASES:
            assert bench.engines.ENGINES[name].reason(case) == ""
            assert turns.prepare(case.name, 32) == ""
            assert min(turns.time(0.0)) > 0


def test_engines_name_what_they_cannot_do(bench: Any) -> None:
    by_name = {case.name: case for case in bench.cases.ENGINE_CASES}
    training, decode = by_name["train-causal-1024"], by_name["decode-bf16-1-8-4096"]
    reasons = {
        name: (engine.reason(training), engine.reason(decode))
        for name, engine in bench.engines.ENGINES.items()
    }
    assert reasons["torch"] == ("", "")
    assert reasons["zentorch"] == ("no backward pass", "")
    assert reasons["ggml"] == ("no backward pass", "no bfloat16")
    assert reasons["onnxruntime-mha"][1] == "no bfloat16"
    assert reasons["read"] == ("only decode steps", "")


def test_a_plain_read_is_timed_without_a_result(bench: Any) -> None:
    turns = started(bench, "read")
    assert turns.prepare("decode-bf16-1-8-4096", 64) == ""
    assert turns.time(0.0)


@pytest.mark.parametrize("damage", [1e-3, float("nan")])
def test_a_wrong_result_is_not_timed(bench: Any, monkeypatch: pytest.MonkeyPatch, damage: float) -> None:
    turns, engine = started(bench, "torch"), bench.engines.ENGINES["torch"]
    right = engine.prepare

    def wrong(self: Any, case: Any, inputs: Any) -> Any:
        prepared = right(self, case, inputs)
        return prepared._replace(result=lambda raw: raw + damage)

    monkeypatch.setattr(engine, "prepare", wrong)
    assert turns.prepare("causal-512-64", 32).startswith("wrong: PyTorch, causal-512-64: error")
    monkeypatch.setattr(engine, "slack", 1e4)
    assert turns.prepare("causal-512-64", 32).startswith("wrong" if damage != damage else "")


def test_an_engine_that_raises_has_failed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, engine = started(bench, "torch"), bench.engines.ENGINES["torch"]

    def refuse(*arguments: Any) -> Any:
        raise ValueError("too long\nand more")

    monkeypatch.setattr(engine, "prepare", refuse)
    assert turns.prepare("causal-512-64", 32) == "failed: ValueError: too long"


@pytest.mark.parametrize("pages", ["2M", "4K"])
def test_inputs_are_aligned_on_pages_of_the_given_size(bench: Any, pages: str) -> None:
    x = torch.randn(3, 1 << 20).requires_grad_()
    copy = bench.turn.placed(pages, x)
    assert torch.equal(copy, x)
    assert copy.is_leaf
    assert copy.requires_grad
    assert copy.data_ptr() % bench.turn.HUGE == 0
    if THP.exists() and "[never]" not in THP.read_text():
        maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
        first = next(text for text in maps if holds(text, copy.data_ptr()))
        assert ("AnonHugePages:         0 kB" in first) == (pages == "4K")


def holds(mapping: str, address: int) -> bool:
    """Returns whether an entry of /proc/self/smaps describes the memory at an address."""
    lines = [line.split()[0] for line in mapping.splitlines() if "-" in line.partition(" ")[0]]
    return any(int(a, 16) <= address < int(b, 16) for a, b in (line.split("-") for line in lines))


# Installation


def test_an_engine_is_installed_once(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.install, "ROOT", tmp_path)
    monkeypatch.setattr(bench.install, "HOME", tmp_path / "build")
    built = []

    def fail(home: Path, wanted: list[str], run: Any) -> None:
        run(sys.executable, "-c", "print('no such wheel'); raise SystemExit(1)")

    def build(home: Path, wanted: list[str], run: Any) -> None:
        built.append(wanted)

    fault = bench.install.ensure("jax", ["jax"], fail)
    assert fault.startswith("not installed: ")
    assert fault.endswith("see build/jax.log")
    assert "no such wheel" in (tmp_path / "build" / "jax.log").read_text()
    assert [bench.install.ensure("jax", ["jax"], build) for _ in range(2)] == ["", ""]
    assert built == [bench.install.pins(["jax"])]


def test_a_missing_library_is_named(
    bench: Any, options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engines.ENGINES["openvino"]
    monkeypatch.setattr(engine, "install", classmethod(lambda cls: ""))
    monkeypatch.setattr(bench.race, "HOME", tmp_path)
    with bench.race.Runner(engine, options) as runner:
        assert runner.ready() == "ModuleNotFoundError: No module named 'openvino'"
    monkeypatch.setattr(engine, "install", classmethod(lambda cls: "not installed: no wheel"))
    with bench.race.Runner(engine, options) as runner:
        assert runner.ready() == "not installed: no wheel"
        assert runner.worker is None


# Turns


def test_engines_take_turns(bench: Any, options: argparse.Namespace, tiny: Any) -> None:
    running = {
        "regard": Played(bench, "regard", "", [2.0], [1.0, 3.0]),
        "torch": Played(bench, "torch", "", [4.0], [8.0]),
        "zentorch": Played(bench, "zentorch", "wrong: zentorch, tiny: error 1"),
        "ggml": Played(bench, "ggml", "", [1.0], RuntimeError("ended with exit code -6")),
        "read": Played(bench, "read"),
    }
    row = bench.race.raced(tiny, running, options)
    assert row.results["regard"] == (1.0, 2.0, "")
    assert row.results["torch"] == (4.0, 6.0, "")
    assert row.results["zentorch"].fault == "wrong: zentorch, tiny: error 1"
    assert row.results["ggml"].fault == "failed: ended with exit code -6"
    assert "read" not in row.results
    assert row.ratio("torch") == (4.0, 3.0)
    assert row.ratio("ggml") is row.ratio("read") is None


def test_an_engine_that_ends_gets_a_row_and_a_new_process(
    bench: Any, options: argparse.Namespace, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.race, "HOME", tmp_path)
    with bench.race.Runner(bench.engines.ENGINES["torch"], options) as runner:
        assert runner.ready() == ""
        assert runner.version == torch.__version__
        os.kill(runner.worker.process.pid, signal.SIGKILL)
        row = bench.race.raced(tiny, {"torch": runner}, options)
        assert row.results["torch"].fault == "failed: ended with exit code -9"
        assert bench.race.raced(tiny, {"torch": runner}, options).results["torch"].best > 0


def test_a_process_that_does_not_answer_is_killed(bench: Any) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with bench.worker.Worker(command, dict(os.environ)) as worker:
        with pytest.raises(RuntimeError, match=r"no answer within 0 s"):
            worker.ask("time", patience=0.1)
        with pytest.raises(RuntimeError, match="ended with exit code -9"):
            worker.ask("time", patience=10.0)


def test_what_a_library_prints_does_not_reach_the_answers(bench: Any) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(bench.turn.__file__).parent)!r}); import turn\n"
        "answers = turn.private_stdout(); print('noise'); print('answer', file=answers)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("answer\n", "noise\n")


def test_the_command_runs(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.race, "HOME", tmp_path)
    few = [*QUICK, "--only", "tiny", "train", "--engines", "torch"]
    assert bench.race.main(few) == 0
    printed = capsys.readouterr().out
    assert printed.count("PyTorch") == printed.count("Regard") == 2
    assert "instruction sets:" in printed
    wrong = bench.standings.Row("tiny-calls", {"regard": bench.standings.Result(fault="wrong: error 1")})
    monkeypatch.setattr(bench.race, "raced", lambda *arguments: wrong)
    assert bench.race.main([*QUICK, "--only", "tiny", "--engines", "regard"]) == 1
    assert "wrong: error 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--engines: expected a part of regard, torch"):
        bench.race.selected(["no such engine"])
    assert [engine.name for engine in bench.race.selected(["jax"])] == ["regard", "jax"]
    with pytest.raises(SystemExit):
        bench.race.parse(["--write", "--engines", "torch"])
    assert "--write: expected all engines" in capsys.readouterr().err


# Page


def rows(bench: Any) -> dict[str, Any]:
    Result, Row = bench.standings.Result, bench.standings.Row
    ours = Result(1e-3, 2e-3)
    return {
        "dense-2048-64": Row(
            "dense-2048-64",
            {"regard": ours, "torch": Result(2e-3, 1.9e-3), "zentorch": Result(fault="wrong: error 1")},
        ),
        "decode-fp32-1-8-4096": Row(
            "decode-fp32-1-8-4096", {"regard": ours, "torch": ours, "read": Result(1e-4, 1e-4)}
        ),
        "tiny-calls": Row("tiny-calls", {"regard": Result(fault="failed: KeyError"), "torch": ours}),
    }


def test_the_page_shows_ratios_and_faults(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "peers.md"
    page.write_text(f"{bench.report.BEGIN}{bench.report.END}", encoding="utf-8")
    monkeypatch.setattr(bench.standings, "PAGE", page)
    monkeypatch.setattr(bench.standings, "STORE", tmp_path / "results.json")
    found = rows(bench)
    missing = {"jax": "not installed: no wheel", "zentorch": "not installed: no wheel"}
    for name in found:  # in several runs
        new = bench.standings.Standings({name: found[name]}, {"zentorch": "2.13"}, missing, "the machine")
        bench.standings.write(new)
        missing = {}
    text = page.read_text(encoding="utf-8")
    assert "| dense | 1, 8/8, 2048, 64 | 1.0 ms | **2.00, 0.95** | wrong | - |" in text
    assert "| one query, fp32 | 1, 32/8, 1/4096, 128 | 1.0 ms | 1.00, 1.00 | - | 0.10, 0.05 |" in text
    assert "| failed | not compared | - | - |" in text
    assert "- dense, 1, 8/8, 2048, 64: PyTorch (2.00, 0.95)\n\n" in text
    assert "- **zentorch** 2.13: " in text
    assert "dense: wrong: error" in text
    assert "- **JAX** not installed: no wheel: " in text
    assert text.count("the machine") == 1


def test_the_page_in_the_docs_names_engines_and_cases_that_exist(bench: Any) -> None:
    text = bench.standings.PAGE.read_text(encoding="utf-8")
    assert text.count(bench.report.BEGIN) == text.count(bench.report.END) == 1
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:2] == "| "
    ]
    heads, cases = [x for x in lines if x[0] == "case"], [x for x in lines if x[0] not in ("case", "---")]
    titles = {engine.title for engine in bench.engines.ENGINES.values()}
    assert len(heads) == 2
    assert all(set(head[2:]) <= titles for head in heads)
    known = {(case.title, case.shape) for case in bench.cases.ENGINE_CASES}
    assert {(title, shape) for title, shape, *_ in cases} <= known
