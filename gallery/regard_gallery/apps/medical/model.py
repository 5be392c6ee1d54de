"""A U-Net with attention at its bottom: which class each pixel of an image belongs to."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._checks import check_images
from .._parts.blocks import Blocks
from .._parts.looking import layer_rows

BLOCKS = Blocks()
CHANNELS = (8, 16, 32)


class Segmenter(nn.Module):
    """Images (B, 1, height, width) -> scores (B, classes, height, width).

    Convolutions halve the image, once for each of CHANNELS; its patches, of `stride` pixels in each
    direction, then attend to each other; convolutions double it again, each time beside what was seen at that
    size on the way down.
    """

    def __init__(self, height: int, width: int, classes: int, blocks: Blocks = BLOCKS) -> None:
        super().__init__()
        d_model = blocks.d_model
        self.stride = 2 ** len(CHANNELS)
        if height % self.stride or width % self.stride:
            raise ValueError(f"height, width: expected multiples of {self.stride}, got {height} and {width}")
        self.shape, self.grid = (1, height, width), (height // self.stride, width // self.stride)
        self.first = nn.Conv2d(1, CHANNELS[0], 3, 1, 1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(CHANNELS))
        self.patches = nn.Conv2d(CHANNELS[-1], d_model, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(self.grid[0] * self.grid[1], d_model) * 0.02)
        self.stack = blocks.stack()
        ways = list(pairwise((d_model, *reversed(CHANNELS))))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ways)
        self.join = nn.ModuleList(nn.Conv2d(2 * b, b, 3, 1, 1) for _, b in ways)
        self.head = nn.Conv2d(CHANNELS[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        seen, tokens = self._tokens(images)
        x = self.stack(tokens).transpose(1, 2).unflatten(2, self.grid)
        for up, join, beside in zip(self.up, self.join, reversed(seen), strict=True):
            x = F.gelu(join(torch.cat([up(x), beside], 1)))
        out: Tensor = self.head(x)
        return out

    def _tokens(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """What was seen at each size, and the patches (B, patches, d_model), row by row."""
        check_images(images, self.shape)
        seen = [F.gelu(self.first(images))]
        for down in self.down:
            seen.append(F.gelu(down(seen[-1])))
        return seen, self.patches(seen[-1]).flatten(2).transpose(1, 2) + self.places

    def looks(self, image: Tensor, row: int, column: int) -> Tensor:
        """Where a patch of an image (1, height, width) looks, mean of the heads: (layers, *grid)."""
        layers = layer_rows(self.stack, self._tokens(image[None])[1], row * self.grid[1] + column)
        return torch.stack([own[0].mean(0).unflatten(0, self.grid) for own in layers])
