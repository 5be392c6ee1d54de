"""Emoji and words in one space: train two encoders with a contrastive loss, and search images by words.

The same as `regard run emoji`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.emoji import App


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    wishes = ["something to drink", "an animal", "I am so happy"]
    with torch.no_grad():
        images = model.of_images(app.tested.plain)  # (emoji, D), of length 1
        texts = model.of_texts(app.embed(wishes))  # (wishes, D)
    for wish, near in zip(wishes, texts @ images.T, strict=True):
        best = near.topk(3).indices.tolist()
        print(f"{wish}: " + ", ".join(f"{app.tested.emoji[i].text} {app.tested.emoji[i].name}" for i in best))
    return code


if __name__ == "__main__":
    sys.exit(main())
