"""Emoji and their names: for each held-out image, the model ranks the names of all held-out emoji.

Data: 1,906 emoji with names, and their skin tone variants, from the npm package
`emoji-datasource-google`. Only the image encoder is trained. The names are encoded by MiniLM, whose
weights are frozen.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores, shuffled
from .._frame.data import FOLDER, bounded, first_of
from .._frame.pictures import figure, save
from .._parts.blocks import Blocks
from .._parts.encoder import encode, minilm
from .._parts.vit import ViT, convolved
from ..text import padded
from .model import CLIP, contrast

PLACES = (FOLDER / "emoji-datasource-google", "node_modules/emoji-datasource-google")
SIZE, PATCH, STATES, SENTENCE = 32, 4, 64, 384
BATCH, SHIFT = 128, 2  # images per batch; maximal shift of the images in pixels
TESTED, VALIDATED = 0.2, 0.1  # shares of emoji families (`Emoji.family`) in the test and validation data
LIMIT = 64  # maximal number of tokens of a name
AMONG, TIMES_CHANCE = 5, 10
# Code points that `family` ignores: joiners, and variants of a person by gender, age, skin tone, direction.
BESIDE = (
    "200D", "FE0F", "2640", "2642", "27A1", "2B05", "1F468", "1F469", "1F9D1", "1F466", "1F467", "1F9D2",
    "1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF",
)  # fmt: skip


class Emoji(NamedTuple):
    unified: str  # code points in hex, such as "1F3C3-200D-2640"
    name: str
    files: tuple[str, ...]  # file names of the image and then of its skin tone variants

    @property
    def text(self) -> str:
        return "".join(chr(int(point, 16)) for point in self.unified.split("-"))

    @property
    def family(self) -> str:
        """The code points that the variants of an emoji share.

        All variants of "person running" are one family, so that the split keeps them together.
        """
        points = [point for point in self.unified.split("-") if point not in BESIDE]
        return "-".join(points) or "a person"


def emoji() -> tuple[Path, list[Emoji]]:
    """Returns the folder of the images, and the list of all emoji that have an image."""
    folder = first_of(PLACES, "emoji", "make data (or npm install emoji-datasource-google)")
    listed = json.loads(bounded(folder / "emoji.json").read_text(encoding="utf-8"))
    known = []
    for entry in listed:
        if entry["category"] == "Component" or not entry["has_img_google"]:
            continue
        variants = entry.get("skin_variations", {}).values()
        skins = [skin["image"] for skin in variants if skin["has_img_google"]]
        known.append(Emoji(entry["unified"], entry["name"].lower(), (entry["image"], *skins)))
    return folder / "img" / "google" / "64", known


def read_image(path: Path) -> Tensor:
    """Returns an image as (3, SIZE, SIZE) in [-1, 1], on a white background."""
    import numpy as np
    from PIL import Image

    with Image.open(bounded(path)) as stored:
        image = stored.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    small = Image.alpha_composite(white, image).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 127.5 - 1


class Part(NamedTuple):
    """One part of the data split: emoji, their images and the embeddings of their names."""

    emoji: list[Emoji]
    images: Tensor  # (n, 3, SIZE, SIZE): the images of all emoji; in training also their skin tone variants
    first: Tensor  # (len(emoji) + 1,): the index in `images` of each emoji's first image; then n
    sentences: Tensor  # (len(emoji), SENTENCE): MiniLM's embeddings of the names

    @property
    def plain(self) -> Tensor:
        """The first image of each of n emoji, without a skin tone: (n, 3, SIZE, SIZE)."""
        return self.images[self.first[:-1]]


class App(Application):
    name = "emoji"
    more = ("recall@5",)
    request = 'words, such as "a fast car"'
    full = Recipe(steps=1200, rate=1e-3, decay=0.1, warmup=40, every=60)

    def load(self) -> None:
        folder, known = emoji()
        known = known[::20] if self.quick else known
        self._encoder, self._tokenizer = minilm()
        families = sorted({one.family for one in known})
        order = shuffled(len(families), self.seed).tolist()
        tested, validated = (round(share * len(families)) for share in (TESTED, TESTED + VALIDATED))
        part = {families[index]: (i >= tested) + (i >= validated) for i, index in enumerate(order)}
        split = [[one for one in known if part[one.family] == which] for which in range(3)]
        self.tested, self.validated = (self._part(folder, chosen, skins=False) for chosen in split[:2])
        self.trained = self._part(folder, split[2], skins=True)

    def _part(self, folder: Path, chosen: list[Emoji], *, skins: bool) -> Part:
        files = [one.files if skins else one.files[:1] for one in chosen]
        images = torch.stack([read_image(folder / name) for names in files for name in names])
        first = torch.tensor([0, *map(len, files)]).cumsum(0)
        return Part(chosen, images, first, self.embed([one.name for one in chosen]))

    @torch.no_grad()
    def embed(self, texts: list[str]) -> Tensor:
        """Returns MiniLM's embeddings of the texts, (len(texts), 384).

        An embedding is the mean of the last hidden states of a text's tokens, scaled to length 1.
        """
        sums = []
        for begin in range(0, len(texts), BATCH):
            tokens, lengths = padded(encode(self._tokenizer, texts[begin : begin + BATCH], LIMIT))
            # The encoder returns zeros for padding, so the sum is over tokens only.
            sums.append(self._encoder.eval()(tokens, lengths).sum(1))
        return F.normalize(torch.cat(sums), dim=-1)

    def model(self) -> nn.Module:
        """Returns a CLIP model that embeds images in MiniLM's space.

        Text embeddings are not projected: there are too few emoji names to learn a projection.
        """
        blocks = Blocks(STATES, dropout=0.1)
        image = ViT(SIZE, PATCH, SENTENCE, blocks, channels=3, patches=convolved(3, STATES))
        return CLIP(image, nn.Identity())

    def batch(self, model: nn.Module, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns images (BATCH, 3, SIZE, SIZE) and embeddings of their names (BATCH, 384).

        Draws distinct emoji with random skin tones. All images of a batch are shifted by the same
        random offset.
        """
        part = self.trained
        chosen = torch.randperm(len(part.emoji), generator=generator)[:BATCH]
        begin, end = part.first[chosen], part.first[chosen + 1]
        variant = begin + (torch.rand(len(chosen), generator=generator) * (end - begin)).long()
        shift = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
        return part.images[variant].roll(shift, (-2, -1)), part.sentences[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return contrast(model(*batch))

    def validation(self, model: nn.Module) -> float:
        """Returns the mean reciprocal rank of the right names.

        Recall@5 would be too noisy with few validation images.
        """
        scores = model(self.validated.plain, self.validated.sentences)
        return (1 / ranks(scores)).mean().item()

    def measure(self, model: nn.Module, held: Part) -> Scores:
        return {"recall@5": recall(model(held.plain, held.sentences))}

    def baselines(self) -> dict[str, Scores]:
        """Returns the scores of chance and of a nearest-neighbour search by pixels.

        The search finds the training image that is nearest to a test image, and ranks the test
        names by their similarity to the name of that training image.
        """
        part = self.trained
        pixels = torch.cdist(self.tested.plain.flatten(1), part.images.flatten(1)).argmin(1)
        owner = torch.searchsorted(part.first, pixels, right=True) - 1
        by_pixels = part.sentences[owner] @ self.tested.sentences.T
        chance = min(1.0, AMONG / len(self.tested.emoji))
        recalls = {"chance": chance, "the name of the nearest image": recall(by_pixels)}
        return {name: {"recall@5": value} for name, value in recalls.items()}

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        chance = baselines["chance"]["recall@5"]
        many = {f"{TIMES_CHANCE} times chance or more": own["recall@5"] >= TIMES_CHANCE * chance}
        return many | super().goals(own, baselines)

    def answer(self, model: nn.Module, request: str) -> str:
        """Lists the emoji whose image embeddings are nearest to the embedding of the request.

        The emoji's names are not used.
        """
        if (tokens := len(encode(self._tokenizer, [request], len(request) + 2)[0])) > LIMIT:
            raise ValueError(f"use: expected at most {LIMIT} tokens, got {tokens}")
        sentence = model.of_texts(self.embed([request.lower()]))  # type: ignore[operator]
        lines = []
        for title, part in (("never seen", self.tested), ("seen", self.trained)):
            near = (model.of_images(part.plain) @ sentence.T)[:, 0]  # type: ignore[operator]
            best = near.topk(min(AMONG, len(near))).indices.tolist()
            shown = (f"{part.emoji[i].text} {part.emoji[i].name} ({near[i]:.2f})" for i in best)
            lines.append(f"{title}: {', '.join(shown)}")
        return "\n".join(lines)

    def draw(self, model: nn.Module, path: Path) -> None:
        """Draws test images, each with the names that the model ranks first.

        The right name is bold.
        """
        scores = model(self.tested.plain, self.tested.sentences)
        shown = torch.arange(0, len(scores), max(1, len(scores) // 8))[:8]
        picture, axes = figure(9, 2.6, nrows=2, ncols=8)
        for (above, below), i in zip(axes.T, shown.tolist(), strict=False):
            above.imshow((self.tested.plain[i].permute(1, 2, 0) + 1).numpy() / 2)
            best = scores[i].topk(min(AMONG, len(scores))).indices.tolist()
            for line, j in enumerate(best):
                weight = "bold" if j == i else "normal"
                name = shorten(self.tested.emoji[j].name, 20, placeholder="…")
                below.text(0, 0.9 - 0.2 * line, name, fontsize=7, weight=weight)
        for one in axes.flat:
            one.axis("off")
        save(picture, path)


def ranks(scores: Tensor) -> Tensor:
    """Returns the rank (n,) of each image's own text among all texts. The best rank is 1.

    scores[i, j] compares image i with text j. A text with the same score as the image's own text
    counts as better.
    """
    return (scores >= scores.diagonal()[:, None]).sum(1).double()


def recall(scores: Tensor) -> float:
    """Returns the share of images whose own text has rank 5 or better, for scores (n, n)."""
    return (ranks(scores) <= AMONG).double().mean().item()
