"""What a conversion costs: errors on tokens seen and unseen, bytes of real caches, a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._attention import weights
from ..nn import Attention, LatentAttention

EQUIVALENT = 1e-5
Module = Attention | LatentAttention


@dataclass(frozen=True)
class Errors:
    """Of a converted module against its source on the same tokens. Relative errors are in L2."""

    output: float  # of the result
    heads: tuple[float, ...]  # of each head's share of the result
    weights: tuple[float, ...]  # by head: total variation, from 0 to 1, mean over queries
    token: tuple[int, int]  # the sample and the place where the result is worst

    @property
    def worst_head(self) -> int:
        """The head whose share of the result is off most."""
        return max(range(len(self.heads)), key=self.heads.__getitem__)


@dataclass(frozen=True)
class Point:
    """A size that could be chosen, key heads or rank: bytes of the cache, error on held-out tokens."""

    size: int
    nbytes: int
    error: float


@dataclass(frozen=True)
class Report:
    """What was done to a module, how far it is from its source, and what it saves.

    Attributes:
        title: what became what.
        exact: the largest difference, by the largest result, when the same steps leave nothing out: the proof
            that head order, rotations, biases and caches are right.
        calibration, held_out: errors on tokens that the conversion saw and did not see, if there were any.
        steps: the error of the result after each step of the conversion, on held-out tokens.
        tokens: how many tokens the caches held.
        bytes_before, bytes_after: `nbytes` of the caches that both modules filled with them.
        curve: the same conversion to other sizes.
        tolerance: the largest error of the result that needs no training.
    """

    title: str
    exact: float
    calibration: Errors | None
    held_out: Errors | None
    steps: tuple[tuple[str, float], ...]
    tokens: int
    bytes_before: int
    bytes_after: int
    curve: tuple[Point, ...]
    tolerance: float

    @property
    def verdict(self) -> str:
        """Whether it can be used as it is, in words."""
        return verdict(self.exact, None if self.held_out is None else self.held_out.output, self.tolerance)

    def smallest(self, tolerance: float | None = None) -> Point | None:
        """The point of the curve with the fewest bytes whose error is within the tolerance."""
        most = self.tolerance if tolerance is None else tolerance
        fit = [point for point in self.curve if point.error <= most]
        return min(fit, key=lambda point: point.nbytes, default=None)

    def __str__(self) -> str:
        lines = [
            self.title,
            f"  nothing left out: differs by {self.exact:.1e}",
            f"  cache of {self.tokens} tokens: {self.bytes_before:,} -> {self.bytes_after:,} bytes "
            f"({self.bytes_before / self.bytes_after:.1f} x smaller)",
            *(f"  after {name}: error {error:.2e}" for name, error in self.steps),
            *_errors("calibration", self.calibration),
            *_errors("held-out", self.held_out),
            *(f"  size {p.size:>5}: {p.nbytes:>12,} bytes, error {p.error:.2e}" for p in self.curve),
            f"  verdict: {self.verdict}",
        ]
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group

        saved = f"cache of {self.tokens} tokens: {self.bytes_before:,} -> {self.bytes_after:,} bytes"
        proof = f"nothing left out: differs by {self.exact:.1e}"
        return Group(self.title, proof, saved, *self._tables(), f"verdict: {self.verdict}")

    def _tables(self) -> list[Any]:
        from rich.table import Table

        if self.calibration is None or self.held_out is None:
            return []
        by_head = Table("head", "error, calibration", "error, held-out", "weights moved, held-out")
        columns = (self.calibration.heads, self.held_out.heads, self.held_out.weights)
        for head, row in enumerate(zip(*columns, strict=True)):
            by_head.add_row(str(head), *(f"{x:.2e}" for x in row))
        by_head.add_row("all", f"{self.calibration.output:.2e}", f"{self.held_out.output:.2e}", "")
        by_size = Table("size", "bytes", "error, held-out")
        for point in self.curve:
            by_size.add_row(str(point.size), f"{point.nbytes:,}", f"{point.error:.2e}")
        return [by_head, by_size]


def verdict(exact: float, error: float | None, tolerance: float) -> str:
    """What the proof and the held-out error say, in words."""
    if not exact < EQUIVALENT:
        return f"broken: nothing was left out, and yet results differ by {exact:.1e}; do not deploy"
    if error is None:
        return "not measured: give calibration tokens; do not deploy"
    if error < EQUIVALENT:
        return "equivalent"
    if error <= tolerance:
        return f"usable without training at tolerance {tolerance:g}"
    return (
        f"needs training; do not deploy: held-out error {error:.2g} is above the tolerance {tolerance:g}. "
        "Train from here, with a loss between the results and those of the source"
    )


def _errors(name: str, errors: Errors | None) -> list[str]:
    if errors is None:
        return []
    worst = errors.worst_head
    by_head = " ".join(f"{x:.1e}" for x in errors.heads)
    moved = " ".join(f"{x:.2f}" for x in errors.weights)
    return [
        f"  {name}: error {errors.output:.2e}, worst at head {worst} and token {errors.token}",
        f"    by head: {by_head}",
        f"    weights moved by: {moved}",
    ]


# Measuring


@torch.no_grad()
def compare(before: Attention, after: Module, order: list[int], x: Tensor) -> Errors:
    """Head i of `after` stands for head order[i] of `before`. x (B, L, d_model)."""
    H = before.heads
    wrong, right, moved = torch.zeros(H).double(), torch.zeros(H).double(), torch.zeros(H).double()
    by_token = []
    for sample in x.split(1):
        (shares, out), (new_shares, new_out) = _shares(before, sample), _shares(after, sample)
        wrong += (new_shares - shares[order]).square().sum((1, 2))
        right += shares[order].square().sum((1, 2))
        moved += (_weights(after, sample) - _weights(before, sample)[order]).abs().sum(-1).mean(-1) / 2
        by_token.append(((new_out - out).square().sum(-1), out.square().sum(-1)))
    error, size = (torch.stack(found) for found in zip(*by_token, strict=True))  # (B, L)
    worst = divmod(int(error.argmax()), x.shape[1])
    back = torch.tensor(order).argsort()
    return Errors(
        _relative(error.sum(), size.sum()),
        tuple(_relative(a, b) for a, b in zip(wrong[back], right[back], strict=True)),
        tuple((moved[back] / len(x)).tolist()),
        worst,
    )


@torch.no_grad()
def output_error(before: Module, after: Module, x: Tensor) -> float:
    with evaluating(before, after):
        out = before(x).double()
        # By token first, as `compare` sums: the same error is the same number.
        error, size = (y.square().sum(-1).sum() for y in (after(x) - out, out))
        return _relative(error, size)


@torch.no_grad()
def largest_difference(before: Module, after: Module, x: Tensor) -> float:
    x = x.to(before.out.weight)
    with evaluating(before, after):
        out = before(x).double()
        return float((after(x) - out).abs().max() / out.abs().max())


@torch.no_grad()
def cache_bytes(module: Module, x: Tensor) -> int:
    """`nbytes` of a cache with room for just these tokens, after the module has filled it."""
    B, L = x.shape[:2]
    cache = module.new_cache(B, capacity=L)
    with evaluating(module):
        module(x, cache=cache)
    if len(cache) != L:
        raise RuntimeError(f"cache: expected {L} tokens after {L} were attended, got {len(cache)}")
    return int(cache.nbytes)


class evaluating:
    """Modules in evaluation, and afterwards as they and their parts were."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules

    def __enter__(self) -> None:
        self.before = [(part, part.training) for module in self.modules for part in module.modules()]
        for module in self.modules:
            module.eval()

    def __exit__(self, *error: object) -> None:
        for part, training in self.before:
            part.training = training


