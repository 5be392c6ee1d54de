"""Claim: a policy with 8 heads can attend over the state variables of an environment.
`regard claims policy_heads`

The sample uses the number of state variables as the width of `nn.MultiheadAttention` with 8 heads.
The width must be a multiple of the number of heads, so the sample raises for most environments,
such as CartPole with 4 variables. A projection to a suitable width before attention mends it.
"""

from __future__ import annotations

import torch
from torch import nn

from regard.nn import Attention

from .finding import Finding, verdict

HEADS = 8
STATES = {"MountainCar": 2, "Pendulum": 3, "CartPole": 4, "Acrobot": 6, "LunarLander": 8, "BipedalWalker": 24}


def builds(variables: int) -> bool:
    """Returns whether PyTorch's module with 8 heads accepts this width."""
    try:
        nn.MultiheadAttention(variables, HEADS)
    except AssertionError:
        return False
    return True


@torch.no_grad()
def projected(variables: int, actions: int = 2, steps: int = 5) -> tuple[int, ...]:
    """Returns the shape of the logits of a policy that projects the states (steps, variables)."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(variables, 64), Attention(64, HEADS), nn.Linear(64, actions))
    return tuple(policy(torch.randn(1, steps, variables))[0, -1].shape)


def measure() -> Finding:
    built = {name: builds(variables) for name, variables in STATES.items()}
    widths = [n for n in range(1, 33) if builds(n)]
    failing = [f"{name} ({STATES[name]})" for name, works in built.items() if not works]
    return Finding(
        claim="a policy with 8 heads attends over the states of an environment",
        verdict=verdict(all(built.values()), "incomplete" if any(built.values()) else "wrong"),
        measured=f"raises for {len(failing)} of {len(STATES)} environments (state variables): "
        f"{', '.join(failing)}; of 1 to 32 variables, only {', '.join(map(str, widths))} work",
        correct="the width must be a multiple of the heads; project the states to such a width first, "
        f"which gives logits of shape {projected(4)} for CartPole",
        numbers={
            "environments that work": built,
            "numbers of state variables that work, up to 32": widths,
            "shape of the logits with a projection, CartPole": list(projected(4)),
        },
    )
