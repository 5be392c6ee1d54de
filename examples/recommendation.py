"""MovieLens-100k: train a causal transformer over films, compare it, and ask it what comes after two of them.

The same as `regard run recommendation`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.recommendation import App, last_scores


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    seen = [app.film(title) for title in ("Star Wars", "Alien")]
    with torch.no_grad():
        chances = last_scores(model, [torch.tensor(seen)])[0].softmax(-1)  # of each film as the next
    best = next(film for film in chances.argsort(descending=True).tolist() if film not in seen)
    print(f"After {' and '.join(app.titles[film] for film in seen)}:")
    print(f"{app.titles[best]}, with {chances[best]:.1%}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
