"""The sides of a benchmark case: Regard, and the PyTorch paths that compute the same result.

`prepare` builds the mask and returns the timed call. The time to build the mask is not measured,
but the memory of the mask is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case, Inputs, Options
from checks import outgoing
from torch import Tensor

import regard
from regard import masks as M, scores

Call = Callable[[], Any]
INF = float("inf")


def prepare(side: str, case: Case, inputs: Inputs) -> Call:
    """Returns the timed call of "regard", "sdpa", "eager" or "flex"."""
    call = SIDES[side](case, inputs)
    return repeated(call if case.work == "forward" else gradients(case, inputs, call), case.calls)


def gradients(case: Case, inputs: Inputs, forward: Call) -> Call:
    """Returns a call that computes the gradients of q, k, v and a bias.

    If `case.work` is "backward", the forward pass runs before and is not timed.
    """
    leaves = inputs.leaves()
    dout = outgoing(case)

    @torch.enable_grad()
    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, dout)

    if case.work == "training":
        return both
    with torch.enable_grad():
        out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def repeated(call: Call, times: int) -> Call:
    """Returns a function that runs `call` `times` times."""
    if times == 1:
        return call

    def loop() -> Any:
        for _ in range(times - 1):
            call()
        return call()

    return loop


def regard_side(case: Case, inputs: Inputs) -> Call:
    q, k, v, options = inputs
    mask = case.make_mask()
    return lambda: regard.attention(q, k, v, mask=mask, **options)


def sdpa_side(case: Case, inputs: Inputs) -> Call:
    q, k, v = sdpa_tensors(inputs)
    with torch.set_grad_enabled(case.work != "forward"):
        options = sdpa_options(case, inputs)
    return lambda: F.scaled_dot_product_attention(q, k, v, **options)


def sdpa_tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v for SDPA.

    For a sink, k and v get one more row of zeros; the bias gives this key the sink as its score.
    """
    q, k, v, options = inputs
    return (q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))) if "sink" in options else (q, k, v)


def sdpa_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    mask, options = case.make_mask(), inputs.options
    unbiased = not {"bias", "sink"} & options.keys()
    is_causal = unbiased and isinstance(mask, M.Causal) and case.Lq == case.Lk
    return {
        "attn_mask": None if is_causal else additive(case, options, mask),
        "dropout_p": options.get("dropout", 0.0),
        "is_causal": is_causal,
        "enable_gqa": case.Hq != case.Hkv,
    }


def additive(case: Case, options: Options, mask: M.Mask | None) -> Tensor | None:
    """Returns mask, bias and sink as one float tensor.

    A bool mask would be slower: SDPA converts it to float in every call.
    """
    bias, sink = options.get("bias"), options.get("sink")
    total = bias.dense(case.Lq, case.Lk)[None] if isinstance(bias, scores.Alibi) else bias
    if total is not None:
        total = total.to(case.dtype)
    if mask is not None:
        start = torch.zeros((), dtype=case.dtype) if total is None else total
        total = torch.where(mask.to_dense(case.Lq, case.Lk), start, -INF)
    return total if sink is None else with_column(total, sink, case)


def with_column(total: Tensor | None, sink: Tensor, case: Case) -> Tensor:
    """Appends the sink's logits as a column to the float mask `total`: (1, Hq, Lq, Lk + 1)."""
    pairs = torch.zeros(1, dtype=case.dtype) if total is None else total
    column = sink.to(case.dtype)[:, None, None].expand(1, case.Hq, case.Lq, 1)
    return torch.cat([pairs.expand(1, case.Hq, case.Lq, case.Lk), column], -1)


def sdpa_path(case: Case, inputs: Inputs) -> str:
    """Returns which of SDPA's CPU paths runs: "fused" or "math"."""
    options = sdpa_options(case, inputs)
    gqa = options.pop("enable_gqa")
    choice = torch._fused_sdp_choice(*sdpa_tensors(inputs), *options.values(), enable_gqa=gqa)
    return "math" if choice == 0 else "fused"


def eager_side(case: Case, inputs: Inputs) -> Call:
    """Returns a call of the softmax formula in PyTorch operations, for options that SDPA lacks."""
    q, k, v, options = inputs
    mask, modify = additive(case, {}, case.make_mask()), score_mod(options)

    def call() -> Tensor:
        s = q @ k.mT * case.D**-0.5
        s = modify(s, None, None, None, None) if modify else s
        return torch.softmax(s if mask is None else s + mask, -1) @ v

    return call


def flex_side(case: Case, inputs: Inputs) -> Call:
    """Returns a call of compiled FlexAttention with a prebuilt BlockMask."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    q, k, v, options = inputs
    mask = case.make_mask()
    compiled = torch.compile(flex_attention, dynamic=False)
    fixed: dict[str, Any] = {
        "block_mask": None if mask is None else M.to_flex(mask, case.Lq, case.Lk),
        "score_mod": score_mod(options),
        "enable_gqa": case.Hq != case.Hkv,
    }
    return lambda: compiled(q, k, v, **fixed)


def score_mod(options: Options) -> Callable[..., Tensor] | None:
    """Returns FlexAttention's score_mod for a softcap or ALiBi, or None."""
    cap, bias = options.get("softcap"), options.get("bias")
    if cap is not None:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if isinstance(bias, scores.Alibi):
        slopes = bias.slopes
        return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
    return None


SIDES: dict[str, Callable[[Case, Inputs], Call]] = {
    "regard": regard_side,
    "sdpa": sdpa_side,
    "eager": eager_side,
    "flex": flex_side,
}
NAMES = {"regard": "Regard", "sdpa": "SDPA", "eager": "plain PyTorch", "flex": "Flex, compiled"}
