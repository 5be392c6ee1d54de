"""The command `regard`: its frame. Subcommands are tested with what they run."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from regard.cli._app import app


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        assert name in result.output, f"{name} is not in the help"


@pytest.mark.parametrize("name", [c.name or c.callback.__name__ for c in app.registered_commands])  # type: ignore[union-attr]
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_info_is_a_command() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert "native core" in result.output


def test_without_typer_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from regard.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "pip install 'regard[cli]'" in run.stderr
