"""Brain tissue: a U-Net with attention segments grey and white matter in slices of an MR image.

Data: the MNI152 template (T1, 1 mm) with maps of grey and white matter, from the package `nilearn`.
The template is one brain, the average of 152 people. Training, validation and test are ranges of
its axial slices with gaps between the ranges, because neighbouring slices are nearly equal. The
results say nothing about other people, other scanners or illness.

In the template, a tissue is equally bright everywhere, so that brightness alone nearly determines
the tissue. In a scanner's images, brightness also varies smoothly with the position (a bias field).
Each slice is therefore multiplied by a smooth random field, and noise is added ("uneven light").
Scores on the unchanged slices ("even light") are listed too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores
from .._frame.data import bounded, package_file
from .._frame.pictures import ORANGE, figure, save
from .._parts.blocks import Blocks
from .model import Segmenter

FILE = ("nilearn", "datasets", "data", "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz")
TISSUES = ("other", "grey", "white")
HEIGHT, WIDTH = 240, 208  # size of a padded slice
TRAINED, VALIDATED, TESTED = range(20, 90), range(94, 99), range(103, 150)  # slices, counted from the bottom
BATCH, LEVELS = 4, 512  # slices per batch; levels of brightness, of which even light uses 0 to 255
UNEVEN, NOISE = 0.3, 0.03  # largest |log| of the light field; standard deviation of the noise


class Slices(NamedTuple):
    x: Tensor  # (n, 1, HEIGHT, WIDTH), in [0, 1]
    y: Tensor  # (n, HEIGHT, WIDTH), indices in TISSUES

    def shaded(self, generator: torch.Generator) -> Slices:
        """Returns the slices, each multiplied by a smooth random light field, with added noise."""
        corners = UNEVEN * (2 * torch.rand(len(self.x), 1, 4, 4, generator=generator) - 1)
        light = F.interpolate(corners, self.x.shape[-2:], mode="bilinear", align_corners=True).exp()
        noise = NOISE * torch.randn(self.x.shape, generator=generator)
        return self._replace(x=(self.x * light + noise).clamp_min(0))

    def one(self, at: int) -> Slices:
        return Slices(self.x[at : at + 1], self.y[at : at + 1])


def brain() -> tuple[Tensor, Tensor, Tensor]:
    """Reads the T1 image and the maps of grey and white matter, each (z, y, x) uint8."""
    kinds = ("t1", "gm", "wm")
    t1, grey, white = (volume(package_file(*FILE[:-1], FILE[-1].format(kind))) for kind in kinds)
    if not t1.shape == grey.shape == white.shape:
        raise ValueError(f"nilearn: expected one shape, got {t1.shape}, {grey.shape}, {white.shape}")
    return t1, grey, white


def cut(volumes: tuple[Tensor, Tensor, Tensor], chosen: range) -> Slices:
    """Returns the axial slices `chosen`. The label of a pixel is its most probable tissue."""
    t1, grey, white = (whole[chosen.start : chosen.stop].int() for whole in volumes)
    border = (0, WIDTH - t1.shape[2], 0, HEIGHT - t1.shape[1])
    tissue = torch.stack([255 - grey - white, grey, white]).argmax(0)
    return Slices(F.pad(t1 / 255, border)[:, None], F.pad(tissue, border))


def volume(path: Path) -> Tensor:
    """Reads a NIfTI file with uint8 values as a tensor (z, y, x)."""
    import nibabel

    try:
        image: Any = nibabel.load(bounded(path))
    except nibabel.filebasedimages.ImageFileError as error:
        raise ValueError(f"{path}: expected a NIfTI file: {error}") from None
    if image.ndim != 3 or image.get_data_dtype() != np.uint8:
        raise ValueError(f"{path}: expected bytes in 3 dims, got {image.get_data_dtype()} {image.shape}")
    return torch.from_numpy(image.dataobj.get_unscaled().T.copy())


def dice(found: Tensor, truth: Tensor, tissue: int) -> float:
    """Returns the Dice score of a tissue: 2 |A and B| / (|A| + |B|).

    A and B are the pixels at which `found` (predicted) and `truth` have this tissue.
    """
    a, b = found == tissue, truth == tissue
    return (2 * (a & b).sum() / (a.sum() + b.sum()).clamp_min(1)).item()


class App(Application):
    name = "medical"
    more = ("Dice grey", "Dice white", "grey, even light", "white, even light")
    request = f"the number of a slice, {TESTED.start} to {TESTED.stop - 1}"
    full = Recipe(steps=1000, rate=2e-3, decay=0.01, warmup=50)

    def load(self) -> None:
        volumes = brain()
        parts = (range(60, 64), range(94, 95), TESTED[:2]) if self.quick else (TRAINED, VALIDATED, TESTED)
        self.trained, self.validated, self.even = (cut(volumes, chosen) for chosen in parts)
        generator = torch.Generator().manual_seed(self.seed)
        self.validated, self.tested = self.validated.shaded(generator), self.even.shaded(generator)

    def model(self) -> nn.Module:
        return Segmenter(HEIGHT, WIDTH, len(TISSUES), Blocks(dropout=0.1))

    def batch(self, model: nn.Module, generator: torch.Generator) -> Slices:
        """Returns random slices with random light and noise, mirrored with probability 1/2."""
        count = 1 if self.quick else BATCH
        chosen = torch.randint(len(self.trained.x), (count,), generator=generator)
        x, y = self.trained.x[chosen], self.trained.y[chosen]
        mirrored = torch.rand(count, generator=generator) < 0.5
        x[mirrored], y[mirrored] = x[mirrored].flip(-1), y[mirrored].flip(-1)
        return Slices(x, y).shaded(generator)

    def loss(self, model: nn.Module, batch: Slices) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    def validation(self, model: nn.Module) -> float:
        return sum(dices(self._predicted(model, self.validated), self.validated)) / 2

    def measure(self, model: nn.Module, held: Slices) -> Scores:
        return self._scores([dices(self._predicted(model, slices), slices) for slices in (held, self.even)])

    def _scores(self, by_light: list[tuple[float, float]]) -> Scores:
        return dict(zip(self.more, (value for pair in by_light for value in pair), strict=True))

    def _predicted(self, model: nn.Module, slices: Slices) -> Tensor:
        """Returns the predicted tissue of each pixel, (n, HEIGHT, WIDTH)."""
        return torch.cat([model(x).argmax(1) for x in slices.x.split(BATCH)])

    def baselines(self) -> dict[str, Scores]:
        """Returns the scores of a baseline that labels each pixel by two thresholds of brightness.

        Uneven and even light have separate pairs of thresholds. Each pair is chosen on training
        slices in the same light.
        """
        shaded = self.trained.shaded(torch.Generator().manual_seed(self.seed + 1))
        by_light = []
        for trained, tested in ((shaded, self.tested), (self.trained, self.even)):
            a, b = thresholds(trained)
            by_light.append(dices((levels(tested) >= a).long() + (levels(tested) >= b), tested))
        return {"two thresholds": self._scores(by_light)}

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        """Returns, for each tissue, whether the model beats the thresholds in uneven light.

        Scores in even light are not compared, because thresholds are hard to beat there.
        """
        rival = baselines["two thresholds"]
        return {f"{name} better than thresholds": own[name] > rival[name] for name in self.more[:2]}

    def answer(self, model: nn.Module, request: str) -> str:
        numbers = TESTED[: len(self.tested.x)]
        one = self.tested.one(self.number(request, numbers) - numbers.start)
        predicted = self._predicted(model, one)
        lines = [f"slice {request} of the average brain; a study of a method, not for diagnosis"]
        for tissue, name in enumerate(TISSUES[1:], 1):
            area, true = ((pixels == tissue).sum().item() / 100 for pixels in (predicted, one.y))
            score = dice(predicted, one.y, tissue)
            lines.append(f"  {name:5}  {area:6.1f} cm2, in the data {true:6.1f}; Dice {score:.3f}")
        return "\n".join(lines)

    def draw(self, model: nn.Module, path: Path) -> None:
        """Draws a test slice, its true and predicted tissue, and the attention of one patch.

        The patch is the one with the most grey matter.
        """
        one = self.tested.one(len(self.tested.x) // 2)
        stride: int = model.stride  # type: ignore[assignment]
        grey = F.avg_pool2d((one.y == 1).float(), stride)[0]
        row, column = divmod(int(grey.argmax()), grey.shape[1])
        looks = model.looks(one.x[0], row, column)  # type: ignore[operator]
        picture, axes = figure(9, 2.9, ncols=4)
        titles = ("T1", "tissue in the data", "predicted tissue", "attention of the marked patch")
        for panel, title in zip(axes, titles, strict=True):
            panel.set_title(title, fontsize=9)
            panel.axis("off")
        axes[1].imshow(one.y[0].numpy(), cmap="gray", origin="lower")
        axes[2].imshow(self._predicted(model, one)[0].numpy(), cmap="gray", origin="lower")
        for panel in (axes[0], axes[3]):
            panel.imshow(one.x[0, 0].numpy(), cmap="gray", origin="lower")
        _overlay(axes[3], looks[-1], row, column, stride)
        save(picture, path)


def _overlay(axes: Any, looks: Tensor, row: int, column: int, stride: int) -> None:
    """Draws the attention weights of a patch over the image, and marks the patch."""
    heat = looks.repeat_interleave(stride, 0).repeat_interleave(stride, 1)
    axes.imshow(heat.numpy(), cmap="magma", alpha=0.6, origin="lower")
    axes.plot((column + 0.5) * stride, (row + 0.5) * stride, marker="s", color=ORANGE, fillstyle="none")


def dices(found: Tensor, slices: Slices) -> tuple[float, float]:
    """Returns the Dice scores of grey and white matter, for predictions `found`."""
    return dice(found, slices.y, TISSUES.index("grey")), dice(found, slices.y, TISSUES.index("white"))


def levels(slices: Slices) -> Tensor:
    """Returns the brightness of each pixel as an integer below LEVELS, (n, HEIGHT, WIDTH)."""
    return (slices.x[:, 0] * 255).round().long().clamp_max(LEVELS - 1)


def thresholds(slices: Slices) -> tuple[int, int]:
    """Returns brightness levels a <= b: pixels in [a, b) count as grey matter, from b on as white.

    Of all pairs of levels, this pair has the largest sum of the Dice scores of both tissues.
    """
    bright, tissues = levels(slices), range(len(TISSUES))
    counts = torch.stack([bright[slices.y == tissue].bincount(minlength=LEVELS) for tissue in tissues])
    below = F.pad(counts.cumsum(1), (1, 0)).double()  # (tissues, LEVELS + 1): pixels darker than a level
    grey_all, white_all = below[1, -1], below[2, -1]
    a, b = torch.meshgrid(torch.arange(LEVELS + 1), torch.arange(LEVELS + 1), indexing="ij")
    between = (below[:, b] - below[:, a]).clamp_min(0)  # (tissues, a, b): pixels in [a, b), labelled grey
    above = below[:, -1, None] - below  # (tissues, b): pixels of level b or brighter, labelled white
    grey = 2 * between[1] / (between.sum(0) + grey_all).clamp_min(1)
    white = 2 * above[2] / (above.sum(0) + white_all).clamp_min(1)
    best = torch.where(a <= b, grey + white, 0).argmax()
    return divmod(int(best), LEVELS + 1)
