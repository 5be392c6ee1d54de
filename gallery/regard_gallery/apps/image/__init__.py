"""Fashion-MNIST: a vision transformer classifies small grey images into ten kinds of clothing.

Data: 60,000 images for training and 10,000 for the test, from Debian's package
`dataset-fashion-mnist`.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import FOLDER, bounded, first_of
from .._frame.pictures import figure, save
from .._parts.blocks import Blocks
from .._parts.vit import ViT, convolved

PLACES = ("/usr/share/datasets/fashion-mnist", FOLDER / "usr/share/datasets/fashion-mnist")
KINDS = (
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
SIZE, PATCH, WIDTH, BATCH, VALIDATED = 28, 4, 64, 64, 2000
AHEAD = 0.03  # the goal is an accuracy of at least that of the baseline + AHEAD
UNSIGNED_BYTES = 8  # IDX's code for uint8 elements, the only type in these files


class Images(NamedTuple):
    x: Tensor  # (n, 1, 28, 28), in [0, 1]
    y: Tensor  # (n,)

    def part(self, begin: int, end: int | None) -> Images:
        return Images(self.x[begin:end], self.y[begin:end])


def fashion(which: str, count: int | None = None, seed: int | None = None) -> Images:
    """Reads `count` images (default: all) and their labels from the set "train" or "t10k".

    Without a seed, takes the first images of the set; with a seed, random images.
    """
    folder = first_of(PLACES, "Fashion-MNIST", "make data (or apt-get install dataset-fashion-mnist)")
    x = read_idx(folder / f"{which}-images-idx3-ubyte.gz", 3)
    y = read_idx(folder / f"{which}-labels-idx1-ubyte.gz", 1)
    if len(x) != len(y):
        raise ValueError(f"{folder}: expected as many labels as images, got {len(y)} and {len(x)}")
    chosen = (torch.arange(len(x)) if seed is None else shuffled(len(x), seed))[:count]
    return Images(x[chosen, None].float() / 255, y[chosen].long())


def read_idx(path: Path, rank: int) -> Tensor:
    """Reads a gzipped IDX file of `rank` dims with uint8 elements.

    The file has two zero bytes, one byte for the element type, one byte for the rank, four bytes
    for the size of each dim, and then the elements.
    """
    # No library is used: torchvision is large, and idx2numpy has had no release for years.
    stored = gzip.decompress(bounded(path).read_bytes())
    if stored[:4] != bytes((0, 0, UNSIGNED_BYTES, rank)):
        raise ValueError(f"{path}: expected an IDX file of bytes with {rank} dims, got {stored[:4].hex()}")
    begin = 4 + 4 * rank
    shape = np.frombuffer(stored[4:begin], ">u4").tolist()
    values = np.frombuffer(stored, np.uint8, offset=begin)
    if values.size != np.prod(shape):
        raise ValueError(f"{path}: expected {np.prod(shape)} values of shape {shape}, got {values.size}")
    return torch.from_numpy(values.reshape(shape).copy())


class App(Application):
    name = "image"
    more = ("accuracy",)
    request = "the number of a test image, such as 7"
    full = Recipe(steps=4500, rate=2e-3, decay=0.05, warmup=100, every=250)

    def load(self) -> None:
        trained, validated, tested = (1000, 100, 200) if self.quick else (None, VALIDATED, None)
        images = fashion("train", None if trained is None else trained + validated, self.seed)
        self.validated, self.trained = images.part(0, validated), images.part(validated, None)
        self.tested = fashion("t10k", tested)

    def model(self) -> nn.Module:
        patches = nn.Sequential(nn.InstanceNorm2d(1), convolved(1, WIDTH))  # normalises brightness
        blocks = Blocks(WIDTH, layers=2, hidden=2 * WIDTH)
        return ViT(SIZE, PATCH, len(KINDS), blocks, patches=patches, place_scale=0.3)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Images:
        chosen = torch.randint(len(self.trained.y), (BATCH,), generator=generator)
        return Images(self.trained.x[chosen], self.trained.y[chosen])

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    def measure(self, model: nn.Module, held: Images) -> Scores:
        batches = zip(held.x.split(500), held.y.split(500), strict=True)
        right = [model(x).argmax(-1) == y for x, y in batches]
        return {"accuracy": torch.cat(right).double().mean().item()}

    def baselines(self) -> dict[str, Scores]:
        """Returns the scores of logistic regression.

        Its penalty is the one with the best validation accuracy.
        """
        from sklearn.linear_model import LogisticRegression

        x, held, tested = (part.x.flatten(1).numpy() for part in (self.trained, self.validated, self.tested))
        tried = [LogisticRegression(C=c, tol=1e-3, max_iter=200).fit(x, self.trained.y) for c in (0.02, 0.5)]
        best = max(tried, key=lambda one: one.score(held, self.validated.y))
        return {"logistic regression on pixels": {"accuracy": float(best.score(tested, self.tested.y))}}

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        return {
            f"{100 * AHEAD:g} points above {name}": own["accuracy"] >= scores["accuracy"] + AHEAD
            for name, scores in baselines.items()
        }

    def answer(self, model: nn.Module, request: str) -> str:
        at = self.number(request, range(len(self.tested.y)))
        one = self.tested.part(at, at + 1)
        probs = model(one.x)[0].softmax(-1)
        looks = model.looks(one.x)[0]  # type: ignore[operator]
        row, column = divmod(int(looks.argmax()), looks.shape[1])
        return (
            f"image {request}: {KINDS[int(probs.argmax())]} with {probs.max():.0%}; in the data "
            f"{KINDS[int(one.y)]}. It looks most at row {row + 1}, column {column + 1} of "
            f"{len(looks)} x {len(looks)} patches ({looks.max():.0%})"
        )

    def draw(self, model: nn.Module, path: Path) -> None:
        """Draws the first test image of each class, and the class token's attention to patches."""
        first = torch.stack([(self.tested.y == kind).nonzero()[0, 0] for kind in range(len(KINDS))])
        images = self.tested.x[first]
        predicted, looks = model(images).argmax(-1), model.looks(images)  # type: ignore[operator]
        picture, axes = figure(9, 2.6, nrows=2, ncols=len(KINDS))
        for i, (above, below) in enumerate(axes.T):
            for panel in (above, below):
                panel.imshow(images[i, 0].numpy(), cmap="gray_r")
                panel.axis("off")
            heat = looks[i].repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)
            below.imshow(heat.numpy(), cmap="magma", alpha=0.6)
            above.set_title(KINDS[int(predicted[i])], fontsize=8)
        save(picture, path)
