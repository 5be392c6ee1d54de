"""MovieLens-100k: which film a user rates next, from those rated before, by a causal transformer (SASRec).

Data: 100,000 ratings of 943 users and 1,682 films, from the package `recbole`. The last film of every user
is the test, the one before it the validation. It is ranked among all films that the user has not rated
before, not among 100 drawn ones, so the numbers are lower than those of papers that draw.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores
from .._frame.data import package_file, rows
from .._frame.pictures import BLUE, ORANGE, figure, save
from .model import PADDING, SASRec

FOLDER = ("recbole", "dataset_example", "ml-100k")
LENGTH, BATCH = 100, 32
TOP = 10
FILMS, FADES = (1, 2, 3, 5, 10), (0.5, 0.7, 0.9)  # of the chain over several films: what is tried


class Ratings(NamedTuple):
    histories: list[Tensor]  # of each user the films in the order they were rated, numbers from 1
    titles: list[str]  # of film i at i; 0 is no film


def ratings() -> Ratings:
    """Films rated in the same second keep the order of the file."""
    films = rows(package_file(*FOLDER, "ml-100k.item"))
    titles = ["", *(f"{title} ({year})" for _, title, year, *_ in films)]
    number = {film[0]: i for i, film in enumerate(films, 1)}
    of_user: dict[str, list[tuple[float, int]]] = {}
    for user, film, _, when in rows(package_file(*FOLDER, "ml-100k.inter")):
        of_user.setdefault(user, []).append((float(when), number[film]))
    ordered = [sorted(seen, key=lambda pair: pair[0]) for seen in of_user.values()]
    return Ratings([torch.tensor([film for _, film in seen]) for seen in ordered], titles)


class App(Application):
    name = "recommendation"
    more = ("HR@10", "NDCG@10")
    request = "titles of films that were seen, the latest last, separated by semicolons: 'Star Wars; Alien'"
    full = Recipe(1600, rate=4e-3, decay=0.01, warmup=100)
    tested, validated = 1, 2  # how far from the end of a history the film stands that is to be found

    def load(self) -> None:
        self.histories, self.titles = ratings()
        if self.quick:
            self.histories = self.histories[:60]
        self.trained = [seen[:-2] for seen in self.histories]

    def model(self) -> nn.Module:
        return SASRec(len(self.titles) - 1, LENGTH)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """(B, LENGTH + 1): a piece of the history of each of some users."""
        users = torch.randint(len(self.trained), (BATCH,), generator=generator).tolist()
        ends = torch.rand(BATCH, generator=generator).tolist()
        pieces = [_piece(self.trained[user], end) for user, end in zip(users, ends, strict=True)]
        return padded(pieces, LENGTH + 1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Among the films not seen so far, as in the test."""
        seen, following = batch[:, :-1], batch[:, 1:]
        real = seen != PADDING
        scores = model.score(model.states(seen)[real])  # type: ignore[operator]
        known = seen_so_far(seen, len(self.titles))[real]
        return F.cross_entropy(scores.masked_fill(known, -torch.inf), following[real])

    def validation(self, model: nn.Module) -> float:
        return self.measure(model, self.validated)["NDCG@10"]

    def measure(self, model: nn.Module, held: int) -> Scores:
        return quality(self._ranks(model, held))

    def _ranks(self, model: nn.Module, back: int) -> Tensor:
        """The rank of the film that is `back` from the end of each history, after those before it."""
        return ranks(lambda known: last_scores(model, known), self.histories, back)

    def baselines(self) -> dict[str, Scores]:
        """How many of the latest films the longer chain counts, and how it fades, is chosen in validation."""
        tried = [(films, fade) for films in FILMS for fade in FADES]
        best = max(tried, key=lambda one: quality(self._markov_ranks(2, *one))["NDCG@10"])
        return {
            "popularity": quality(self._popularity_ranks()),
            "item-item Markov": quality(self._markov_ranks(1)),
            "Markov over the latest films": quality(self._markov_ranks(1, *best)),
        }

    def _markov_ranks(self, back: int, films: int = 1, fade: float = 1.0) -> Tensor:
        """By what came right after the latest films, each weighted by `fade` to the power of how long ago."""
        follows, popularity = markov(self.trained, len(self.titles)), self._popularity()

        def after(seen: Tensor) -> Tensor:
            """Popularity decides among films that never came next."""
            latest = seen.flip(0)[:films]
            return fade ** torch.arange(len(latest)) @ follows[latest] + 1e-6 * popularity

        return ranks(lambda known: torch.stack([after(seen) for seen in known]), self.histories, back)

    def _popularity(self) -> Tensor:
        return torch.cat(self.trained).bincount(minlength=len(self.titles)).float()

    def _popularity_ranks(self) -> Tensor:
        popularity = self._popularity()
        return ranks(lambda known: popularity.expand(len(known), -1), self.histories, 1)

    def answer(self, model: nn.Module, request: str) -> str:
        titles = request.split(";")
        if len(titles) > LENGTH:
            raise ValueError(f"use: expected at most {LENGTH} titles, got {len(titles)}")
        seen = torch.tensor([self.film(title) for title in titles])
        scores = last_scores(model, [seen])[0].index_fill(0, seen, -torch.inf)
        chances = scores.softmax(-1)
        best = chances.topk(TOP).indices.tolist()
        return "\n".join(f"{chances[film]:6.1%}  {self.titles[film]}" for film in best)

    def film(self, title: str) -> int:
        """The film of that title, with or without its year; else the only one whose title begins so."""
        wanted = title.strip().lower()
        known = [name.lower() for name in self.titles]
        same = [i for i, name in enumerate(known) if wanted and wanted in (name, name.rpartition(" (")[0])]
        found = same or [i for i, name in enumerate(known) if wanted and name.startswith(wanted)]
        if len({known[i] for i in found}) == 1:  # some films are in the data twice
            return found[0]
        several = ", ".join(self.titles[i] for i in found[:TOP])
        what = f"several begin with {title.strip()!r}: {several}" if found else f"none is {title.strip()!r}"
        raise ValueError(f"use: expected {self.request}; {what}")

    def draw(self, model: nn.Module, path: Path) -> None:
        """How often the next film is among the first k, beside popularity."""
        own, other = self._ranks(model, 1), self._popularity_ranks()
        made, axes = figure(7, 3.8)
        k = torch.arange(1, 101)
        for found, colour, label in ((own, BLUE, "SASRec"), (other, ORANGE, "popularity")):
            axes.plot(k, (found[:, None] < k).double().mean(0), color=colour, label=label)
        axes.set(xlabel="k", ylabel="next film among the first k")
        axes.legend(frameon=False)
        save(made, path)


