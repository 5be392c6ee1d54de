"""Times prefill and decoding of models that differ only in their kind of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ._models import ByteModel, Sizes

LIMIT = 1e-4  # largest relative difference between decoding and one forward pass, in float32


class Side:
    """A model with one kind of attention, its caches after a prompt (1, L), and its shortest times.

    The caches have room for `steps` more tokens.
    """

    def __init__(self, kind: str, sizes: Sizes, prompt: Tensor, steps: int) -> None:
        torch.manual_seed(0)
        self.kind, self.prompt, self.steps = kind, prompt, steps
        self.model = ByteModel(kind, sizes).eval()
        self.to_read = self.to_write = float("inf")  # shortest times so far, in seconds per token
        self.caches: list[Any] = []
        self.read()

    def read(self) -> None:
        begin = perf_counter()
        caches = self.model.new_caches(self.prompt.shape[1] + self.steps)
        self.model(self.prompt, caches)
        self.to_read = min(self.to_read, (perf_counter() - begin) / self.prompt.shape[1])
        self.caches = caches

    def write(self, tokens: Tensor) -> Tensor:
        """Feeds tokens (1, L) to the model one by one and returns the logits (1, L, 256).

        Works on copies of the caches, so that every call continues from the end of the prompt.
        """
        caches = [cache.fork() for cache in self.caches]
        begin = perf_counter()
        logits = [self.model(token, caches) for token in tokens.split(1, 1)]
        self.to_write = min(self.to_write, (perf_counter() - begin) / tokens.shape[1])
        return torch.cat(logits, 1)

    def check(self, tokens: Tensor) -> None:
        """Raises ArithmeticError unless decoding gives the same logits as one forward pass."""
        whole = self.model(torch.cat((self.prompt, tokens), 1))[:, self.prompt.shape[1] :]
        error = float((self.write(tokens) - whole).norm() / whole.norm())
        if not error < LIMIT:
            raise ArithmeticError(f"{self.kind}: decoding is {error:.1e} away from one call over all tokens")


@torch.no_grad()
def decoded(
    kinds: Sequence[str], sizes: Sizes, *, tokens: int, steps: int = 16, rounds: int = 5,
    progress: Callable[[str], None] = lambda kind: None,
) -> list[Side]:  # fmt: skip
    """Times prefill of `tokens` tokens and decoding of `steps` tokens, for each kind of attention.

    Returns a Side per kind, with the shortest times of `rounds` rounds. The kinds take turns, so
    that other load on the machine affects all of them.
    """
    text = torch.randint(256, (1, tokens + steps), generator=torch.Generator().manual_seed(1))
    prompt, new = text.split((tokens, steps), 1)
    sides = []
    for kind in kinds:
        progress(kind)
        sides.append(Side(kind, sizes, prompt, steps))
        sides[-1].check(new)
    for _ in range(rounds):
        for side in sides:
            progress(side.kind)
            side.read()
            side.write(new)
    return sides
