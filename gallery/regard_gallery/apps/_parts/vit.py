"""A vision transformer: attention between the patches of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..._checks import check_images
from .blocks import Blocks
from .looking import layer_rows

BLOCKS = Blocks()


class ViT(nn.Module):
    """Maps images (B, channels, size, size) to (B, outputs), by a linear head on the class token.

    The module `patches` embeds images as (B, d_model, size / patch, size / patch). By default it is
    a linear map of each patch. `place_scale` is the standard deviation of the initial position
    embeddings. If they are as large as the patch embeddings, the model can distinguish positions
    from the start.
    """

    def __init__(
        self, size: int, patch: int, outputs: int, blocks: Blocks = BLOCKS, *, channels: int = 1,
        patches: nn.Module | None = None, place_scale: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        d_model = blocks.d_model
        if size % patch:
            raise ValueError(f"patch: expected a divisor of size = {size}, got {patch}")
        self.shape, self.side = (channels, size, size), size // patch
        self.patches = nn.Conv2d(channels, d_model, patch, patch) if patches is None else patches
        self.first = nn.Parameter(torch.zeros(d_model))
        self.places = nn.Parameter(torch.randn(1 + self.side**2, d_model) * place_scale)
        self.stack = blocks.stack()
        self.head = nn.Linear(d_model, outputs)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.stack(self.tokens(images))[:, 0])
        return out

    def tokens(self, images: Tensor) -> Tensor:
        """Returns the embeddings (B, 1 + n, d_model) of the class token and the n patches.

        The class token comes first, then the patches in row-major order. Position embeddings are
        added.
        """
        check_images(images, self.shape)
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.expand(len(images), 1, -1)
        return torch.cat([first, patches], 1) + self.places

    def looks(self, images: Tensor) -> Tensor:
        """Returns the class token's attention weights on the patches, (B, side, side).

        `side` is the number of patches in a row and in a column. The weights are from the last
        layer, averaged over its heads and scaled to a sum of 1.
        """
        last = layer_rows(self.stack, self.tokens(images), 0)[-1]  # (B, H, L)
        on_patches = last[:, :, 1:].mean(1)
        shares = on_patches / on_patches.sum(-1, keepdim=True)
        return shares.view(-1, self.side, self.side)


def convolved(channels: int, d_model: int) -> nn.Sequential:
    """Returns an embedding of 4 x 4 patches for `ViT`: two convolutions of stride 2."""
    half = nn.Conv2d(channels, d_model // 2, 3, 2, 1)
    return nn.Sequential(half, nn.GELU(), nn.Conv2d(d_model // 2, d_model, 3, 2, 1))
