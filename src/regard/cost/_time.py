"""Seconds, predicted from what a call does and what the machine can."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, get_args

import torch

from ._cache import What, layers_of
from ._call import Call
from ._layers import Work
from ._machine import Machine

Pass = Literal["forward", "backward", "training"]

# Shares of the machine's limits that the kernels reach; `benchmarks/cost.py` compares with what is measured.
FORWARD, BACKWARD = 0.82, 0.79  # of the multiply-adds
FEW, PANELS = 0.42, 0.65  # in decoding: with fewer than 12 rows in a group of heads, and with more
TRAFFIC = 0.75  # of reading, where results are as large as inputs and lie in new memory


def predict(call: Call, machine: Machine, passes: Pass = "forward") -> float:
    """Seconds of one call of `regard.attention` on this machine, in a forward pass, backward, or both.

    Products and memory take turns. In decoding, which reads ahead, they overlap, though not in full.
    """
    if passes not in get_args(Pass):
        raise ValueError(f"passes: expected one of {', '.join(get_args(Pass))}, got {passes!r}")
    cost = call.cost()
    fma = machine.fma / (2 if call.dtype is torch.float64 else 1)
    moved = cost.read_bytes + cost.written_bytes
    if passes == "forward" and cost.decodes:
        rows = call.Lq * call.Hq // (call.Hkv or call.Hq)
        products = cost.forward.executed / ((FEW if rows < 12 else PANELS) * fma)
        return machine.call + math.cbrt(products**3 + machine.seconds_to_read(moved) ** 3)
    forward = cost.forward.executed / (FORWARD * fma) + machine.seconds_to_read(moved) / TRAFFIC
    # What was saved and the gradient of the result come in, gradients of all inputs go out.
    back = machine.seconds_to_read(cost.saved_bytes + moved) / TRAFFIC
    backward = cost.backward.executed / (BACKWARD * fma) + back
    return machine.call + (passes != "backward") * forward + (passes != "forward") * backward


def attention_seconds(what: What, work: Work, machine: Machine, passes: Pass = "forward") -> float:
    """Seconds of all calls of `regard.attention` in layers or a model; other products not."""
    for layer in layers_of(what):
        layer.check(work)
    calls = Counter(call for layer in layers_of(what) for call in layer.calls(work))
    return sum(times * predict(call, machine, passes) for call, times in calls.items())
