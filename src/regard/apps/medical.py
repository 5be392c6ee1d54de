"""Tissue of the brain: grey and white matter in slices of an MR image, by a U-Net with attention.

Data: the MNI152 template (T1, 1 mm) with maps of grey and white matter, from the package `nilearn`. It is one
brain, the average of 152: training, validation and test are ranges of its axial slices with gaps between
them, because neighbours are nearly the same. The brain stays the same, so nothing here speaks of other
people, other scanners or illness.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.segmenter import STRIDE, Segmenter
from ._application import Application, Recipe, Scores
from ._data import bounded, package_file
from ._pictures import ORANGE, figure, save

FILE = ("nilearn", "nilearn", "datasets", "data", "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz")
TISSUES = ("other", "grey", "white")
HEIGHT, WIDTH = 240, 208  # of a slice with its border
TRAINED, VALIDATED, TESTED = range(20, 90), range(94, 99), range(103, 150)  # slices, from the bottom
BATCH, LEVELS = 4, 256
BYTES = 2  # NIfTI's code of the only type that these files have


class Slices(NamedTuple):
    x: Tensor  # (n, 1, HEIGHT, WIDTH), from 0 to 1
    y: Tensor  # (n, HEIGHT, WIDTH), places in TISSUES

    def part(self, chosen: range) -> Slices:
        return Slices(self.x[chosen.start : chosen.stop], self.y[chosen.start : chosen.stop])


def brain() -> Slices:
    """All axial slices. A pixel belongs to the tissue that is the most probable."""
    t1, grey, white = (volume(package_file(*FILE[:-1], FILE[-1].format(kind))) for kind in ("t1", "gm", "wm"))
    shares = torch.stack([255 - grey.int() - white.int(), grey.int(), white.int()])
    height, width = t1.shape[1:]
    border = (0, WIDTH - width, 0, HEIGHT - height)
    return Slices(F.pad(t1.float() / 255, border)[:, None], F.pad(shares.argmax(0), border))


def volume(path: Path) -> Tensor:
    """The bytes (z, y, x) of a NIfTI-1 file."""
    stored = gzip.decompress(bounded(path).read_bytes())
    if struct.unpack_from("<i", stored)[0] != 348 or stored[344:348] != b"n+1\0":
        raise ValueError(f"{path}: expected a NIfTI-1 file, got one that begins with {stored[:4].hex()}")
    rank, x, y, z = struct.unpack_from("<4h", stored, 40)
    kind, begin = struct.unpack_from("<h", stored, 70)[0], int(struct.unpack_from("<f", stored, 108)[0])
    if rank != 3 or kind != BYTES or len(stored) != begin + x * y * z:
        raise ValueError(f"{path}: expected bytes in 3 dims, got {rank} dims {x, y, z} of type {kind}")
    return torch.from_numpy(np.frombuffer(stored, np.uint8, offset=begin).reshape(z, y, x).copy())


def dice(found: Tensor, truth: Tensor, tissue: int) -> float:
    """2 |A and B| / (|A| + |B|) of the pixels that are said to be of a tissue and those that are."""
    a, b = found == tissue, truth == tissue
    return (2 * (a & b).sum() / (a.sum() + b.sum()).clamp_min(1)).item()


class App(Application):
    name = "medical"
    more = ("Dice grey", "Dice white")
    request = f"the number of a slice, {TESTED.start} to {TESTED.stop - 1}"

    def __init__(self, *, quick: bool = False, seed: int = 0) -> None:
        super().__init__(quick=quick, seed=seed)
        whole = brain()
        parts = (range(60, 68), range(94, 95), TESTED[:2]) if quick else (TRAINED, VALIDATED, TESTED)
        self.trained, self.validated, self.tested = (whole.part(chosen) for chosen in parts)

    @property
    def recipe(self) -> Recipe:
        if self.quick:
            return Recipe(steps=2, every=2)
        return Recipe(steps=400, rate=2e-3, decay=0.01, warmup=20, every=50)

    def model(self) -> nn.Module:
        return Segmenter(HEIGHT, WIDTH, len(TISSUES))

    def batch(self, model: nn.Module, generator: torch.Generator) -> Slices:
        """Some slices, each perhaps mirrored."""
        chosen = torch.randint(len(self.trained.x), (BATCH,), generator=generator)
        x, y = self.trained.x[chosen], self.trained.y[chosen]
        mirrored = torch.rand(BATCH, generator=generator) < 0.5
        x[mirrored], y[mirrored] = x[mirrored].flip(-1), y[mirrored].flip(-1)
        return Slices(x, y)

    def loss(self, model: nn.Module, batch: Slices) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    def validation(self, model: nn.Module) -> float:
        return sum(dices(self._found(model, self.validated), self.validated).values()) / 2

    def scores(self, model: nn.Module) -> Scores:
        return dices(self._found(model, self.tested), self.tested)

    def _found(self, model: nn.Module, slices: Slices) -> Tensor:
        """(n, HEIGHT, WIDTH)"""
        return torch.cat([model(x).argmax(1) for x in slices.x.split(BATCH)])

    def baselines(self) -> dict[str, Scores]:
        """Dark, grey, white: the two brightnesses between them are the best for the training slices."""
        a, b = thresholds(self.trained)
        levels = (self.tested.x[:, 0] * 255).round()
        return {"two thresholds": dices((levels >= a).long() + (levels >= b), self.tested)}

    def use(self, model: nn.Module, request: str) -> str:
        given = TESTED[: len(self.tested.x)]
        if not request.isdecimal() or int(request) not in given:
            raise ValueError(f"use: expected {self.request} (here up to {given[-1]}), got {request!r}")
        at = int(request) - given.start
        one = self.tested.part(range(at, at + 1))
        found = self._found(model, one)
        lines = [f"slice {request} of the average brain; a study of a method, not for diagnosis"]
        for tissue, name in enumerate(TISSUES[1:], 1):
            own, true = ((part == tissue).sum().item() / 100 for part in (found, one.y))
            same = dice(found, one.y, tissue)
            lines.append(f"  {name:5}  {own:6.1f} cm2, in the data {true:6.1f}; Dice {same:.3f}")
        return "\n".join(lines)

    @torch.no_grad()
    def draw(self, model: nn.Module, path: Path) -> None:
        """A slice of the test, its tissue, what was found, and where its greyest patch looks."""
        one = self.tested.part(range(len(self.tested.x) // 2, len(self.tested.x) // 2 + 1))
        grey = F.avg_pool2d((one.y == 1).float(), STRIDE)[0]
        row, column = divmod(int(grey.argmax()), grey.shape[1])
        looks = model.looks(one.x[0], row, column)  # type: ignore[operator]
        made, axes = figure(9, 2.9, ncols=4)
        titles = ("T1", "tissue in the data", "found", "where the marked patch looks")
        for panel, title in zip(axes, titles, strict=True):
            panel.set_title(title, fontsize=9)
            panel.axis("off")
        axes[1].imshow(one.y[0].numpy(), cmap="gray", origin="lower")
        axes[2].imshow(self._found(model, one)[0].numpy(), cmap="gray", origin="lower")
        for panel in (axes[0], axes[3]):
            panel.imshow(one.x[0, 0].numpy(), cmap="gray", origin="lower")
        _overlay(axes[3], looks[-1], row, column)
        save(made, path)


def _overlay(axes: Any, looks: Tensor, row: int, column: int) -> None:
    """The weights of a patch over the image, and the patch itself."""
    whole = looks.repeat_interleave(STRIDE, 0).repeat_interleave(STRIDE, 1)
    axes.imshow(whole.numpy(), cmap="magma", alpha=0.6, origin="lower")
    axes.plot((column + 0.5) * STRIDE, (row + 0.5) * STRIDE, marker="s", color=ORANGE, fillstyle="none")


def dices(found: Tensor, slices: Slices) -> Scores:
    return {f"Dice {name}": dice(found, slices.y, tissue) for tissue, name in enumerate(TISSUES) if tissue}


def thresholds(slices: Slices) -> tuple[int, int]:
    """The brightness from which a pixel is grey matter, and from which white: best for both Dice."""
    levels = (slices.x[:, 0] * 255).round().long()
    counts = torch.stack(
        [levels[slices.y == tissue].bincount(minlength=LEVELS) for tissue in range(len(TISSUES))]
    )
    below = F.pad(counts.cumsum(1), (1, 0)).double()  # (tissues, LEVELS + 1)
    grey_all, white_all = below[1, -1], below[2, -1]
    a, b = torch.meshgrid(torch.arange(LEVELS + 1), torch.arange(LEVELS + 1), indexing="ij")
    between = (below[:, b] - below[:, a]).clamp_min(0)  # (tissues, a, b): pixels called grey
    above = below[:, -1, None] - below  # (tissues, b): pixels called white
    grey = 2 * between[1] / (between.sum(0) + grey_all).clamp_min(1)
    white = 2 * above[2] / (above.sum(0) + white_all).clamp_min(1)
    best = torch.where(a <= b, grey + white, 0).argmax()
    return divmod(int(best), LEVELS + 1)
