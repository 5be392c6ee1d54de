"""`regard cost`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import one_line_errors, tables

if TYPE_CHECKING:
    from rich.table import Table

    from ..cost import LayerSpec, ModelSpec, TotalCost, Work


class Kind(str, Enum):
    heads = "heads"
    latent = "latent"
    absorbed = "absorbed"
    longformer = "longformer"
    bigbird = "bigbird"
    linformer = "linformer"
    performer = "performer"
    linear = "linear"


def cost(
    config: Annotated[
        Path | None, typer.Argument(help="A config.json of Hugging Face or its directory; else one layer.")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="The layer, without a config.")] = Kind.heads,
    width: Annotated[int, typer.Option(min=1, help="d_model of the layer.")] = 512,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="For heads: key heads.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="For heads: tokens that a token sees.")] = None,
    sinks: Annotated[int, typer.Option(min=0, help="With a window: first tokens that all see.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each sample.")] = 1024,
    past: Annotated[int, typer.Option(min=0, help="Tokens before them, in a cache.")] = 0,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "float32",
    cache: Annotated[str | None, typer.Option(help="Of keys and values: a dtype, int8, int4, ...")] = None,
    page: Annotated[int | None, typer.Option(min=1, help="Tokens of a page of the cache.")] = None,
    time: Annotated[bool, typer.Option("--time", help="Measure this machine and predict seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, FLOPs and bytes of an attention layer, or of a model from its config."""
    with one_line_errors():
        from ..cost import Work, estimate, from_config
        from ..cost._cache import dtype_of

        layer = (kind, width, heads, kv_heads, window, sinks)
        what = _layer(*layer) if config is None else from_config(config)
        work = Work(tokens, past, batch, dtype_of(dtype))
        found = estimate(what, tokens, past=past, B=batch, dtype=work.dtype, cache=cache, page=page)
        if as_json:
            typer.echo(found.to_json())
            return
        console = tables()
        after = f" after {past:,}" if past else ""
        console.print(_table(found, f"{batch} x {tokens:,} tokens{after}, {dtype}"))
        if time:
            console.print(_seconds(what, work))


def _layer(
    kind: Kind, width: int, heads: int, kv_heads: int | None, window: int | None, sinks: int
) -> LayerSpec:
    from .. import cost
    from ..masks import Causal

    if kind is not Kind.heads and (kv_heads, window, sinks) != (None, None, 0):
        raise ValueError("--kv-heads, --window, --sinks: expected with --kind heads alone")
    if sinks and window is None:
        raise ValueError("--sinks: expected with --window alone")
    if kind is Kind.heads:
        return cost.AttentionSpec(width, heads, kv_heads, mask=Causal(), window=window, sinks=sinks)
    if kind in (Kind.latent, Kind.absorbed):
        return cost.LatentSpec(width, heads, absorbed=kind is Kind.absorbed, mask=Causal())
    others: dict[Kind, type[LayerSpec]] = {
        Kind.longformer: cost.LongformerSpec, Kind.bigbird: cost.BigBirdSpec,
        Kind.linformer: cost.LinformerSpec, Kind.performer: cost.PerformerSpec, Kind.linear: cost.LinearSpec,
    }  # fmt: skip
    return others[kind](width, heads)


def _seconds(what: LayerSpec | ModelSpec, work: Work) -> str:
    from ..cost import attention_seconds, measure_machine

    here = measure_machine()
    forward, training = (attention_seconds(what, work, here, kind) for kind in ("forward", "training"))
    return (
        f"attention on {here.threads} threads with {here.fma / 1e9:.0f} GFLOP/s and "
        f"{here.read[-1][1] / 1e9:.0f} GB/s: {forward:.3g} s forward, {training:.3g} s in training"
    )


def _table(found: TotalCost, title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    amount = Column("", justify="right", no_wrap=True)
    table = Table("", amount, "", "what is counted", title=title, box=SIMPLE_HEAD)
    for name, value, unit, convention in found.rows():
        table.add_row(name, f"{value:,}", unit, convention)
    return table
