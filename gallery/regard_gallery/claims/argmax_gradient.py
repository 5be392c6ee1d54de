"""Claim: hard selection by argmax has no gradient. `regard claims argmax_gradient`

Hard attention returns the value of the key with the largest score. The experiment changes each
number of random queries, keys and values a little, and looks at the change of the output (finite
differences, in double precision). The output of hard attention is constant in queries and keys
except where two scores are equal; there it jumps. So its gradient with respect to queries and keys
is not missing but zero almost everywhere, and gradient descent does not change them. Values do get
a gradient. The straight-through estimator selects hard in the forward pass and takes the softmax's
gradient in the backward pass. Its gradient is not that of the hard output, but queries and keys
learn with it: in the second part, a matrix must learn to find each key by a rotated copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .finding import Finding, verdict
from .formula import weights
from .training import trained

Rule = Callable[[Tensor, Tensor], Tensor]
EPSILON = 1e-7


def hard(q: Tensor, k: Tensor) -> Tensor:
    return F.one_hot((q @ k.mT).argmax(-1), k.shape[-2]).to(q.dtype)


def straight_through(q: Tensor, k: Tensor) -> Tensor:
    """Returns the hard weights, with the gradient of the softmax."""
    soft = weights(q, k)
    return hard(q, k) + soft - soft.detach()


RULES: dict[str, Rule] = {"argmax": hard, "straight-through": straight_through, "softmax": weights}


def slopes(rule: Rule, qkv: list[Tensor], i: int) -> Tensor:
    """Returns the slope of the mean squared output in each number of input i, by central differences."""
    found = []
    for at in range(qkv[i].numel()):
        step = torch.zeros(qkv[i].numel(), dtype=torch.float64)
        step[at] = EPSILON
        above, below = (
            squared(rule, *(x + s * step.view_as(x) if n == i else x for n, x in enumerate(qkv)))
            for s in (1, -1)
        )
        found.append((above - below) / (2 * EPSILON))
    return torch.stack(found).view_as(qkv[i])


def squared(rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (rule(q, k) @ v).square().mean()


def gradients(rule: Rule, qkv: list[Tensor]) -> list[Tensor]:
    """Returns the gradients that autograd computes. An input that gets none has the gradient 0."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    found = torch.autograd.grad(squared(rule, *leaves), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(qkv, found, strict=True)]


def jumps(q: Tensor, k: Tensor, v: Tensor, points: int = 2001) -> tuple[int, float]:
    """Moves each query on a line to the next query, in small steps.

    Returns how many steps of all lines change the hard output, and the median change of those.
    """
    shares = torch.linspace(0, 1, points, dtype=q.dtype)[:, None, None]
    change = (hard(torch.lerp(q[:-1], q[1:], shares), k) @ v).diff(dim=0).norm(dim=-1)
    changed = change[change > 0]
    return len(changed), float(changed.median()) if len(changed) else 0.0


def recalled(rule: Rule, n: int, d: int, steps: int) -> float:
    """Trains a matrix that maps rotated keys to queries. Returns the share of keys that it finds."""
    generator = torch.Generator().manual_seed(1)
    k, v = F.normalize(torch.randn(2, n, d, generator=generator), dim=-1)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    layer = nn.Linear(d, d, bias=False)
    nn.init.normal_(layer.weight, std=d**-0.5, generator=generator)

    def queries() -> Tensor:
        found: Tensor = layer(k @ rotation)
        return math.sqrt(d) * 3 * found

    def loss() -> Tensor:
        x = queries()
        # The second term is 0. With it, backward() does not raise if the rule has no gradient.
        found: Tensor = (rule(x, k) @ v - v).square().mean() + 0 * x.sum()
        return found

    trained(layer, loss, steps, 0.01)
    with torch.no_grad():
        return float((hard(queries(), k).argmax(-1) == torch.arange(n)).float().mean())


def largest(slopes: Iterable[Tensor]) -> list[float]:
    return [float(found.abs().max()) for found in slopes]


def judge(slopes_of_hard: list[float]) -> str:
    """Returns the verdict from the largest slopes in queries, keys and values."""
    *scores, values = [slope > 1e-6 for slope in slopes_of_hard]
    return "wrong" if any(scores) else verdict(not values, "incomplete")


def measure(n: int = 16, d: int = 8, steps: int = 200) -> Finding:
    generator = torch.Generator().manual_seed(0)
    qkv = [*torch.randn(3, n, d, generator=generator, dtype=torch.float64)]
    found = {name: largest(slopes(rule, qkv, i) for i in range(3)) for name, rule in RULES.items()}
    given = {name: largest(gradients(rule, qkv)) for name, rule in RULES.items()}
    error = max(
        float((slopes(weights, qkv, i) - g).abs().max()) for i, g in enumerate(gradients(weights, qkv))
    )
    count, size = jumps(*qkv)
    learned = {name: recalled(rule, 2 * n, 2 * d, steps) for name, rule in RULES.items()}
    return Finding(
        claim="hard selection by argmax has no gradient",
        verdict=judge(found["argmax"]),
        measured=f"largest slope of {3 * n * d} numbers: queries {found['argmax'][0]:.2g}, "
        f"keys {found['argmax'][1]:.2g}, values {found['argmax'][2]:.2g} (softmax: "
        f"{' / '.join(f'{x:.2g}' for x in found['softmax'])}); on {n - 1} lines from one query to "
        f"the next, the output is constant except for {count} jumps",
        correct="the gradient in queries and keys is zero almost everywhere, values do get one; a matrix "
        f"that must learn to find {2 * n} keys finds {learned['argmax']:.0%} with argmax, "
        f"{learned['softmax']:.0%} with softmax, and {learned['straight-through']:.0%} with "
        "argmax and the softmax's gradient (straight-through)",
        numbers={
            "largest slope in queries, keys, values": found,
            "largest gradient of autograd": given,
            "softmax: largest difference of slope and gradient": error,
            "jumps on lines between queries": count,
            "median size of a jump": size,
            "share of keys found after training": learned,
        },
    )
