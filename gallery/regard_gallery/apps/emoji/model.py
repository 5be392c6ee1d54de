"""CLIP: two encoders that embed images and texts in one space."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARPEST = math.log(100.0)


class CLIP(nn.Module):
    """An image and a text encoder, whose outputs (B, D) are scaled to length 1.

    The method is CLIP (Radford et al., 2021).

    The encoders do not attend to each other; only the loss combines images and texts.
    """

    def __init__(self, image: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.sharpness = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        """Returns scores (number of images, number of texts).

        A score is the cosine similarity of an image's and a text's embedding, times a learned
        factor.
        """
        cosines = self.of_images(images) @ self.of_texts(texts).T
        return cosines * self.sharpness.clamp(max=SHARPEST).exp()

    def of_images(self, images: Tensor) -> Tensor:
        return F.normalize(self.image(images), dim=-1)

    def of_texts(self, texts: Tensor) -> Tensor:
        return F.normalize(self.text(texts), dim=-1)


def contrast(scores: Tensor) -> Tensor:
    """Returns CLIP's symmetric contrastive loss of scores (B, B).

    scores[i, j] compares image i with text j. Image i belongs to text i, so the matching pairs are
    on the diagonal.
    """
    labels = torch.arange(len(scores), device=scores.device)
    return 0.5 * (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels))
