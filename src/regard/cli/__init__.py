"""The `regard` command. Each subcommand has a file here; `_app.py` lists them."""

import sys


def main() -> None:
    """Runs the `regard` command. Without the extra `cli`, only `regard info` works."""
    try:
        from ._app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        if sys.argv[1:] != ["info"]:
            raise SystemExit("the command needs typer: pip install 'regard[cli]'") from None
        from ..info import main as info

        sys.exit(info())
    app()
