"""Electricity demand: train a patch transformer, compare it, and forecast the last day of the year.

The same as `regard run forecast`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.forecast import DAY, App


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    series, wanted = app.windows([len(app.series) - DAY])
    with torch.no_grad():
        found = model(series)  # (1, half hours), in GW
    highest = int(found.argmax())
    print(f"The highest demand is forecast for {highest // 2}:{highest % 2 * 3}0: {found.max():.2f} GW;")
    print(f"it was {wanted.max():.2f} GW. Mean error {1000 * (found - wanted).abs().mean():.0f} MW.")
    return code


if __name__ == "__main__":
    sys.exit(main())