def _piece(seen: Tensor, where: float) -> Tensor:
    """At most LENGTH + 1 films in a row that end anywhere, `where` from 0 to 1."""
    end = min(len(seen), LENGTH + 1) + int(where * (1 + max(0, len(seen) - LENGTH - 1)))
    return seen[max(0, end - LENGTH - 1) : end]


def padded(histories: list[Tensor], length: int) -> Tensor:
    """(n, length): the end of each history, 0 in front."""
    return torch.stack([F.pad(seen[-length:], (length - min(length, len(seen)), 0)) for seen in histories])


def seen_so_far(seen: Tensor, films: int) -> Tensor:
    """(B, L, films) bool: which films are among the first ones of a row, up to each place; and padding."""
    B, L = seen.shape
    place = torch.arange(L)
    first = torch.full((B, films), L).scatter_reduce_(1, seen, place.expand(B, L), "amin")
    first[:, PADDING] = 0
    return first[:, None] <= place[:, None]


# Ranking


def last_scores(model: nn.Module, histories: list[Tensor]) -> Tensor:
    """Scores of each film as the next one, (n, films + 1); padding is never next."""
    parts = [padded(histories[i : i + 256], LENGTH) for i in range(0, len(histories), 256)]
    found = torch.cat([model.score(model.states(part)[:, -1]) for part in parts])  # type: ignore[operator]
    return found.index_fill(1, torch.tensor(PADDING), -torch.inf)


def ranks(score: Callable[[list[Tensor]], Tensor], histories: list[Tensor], back: int) -> Tensor:
    """From 0 on: the films that come before the right one, those the user knows left out. Ties count half."""
    known, right = [seen[:-back] for seen in histories], torch.stack([seen[-back] for seen in histories])
    scores = score(known).clone()
    scores[:, PADDING] = -torch.inf
    for row, seen in zip(scores, known, strict=True):
        row[seen] = -torch.inf
    own = scores.gather(1, right[:, None])
    return (scores > own).sum(1) + ((scores == own).sum(1) - 1) // 2


def quality(found: Tensor) -> Scores:
    """The share among the first ten, and the same weighted by 1 / log2(rank + 2)."""
    hit = (found < TOP).double()
    return {"HR@10": hit.mean().item(), "NDCG@10": (hit / (found + 2).double().log2()).mean().item()}


def markov(histories: list[Tensor], films: int) -> Tensor:
    """How often film j came right after film i, (films, films)."""
    pairs = torch.cat([torch.stack([seen[:-1], seen[1:]]) for seen in histories], 1)
    return (pairs[0] * films + pairs[1]).bincount(minlength=films**2).view(films, films).float()
