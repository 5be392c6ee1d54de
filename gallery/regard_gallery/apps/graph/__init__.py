"""Papers of Cora: predicts a paper's subject from words and citations, with 20 labels per subject.

Data: Cora (2,708 papers, 1,433 words, 5,429 citations) from the package `graphdatascience`. The
split is random and depends on the seed. The GAT paper reports 83.0 % for one fixed split. The
package does not contain that split.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import Graph

from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import package_file
from .._frame.pictures import COLOURS, GREY, figure, save
from .._frame.training import rival_scores
from .model import DROPOUT, GAT, drop

PACKAGE = ("graphdatascience", "resources", "cora")
SUBJECTS = (
    "neural networks", "rule learning", "reinforcement learning", "probabilistic methods", "theory",
    "genetic algorithms", "case based",
)  # fmt: skip
LABELLED, VALIDATED, TESTED = 20, 500, 1000
PEER = "GAT of PyTorch Geometric"


class Cora(NamedTuple):
    papers: list[int]  # papers[i] is the id of node i in the data set
    x: Tensor  # (n, words), sparse: 1 / (number of words) for each word of a paper
    y: Tensor  # (n,): indices in SUBJECTS
    graph: Graph


def cora() -> Cora:
    """Reads the words, subjects and citations of all papers of Cora.

    A citation becomes two edges of the graph, one in each direction.
    """
    from pandas import Index, read_parquet  # type: ignore[import-untyped]

    files = [package_file(*PACKAGE, f"cora_{kind}.parquet.gzip") for kind in ("nodes", "rels")]
    nodes, links = map(read_parquet, files)
    index = Index(nodes["nodeId"])
    ends = [index.get_indexer(links[side]) for side in ("sourceNodeId", "targetNodeId")]
    edges = torch.from_numpy(np.stack(ends))
    words = torch.from_numpy(np.stack(nodes["features"])).float()
    x = (words / words.sum(1, keepdim=True).clamp_min(1)).to_sparse()
    both = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
    return Cora(index.tolist(), x, torch.tensor(nodes["subject"].tolist()), Graph(both, len(index)))


class App(Application):
    name = "graph"
    more = ("accuracy",)
    request = "the number of a paper, such as 31336"
    peers = (PEER,)
    seeds = 10
    full = Recipe(steps=200, rate=0.01, decay=0.1, falls=False, every=5)
    trial = replace(full, steps=10)

    def load(self) -> None:
        self.data = cora()
        self.sizes = self.data.x.shape[1], len(SUBJECTS)  # words, classes
        order = shuffled(len(self.data.y), self.seed)
        subjects = self.data.y[order]
        train = [(subjects == c).nonzero()[:LABELLED, 0] for c in range(len(SUBJECTS))]
        chosen = torch.cat(train)
        rest = order[torch.ones(len(order), dtype=torch.bool).index_fill(0, chosen, False)]
        self.trained, self.validated = order[chosen], rest[:VALIDATED]
        self.tested = rest[VALIDATED : VALIDATED + TESTED]

    def model(self) -> nn.Module:
        return GAT(*self.sizes)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        return self.trained

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        scores = model(self.data.x, self.data.graph)
        return F.cross_entropy(scores[batch], self.data.y[batch])

    def validation(self, model: nn.Module) -> float:
        """Returns the validation accuracy, minus a thousandth of the loss to break ties."""
        scores = model(self.data.x, self.data.graph)[self.validated]
        y = self.data.y[self.validated]
        right = (scores.argmax(-1) == y).double().mean()
        return float(right - 1e-3 * F.cross_entropy(scores, y))

    def measure(self, model: nn.Module, held: Tensor) -> Scores:
        predicted = model(self.data.x, self.data.graph)[held].argmax(-1)
        return {"accuracy": (predicted == self.data.y[held]).double().mean().item()}

    def baselines(self) -> dict[str, Scores]:
        rivals = {"MLP without edges": MLP, PEER: Geometric}
        return {name: rival_scores(self, partial(kind, *self.sizes)) for name, kind in rivals.items()}

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        mlp, peer = (scores["accuracy"] for scores in baselines.values())
        return {
            "10 points above an MLP without edges": own["accuracy"] >= mlp + 0.10,
            "within 1 point of PyTorch Geometric's GAT": abs(own["accuracy"] - peer) <= 0.01,
        }

    def answer(self, model: nn.Module, request: str) -> str:
        paper = self.data.papers.index(self.number(request, self.data.papers))
        probs = model(self.data.x, self.data.graph)[paper].softmax(-1)
        lines = [f"paper {request}: {SUBJECTS[int(probs.argmax())]} with {probs.max():.0%}"]
        lines[0] += f"; in the data {self._subject(paper)}. It attends to"
        for other, weight in sorted(self._attended(model, paper), key=lambda pair: -pair[1]):
            what = "itself" if other == paper else f"paper {self.data.papers[other]}: {self._subject(other)}"
            lines.append(f"  {weight:6.1%}  {what}")
        return "\n".join(lines)

    def _subject(self, paper: int) -> str:
        return SUBJECTS[int(self.data.y[paper])]

    def _attended(self, model: nn.Module, paper: int) -> list[tuple[int, float]]:
        """Returns the papers that `paper` attends to in the first layer, with attention weights.

        The weights are averaged over the heads.
        """
        source, target = self.data.graph.edges
        w = model.first.weights(self.data.x, self.data.graph).mean(0)  # type: ignore[operator, union-attr]
        into = target == paper
        return list(zip(source[into].tolist(), w[into].tolist(), strict=True))

    def draw(self, model: nn.Module, path: Path) -> None:
        """Draws the attention weights of one test paper on its neighbours.

        Of the test papers with at most 12 neighbours, chooses the one with the most neighbours.
        """
        degrees = self.data.graph.edges[1].bincount()[self.tested]
        paper = int(self.tested[torch.where(degrees <= 13, degrees, 0).argmax()])
        neighbours = [pair for pair in self._attended(model, paper) if pair[0] != paper]
        predicted = model(self.data.x, self.data.graph).argmax(-1)
        angles = torch.linspace(0, 2 * torch.pi, len(neighbours) + 1)[:-1]
        picture, axes = figure(6, 5.6)
        for (other, weight), x, y in zip(
            neighbours, angles.cos().tolist(), angles.sin().tolist(), strict=True
        ):
            axes.plot([0, x], [0, y], color=GREY, linewidth=40 * weight, zorder=1, solid_capstyle="butt")
            axes.scatter(x, y, s=420, color=COLOURS[int(predicted[other])], zorder=2)
            axes.annotate(f"{weight:.0%}", (1.2 * x, 1.2 * y), ha="center", va="center", fontsize=9)
        axes.scatter(0, 0, s=900, color=COLOURS[int(predicted[paper])], zorder=2)
        axes.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
        axes.set_title("What one paper of Cora attends to; colours are predicted subjects", fontsize=10)
        axes.axis("off")
        save(picture, path)


# Baselines: other models that are trained on the same split with the same recipe


class MLP(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 64), nn.Linear(64, classes)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        x = torch.sparse.mm(drop(x, self.training), self.first.weight.T) + self.first.bias
        out: Tensor = self.second(drop(x.relu(), self.training))
        return out


class Geometric(nn.Module):
    """The model `GAT`, built from the layers of PyTorch Geometric."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        with warnings.catch_warnings():  # PyTorch Geometric warns on import
            warnings.simplefilter("ignore")
            from torch_geometric.nn import GATConv
        self.first = GATConv(features, 8, 8, dropout=DROPOUT)
        self.second = GATConv(64, classes, dropout=DROPOUT)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        x = F.elu(self.first(drop(x, self.training), graph.edges))
        out: Tensor = self.second(drop(x, self.training), graph.edges)
        return out
