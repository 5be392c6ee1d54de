"""Source code: train a decoder on the standard library, compare it with 5-grams, see which lines surprise it.

The same as `regard run source`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.source import App

LINES = """def load(path):
    with open(path) as file:
        return file.read()
    with banana(path) as file:
"""


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    read = ""
    for line in LINES.splitlines(keepends=True):
        before, tokens = len(app.encode([read])), app.encode([read + line])
        with torch.no_grad():
            bits = app.bits(model, tokens)[before - 2 : -1]  # without the end of the document
        print(f"{bits.sum() / len(line):5.2f} bits per byte: {line.rstrip()}")
        read += line
    return code


if __name__ == "__main__":
    sys.exit(main())
