"""Fashion-MNIST: its files, and the vision transformer."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from regard_gallery.apps import image
from regard_gallery.apps._parts.blocks import Blocks
from regard_gallery.apps._parts.vit import ViT, convolved


def vit() -> ViT:
    torch.manual_seed(0)
    return ViT(12, 4, 5, Blocks(16, 2, 2)).eval()


def test_first_token_is_read_and_patches_know_their_places() -> None:
    """Patches that change places with what marks their places change nothing."""
    model, images = vit(), torch.rand(2, 1, 12, 12)
    other = images.clone()
    other[..., :4, :4], other[..., 8:, 4:8] = images[..., 8:, 4:8], images[..., :4, :4]
    expected = model(images)
    assert (model(other) - expected).abs().max() > 1e-4
    model.places.data[[1, 8]] = model.places.data[[8, 1]]
    torch.testing.assert_close(model(other), expected, atol=1e-5, rtol=1e-5)


def test_looks() -> None:
    model, images = vit(), torch.rand(3, 1, 12, 12)
    looks = model.looks(images)
    assert looks.shape == (3, 3, 3)
    torch.testing.assert_close(looks.sum((1, 2)), torch.ones(3), atol=1e-5, rtol=1e-5)
    assert (looks[0] - looks[1]).abs().max() > 1e-6
    model.places.data.zero_()
    torch.testing.assert_close(model.looks(torch.ones(1, 1, 12, 12)), torch.full((1, 3, 3), 1 / 9))


def test_convolutions_keep_patches_where_they_are() -> None:
    """A change of pixels changes the patches around it and no others."""
    made = convolved(1, 8)
    images = torch.rand(1, 1, 28, 28)
    other = images.clone()
    other[..., 12, 12] += 1
    changed = (made(other) != made(images)).any(1)[0]
    assert changed.shape == (7, 7)
    assert changed[3, 3]
    assert changed.sum() == changed[2:5, 2:5].sum()


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"patch: expected a divisor of size = 28, got 5"):
        ViT(28, 5, 10)
    with pytest.raises(ValueError, match=r"images: expected .B, 1, 12, 12., got"):
        vit()(torch.rand(2, 3, 12, 12))


def idx(path: Path, values: torch.Tensor, code: int = 8) -> Path:
    head = bytes((0, 0, code, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.numpy().tobytes()))
    return path


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(256, (3, 28, 28), dtype=torch.uint8)
    labels = torch.tensor([7, 0, 9], dtype=torch.uint8)
    idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    idx(tmp_path / "train-labels-idx1-ubyte.gz", labels)
    monkeypatch.setattr(image, "PLACES", ("nowhere", str(tmp_path)))
    found = image.fashion("train")
    torch.testing.assert_close(found.x[:, 0] * 255, pixels.float())
    assert found.y.tolist() == [7, 0, 9]
    mixed = image.fashion("train", 2, seed=1)
    for one, label in zip(mixed.x[:, 0] * 255, mixed.y.tolist(), strict=True):
        torch.testing.assert_close(one, pixels[[7, 0, 9].index(label)].float())
    idx(tmp_path / "train-labels-idx1-ubyte.gz", labels[:2])
    with pytest.raises(ValueError, match=r"as many labels as images, got 2 and 3"):
        image.fashion("train")


def test_unsound_files_are_refused(tmp_path: Path) -> None:
    path = idx(tmp_path / "a.gz", torch.zeros(3, dtype=torch.uint8), code=9)
    with pytest.raises(ValueError, match=r"a.gz: expected an IDX file of bytes with 1 dims, got 00000901"):
        image.read_idx(path, 1)
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 1)) + struct.pack(">I", 5) + b"abc"))
    with pytest.raises(ValueError, match=r"expected 5 values of shape .5., got 3"):
        image.read_idx(path, 1)


def test_missing_data_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "PLACES", ("nowhere",))
    with pytest.raises(FileNotFoundError, match=r"Fashion-MNIST: expected in one of nowhere; .* make data"):
        image.App(quick=True)
