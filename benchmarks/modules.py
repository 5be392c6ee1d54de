"""Compares `regard.nn.MultiheadAttention` with PyTorch's, and with a composition of functions.

`python benchmarks/modules.py` prints one row for each case, with the times of
- Regard: `regard.nn.MultiheadAttention`;
- PyTorch: `torch.nn.MultiheadAttention` with the same weights, called so that it can use its fast
  path;
- composed: one packed linear layer, `scaled_dot_product_attention`, one linear layer.
"Speedup" is PyTorch's time divided by Regard's, and "target" is the speedup to reach. Every result
is compared with float64 first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import command
import torch
import torch.nn.functional as F
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor, nn

import regard

Call = Callable[[], Tensor]
SIDES = ("Regard", "PyTorch", "composed")
LIMIT = 1e-5  # largest relative error against float64


@dataclass(frozen=True)
class Case:
    name: str
    target: float
    causal: bool = False
    training: bool = False
    dropout: float = 0.0
    weights: bool = False
    B: int = 1
    L: int = 512
    d: int = 512
    heads: int = 8


CASES = (
    Case("evaluation", 1.2),
    Case("evaluation, batch of 4", 1.0, B=4, L=128),
    Case("evaluation, causal", 1.2, causal=True),
    Case("evaluation, with weights", 1.0, weights=True),
    Case("training", 1.05, training=True),
    Case("training, causal", 1.05, training=True, causal=True),
    Case("training, dropout 0.1", 1.3, training=True, dropout=0.1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 4.0, "case")
    parser.add_argument("--length", type=int, help="tokens of all cases")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    rows = [row(case, options.length or case.L, options.seconds) for case in CASES]
    print("| case | B, L, d, heads | Regard | PyTorch | composed | speedup | target |")
    print("|---|---|---:|---:|---:|---:|---:|")
    print("\n".join(rows))
    print(session.closing("float32"))
    return 0


def row(case: Case, L: int, seconds: float) -> str:
    theirs = nn.MultiheadAttention(case.d, case.heads, case.dropout, batch_first=True).train(case.training)
    x = torch.randn(case.B, L, case.d, requires_grad=case.training)
    calls = sides(case, theirs, x)
    check(case, theirs, x, calls)
    if case.training:
        calls = {side: partial(gradients, call, [x, *theirs.parameters()]) for side, call in calls.items()}
    with torch.set_grad_enabled(case.training):
        best = best_times(calls, seconds)
    times = [milliseconds(best[side]) if side in best else "" for side in SIDES]
    shape = f"{case.B}, {L}, {case.d}, {case.heads}"
    speedup = best["PyTorch"] / best["Regard"]
    return f"| {case.name} | {shape} | {' | '.join(times)} | {speedup:.2f} x | {case.target:g} x |"


def sides(case: Case, theirs: nn.MultiheadAttention, x: Tensor) -> dict[str, Call]:
    """Returns a function for each timed implementation. All of them share the same parameters."""
    ours = regard.nn.MultiheadAttention(case.d, case.heads, case.dropout, batch_first=True)
    ours.in_proj_weight, ours.in_proj_bias = theirs.in_proj_weight, theirs.in_proj_bias
    ours.out_proj = theirs.out_proj
    ours.train(case.training)
    fixed: dict[str, Any] = {"need_weights": case.weights, "is_causal": case.causal}
    # PyTorch's module requires the mask in addition to is_causal, although its fast path ignores the mask.
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if case.causal else None
    calls: dict[str, Call] = {
        "Regard": lambda: ours(x, x, x, **fixed)[0],
        "PyTorch": lambda: theirs(x, x, x, attn_mask=mask, **fixed)[0],
    }
    return calls if case.weights else calls | {"composed": partial(composed, case, theirs, x)}


def composed(case: Case, module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    packed = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = packed.unflatten(-1, (3, case.heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=case.dropout, is_causal=case.causal)
    projected: Tensor = module.out_proj(out.transpose(1, 2).flatten(2))
    return projected


def gradients(call: Call, parameters: list[Tensor]) -> None:
    out = call()
    torch.autograd.grad(out, parameters, torch.ones_like(out))


def check(case: Case, theirs: nn.MultiheadAttention, x: Tensor, calls: dict[str, Call]) -> None:
    """Compares each implementation with PyTorch's module in float64.

    Does nothing if there is dropout, because dropout patterns differ.
    """
    if case.dropout:
        return
    exact = nn.MultiheadAttention(case.d, case.heads, batch_first=True, dtype=torch.float64)
    exact.load_state_dict(theirs.state_dict())
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).double() if case.causal else None
    with torch.no_grad():
        expected, _ = exact(*[x.double()] * 3, attn_mask=mask)
        for side, call in calls.items():
            error = ((call().double() - expected).norm() / expected.norm()).item()
            if not error < LIMIT:
                raise WrongResult(f"{side}, {case.name}: relative error {error:.1e} against float64")


if __name__ == "__main__":
    sys.exit(main())
