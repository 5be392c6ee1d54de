"""Claim: several heads are better than one head. `regard claims one_head`

The notes report it as an experimental observation, without the experiment. Here, small byte-level
language models are trained on the source of Python's standard library. They have the same width and
the same number of parameters, and differ in the number of heads only. With the same seed, they
start from the same weights and train on the same batches, so their losses are compared seed by
seed. Several heads are better if the loss with one head exceeds theirs, on average over the seeds,
by more than twice the standard deviation of this difference. They are worse if the reverse holds.

The claim is right if each tried number of heads is better than one head, incomplete if only some
are, wrong if none is and some are worse, otherwise undecided. The experiment takes about two
minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from ..compare import ONE_HEAD, Sizes, layer, parameters, trained
from .finding import Finding

SEVERAL = 4, 8
WIDTH, LAYERS = 64, 2


def losses(heads: int, width: int, steps: int, seeds: int) -> list[float]:
    """Returns the held-out loss of each seed, in nats per byte."""
    kind, sizes = settings(heads, width)
    return [trained(kind, sizes, seed, steps) for seed in range(seeds)]


def settings(heads: int, width: int) -> tuple[str, Sizes]:
    return (
        (ONE_HEAD, Sizes(width, SEVERAL[0], LAYERS)) if heads == 1 else ("MHA", Sizes(width, heads, LAYERS))
    )


def leads(one: Sequence[float], several: Sequence[float]) -> list[float]:
    """Returns by how much the loss of several heads is lower than that of one head, for each seed."""
    return [a - b for a, b in zip(one, several, strict=True)]


def compared(ahead: Sequence[float]) -> str:
    """Returns whether several heads are better, worse, or not distinguishable by these seeds."""
    lead, margin = mean(ahead), 2 * stdev(ahead)
    return "within the scatter" if abs(lead) <= margin else "better" if lead > 0 else "worse"


def judge(comparisons: Sequence[str]) -> str:
    if "better" in comparisons:
        return "right" if set(comparisons) == {"better"} else "incomplete"
    return "wrong" if "worse" in comparisons else "undecided"


def measure(width: int = WIDTH, steps: int = 800, seeds: int = 3) -> Finding:
    counts = (1, *SEVERAL)
    sizes = {heads: parameters(layer(*settings(heads, width))) for heads in counts}
    found = {heads: losses(heads, width, steps, seeds) for heads in counts}
    ahead = {heads: leads(found[1], found[heads]) for heads in SEVERAL}
    comparisons = {heads: compared(values) for heads, values in ahead.items()}
    results = (
        f"{heads} heads are {text} (loss {-mean(ahead[heads]):+.3f}, "
        f"standard deviation {stdev(ahead[heads]):.3f})"
        for heads, text in comparisons.items()
    )
    return Finding(
        claim="several heads are better than one",
        verdict=judge(list(comparisons.values())),
        measured=f"held-out loss with {' / '.join(map(str, counts))} heads: "
        f"{' / '.join(f'{mean(found[heads]):.3f}' for heads in counts)} nats per byte of source code, "
        f"means of {seeds} seeds",
        correct=f"beside one head, {', '.join(results)}, at equal size (width {width}, {LAYERS} layers, "
        f"{' or '.join(f'{x:,}' for x in sorted(set(sizes.values())))} parameters in a layer's attention, "
        f"{steps} steps)",
        numbers={
            "parameters of attention by heads": {str(heads): x for heads, x in sizes.items()},
            "losses by heads": {str(heads): x for heads, x in found.items()},
            "loss of one head, minus loss": {str(heads): x for heads, x in ahead.items()},
            "beside one head": {str(heads): text for heads, text in comparisons.items()},
        },
    )
