"""Papers of Cora: train a graph attention network, compare it, and look at what one paper attends to.

The same as `regard run graph`, then the trained model in Python.
"""

import sys

import torch

from regard.apps import arguments, command, load
from regard.apps.graph import SUBJECTS, App


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    app, model = load(App, options)  # from the checkpoint
    with torch.no_grad():
        chances = model(app.data.x, app.data.graph).softmax(-1)  # (papers, subjects)
        weights = model.first.weights(app.data.x, app.data.graph)  # (heads, edges)
    source, target = app.data.graph.edges
    paper = int(app.tested[0])
    best = weights[:, target == paper].mean(0).argmax()
    print(f"Paper {app.data.papers[paper]} is about {SUBJECTS[int(chances[paper].argmax())]};")
    print(f"it attends most to paper {app.data.papers[int(source[target == paper][best])]}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
