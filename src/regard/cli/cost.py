"""The command `regard cost`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from .console import one_line_errors, tables

if TYPE_CHECKING:
    from rich.table import Table

    from ..cost import LayerSpec, ModelSpec, TotalCost, Work


Latent = tuple[int | None, ...]  # rank, nope_dim, rope_dim, value_dim, q_rank
Kind = Literal["heads", "latent", "absorbed", "longformer", "bigbird", "linformer", "performer", "linear"]
Config = Annotated[
    Path | None, typer.Argument(help="A Hugging Face config.json or its directory. Default: one layer.")
]
Window = Annotated[
    int | None, typer.Option(min=1, help="Window in tokens, the query's own included, for --kind heads.")
]
Ranks = Annotated[
    list[str] | None,
    typer.Option(metavar="N,N,...", help="Attention over so many processes, by method, instead of a layer."),
]
Flops = Annotated[float | None, typer.Option(help="GFLOP/s of a rank, with --ranks. Default: 5,000.")]
Bandwidth = Annotated[
    float | None, typer.Option(help="GB/s of a rank's link in each direction, with --ranks. Default: 3.125.")
]
Latency = Annotated[float | None, typer.Option(help="Microseconds of a message, with --ranks. Default: 50.")]
Training = Annotated[bool, typer.Option("--training", help="With --ranks: forward and backward.")]


def cost(
    config: Config = None,
    kind: Annotated[Kind, typer.Option(help="The type of the layer, without a config.")] = "heads",
    width: Annotated[int, typer.Option(min=1, help="d_model of the layer.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads, for --kind heads.")] = None,
    window: Window = None,
    sinks: Annotated[int, typer.Option(min=0, help="Sink tokens, with --window.")] = 0,
    rank: Annotated[int | None, typer.Option(min=1, help="Channels of the latent (MLA).")] = None,
    nope_dim: Annotated[int | None, typer.Option(min=0, help="Key channels without rotation (MLA).")] = None,
    rope_dim: Annotated[int | None, typer.Option(min=0, help="Key channels with rotation (MLA).")] = None,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Value channels of a head (MLA).")] = None,
    q_rank: Annotated[int | None, typer.Option(min=1, help="Channels of the query latent (MLA).")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="MHA, GQA (--kv-heads) and MLA (--rank ...) side by side.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per sample.")] = 1024,
    past: Annotated[int, typer.Option(min=0, help="Cached tokens per sample.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "float32",
    cache: Annotated[str | None, typer.Option(help="Cache format: a dtype, int8, int4, ...")] = None,
    page: Annotated[int | None, typer.Option(min=1, help="Page size of the cache in tokens.")] = None,
    time: Annotated[bool, typer.Option("--time", help="Measure this machine and predict seconds.")] = False,
    ranks: Ranks = None,
    flops: Flops = None,
    link_bandwidth: Bandwidth = None,
    link_latency: Latency = None,
    training: Training = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print parameters, FLOPs and bytes of an attention layer, or of a model from its config."""
    with one_line_errors():
        from ..cost import Work, estimate, from_config, table
        from ..cost._cache import dtype_of

        work = Work(tokens, past, batch, dtype_of(dtype))
        latent = (rank, nope_dim, rope_dim, value_dim, q_rank)
        over = RanksOptions(ranks, flops, link_bandwidth, link_latency, training)
        if over.given((config, kind, past, cache, page, compare, latent)):
            layer = _layer(kind, width, heads, kv_heads, window, sinks, latent)
            typer.echo(over.output(layer, work, time, as_json))
            return
        if compare:
            if (config, kind, window, sinks, as_json) != (None, "heads", None, 0, False):
                raise ValueError("--compare: expected no config, --kind, --window, --sinks or --json")
            specs = _compared(width, heads, kv_heads, latent)
            typer.echo(table(specs, tokens, past=past, B=batch, dtype=work.dtype, cache=cache))
            return
        what = from_config(config) if config else _layer(kind, width, heads, kv_heads, window, sinks, latent)
        total = estimate(what, tokens, past=past, B=batch, dtype=work.dtype, cache=cache, page=page)
        if as_json:
            typer.echo(total.to_json())
            return
        console = tables()
        after = f" after {past:,}" if past else ""
        console.print(_table(total, f"{batch} x {tokens:,} tokens{after}, {dtype}"))
        if time:
            console.print(_seconds(what, work))


