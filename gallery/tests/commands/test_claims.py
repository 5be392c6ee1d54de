"""`regard claims`: the list of claims, single experiments, the page, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from regard_gallery.claims import NAMES, Finding, records, softmax_example
from regard_gallery.commands.claims import claims

app = typer.Typer()
app.command()(claims)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces the file of records by an empty one in a temporary folder."""
    file = tmp_path / "recorded.json"
    file.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(records, "FILE", file)
    return file


def test_the_list_has_every_claim_and_its_verdict() -> None:
    result = run()
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for name, record in records.read().items():
        assert record["verdict"] in lines[name]
    assert "Var[q.k] = d_k" in lines["variance"]  # not read as markup


def test_named_experiments_run(stored: Path) -> None:
    result = run("softmax_example", "worked_example")
    assert result.exit_code == 0
    assert "0.9987" in result.stdout
    assert "X W_1^Q" in result.stdout
    assert result.stderr.splitlines() == ["1 of 2: softmax_example", "2 of 2: worked_example"]
    assert stored.read_text(encoding="utf-8") == "{}"  # recorded only with --page


def test_a_page_gets_the_new_rows_and_keeps_the_others(stored: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"above\n{records.BEGIN}stale\n{records.END}below\n", encoding="utf-8")
    assert run("softmax_example", "--page", page).exit_code == 0
    assert run("worked_example", "--page", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "stale" not in text
    assert "2 claims: 0 right, 2 wrong, 0 incomplete, 0 undecided." in text
    assert text.index("softmax([2.3, 9.1, 0.5])") > text.index("X W_1^Q")  # the order of CLAIMS


def test_a_page_without_marks_is_left_alone(stored: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("other\n", encoding="utf-8")
    result = run("--page", page)
    assert result.exit_code == 1
    assert result.stderr.startswith("regard: --page: expected a page with the lines ")
    assert page.read_text(encoding="utf-8") == "other\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), f"names: expected some of {', '.join(NAMES)}, got nonsense"),
        (("variance", "--all"), f"names: expected some of {', '.join(NAMES)}, got variance beside --all"),
        (("--page", "none.md"), "--page: expected a file that exists, got none.md"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr == f"regard: {message}\n"


def test_a_missing_package_skips_its_claim_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(softmax_example, "measure", fail)
    result = run("softmax_example", "worked_example")
    assert result.exit_code == 1
    line = "regard: softmax_example was not tested: No module named 'transformers'; pip install 'regard[hf]'"
    assert line in result.stderr.splitlines()
    assert "X W_1^Q" in result.stdout
