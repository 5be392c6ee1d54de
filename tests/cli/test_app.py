"""The command `regard`. Subcommands are tested with the code that they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

from regard.cli import _app
from regard.cli._app import GALLERY, app
from regard.cli.console import one_line_errors

# Commands of the gallery are hidden if the gallery is not installed.
NAMES = [c.name or c.callback.__name__ for c in app.registered_commands if not c.hidden]  # type: ignore[union-attr]


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in NAMES:
        assert name in result.output, f"{name} is not in the help"


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_info_is_a_command() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert "native core" in result.output


def test_saving_a_page_without_a_text_says_what_to_write(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explore", "--save", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert "texts: expected a text to save, as in `regard explore TEXT --save" in result.output


def test_missing_typer_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from regard.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install 'regard[cli]'" in run.stderr


def test_info_works_without_typer() -> None:
    program = "import sys; sys.modules['typer'] = None; from regard.cli import main; main()"
    command = [sys.executable, "-c", program, "info"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "self-test reference" in run.stdout


AFTER = ((), ("hello",), ("--help",), ("-m", "x", "hello"), ("--model=x", "--max-tokens", "5"), ("--", "--x"))


@pytest.mark.parametrize("after", AFTER, ids=" ".join)
@pytest.mark.parametrize("name", GALLERY)
def test_without_the_gallery_its_commands_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, after: tuple[str, ...]
) -> None:
    monkeypatch.setattr(_app, "entry_points", lambda group: [])
    result = CliRunner().invoke(_app.make_app(), [name, *after])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"regard: {name} is a command of the gallery; pip install regard-gallery\n"


def test_without_the_gallery_help_lists_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_app, "entry_points", lambda group: [])
    library_app = _app.make_app()
    result = CliRunner().invoke(library_app, ["--help"])
    assert result.exit_code == 0
    assert [name for name in GALLERY if name in result.output] == []
    assert "crossover" in result.output
    assert CliRunner().invoke(library_app, ["juggle"]).exit_code == 2


def test_a_missing_package_says_what_to_install() -> None:
    import typer

    from regard.cli.console import one_line_errors

    for name, package in (("uvicorn.config", "'regard[explore]'"), ("pandas", "regard-gallery")):
        failing_app = typer.Typer()

        @failing_app.command()
        def command(name: str = name) -> None:
            with one_line_errors():
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        result = CliRunner().invoke(failing_app)
        assert result.exit_code == 1
        assert result.stderr == f"regard: No module named {name!r}; pip install {package}\n"


def test_errors_of_the_system_are_sentences(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing", "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(typer.Exit), one_line_errors():
            path.read_bytes()
        assert capsys.readouterr().err == f"regard: {path}: {reason}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["crossover", "--plot", "no/such/x.png"],
            "--plot: expected a file in a directory that exists, got ",
        ),
        (["crossover", "--plot", "x"], "--plot: expected a file that ends in .png, .pdf, .svg, got x"),
        (["shapes", "--out", "."], "--out: expected a file in a directory that exists, got ."),
        (["shapes", "--out", "no/such/x.svg"], "--out: expected a file in a directory that exists, got "),
        (["explore", "--save", "no/such/x.html", "hello"], "--save: expected a file in a directory that "),
        (["explore", "--model", "no/such", "hello"], "model: expected a directory with a config.json, got "),
        (["cost", "no/such.json"], "config: expected a file, got no/such.json, which does not exist"),
        (["embed", "--out", "no/such/x.npy", "hello"], "--out: expected a file in a directory that exists, "),
        (["search", "no/such.txt", "-q", "x"], "no/such.txt: no such file or directory"),
        (["transcribe", "no/such.wav"], "path: expected a wav file, got no/such.wav, which does not exist"),
        (["transcribe", "x.wav", "--picture", "no/such/x.png"], "--picture: expected a file in a directory "),
        (["chat", "--model", "no/such"], "model: expected a directory with a config.json, got no/such"),
        (["generate", "--model", "no/such", "x"], "model: expected a directory with a config.json, got no/"),
        (
            ["run", "text", "--out", "README.md", "--use", "hello"],
            "README.md/text-0.safetensors: expected a checkpoint",
        ),
        (["claims", "--page", "no/such.md"], "--page: expected a file that exists, got no/such.md"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_every_command_that_takes_a_path_says_what_is_wrong(arguments: list[str], message: str) -> None:
    if arguments[0] not in NAMES:
        pytest.skip("the gallery is not installed")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.output.startswith(f"regard: {message}"), result.output
    assert "Errno" not in result.output
