"""Claim: the notes' attention module applies `attn_mask`, and applies dropout only in training.
`regard claims unused_mask`

The module takes `attn_mask` but does not pass it on, and it passes its dropout on in evaluation
too. Neither fault raises an error. Three checks find them: a mask must change the output; with a
causal mask, the last token must not change earlier outputs; and in evaluation, two equal calls must
give equal results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks as M
from regard.nn import Attention

from .finding import Finding, verdict


class PackedAttention(nn.Module):
    """The notes' module for inputs of one width, with the same arguments and both faults.

    One matrix projects queries, keys and values, PyTorch's function computes attention, and a
    second matrix projects its output.
    """

    def __init__(self, width: int, total: int, heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.packed = nn.Linear(width, 3 * total, bias=bias)
        self.out = nn.Linear(total, width, bias=bias)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Both faults are in this call: no attn_mask, and dropout_p without a look at self.training.
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=is_causal)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


def seeded(call: Callable[..., Tensor], *inputs: Tensor | bool) -> Tensor:
    """Calls a layer with the same draw of dropout each time."""
    torch.manual_seed(1)
    return call(*inputs)


def faults(call: Callable[[Tensor, bool], Tensor], x: Tensor) -> tuple[float, float, float]:
    """Returns by how much a causal mask, the last token and a repetition change the output.

    `call` runs a layer in evaluation on x (B, L, d), with or without a causal mask. The change by
    the last token is measured at earlier tokens, with the mask.
    """
    other = x.clone()
    other[:, -1] += 1
    first = seeded(call, x, True)
    by_mask = seeded(call, x, False) - first
    by_future = (seeded(call, other, True) - first)[:, :-1]
    by_repetition = call(x, True) - first
    return float(by_mask.abs().max()), float(by_future.abs().max()), float(by_repetition.abs().max())


@torch.no_grad()
def measure(n: int = 11, d: int = 32, dropout: float = 0.1) -> Finding:
    torch.manual_seed(0)
    printed, right = PackedAttention(d, d, 4, dropout).eval(), Attention(d, 4, dropout=dropout).eval()
    x, causal = torch.randn(2, n, d), torch.ones(n, n, dtype=torch.bool).tril()
    theirs = faults(lambda x, masked: printed(x, attn_mask=causal if masked else None), x)
    ours = faults(lambda x, masked: right(x, mask=M.Causal() if masked else None), x)
    masked = theirs[0] > 0 and theirs[1] == 0
    return Finding(
        claim="the notes' module applies `attn_mask`, and dropout only in training",
        verdict=verdict(masked and theirs[2] == 0, "incomplete" if masked or theirs[2] == 0 else "wrong"),
        measured=f"a causal mask changes the output by {theirs[0]:g}, and with it the last token changes "
        f"earlier outputs by {theirs[1]:.2g}; two equal calls in evaluation differ by {theirs[2]:.2g}",
        correct="pass the mask on, and dropout only in training: with `regard.nn.Attention`, "
        f"these differences are {ours[0]:.2g}, {ours[1]:g} and {ours[2]:g}",
        numbers={
            "change by a causal mask, printed": theirs[0],
            "change by a causal mask, regard.nn": ours[0],
            "future on past, printed": theirs[1],
            "future on past, regard.nn": ours[1],
            "call to call in evaluation, printed": theirs[2],
            "call to call in evaluation, regard.nn": ours[2],
        },
    )
