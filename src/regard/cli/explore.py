"""The command `regard explore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import amount, check_output, one_line_errors, quiet_offline

WARNING = (
    "warning: {host} can be reached from the network; anyone who has the link can open the page, and the "
    "connection is not encrypted"
)


def explore(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to show; two can be compared.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A local directory with safetensors, or a GGUF file. Default: MiniLM.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write one HTML file instead of serving.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: loopback.")] = None,
    i_know: Annotated[bool, typer.Option("--i-know", help="Allow network access, for --host.")] = False,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show what each head of a model attends to, in a browser."""
    with one_line_errors():
        if host is not None and not i_know:
            raise ValueError(f"--host {host}: expected --i-know, because the network can reach the page")
        check_output("--save", save)
        if save is not None and not texts:
            raise ValueError(
                f"texts: expected a text to save, as in `regard explore TEXT --save {save}`, got none"
            )
        quiet_offline()
        from ..explore import text

        explorer = text(*(texts or []), model=model)
        if save is not None:
            size = explorer.save(save).stat().st_size
            typer.echo(f"{save}: {amount(size)}", err=True)
            return
        if host is not None:
            typer.echo(WARNING.format(host=host), err=True)
        explorer.serve(host=host, port=port, open_browser=browser)
