"""Spoken digits: train a recogniser with CTC, compare it with time warping, and let it read a long string.

The same as `regard run speech`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.speech import App, strings
from regard.models.recogniser import greedy


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    heard = strings(app.tested, [torch.arange(12)])  # twelve recordings, longer than any string in training
    with torch.no_grad():
        chances = model(heard.frames, heard.lengths)  # (1, frames, 1 + digits), log
    found = greedy(chances, heard.lengths)[0]
    print("spoken", "".join(str(symbol - 1) for symbol in heard.spoken[0].tolist()))
    print("heard ", "".join(str(symbol - 1) for symbol in found))
    return code


if __name__ == "__main__":
    sys.exit(main())
