"""Claim: there are heads for syntax, for meaning and for position. `regard claims head_roles`

The notes name the relation of subject, verb and object, synonyms, and adjacent words. The heads of
two pretrained models, MiniLM and SmolLM2, are counted for each of them:

- Position: over clothing reviews, a head puts at least half of its weight on adjacent tokens.
- Syntax: in sentences such as "Today near the old king, the doctor behind the lawyer helps the
  small pilot.", the verb gives its subject a larger weight than all other nouns. Nouns are persons,
  drawn at random, so meaning does not help. The subject is the nearest noun before the verb, the
  second nearest or the third.
- Meaning: in sentences such as "They spoke about the ship, the lawyer, the hill and the boat.", a
  word gives its synonym a larger weight than all other nouns. The order is random, so position
  does not help.

For syntax and meaning, a head counts only if it is right in both halves of the sentences, each time
in at least half of the cases and three standard errors above the best rule that knows only the
order of the nouns, such as "the last noun before the verb". A causal model sees earlier nouns only.

The claim is right if every model has all three kinds of heads, incomplete if some kind is missing,
wrong if all are. The experiment also counts heads by the roles of `see.ROLES` over the reviews. The
packages are those of `head_distances`. The experiment takes about a minute and a half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard import see

from .finding import Finding
from .head_distances import loaded, of_sample, recorded, texts
from .head_questions import Question, best_rule, meaning, syntax

HALF = 0.5
SIZES = {"MiniLM": (64, 300), "SmolLM2": (16, 60)}  # reviews, sentences of each kind
KINDS = "syntax", "meaning", "position"


def answered(model: Any, tokenizer: Any, questions: Sequence[Question]) -> Tensor:
    """Returns for which questions each head is right, bool (questions, layers, heads)."""
    right: list[Tensor] = []
    for seen in recorded(model, tokenizer, [question.text for question in questions], keep="qk"):
        batch = questions[len(right) : len(right) + seen[0].shape[0]]
        weights = torch.stack(
            [layer.rows(list(range(layer.shape[2]))) for layer in seen]
        )  # (layers, B, H, L, L)
        for sample, question in enumerate(batch):
            tokens = [token.strip("Ġ").lower() for token in seen[0].texts(sample)]
            keys = [tokens.index(noun) for noun in question.nouns]
            row = weights[:, sample, :, tokens.index(question.word)]  # (layers, H, L)
            right.append(row[:, :, keys].argmax(-1) == question.nouns.index(question.answer))
    return torch.stack(right)


def heads_right(right: Tensor, rule: float) -> Tensor:
    """Returns which heads are right in both halves of the questions, (layers, heads)."""
    halves = [right[start::2].double() for start in (0, 1)]
    return torch.stack(
        [half.mean(0) >= max(HALF, rule + 3 * (rule * (1 - rule) / len(half)) ** 0.5) for half in halves]
    ).all(0)


def over_reviews(recordings: Iterable[see.Capture]) -> tuple[Tensor, Counter[str]]:
    """Returns each head's share of weight on adjacent tokens (layers, heads), and counts of roles.

    A head's role is the first one of `see.ROLES` whose mean score over the reviews reaches the
    role's threshold. Without such a role, the head counts as "mixed".
    """
    adjacent, scores, queries = torch.zeros(0), [], 0
    for seen in recordings:
        for sample in range(seen[0].shape[0]):
            layers = of_sample(seen, sample)
            share = torch.tensor([[adjacent_mass(head) for head in layer] for layer in layers])
            adjacent = adjacent + share if adjacent.numel() else share
            queries += len(seen[0].texts(sample))
            scores.append([[certain_scores(head) for head in layer] for layer in layers])
    means = torch.tensor(scores).nanmean(0).flatten(0, 1)  # (heads of all layers, roles)
    return adjacent / queries, Counter(map(role_of, means.tolist()))


def adjacent_mass(head: see.Head) -> float:
    distances, mass = head.distances
    return float(mass[distances.abs() == 1].sum())


def certain_scores(head: see.Head) -> list[float]:
    """Returns the scores of all roles. A score is NaN if too few queries contribute to it."""
    return [role.score if role.certain else math.nan for role in head.roles.values()]


def role_of(scores: Sequence[float]) -> str:
    reached = (
        name for score, (name, role) in zip(scores, see.ROLES.items(), strict=True) if score >= role.least
    )
    return next(reached, "mixed")


def of_kinds(name: str, reviews: int, sentences: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns which heads of a model are of each kind, bool (layers, heads), and further numbers."""
    model, tokenizer, causal = loaded(name)
    kinds: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for kind, questions in (("syntax", syntax(sentences, causal)), ("meaning", meaning(sentences, causal))):
        right, rule = answered(model, tokenizer, questions), best_rule(questions)
        kinds[kind] = heads_right(right, rule)
        numbers[f"{kind}: questions"] = len(questions)
        numbers[f"{kind}: best head"] = float(right.double().mean(0).max())
        numbers[f"{kind}: best rule of order"] = rule
    adjacent, roles = over_reviews(recorded(model, tokenizer, texts(reviews)))
    kinds["position"] = adjacent >= HALF
    numbers["position: largest weight on adjacent tokens"] = float(adjacent.max())
    numbers["roles over reviews"] = dict(roles.most_common())
    return kinds, numbers


def judge(models: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the verdict from each model's number of heads of each kind."""
    present = [count > 0 for counts in models.values() for count in counts.values()]
    return "right" if all(present) else "incomplete" if any(present) else "wrong"


def measure(sizes: Mapping[str, tuple[int, int]] = SIZES) -> Finding:
    counts: dict[str, dict[str, int]] = {}
    numbers: dict[str, Any] = {}
    shown, others = [], []
    for name, (reviews, sentences) in sizes.items():
        kinds, more = of_kinds(name, reviews, sentences)
        counts[name] = {kind: int(kinds[kind].sum()) for kind in KINDS}
        several = torch.stack(list(kinds.values())).sum(0)  # kinds of each head
        numbers[f"heads, {name}"] = {**counts[name], "several kinds": int((several > 1).sum())}
        numbers |= {f"{title}, {name}": value for title, value in more.items()}
        best = ", ".join(
            f"{kind} {more[f'{kind}: best head']:.0%} (order alone {more[f'{kind}: best rule of order']:.0%})"
            for kind in KINDS[:2]
        )
        number = " / ".join(map(str, counts[name].values()))
        shown.append(f"{name}: {number} of {several.numel()} heads; best head for {best}")
        others.append(f"{int((several == 0).sum())} of {several.numel()} in {name}")
    return Finding(
        claim="there are heads for syntax, for meaning and for position",
        verdict=judge(counts),
        measured=f"heads for {' / '.join(KINDS)}: {'. '.join(shown)}",
        correct=f"many heads are of none of these kinds: {', '.join(others)}",
        numbers=numbers,
    )
