"""Claim: the notes' table of MHA, GQA, MQA and MLA. `regard claims comparison`

The notes say     parameters  memory    inference  quality
    MHA           high        high      slow       high
    GQA           medium      medium    medium     high
    MQA           low         low       fast       medium
    MLA           low         very low  fast       high

The experiment takes about two minutes. It measures, at equal width, the parameters of an attention
layer, the layer's cache bytes per token, the decoding speed of a small model, and the loss of a
smaller model on held-out source code. It uses the models and measurements of `regard compare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from regard.nn import Attention, LatentAttention

from ..compare import NOTES, Sizes, decoded, denied, layer, parameters, trained
from .finding import Finding, verdict

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
    loss_text = " / ".join(f"{mean(losses[kind]):.2f}" for kind in KINDS)
    at_large = sizes(large())
    return Finding(
        claim="the table of MHA / GQA / MQA / MLA: parameters, memory, inference, quality",
        verdict=verdict(not any(against.values())),
        measured="; ".join(
            f"{name} {relative(columns[name])}" for name in ("parameters", "memory", "inference")
        )
        + f"; loss {loss_text}, standard deviation over seeds up to {margins['quality']:.2f}",
        correct="rankings not confirmed: "
        + "; ".join(f"{name} {', '.join(pairs)}" for name, pairs in against.items() if pairs)
        + f". At DeepSeek-V2's sizes: parameters {relative(at_large['parameters'])}, "
        f"memory {relative(at_large['memory'])}",
        numbers={
            **{name: values for name, values in columns.items() if name != "quality"},
            "loss by seed": losses,
            "orders that are not there": against,
            **{f"{name} at DeepSeek-V2's sizes": values for name, values in at_large.items()},
        },
    )
