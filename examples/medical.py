"""Grey and white matter: train a U-Net with attention, compare it with thresholds, and see where it fails.

The same as `regard run medical`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.medical import TISSUES, App


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    image, truth = app.tested.x[:1], app.tested.y[0]
    with torch.no_grad():
        found = model(image)[0].argmax(0)  # (height, width)
        looks = model.looks(image[0], 12, 12)[-1]  # (30, 26): where that patch looks in the last layer
    print("pixels of the first test slice: rows are the data, columns what was found")
    print(f"{'':8}" + "".join(f"{name:>8}" for name in TISSUES))
    for tissue, name in enumerate(TISSUES):
        counts = found[truth == tissue].bincount(minlength=len(TISSUES)).tolist()
        print(f"{name:8}" + "".join(f"{count:8}" for count in counts))
    print(f"Half of what the middle patch looks at lies in {_half(looks)} of {looks.numel()} patches.")
    return code


def _half(looks: torch.Tensor) -> int:
    """The fewest patches that hold half of the weight."""
    held = looks.flatten().sort(descending=True).values.cumsum(0)
    return int((held < 0.5 * held[-1]).sum()) + 1


if __name__ == "__main__":
    sys.exit(main())
