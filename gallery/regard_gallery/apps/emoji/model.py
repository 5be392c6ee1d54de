"""Images and texts in one space (CLIP): two encoders, trained so that an image is near its text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARPEST = math.log(100.0)


class CLIP(nn.Module):
    """Two encoders that each give (B, D); what they give is scaled to length 1.

    The encoders never attend to each other: images and texts meet in the loss alone (Radford et al., 2021).
    """

    def __init__(self, image: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.sharpness = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        """How near each image is to each text, (images, texts), sharpened for a softmax."""
        found = self.of_images(images) @ self.of_texts(texts).T
        return found * self.sharpness.clamp(max=SHARPEST).exp()

    def of_images(self, images: Tensor) -> Tensor:
        return F.normalize(self.image(images), dim=-1)

    def of_texts(self, texts: Tensor) -> Tensor:
        return F.normalize(self.text(texts), dim=-1)


def contrast(scores: Tensor) -> Tensor:
    """The loss for scores (B, B) of pairs: each image must find its text, and each text its image."""
    own = torch.arange(len(scores), device=scores.device)
    return 0.5 * (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own))
