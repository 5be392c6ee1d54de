"""The command `regard compare`: trains and times models with six kinds of attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import check_output, one_line_errors, tables

from .._progress import bar

if TYPE_CHECKING:
    from rich.table import Table

    from ..compare import Measured


def compare(
    quick: Annotated[bool, typer.Option("--quick", help="Two minutes: a smaller model, few steps.")] = False,
    width: Annotated[int | None, typer.Option(min=1, help="d_model of all models.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps per kind and seed.")] = None,
    seeds: Annotated[int | None, typer.Option(min=2, help="Training runs per kind.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt before decoding.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: PyTorch's number.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also plot the results into this file.")] = None,
) -> None:
    """Train and time MHA, GQA, MQA, MLA, sliding-window and linear attention at equal width."""
    with one_line_errors():
        import torch

        from ..compare import FULL, QUICK, measure

        check_output("--json", json)  # before minutes of training
        check_output("--plot", plot, picture=True)
        sizes, effort = QUICK if quick else FULL
        sizes = sizes if width is None else replace(sizes, width=width)
        options = {"steps": steps, "seeds": seeds, "tokens": tokens}
        effort = replace(effort, **{name: n for name, n in options.items() if n is not None})
        if threads is not None:
            torch.set_num_threads(threads)
        with bar("", effort.ticks) as update:
            measured = measure(sizes, effort, progress=lambda what: update(description=what, advance=1))
        tables().print(_table(measured), _beside_the_notes(measured), sep="\n")
        if json is not None:
            json.write_text(measured.to_json(), encoding="utf-8")
        if plot is not None:
            measured.plot(str(plot))


def _empty_table(title: str, caption: str | None = None) -> Table:
    from rich.box import MARKDOWN
    from rich.table import Table

    return Table("kind", title=title, box=MARKDOWN, caption=caption)


def _table(measured: Measured) -> Table:
    caption = (
        "parameters of attention in a layer, and of the model; cache: bytes / token; "
        "prefill, decode: tokens / s; loss: held out, nats / byte, by seeds"
    )
    table = _empty_table(measured.setting, caption)
    for name in ("layer", "model", "cache", "prefill", "decode", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in measured.rows:
        table.add_row(
            row.kind, f"{row.attention_parameters:,}", f"{row.model_parameters:,}", f"{row.token_bytes:,.0f}",
            f"{row.prefill:,.0f}", f"{row.decode:,.0f}", f"{row.loss:.3f} ± {row.spread:.3f}",
        )  # fmt: skip
    return table


def _beside_the_notes(measured: Measured) -> Table:
    """Returns a table that compares the study notes of `compare/_notes.py` with the measurements.

    A cell has the notes' word, such as "high", and the measured ratio to MHA, or for quality the
    loss. The last rows list the orderings of the notes that the measurements contradict or leave open.
    """
    from ..compare import NOTES

    table = _empty_table("The study notes and the measurements: ratios to MHA, or nats")
    for name in NOTES:
        table.add_column(name)
    for kind in NOTES["quality"]:
        shares = {name: measured.values(name)[kind] / measured.values(name)["MHA"] for name in NOTES}
        cells = (f"{NOTES[name][kind]}: {share:.2f}" for name, share in shares.items() if name != "quality")
        table.add_row(kind, *cells, f"{NOTES['quality'][kind]}: {measured[kind].loss:.3f}")
    for title, orders in (("contradicted", measured.denied()), ("undecided", measured.undecided())):
        table.add_row(title, *("; ".join(pairs) or "-" for pairs in orders.values()))
    return table
