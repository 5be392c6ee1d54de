"""Tissue of the brain: its files, Dice, thresholds, and the segmenter."""

from __future__ import annotations

import gzip
import itertools
import math
import struct
from pathlib import Path

import pytest
import torch

from regard_gallery.apps._parts.blocks import Blocks
from regard_gallery.apps.medical import (
    NOISE,
    TESTED,
    TRAINED,
    UNEVEN,
    VALIDATED,
    Slices,
    dice,
    dices,
    thresholds,
    volume,
)
from regard_gallery.apps.medical.model import Segmenter


def nifti(path: Path, shape: tuple[int, int, int], kind: int = 2) -> Path:
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<4h", head, 40, 3, *shape)
    struct.pack_into("<h", head, 70, kind)
    struct.pack_into("<f", head, 108, 352.0)
    head[344:348] = b"n+1\0"
    x, y, z = shape
    path.write_bytes(gzip.compress(bytes(head) + bytes(i % 256 for i in range(x * y * z))))
    return path


def test_volume(tmp_path: Path) -> None:
    """x runs fastest."""
    found = volume(nifti(tmp_path / "a.nii.gz", (3, 5, 7)))
    assert found.shape == (7, 5, 3)
    assert torch.equal(found.flatten(), torch.arange(105, dtype=torch.uint8))


def test_unsound_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected bytes in 3 dims, got int16 \(2, 3, 4\)"):
        volume(nifti(tmp_path / "a.nii.gz", (2, 3, 4), kind=4))
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(bytes(400)))
    with pytest.raises(ValueError, match=r"b.nii.gz: expected a NIfTI file"):
        volume(tmp_path / "b.nii.gz")


def test_ranges_keep_apart() -> None:
    assert TRAINED.stop + 4 <= VALIDATED.start
    assert VALIDATED.stop + 4 <= TESTED.start


def test_dice() -> None:
    found, truth = torch.tensor([1, 1, 2, 0]), torch.tensor([1, 2, 2, 1])
    assert dice(found, truth, 1) == pytest.approx(0.5)
    assert dice(found, truth, 2) == pytest.approx(2 / 3)
    assert dice(found, truth, 0) == 0.0


def test_thresholds_are_the_best() -> None:
    torch.manual_seed(0)
    levels = torch.randint(0, 12, (2, 1, 30, 30))
    tissue = (levels[:, 0] + torch.randint(-3, 4, (2, 30, 30)) >= 5).long()
    tissue += (levels[:, 0] + torch.randint(-3, 4, (2, 30, 30)) >= 9).long() * tissue
    slices = Slices(levels / 255, tissue)

    def score(a: int, b: int) -> float:
        called = (levels[:, 0] >= a).long() + (levels[:, 0] >= b)
        return sum(dices(called, slices))

    every = [score(a, b) for a, b in itertools.combinations_with_replacement(range(14), 2)]
    assert score(*thresholds(slices)) == pytest.approx(max(every))


def test_shading_is_smooth_bounded_and_keeps_the_tissue() -> None:
    slices = Slices(torch.ones(3, 1, 240, 208), torch.zeros(3, 240, 208, dtype=torch.long))
    one, two = (slices.shaded(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(one.y, slices.y)
    assert (one.x - two.x).abs().mean() > 0.02
    light = torch.nn.functional.avg_pool2d(one.x, 16)
    assert math.exp(-UNEVEN) - 0.02 < light.min() < 0.97
    assert 1.03 < light.max() < math.exp(UNEVEN) + 0.02
    assert (light.diff(dim=-1)).abs().max() < 0.2
    assert one.x[0].diff(dim=-1).std() == pytest.approx(NOISE * 2**0.5, rel=0.1)


def test_segmenter() -> None:
    torch.manual_seed(0)
    model = Segmenter(24, 16, 3, Blocks(16, 2, 2)).eval()
    images = torch.rand(2, 1, 24, 16)
    assert model(images).shape == (2, 3, 24, 16)
    looks = model.looks(images[0], 1, 1)
    assert looks.shape == (2, 3, 2)
    torch.testing.assert_close(looks.sum((1, 2)), torch.ones(2), atol=1e-5, rtol=1e-5)
    (slope,) = torch.autograd.grad(model(images.requires_grad_())[0, 0, 0, 0], images)
    assert slope[0, 0, 20, 12].abs() > 0  # beyond what convolutions alone would reach
    with pytest.raises(ValueError, match=r"images: expected .B, 1, 24, 16., got"):
        model(torch.rand(2, 1, 16, 24))
    with pytest.raises(ValueError, match=r"multiples of 8, got 20 and 16"):
        Segmenter(20, 16, 3)
