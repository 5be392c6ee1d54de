"""Predicts the seconds of a call from its cost and the machine's limits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, get_args

import torch

from .._backends.native import core
from ._cache import What, layers_of
from ._call import CallCost, CallSpec
from ._layers import Work
from ._machine import Machine

Pass = Literal["forward", "backward", "training"]

# The fractions of the machine's limits that the kernels reach. `benchmarks/cost.py` compares predicted
# and measured times.
FORWARD, BACKWARD = 0.82, 0.79  # fractions of the peak FLOP/s
TRAFFIC = 0.75  # fraction of the read bandwidth, if outputs are newly allocated and as large as inputs

# Decode. One load of a key vector serves up to 4 query rows, but every multiply-add also loads an element of
# the query or a weight. So few query rows reach little more than half of the peak FLOP/s. If the rows that
# share a key head fill at least three quarters of a panel, they are computed as a panel, as in forward.
FEW, PANELS = 0.62, 0.9  # fractions of the peak FLOP/s with few rows, and with panels
TOGETHER = 4  # number of query rows that share a load of a key
SOFTMAX = 70  # FLOPs of the softmax per score
CONVERT = 6  # FLOPs to convert an element of a 16-bit key or value that more than TOGETHER rows use
START = 0.01  # overhead per sample and key head, as a fraction of the time of the smallest call
ALONE = 500_000  # with fewer multiplications, decode uses one thread


def predict(call: CallSpec, machine: Machine, passes: Pass = "forward") -> float:
    """Predicts the seconds of one call of `regard.attention` on a machine.

    The time is the sum of three times: of the smallest call, of the matrix products, and of the
    memory traffic. In the decode kernel, which runs for few query rows, the last two overlap
    partly, because it prefetches keys and values.

    Args:
        call: dtype, mask and shapes of the call.
        machine: the result of `measure_machine`.
        passes: "forward", "backward", or "training" (both).
    """
    if passes not in get_args(Pass):
        raise ValueError(f"passes: expected one of {', '.join(get_args(Pass))}, got {passes!r}")
    cost = call.cost()
    fma = machine.fma / (2 if call.dtype is torch.float64 else 1)
    moved = cost.read_bytes + cost.written_bytes
    if passes == "forward" and cost.decodes:
        products = _decoding_flops(call, cost) / (fma * _utilization(cost, machine))
        start = machine.call * (1 + START * call.B * (call.Hkv or call.Hq))
        return start + math.cbrt(products**3 + machine.seconds_to_read(moved) ** 3)
    forward = cost.forward.executed / (FORWARD * fma) + machine.seconds_to_read(moved) / TRAFFIC
    # Backward reads the saved tensors and the output's gradient, and writes the gradients of all inputs.
    back = machine.seconds_to_read(cost.saved_bytes + moved) / TRAFFIC
    backward = cost.backward.executed / (BACKWARD * fma) + back
    return machine.call + (passes != "backward") * forward + (passes != "forward") * backward


def _decoding_flops(call: CallSpec, cost: CallCost) -> float:
    """Returns how many FLOPs at the peak rate take as long as the computation of a decode call.

    The computation consists of matrix products, softmax and conversion of 16-bit values.
    """
    rows = call.Lq * call.Hq // (call.Hkv or call.Hq)  # query rows that share a key
    panel = core.panel_rows() // (2 if call.dtype is torch.float64 else 1)
    full, left = divmod(rows, panel)
    filled = 4 * left >= 3 * panel
    few = 0 if filled else left
    unpaired = few % 2  # one row takes as long as two, because loading the key dominates
    row_time = (full + filled) * panel / PANELS + (few + unpaired) / FEW
    width = call.D + (call.Dv or call.D)
    converts = call.dtype.itemsize == 2 and rows > TOGETHER
    keys = cost.pairs.executed / rows
    return keys * (2 * width * row_time + SOFTMAX * rows + CONVERT * width * converts)


def _utilization(cost: CallCost, machine: Machine) -> float:
    """Returns the fraction of the threads that compute, averaged over the time of the call.

    Each task runs on one thread, so some threads may be idle in the last round of tasks. Small
    calls use one thread.
    """
    if cost.forward.executed < 2 * ALONE:
        return 1 / machine.threads
    rounds = math.ceil(cost.tasks / machine.threads)
    return cost.tasks / (rounds * machine.threads)


def attention_seconds(what: What, work: Work, machine: Machine, passes: Pass = "forward") -> float:
    """Predicts the total seconds of the attention calls of layers or of a model.

    The time of projections and other layers is not included.
    """
    for layer in layers_of(what):
        layer.check(work)
    calls = Counter(call for layer in layers_of(what) for call in layer.calls(work))
    return sum(times * predict(call, machine, passes) for call, times in calls.items())