def _shares(module: Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What each head adds to the result, (H, L, d_model), and the result (L, d_model); x (1, L, d_model)."""
    joined: list[Tensor] = []
    handle = module.out.register_forward_pre_hook(lambda _, args: joined.append(args[0]))
    try:
        with evaluating(module):
            out = module(x)[0].double()
    finally:
        handle.remove()
    by_head = joined[0][0].double().unflatten(-1, (module.heads, -1)).transpose(0, 1)
    matrices = module.out.weight.double().unflatten(1, (module.heads, -1)).transpose(0, 1)
    return by_head @ matrices.transpose(1, 2), out


def _weights(module: Module, x: Tensor) -> Tensor:
    """(H, L, L) in float64; x (1, L, d_model)"""
    qkv, options = module.arguments(x)
    return weights(*qkv, **options)[0].double()


def _relative(error: Tensor, size: Tensor) -> float:
    """The square root of their ratio; of the error alone if there is nothing to compare it with."""
    return float((error / size if size > 0 else error).sqrt())


def split(x: Tensor, held_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Calibration and held-out samples: if only the first are given, the last quarter of them is held out."""
    if held_out is not None:
        return x, held_out
    if len(x) < 2:
        raise ValueError(
            "calibration: expected 2 samples or more, of which the last quarter is held out, or held_out"
        )
    kept = len(x) - max(1, len(x) // 4)
    return x[:kept], x[kept:]


def curve(
    sizes: Iterable[int], made: Callable[[int], Module], before: Attention, x: Tensor
) -> tuple[Point, ...]:
    points = []
    for size in sizes:
        after = made(size)
        points.append(Point(size, cache_bytes(after, x), output_error(before, after, x)))
    return tuple(points)
