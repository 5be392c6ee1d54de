"""Seconds, predicted from what a call does and what the machine can."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

import torch

from ._cache import What, layers_of
from ._call import Call
from ._layers import Work
from ._machine import Machine

Pass = Literal["forward", "backward", "training"]

# Shares of the machine's limits that the kernels reach; `benchmarks/cost.py` compares with what is measured.
FORWARD, BACKWARD, DECODE, READ = 0.82, 0.79, 0.5, 0.75


def predict(call: Call, machine: Machine, passes: Pass = "forward") -> float:
    """Seconds of one call of `regard.attention` on this machine, in a forward pass, backward, or both.

    Products and memory take turns; in decoding, which reads ahead, the slower of them counts.
    """
    if passes not in get_args(Pass):
        raise ValueError(f"passes: expected one of {', '.join(get_args(Pass))}, got {passes!r}")
    cost = call.cost()
    fma = machine.fma / (2 if call.dtype is torch.float64 else 1)
    moved = cost.read_bytes + cost.written_bytes
    forward = [cost.forward.executed / (FORWARD * fma), moved / (READ * machine.read)]
    if passes == "forward" and cost.decodes:
        return max(cost.forward.executed / (DECODE * fma), forward[1], machine.call)
    # What was saved and the gradient of the result come in, gradients of all inputs go out.
    back = cost.saved_bytes + moved
    backward = [cost.backward.executed / (BACKWARD * fma), back / (READ * machine.read)]
    taken = {"forward": forward, "backward": backward, "training": forward + backward}[passes]
    return max(sum(taken), machine.call)


def attention_seconds(what: What, work: Work, machine: Machine, passes: Pass = "forward") -> float:
    """Seconds of all calls of `regard.attention` in layers or a model; other products not."""
    for layer in layers_of(what):
        layer.check(work)
    calls = Counter(call for layer in layers_of(what) for call in layer.calls(work))
    return sum(times * predict(call, machine, passes) for call, times in calls.items())
