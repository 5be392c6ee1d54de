"""Segmentation of brain tissue: NIfTI files, Dice, thresholds, and the segmenter."""

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


def write_nifti(path: Path, shape: tuple[int, int, int], kind: int = 2) -> Path:
    header = bytearray(352)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<4h", header, 40, 3, *shape)
    struct.pack_into("<h", header, 70, kind)
    struct.pack_into("<f", header, 108, 352.0)
    header[344:348] = b"n+1\0"
    x, y, z = shape
    path.write_bytes(gzip.compress(bytes(header) + bytes(i % 256 for i in range(x * y * z))))
    return path


def test_volume(tmp_path: Path) -> None:
    """The file stores x as the fastest-varying dim, and `volume` returns (z, y, x)."""
    voxels = volume(write_nifti(tmp_path / "a.nii.gz", (3, 5, 7)))
    assert voxels.shape == (7, 5, 3)
    assert torch.equal(voxels.flatten(), torch.arange(105, dtype=torch.uint8))


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected bytes in 3 dims, got int16 \(2, 3, 4\)"):
        volume(write_nifti(tmp_path / "a.nii.gz", (2, 3, 4), kind=4))
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(bytes(400)))
    with pytest.raises(ValueError, match=r"b.nii.gz: expected a NIfTI file"):
        volume(tmp_path / "b.nii.gz")


def test_splits_are_at_least_four_slices_apart() -> None:
    assert TRAINED.stop + 4 <= VALIDATED.start
    assert VALIDATED.stop + 4 <= TESTED.start


def test_dice() -> None:
    predicted, truth = torch.tensor([1, 1, 2, 0]), torch.tensor([1, 2, 2, 1])
    assert dice(predicted, truth, 1) == pytest.approx(0.5)
    assert dice(predicted, truth, 2) == pytest.approx(2 / 3)
    assert dice(predicted, truth, 0) == 0.0


def test_thresholds_maximise_dice() -> None:
    torch.manual_seed(0)
    levels = torch.randint(0, 12, (2, 1, 30, 30))
    tissue = (levels[:, 0] + torch.randint(-3, 4, (2, 30, 30)) >= 5).long()
    tissue += (levels[:, 0] + torch.randint(-3, 4, (2, 30, 30)) >= 9).long() * tissue
    slices = Slices(levels / 255, tissue)

    def score(a: int, b: int) -> float:
        predicted = (levels[:, 0] >= a).long() + (levels[:, 0] >= b)
        return sum(dices(predicted, slices))

    all_scores = [score(a, b) for a, b in itertools.combinations_with_replacement(range(14), 2)]
    assert score(*thresholds(slices)) == pytest.approx(max(all_scores))


def test_shading_is_smooth_and_bounded_and_keeps_the_labels() -> None:
    slices = Slices(torch.ones(3, 1, 240, 208), torch.zeros(3, 240, 208, dtype=torch.long))
    first, second = (slices.shaded(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(first.y, slices.y)
    assert (first.x - second.x).abs().mean() > 0.02
    brightness = torch.nn.functional.avg_pool2d(first.x, 16)
    assert math.exp(-UNEVEN) - 0.02 < brightness.min() < 0.97
    assert 1.03 < brightness.max() < math.exp(UNEVEN) + 0.02
    assert (brightness.diff(dim=-1)).abs().max() < 0.2
    assert first.x[0].diff(dim=-1).std() == pytest.approx(NOISE * 2**0.5, rel=0.1)


def test_segmenter() -> None:
    torch.manual_seed(0)
    model = Segmenter(24, 16, 3, Blocks(16, 2, 2)).eval()
    images = torch.rand(2, 1, 24, 16)
    assert model(images).shape == (2, 3, 24, 16)
    looks = model.looks(images[0], 1, 1)
    assert looks.shape == (2, 3, 2)
    torch.testing.assert_close(looks.sum((1, 2)), torch.ones(2), atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(model(images.requires_grad_())[0, 0, 0, 0], images)
    assert gradient[0, 0, 20, 12].abs() > 0  # this pixel is outside the receptive field of the convolutions
    with pytest.raises(ValueError, match=r"images: expected .B, 1, 24, 16., got"):
        model(torch.rand(2, 1, 16, 24))
    with pytest.raises(ValueError, match=r"multiples of 8, got 20 and 16"):
        Segmenter(20, 16, 3)