class RanksOptions(NamedTuple):
    """The options of `--ranks`, as they are given."""

    ranks: list[str] | None
    flops: float | None
    bandwidth: float | None
    latency: float | None
    training: bool

    def given(self, others: tuple[object, ...]) -> bool:
        """Returns whether `--ranks` is given. Raises if one of the others is also given."""
        if not self.ranks:
            if self != RanksOptions(self.ranks, None, None, None, False):
                names = "--flops, --link-bandwidth, --link-latency, --training"
                raise ValueError(f"{names}: expected only with --ranks")
            return False
        if others != (None, "heads", 0, None, None, False, (None,) * 5):
            raise ValueError(
                "--ranks: expected no config, --kind, --rank, --past, --cache, --page or --compare"
            )
        return True

    def output(self, layer: LayerSpec, work: Work, measured: bool, as_json: bool) -> str:
        """Returns the table or the JSON. `measured`: a rank is as fast as this machine."""
        from ..cost import RankLink, measure_machine, ranks_table
        from ..cost._ranks import FLOPS
        from ..cost._time import FORWARD

        words = [word.strip() for text in self.ranks or () for word in text.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"--ranks: expected integers, as in 8,64, got {','.join(self.ranks or ())}")
        if measured and self.flops is not None:
            raise ValueError("--flops: expected only without --time, which measures it")
        default, (call,) = RankLink(), layer.calls(work)
        bandwidth = default.bandwidth if self.bandwidth is None else 1e9 * self.bandwidth
        latency = default.latency if self.latency is None else 1e-6 * self.latency
        flops = FLOPS if self.flops is None else 1e9 * self.flops
        table = ranks_table(
            call, map(int, words), flops=FORWARD * measure_machine().fma if measured else flops,
            link=RankLink(bandwidth, latency), passes="training" if self.training else "forward",
        )  # fmt: skip
        return table.to_json() if as_json else str(table)


def _layer(
    kind: Kind, width: int, heads: int, kv_heads: int | None, window: int | None, sinks: int, latent: Latent
) -> LayerSpec:
    from .. import cost
    from ..masks import Causal

    if kind != "heads" and (kv_heads, window, sinks) != (None, None, 0):
        raise ValueError("--kv-heads, --window, --sinks: expected only with --kind heads")
    if sinks and window is None:
        raise ValueError("--sinks: expected only with --window")
    if kind in ("latent", "absorbed"):
        return _latent(width, heads, latent, kind == "absorbed")
    if any(size is not None for size in latent):
        raise ValueError("--rank and other sizes of a latent: expected only with --kind latent or absorbed")
    if kind == "heads":
        return cost.AttentionSpec(width, heads, kv_heads, mask=Causal(), window=window, sinks=sinks)
    others: dict[str, type[LayerSpec]] = {
        "longformer": cost.LongformerSpec, "bigbird": cost.BigBirdSpec,
        "linformer": cost.LinformerSpec, "performer": cost.PerformerSpec, "linear": cost.LinearSpec,
    }  # fmt: skip
    return others[kind](width, heads)


def _latent(width: int, heads: int, latent: Latent, absorbed: bool) -> LayerSpec:
    from ..cost import LatentSpec
    from ..masks import Causal

    rank, nope_dim, rope_dim, value_dim, q_rank = latent
    if rank is None or nope_dim is None or rope_dim is None or value_dim is None:
        raise ValueError(
            "--rank, --nope-dim, --rope-dim, --value-dim: expected all four for latent attention, such as "
            "DeepSeek-V3's 512, 128, 64 and 128"
        )
    sizes = rank, nope_dim, rope_dim, value_dim, q_rank
    return LatentSpec(width, heads, *sizes, absorbed=absorbed, mask=Causal())


def _compared(width: int, heads: int, kv_heads: int | None, latent: Latent) -> dict[str, LayerSpec]:
    """Returns the specs of multi-head, grouped and latent attention, as far as sizes are given."""
    from ..cost import AttentionSpec
    from ..masks import Causal

    specs: dict[str, LayerSpec] = {"MHA": AttentionSpec(width, heads, mask=Causal())}
    if kv_heads is not None:
        specs["GQA"] = AttentionSpec(width, heads, kv_heads, mask=Causal())
    if any(size is not None for size in latent):
        specs["MLA"] = _latent(width, heads, latent, absorbed=False)
        specs["MLA, absorbed"] = _latent(width, heads, latent, absorbed=True)
    return specs


def _seconds(what: LayerSpec | ModelSpec, work: Work) -> str:
    from ..cost import attention_seconds, measure_machine

    machine = measure_machine()
    forward, training = (attention_seconds(what, work, machine, kind) for kind in ("forward", "training"))
    return (
        f"attention on {machine.threads} threads with {machine.fma / 1e9:.0f} GFLOP/s and "
        f"{machine.read[-1][1] / 1e9:.0f} GB/s: {forward:.3g} s forward, {training:.3g} s with backward"
    )


def _table(total: TotalCost, title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    amount = Column("", justify="right", no_wrap=True)
    table = Table("", amount, "", "convention", title=title, box=SIMPLE_HEAD)
    for name, value, unit, convention in total.rows():
        table.add_row(name, f"{value:,}", unit, convention)
    return table
