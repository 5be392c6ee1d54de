"""Claim: CLIP aligns images and texts by cross-attention. `regard claims clip_towers`

CLIP has two encoders without attention between them. The contrastive loss aligns their outputs:
each image must be nearer to its own text than to the other texts of the batch, and each text nearer
to its own image. The experiment uses a small CLIP of Hugging Face Transformers with random weights.
It looks for attention between the two encoders, and then trains the model on a batch of pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .finding import Finding, verdict

PAIRS, WORDS = 8, 6


def small_clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **sizes,
        "vocab_size": 50,
        "max_position_embeddings": WORDS,
        "bos_token_id": 48,
        "eos_token_id": 49,
    }
    vision = {**sizes, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    make: Any = CLIPModel._from_config
    return make(config, attn_implementation="eager")


def lengths_attended(model: Any, tokens: Tensor, pixels: Tensor) -> set[tuple[int, int]]:
    """Returns the distinct pairs (Lq, Lk) of all attention calls in the model."""
    found = model(input_ids=tokens, pixel_values=pixels, output_attentions=True)
    both = (*found.text_model_output.attentions, *found.vision_model_output.attentions)
    return {(weights.shape[2], weights.shape[3]) for weights in both}


def matched(model: Any, tokens: Tensor, pixels: Tensor) -> float:
    """Returns the share of images whose nearest text is their own."""
    near = model(input_ids=tokens, pixel_values=pixels).logits_per_image.argmax(1)
    return float((near == torch.arange(len(pixels))).float().mean())


def train(model: Any, tokens: Tensor, pixels: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss.backward()
        optimizer.step()


def measure(steps: int = 60) -> Finding:
    torch.manual_seed(0)
    model = small_clip().eval()
    tokens = torch.randint(1, 48, (PAIRS, WORDS))
    tokens[:, -1] = 49  # end token, whose state represents the text
    pixels = torch.randn(PAIRS, 3, 16, 16)
    with torch.no_grad():
        pairs = lengths_attended(model, tokens, pixels)
        images = [model(input_ids=x, pixel_values=pixels).image_embeds for x in (tokens, tokens.flip(0))]
    changed = float((images[0] - images[1]).abs().max())
    before = matched(model, tokens, pixels)
    train(model, tokens, pixels, steps)
    after = matched(model, tokens, pixels)
    crossing = sorted(pair for pair in pairs if pair[0] != pair[1])
    return Finding(
        claim="CLIP aligns images and texts by cross-attention",
        verdict=verdict(bool(crossing) or changed > 0),
        measured=f"{len(crossing)} attention calls between text and image; "
        f"if the text changes, an image's embedding changes by {changed:g}",
        correct=f"two encoders, aligned by a contrastive loss: {steps} training steps on {PAIRS} pairs raise "
        f"the share of images whose nearest text is their own from {before:.1%} to {after:.0%}",
        numbers={
            "queries and keys of all attentions": sorted(pairs),
            "tokens of a text, patches of an image + 1": [WORDS, 17],
            "change of an image's vector by another text": changed,
            "matched before training": before,
            "matched after training": after,
        },
    )
