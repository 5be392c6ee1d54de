"""English to French: train an encoder-decoder, compare it with a lexicon, translate with few and many beams.

The same as `regard run translation`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.translation import App
from regard.models.translator import END, sentences


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    one = app.tested[0]
    source = sentences([[*app.tokenizer.encode(one.source).ids, END]])
    print(one.source, "->", " | ".join(one.references))
    with torch.no_grad():
        for width in (1, 4, 16):  # sequences that are kept at the same time
            (written,) = model.translate(source, width=width, longest=30)
            print(f"{width:3} beams: {written.score:7.3f} {app.tokenizer.decode(written.tokens)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
