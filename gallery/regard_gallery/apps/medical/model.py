"""A U-Net with attention at its lowest resolution, for segmentation."""

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
    """Maps images (B, 1, height, width) to logits (B, classes, height, width).

    Convolutions halve the resolution three times. Each position of the result then stands for a
    patch of `stride` x `stride` pixels, and the patches attend to each other. Transposed
    convolutions restore the resolution, with skip connections from the earlier features of the same
    resolution.
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
        channels = list(pairwise((d_model, *reversed(CHANNELS))))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in channels)
        self.join = nn.ModuleList(nn.Conv2d(2 * b, b, 3, 1, 1) for _, b in channels)
        self.head = nn.Conv2d(CHANNELS[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, tokens = self._tokens(images)
        x = self.stack(tokens).transpose(1, 2).unflatten(2, self.grid)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = F.gelu(join(torch.cat([up(x), skip], 1)))
        out: Tensor = self.head(x)
        return out

    def _tokens(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the features of each resolution, and embeddings (B, n, d_model) of n patches."""
        check_images(images, self.shape)
        skips = [F.gelu(self.first(images))]
        for down in self.down:
            skips.append(F.gelu(down(skips[-1])))
        return skips, self.patches(skips[-1]).flatten(2).transpose(1, 2) + self.places

    def looks(self, image: Tensor, row: int, column: int) -> Tensor:
        """Returns the attention weights (layers, rows, columns) of the patch at (row, column).

        The image (1, height, width) has `rows` x `columns` patches. Weights are averaged over the
        heads.
        """
        layers = layer_rows(self.stack, self._tokens(image[None])[1], row * self.grid[1] + column)
        return torch.stack([weights[0].mean(0).unflatten(0, self.grid) for weights in layers])
