"""The `regard` command. Each subcommand has a file here; `_app.py` lists them."""


def main() -> None:
    try:
        from ._app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        raise SystemExit("the command needs typer: pip install 'regard[cli]'") from None
    app()
