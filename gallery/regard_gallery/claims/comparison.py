"""Claim: the notes' table of MHA, GQA, MQA and MLA. `regard claims comparison`

The notes say     parameters  memory    inference  quality
    MHA           high        high      slow       high
    GQA           medium      medium    medium     high
    MQA           low         low       fast       medium
    MLA           low         very low  fast       high

The experiment takes about two minutes. It measures, at equal width, the parameters of an attention
layer, the layer's cache bytes per token, the decoding speed of a small model, and the loss of a
smaller model on held-out source code. It uses the models and measurements of `regard compare`.
Parameters and memory are also computed at DeepSeek-V2's sizes. Each column of the table gets its
own verdict: wrong if an order is contradicted at all measured sizes, incomplete if it holds at one
size only, undecided if the differences are within the margin. If the verdicts of the columns
differ, the verdict on the table is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from regard.nn import Attention, LatentAttention

from ..compare import NOTES, Sizes, decoded, denied, layer, parameters, trained, undecided
from .finding import Finding

KINDS = tuple(NOTES["memory"])
SIZES, SMALL = Sizes(512, layers=2), Sizes(64, layers=2)


def sizes(layers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        "parameters": {kind: parameters(layer) for kind, layer in layers.items()},
        "memory": {kind: layer.new_cache(1, 64).nbytes // 64 for kind, layer in layers.items()},
    }


def large() -> dict[str, Any]:
    """Returns a layer per kind of attention, with DeepSeek-V2's sizes, on the meta device."""
    options: dict[str, Any] = {"bias": False, "device": "meta"}
    groups = {"MHA": 128, "GQA-4": 4, "MQA": 1}
    latent = LatentAttention(5120, 128, rank=512, nope_dim=128, rope_dim=64, q_rank=1536, **options)
    grouped = {kind: Attention(5120, 128, kv_heads=n, head_dim=128, **options) for kind, n in groups.items()}
    return {**grouped, "MLA": latent}


def relative(column: Mapping[str, float]) -> str:
    """Formats the values of all kinds of attention, each divided by MHA's value."""
    return " / ".join(f"{column[kind] / column['MHA']:.3g}" for kind in KINDS)


def explained(name: str, judged: str, denials: Sequence[Sequence[str]], undecided: Sequence[str]) -> str:
    """Formats the verdict on a column and the orders that are the reason for it."""
    places = ("at width 512", "at DeepSeek-V2's sizes")
    reasons = [
        f"not {', '.join(found)} {place}" for found, place in zip(denials, places, strict=False) if found
    ]
    if undecided:
        reasons.append(f"within the margin: {', '.join(undecided)}")
    return f"{name.capitalize()}: {judged}" + (f" ({'; '.join(reasons)})" if reasons else "")


def judge(denials: Sequence[Sequence[str]], undecided: Sequence[str]) -> str:
    """Returns the verdict on a column from the contradicted orders at each size and undecided ones."""
    if set.intersection(*map(set, denials)):
        return "wrong"
    if any(denials):
        return "incomplete"
    return "undecided" if undecided else "right"


def measure(tokens: int = 2048, rounds: int = 5, steps: int = 200, seeds: int = 3) -> Finding:
    losses = {kind: [trained(kind, SMALL, seed, steps) for seed in range(seeds)] for kind in KINDS}
    sides = decoded(KINDS, SIZES, tokens=tokens, steps=8, rounds=rounds)
    columns = {
        **sizes({kind: layer(kind, SIZES) for kind in KINDS}),
        "inference": {side.kind: 1 / side.to_write for side in sides},
        "quality": {kind: -mean(found) for kind, found in losses.items()},
    }
    margins = {
        "inference": 0.05 * columns["inference"]["MHA"],
        "quality": max(stdev(found) for found in losses.values()),
    }
    against = {name: denied(NOTES[name], columns[name], margins.get(name, 0.0)) for name in NOTES}
    open_orders = {name: undecided(NOTES[name], columns[name], margins.get(name, 0.0)) for name in NOTES}
    at_large = sizes(large())
    denials = {name: [against[name]] for name in NOTES}
    for name, values in at_large.items():
        denials[name].append(denied(NOTES[name], values))
    verdicts = {name: judge(denials[name], open_orders[name]) for name in NOTES}
    loss_text = " / ".join(f"{mean(losses[kind]):.2f}" for kind in KINDS)
    return Finding(
        claim="the table of MHA / GQA / MQA / MLA: parameters, memory, inference, quality",
        verdict=verdicts["memory"] if len(set(verdicts.values())) == 1 else "incomplete",
        measured="; ".join(
            f"{name} {relative(columns[name])}" for name in ("parameters", "memory", "inference")
        )
        + f"; loss {loss_text}, standard deviation over seeds up to {margins['quality']:.2f}. "
        f"At DeepSeek-V2's sizes: parameters {relative(at_large['parameters'])}, "
        f"memory {relative(at_large['memory'])}",
        correct=". ".join(
            explained(name, verdicts[name], denials[name], open_orders[name]) for name in NOTES
        ),
        numbers={
            **{name: values for name, values in columns.items() if name != "quality"},
            "loss by seed": losses,
            "verdict by column": verdicts,
            "orders that are contradicted": against,
            "orders that are undecided": open_orders,
            **{f"{name} at DeepSeek-V2's sizes": values for name, values in at_large.items()},
        },
    )
