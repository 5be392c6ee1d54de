"""MovieLens-100k: a causal transformer (SASRec) predicts the film that a user rates next.

Data: 100,000 ratings of 943 users and 1,682 films, from the package `recbole`. The last film of
every user is for the test, the film before it for validation. Each of these two films is ranked
among all films that the user has not rated before. Papers that rank the film among only 100 sampled
films report higher scores.
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
FILMS, FADES = (1, 2, 3, 5, 10), (0.5, 0.7, 0.9)  # candidates for `films` and `fade` of a Markov chain


class Ratings(NamedTuple):
    histories: list[Tensor]  # each user's films in the order of rating, numbered from 1
    titles: list[str]  # titles[i] is the title of film i; titles[0] is empty


def ratings() -> Ratings:
    """Reads the films that each user rated, in order of time, and the titles of all films.

    Films that a user rated in the same second keep the order of the file.
    """
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
    tested, validated = 1, 2  # the target is the film at index -1 or -2 of a history

    def load(self) -> None:
        self.histories, self.titles = ratings()
        if self.quick:
            self.histories = self.histories[:60]
        self.trained = [seen[:-2] for seen in self.histories]

    def model(self) -> nn.Module:
        return SASRec(len(self.titles) - 1, LENGTH)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Returns parts of the histories of random users, padded on the left: (B, LENGTH + 1)."""
        users = torch.randint(len(self.trained), (BATCH,), generator=generator).tolist()
        ends = torch.rand(BATCH, generator=generator).tolist()
        parts = [_part(self.trained[user], end) for user, end in zip(users, ends, strict=True)]
        return padded(parts, LENGTH + 1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Returns the cross-entropy of the next film.

        Films that the user has rated before are no candidates, as in the test.
        """
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
        """Returns the rank (n,) that the model gives the film at index -back of each history."""
        return ranks(lambda known: last_scores(model, known), self.histories, back)

    def baselines(self) -> dict[str, Scores]:
        """Returns the scores of popularity and of two Markov chains.

        The first chain predicts from the latest film, the second from several of the latest films.
        For the second chain, the number of films and the decay `fade` of their weights are chosen
        by validation score.
        """
        candidates = [(films, fade) for films in FILMS for fade in FADES]
        best = max(candidates, key=lambda one: quality(self._markov_ranks(2, *one))["NDCG@10"])
        return {
            "popularity": quality(self._popularity_ranks()),
            "item-item Markov": quality(self._markov_ranks(1)),
            "Markov over the latest films": quality(self._markov_ranks(1, *best)),
        }

    def _markov_ranks(self, back: int, films: int = 1, fade: float = 1.0) -> Tensor:
        """Returns a Markov chain's rank (n,) of the film at index -back of each history.

        The score of a candidate film is a sum over the latest `films` films of the history: how
        often the candidate directly followed the film, times fade**n for the film n steps before
        the latest.
        """
        follows, popularity = markov(self.trained, len(self.titles)), self._popularity()

        def after(seen: Tensor) -> Tensor:
            """Returns each film's score as the next film after the history `seen`.

            The scores have the shape (len(self.titles),). Popularity breaks ties.
            """
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
        probs = scores.softmax(-1)
        best = probs.topk(TOP).indices.tolist()
        return "\n".join(f"{probs[film]:6.1%}  {self.titles[film]}" for film in best)

    def film(self, title: str) -> int:
        """Returns the number of the film with this title.

        `title` may lack the year. If no film has this title, finds the film whose title begins with
        `title`.

        Raises ValueError if no film or several films match.
        """
        wanted = title.strip().lower()
        known = [name.lower() for name in self.titles]
        exact = [i for i, name in enumerate(known) if wanted and wanted in (name, name.rpartition(" (")[0])]
        matches = exact or [i for i, name in enumerate(known) if wanted and name.startswith(wanted)]
        if len({known[i] for i in matches}) == 1:  # the data lists some films twice, under the same title
            return matches[0]
        several = ", ".join(self.titles[i] for i in matches[:TOP])
        what = f"several begin with {title.strip()!r}: {several}" if matches else f"none is {title.strip()!r}"
        raise ValueError(f"use: expected {self.request}; {what}")

    def draw(self, model: nn.Module, path: Path) -> None:
        """Plots the hit rate at k against k, for the model and for the popularity baseline."""
        by_model, by_popularity = self._ranks(model, 1), self._popularity_ranks()
        picture, axes = figure(7, 3.8)
        k = torch.arange(1, 101)
        for ranked, colour, label in ((by_model, BLUE, "SASRec"), (by_popularity, ORANGE, "popularity")):
            axes.plot(k, (ranked[:, None] < k).double().mean(0), color=colour, label=label)
        axes.set(xlabel="k", ylabel="next film among the first k")
        axes.legend(frameon=False)
        save(picture, path)


def _part(seen: Tensor, fraction: float) -> Tensor:
    """Returns at most LENGTH + 1 consecutive films of a history.

    `fraction` in [0, 1) chooses where they start: 0 gives the first films, values near 1 the last.
    """
    end = min(len(seen), LENGTH + 1) + int(fraction * (1 + max(0, len(seen) - LENGTH - 1)))
    return seen[max(0, end - LENGTH - 1) : end]


def padded(histories: list[Tensor], length: int) -> Tensor:
    """Returns the last `length` films of each history, padded with 0 on the left: (n, length)."""
    return torch.stack([F.pad(seen[-length:], (length - min(length, len(seen)), 0)) for seen in histories])


def seen_so_far(seen: Tensor, films: int) -> Tensor:
    """Returns a bool tensor (B, L, films). Entry (b, l, i) is whether film i is in seen[b, :l + 1].

    The entries of film 0, which is PADDING, are True.
    """
    B, L = seen.shape
    position = torch.arange(L)
    first = torch.full((B, films), L).scatter_reduce_(1, seen, position.expand(B, L), "amin")
    first[:, PADDING] = 0
    return first[:, None] <= position[:, None]


# Ranking


def last_scores(model: nn.Module, histories: list[Tensor]) -> Tensor:
    """Returns the logits (n, films + 1) of the next film after each history.

    The logits of film 0, which is PADDING, are -inf.
    """
    batches = [padded(histories[i : i + 256], LENGTH) for i in range(0, len(histories), 256)]
    logits = torch.cat([model.score(model.states(x)[:, -1]) for x in batches])  # type: ignore[operator]
    return logits.index_fill(1, torch.tensor(PADDING), -torch.inf)


def ranks(score: Callable[[list[Tensor]], Tensor], histories: list[Tensor], back: int) -> Tensor:
    """Returns the rank (n,) of the film at index -back of each history. The best rank is 0.

    `score` maps n histories, each cropped before the ranked film, to scores (n, films + 1). Films
    that the user has rated before are excluded. Of the films with an equal score, half count as
    better.
    """
    known, right = [seen[:-back] for seen in histories], torch.stack([seen[-back] for seen in histories])
    scores = score(known).clone()
    scores[:, PADDING] = -torch.inf
    for row, seen in zip(scores, known, strict=True):
        row[seen] = -torch.inf
    target = scores.gather(1, right[:, None])
    return (scores > target).sum(1) + ((scores == target).sum(1) - 1) // 2


def quality(found: Tensor) -> Scores:
    """Returns hit rate at 10 and NDCG at 10 for ranks (n,). The best rank is 0."""
    hit = (found < TOP).double()
    return {"HR@10": hit.mean().item(), "NDCG@10": (hit / (found + 2).double().log2()).mean().item()}


def markov(histories: list[Tensor], films: int) -> Tensor:
    """Returns counts (films, films). Entry (i, j) is how often film j directly followed film i."""
    pairs = torch.cat([torch.stack([seen[:-1], seen[1:]]) for seen in histories], 1)
    return (pairs[0] * films + pairs[1]).bincount(minlength=films**2).view(films, films).float()
