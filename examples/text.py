"""Clothing reviews: train a classifier on MiniLM, compare it, and ask it about two sentences.

The same as `regard run text`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.text import LIMIT, App, padded
from regard.models.encoder import encode, minilm

REVIEWS = [
    "The fabric is soft, it fits perfectly, and I wear it all the time.",
    "It looked nothing like the picture and the seam came apart after one wash.",
]


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    _, model = load(App, options)  # from the checkpoint
    _, tokenizer = minilm()
    with torch.no_grad():
        chances = model(*padded(encode(tokenizer, REVIEWS, LIMIT))).softmax(-1)  # (reviews, bad or good)
    for review, chance in zip(REVIEWS, chances[:, 1], strict=True):
        print(f"{chance:4.0%} for 4 or 5 stars: {review}")
    return code


if __name__ == "__main__":
    sys.exit(main())
