"""Clothing in small images: train a vision transformer, compare it, and see where it looks.

The same as `regard run image`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.image import KINDS, App

SHADES = " .:-=+*#%@"


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    image = app.tested.x[:1]  # (1, 1, 28, 28)
    with torch.no_grad():
        chances = model(image)[0].softmax(-1)  # (kinds,)
        looks = model.looks(image)[0]  # (7, 7), sums to 1
    print(f"The first test image is a {KINDS[int(chances.argmax())]} ({chances.max():.0%}). It looks here:")
    for row in (looks / looks.max() * (len(SHADES) - 1)).round().int().tolist():
        print("   " + "".join(2 * SHADES[shade] for shade in row))
    return code


if __name__ == "__main__":
    sys.exit(main())
