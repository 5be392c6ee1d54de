"""Measures size, speed and loss of models that differ only in their kind of attention."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING

import torch

from .._checks import count
from ._models import KINDS, Sizes, layer, parameters
from ._notes import NOTES, denied, undecided
from ._speed import Side, decoded
from ._training import trained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLEAR = 0.05  # decoding speeds count as equal if they differ by less than CLEAR * MHA's speed


@dataclass(frozen=True)
class Effort:
    """Settings of the measurement: the length of training and the amount of timing."""

    steps: int = 400  # training steps
    seeds: int = 3
    length: int = 256  # bytes per training sequence
    batch: int = 4  # sequences per training step
    tokens: int = 4096  # length of the timed prompt
    rounds: int = 5  # repetitions of prefill and decoding

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            count(name, size, 2 if name == "seeds" else 1)

    @property
    def ticks(self) -> int:
        """The number of times that `measure` calls `progress`."""
        return len(KINDS) * (1 + self.rounds + self.seeds * self.steps)


FULL = Sizes(), Effort()
QUICK = Sizes(128, layers=2), Effort(80, length=128, batch=8, tokens=2048, rounds=3)


@dataclass(frozen=True)
class Row:
    """The measured sizes, speeds and losses of the model with one kind of attention."""

    kind: str
    attention_parameters: int  # number of parameters in one attention layer
    model_parameters: int
    cache_bytes: int  # size of the caches of all layers after the prompt
    token_bytes: float  # cache bytes per token
    prefill: float  # tokens per second
    decode: float  # tokens per second
    losses: tuple[float, ...]  # held-out loss of each seed, in nats per byte

    @property
    def loss(self) -> float:
        return mean(self.losses)

    @property
    def spread(self) -> float:
        """The standard deviation of the loss over the seeds."""
        return stdev(self.losses)


@dataclass(frozen=True)
class Measured:
    """The measured results of all kinds of attention, and the settings of the measurement."""

    sizes: Sizes
    effort: Effort
    threads: int
    rows: tuple[Row, ...]

    def __getitem__(self, kind: str) -> Row:
        return {row.kind: row for row in self.rows}[kind]

    @property
    def setting(self) -> str:
        s, e = self.sizes, self.effort
        return (
            f"width {s.width}, {s.heads} heads, {s.layers} layers, window {s.window}; "
            f"{e.steps} steps of {e.batch} x {e.length} bytes, {e.seeds} seeds; "
            f"{e.tokens:,} tokens read; float32, threads: {self.threads}"
        )

    def values(self, column: str) -> dict[str, float]:
        """Returns the measurements to compare with a column of NOTES, a table from study notes.

        The keys are the kinds of attention in that table. Quality is measured as the negative loss.
        """
        columns: dict[str, Callable[[Row], float]] = {
            "parameters": lambda row: row.attention_parameters,
            "memory": lambda row: row.token_bytes,
            "inference": lambda row: row.decode,
            "quality": lambda row: -row.loss,
        }
        return {kind: columns[column](self[kind]) for kind in NOTES[column]}

    def denied(self) -> dict[str, list[str]]:
        """Maps each column of the notes' table to the orderings that measurements contradict.

        The table NOTES is from study notes. An ordering is a text such as "MLA < MHA". Measured
        speeds and losses contradict an ordering only if they differ by more than a margin.
        """
        return {
            column: denied(words, self.values(column), self._margin(column))
            for column, words in NOTES.items()
        }

    def undecided(self) -> dict[str, list[str]]:
        """Maps each column of the notes' table to the orderings that are within the margin."""
        return {
            column: undecided(words, self.values(column), self._margin(column))
            for column, words in NOTES.items()
        }

    def _margin(self, column: str) -> float:
        if column == "inference":
            return CLEAR * self["MHA"].decode
        return max(self[kind].spread for kind in NOTES[column]) if column == "quality" else 0.0

    def to_json(self) -> str:
        orders = {"not as in the notes": self.denied(), "undecided": self.undecided()}
        results = asdict(self) | {"notes": NOTES} | orders
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        return json.dumps(results | versions, indent=2)

    def plot(self, path: str | None = None) -> Figure:
        """Returns a matplotlib Figure of the results, in five panels. Saves it to `path` if given.

        Needs the extra `plot`.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 3.4), layout="constrained")
        rows = self.rows
        panels = {
            "parameters of a layer": [row.attention_parameters for row in rows],
            "cache bytes for a token": [row.token_bytes for row in rows],
            "prefill, tokens / s": [row.prefill for row in rows],
            "decode, tokens / s": [row.decode for row in rows],
        }
        *bars, last = figure.subplots(1, 5)
        names = [row.kind for row in rows]
        for axes, (title, values) in zip(bars, panels.items(), strict=True):
            axes.barh(names, values, color=COLOURS[: len(rows)])
            axes.set_title(title, fontsize=10)
        _draw_losses(last, rows)
        for axes in figure.axes:
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
            axes.ticklabel_format(axis="x", scilimits=(-2, 4))
        figure.suptitle(self.setting, fontsize=9)
        if path is not None:
            figure.savefig(path, dpi=110, metadata={"Software": None})
        return figure


COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


def _draw_losses(axes: Axes, rows: Sequence[Row]) -> None:
    """Plots each kind's mean loss with its standard deviation, and a dot per seed.

    Bars would have to start at zero, which would hide the differences between the losses.
    """
    for row, colour in zip(rows, COLOURS, strict=False):
        axes.errorbar(row.loss, row.kind, xerr=row.spread, fmt="D", color=colour, capsize=4)
        axes.plot(row.losses, [row.kind] * len(row.losses), "o", color="black", markersize=2.5)
    axes.set_title("held-out loss, nats / byte", fontsize=10)


def measure(sizes: Sizes, effort: Effort, *, progress: Callable[[str], None] = lambda step: None) -> Measured:
    """Trains and times a model for each kind of attention, and returns all results.

    Untrained models are timed, because the speed does not depend on the weights.

    Args:
        progress: called `effort.ticks` times with a description of the next step.
    """
    sides = decoded(
        KINDS, sizes, tokens=effort.tokens, rounds=effort.rounds,
        progress=lambda kind: progress(f"speed, {kind}"),
    )  # fmt: skip
    rows = tuple(_row(side, sizes, effort, progress) for side in sides)
    return Measured(sizes, effort, torch.get_num_threads(), rows)


def _row(side: Side, sizes: Sizes, effort: Effort, progress: Callable[[str], None]) -> Row:
    def loss(seed: int) -> float:
        return trained(
            side.kind, sizes, seed, effort.steps, length=effort.length, batch=effort.batch,
            progress=lambda: progress(f"training, {side.kind}, seed {seed}"),
        )  # fmt: skip

    cache = side.model.cache_bytes(effort.tokens)
    return Row(
        side.kind, parameters(layer(side.kind, sizes)), parameters(side.model), cache, cache / effort.tokens,
        1 / side.to_read, 1 / side.to_write, tuple(loss(seed) for seed in range(effort.seeds)),
    )  # fmt: skip
