"""Why self-attention instead of recurrence or convolution? `python docs/why/sequences.py`

How much does the last output depend on a token at a given distance? The measure is the norm of the
derivative of the last output with respect to the token, for untrained layers of equal width. In a
recurrence, information passes through every step between the token and the last output. A stack of
convolutions with kernel size w reaches w - 1 tokens further with each layer. Attention reads every
token in one step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks as M
from regard.nn import Attention

WIDTH, LAYERS, KERNEL = 32, 4, 3
Make = Callable[[], Callable[[Tensor], Tensor]]


def recurrence() -> Callable[[Tensor], Tensor]:
    layer = nn.RNN(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)
    return lambda x: layer(x)[0]


def convolution() -> Callable[[Tensor], Tensor]:
    layers = [nn.Conv1d(WIDTH, WIDTH, KERNEL, dtype=torch.float64) for _ in range(LAYERS)]

    def run(x: Tensor) -> Tensor:
        x = x.mT
        for layer in layers:
            x = torch.tanh(layer(F.pad(x, (KERNEL - 1, 0))))
        return x.mT

    return run


def attention() -> Callable[[Tensor], Tensor]:
    return Attention(WIDTH, 4, mask=M.Causal(), dtype=torch.float64)


MAKERS: dict[str, Make] = {"recurrence": recurrence, "convolution": convolution, "attention": attention}


def influence(make: Make, n: int) -> Tensor:
    """Returns how much the tokens at distances 0 to n - 1 influence the last output, (n,).

    The influence of a token is the norm of the derivative of the last output with respect to the
    token, averaged over 8 samples.
    """
    torch.manual_seed(0)
    run, x = make(), torch.randn(8, n, WIDTH, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(x)[:, -1].sum(), x)
    return gradient.norm(dim=-1).mean(0).flip(0)


def multiplications(n: int, d: int) -> dict[str, int]:
    """Counts the multiplications of one layer of each kind, for n tokens of width d.

    The number for attention includes its four projections.
    """
    return {
        "recurrence": 2 * n * d * d,
        "convolution": KERNEL * n * d * d,
        "attention": 4 * n * d * d + 2 * n * n * d,
    }


def measure(n: int = 128) -> dict[str, dict[str, float]]:
    """Returns, for each kind of layer, the influence of the first token and the reach.

    The influence is relative to that of the last token. The reach is the largest distance of a
    token with any influence.
    """
    curves = {name: influence(make, n) for name, make in MAKERS.items()}
    return {
        name: {"far / near": float(curve[-1] / curve[0]), "reach": int(curve.nonzero().max())}
        for name, curve in curves.items()
    }


if __name__ == "__main__":
    for name, found in measure().items():
        print(f"{name:<11}:", ", ".join(f"{what} {value:.3g}" for what, value in found.items()))
