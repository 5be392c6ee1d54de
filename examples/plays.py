"""Shakespeare: train a decoder, compare it with 5-grams, and let it write on, carefully and boldly.

The same as `regard run plays`, then the trained model in Python.
"""

import sys

from regard.apps import arguments, command, load
from regard.apps.plays import App
from regard.models.decoder import write
from regard.models.generate import Sampling

PROMPT = "ROMEO.\nWhat light"


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    prompt = app.tokenizer.encode(PROMPT).ids
    for temperature in (0.3, 1.0):
        tokens = write(model, prompt, Sampling(max_tokens=60, temperature=temperature))
        print(f"\nTemperature {temperature}:\n{PROMPT}{app.tokenizer.decode(list(tokens))}")
    return code


if __name__ == "__main__":
    sys.exit(main())
