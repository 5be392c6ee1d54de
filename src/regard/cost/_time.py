"""Seconds, predicted from what a call does and what the machine can."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, get_args

import torch

from ._cache import What, layers_of
from ._call import CallCost, CallSpec
from ._layers import Work
from ._machine import Machine

Pass = Literal["forward", "backward", "training"]

# Shares of the machine's limits that the kernels reach; `benchmarks/cost.py` compares with what is measured.
FORWARD, BACKWARD = 0.82, 0.79  # of the multiply-adds
TRAFFIC = 0.75  # of reading, where results are as large as inputs and lie in new memory

# Decoding. A vector of a key is loaded for up to 4 query rows, and each of their multiply-adds waits for its
# own query or weight: little more than half of the peak. Rows that fill three quarters of a panel or more
# lie in one, as in forward.
FEW, PANELS = 0.62, 0.9
TOGETHER, PANEL = 4, 16
SOFTMAX = 70  # FLOPs that a score takes from its product to its weight
CONVERT = 6  # FLOPs for a number of 16 bits that is written anew, since several loads of it follow
START = 0.01  # of a call, to start and to end the rows of one key head
ALONE = 500_000  # multiplications that are not worth a second thread


def predict(call: CallSpec, machine: Machine, passes: Pass = "forward") -> float:
    """Seconds of one call of `regard.attention` on this machine, in a forward pass, backward, or both.

    Products and memory take turns. In decoding, which reads ahead, they overlap, though not in full.
    """
    if passes not in get_args(Pass):
        raise ValueError(f"passes: expected one of {', '.join(get_args(Pass))}, got {passes!r}")
    cost = call.cost()
    fma = machine.fma / (2 if call.dtype is torch.float64 else 1)
    moved = cost.read_bytes + cost.written_bytes
    if passes == "forward" and cost.decodes:
        products = _decoding_flops(call, cost) / (fma * _busy(cost, machine))
        start = machine.call * (1 + START * call.B * (call.Hkv or call.Hq))
        return start + math.cbrt(products**3 + machine.seconds_to_read(moved) ** 3)
    forward = cost.forward.executed / (FORWARD * fma) + machine.seconds_to_read(moved) / TRAFFIC
    # What was saved and the gradient of the result come in, gradients of all inputs go out.
    back = machine.seconds_to_read(cost.saved_bytes + moved) / TRAFFIC
    backward = cost.backward.executed / (BACKWARD * fma) + back
    return machine.call + (passes != "backward") * forward + (passes != "forward") * backward


def _decoding_flops(call: CallSpec, cost: CallCost) -> float:
    """What the products, softmax and conversion take, in multiply-adds at the peak."""
    rows = call.Lq * call.Hq // (call.Hkv or call.Hq)  # that share a key
    panel = PANEL // 2 if call.dtype is torch.float64 else PANEL
    full, left = divmod(rows, panel)
    filled = 4 * left >= 3 * panel  # such a panel is worth it
    few = 0 if filled else left
    alone = few % 2  # loading a key for one row takes as long as for two
    each = (full + filled) * panel / PANELS + (few + alone) / FEW
    width = call.D + (call.Dv or call.D)
    converts = call.dtype.itemsize == 2 and rows > TOGETHER
    keys = cost.pairs.executed / rows
    return keys * (2 * width * each + SOFTMAX * rows + CONVERT * width * converts)


def _busy(cost: CallCost, machine: Machine) -> float:
    """The share of the threads that have work: pieces of keys are whole."""
    if cost.forward.executed < 2 * ALONE:
        return 1 / machine.threads
    turns = math.ceil(cost.tasks / machine.threads)
    return cost.tasks / (turns * machine.threads)


def attention_seconds(what: What, work: Work, machine: Machine, passes: Pass = "forward") -> float:
    """Seconds of all calls of `regard.attention` in layers or a model; other products not."""
    for layer in layers_of(what):
        layer.check(work)
    calls = Counter(call for layer in layers_of(what) for call in layer.calls(work))
    return sum(times * predict(call, machine, passes) for call, times in calls.items())
