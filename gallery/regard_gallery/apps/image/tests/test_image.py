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


def test_logits_depend_on_the_positions_of_patches() -> None:
    """Swapping two patches changes the logits, unless their position embeddings are swapped too."""
    model, images = vit(), torch.rand(2, 1, 12, 12)
    swapped = images.clone()
    swapped[..., :4, :4], swapped[..., 8:, 4:8] = images[..., 8:, 4:8], images[..., :4, :4]
    expected = model(images)
    assert (model(swapped) - expected).abs().max() > 1e-4
    model.places.data[[1, 8]] = model.places.data[[8, 1]]
    torch.testing.assert_close(model(swapped), expected, atol=1e-5, rtol=1e-5)


def test_looks_are_weights_over_the_patches() -> None:
    model, images = vit(), torch.rand(3, 1, 12, 12)
    looks = model.looks(images)
    assert looks.shape == (3, 3, 3)
    torch.testing.assert_close(looks.sum((1, 2)), torch.ones(3), atol=1e-5, rtol=1e-5)
    assert (looks[0] - looks[1]).abs().max() > 1e-6
    model.places.data.zero_()
    torch.testing.assert_close(model.looks(torch.ones(1, 1, 12, 12)), torch.full((1, 3, 3), 1 / 9))


def test_convolutions_are_local() -> None:
    """A change of one pixel changes only the patches around it."""
    convolutions = convolved(1, 8)
    images = torch.rand(1, 1, 28, 28)
    changed_images = images.clone()
    changed_images[..., 12, 12] += 1
    changed = (convolutions(changed_images) != convolutions(images)).any(1)[0]
    assert changed.shape == (7, 7)
    assert changed[3, 3]
    assert changed.sum() == changed[2:5, 2:5].sum()


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"patch: expected a divisor of size = 28, got 5"):
        ViT(28, 5, 10)
    with pytest.raises(ValueError, match=r"images: expected .B, 1, 12, 12., got"):
        vit()(torch.rand(2, 3, 12, 12))


def write_idx(path: Path, values: torch.Tensor, code: int = 8) -> Path:
    header = bytes((0, 0, code, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.numpy().tobytes()))
    return path


def test_idx_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(256, (3, 28, 28), dtype=torch.uint8)
    labels = torch.tensor([7, 0, 9], dtype=torch.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", labels)
    monkeypatch.setattr(image, "PLACES", ("nowhere", str(tmp_path)))
    dataset = image.fashion("train")
    torch.testing.assert_close(dataset.x[:, 0] * 255, pixels.float())
    assert dataset.y.tolist() == [7, 0, 9]
    shuffled = image.fashion("train", 2, seed=1)
    for picture, label in zip(shuffled.x[:, 0] * 255, shuffled.y.tolist(), strict=True):
        torch.testing.assert_close(picture, pixels[[7, 0, 9].index(label)].float())
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", labels[:2])
    with pytest.raises(ValueError, match=r"as many labels as images, got 2 and 3"):
        image.fashion("train")


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "a.gz", torch.zeros(3, dtype=torch.uint8), code=9)
    with pytest.raises(ValueError, match=r"a.gz: expected an IDX file of bytes with 1 dims, got 00000901"):
        image.read_idx(path, 1)
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 1)) + struct.pack(">I", 5) + b"abc"))
    with pytest.raises(ValueError, match=r"expected 5 values of shape .5., got 3"):
        image.read_idx(path, 1)


def test_missing_data_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "PLACES", ("nowhere",))
    with pytest.raises(FileNotFoundError, match=r"Fashion-MNIST: expected in one of nowhere; .* make data"):
        image.App(quick=True)
