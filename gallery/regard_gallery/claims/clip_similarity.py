"""Claim: softmax(image_features @ text_features.T) is CLIP's similarity.
`regard claims clip_similarity`

CLIP divides the features by their lengths and multiplies the cosines by a learned scale before the
softmax. The sample does neither. The experiment trains the small CLIP of `clip_towers` on pairs and
compares both formulas, while some pairs are still confused. It then makes one text's features
twice as long, which does not change their direction, so that CLIP's probabilities stay the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .clip_towers import PAIRS, WORDS, small_clip, train
from .finding import Finding, verdict


def features(steps: int) -> tuple[Tensor, Tensor, float, Tensor]:
    """Trains a CLIP. Returns its features (n, d) of images and texts, not normalised, and its scale.

    The last result is the model's own probabilities (n, n) of texts for each image.
    """
    torch.manual_seed(0)
    model = small_clip().eval()
    tokens = torch.randint(1, 48, (PAIRS, WORDS))
    tokens[:, -1] = 49  # end token, whose state represents the text
    pixels = torch.randn(PAIRS, 3, 16, 16)
    train(model, tokens, pixels, steps)
    with torch.no_grad():
        images = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
        texts = model.text_projection(model.text_model(input_ids=tokens).pooler_output)
        found = model(input_ids=tokens, pixel_values=pixels).logits_per_image.softmax(-1)
    scale = float(model.logit_scale.detach().exp())
    return images, texts, scale, found


def printed(images: Tensor, texts: Tensor) -> Tensor:
    return (images @ texts.T).softmax(-1)


def probabilities(images: Tensor, texts: Tensor, scale: float) -> Tensor:
    """Returns CLIP's probabilities (n, n) of texts for each image."""
    images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
    return (scale * images @ texts.T).softmax(-1)


def measure(steps: int = 15) -> Finding:
    images, texts, scale, found = features(steps)
    longer = texts.clone()
    longer[0] *= 2
    right, sample = probabilities(images, texts, scale), printed(images, texts)
    apart = float((sample - right).abs().max())
    by_length = [
        float((after - before).abs().max())
        for before, after in (
            (sample, printed(images, longer)), (right, probabilities(images, longer, scale))
        )
    ]  # fmt: skip
    own = [float(x.diagonal().mean()) for x in (sample, right)]
    moved = int((sample.argmax(-1) != right.argmax(-1)).sum())
    return Finding(
        claim="softmax(image_features @ text_features.T) is CLIP's similarity",
        verdict=verdict(apart < 1e-3),
        measured=f"probabilities differ from CLIP's by up to {apart:.2f}, and {moved} of {PAIRS} images get "
        f"another best text; if one text's features double, they change by up to {by_length[0]:.2f}",
        correct=f"divide the features by their lengths and multiply by the learned scale (here {scale:.1f}): "
        f"lengths then change the probabilities by {by_length[1]:.1g}",
        numbers={
            "largest difference of the probabilities": apart,
            "the correct formula beside the model": float((right - found).abs().max()),
            "images with another best text": moved,
            "mean probability of the own text, printed": own[0],
            "mean probability of the own text, CLIP": own[1],
            "change by doubled features, printed": by_length[0],
            "change by doubled features, CLIP": by_length[1],
            "lengths of the image features": images.norm(dim=-1).tolist(),
            "scale": scale,
        },
    )
