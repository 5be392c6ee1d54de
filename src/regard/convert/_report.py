"""Reports of conversions: errors on tokens seen and unseen, bytes of real caches, a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import cost
from .._api.attention import weights
from .._tools.modes import evaluating
from ..nn import Attention, LatentAttention
from ._needle import Needle, needles
from ._origin import Origin, origin

EQUIVALENT = 1e-5
# Fields of `Errors` with a number for each head: their names in the text, and above columns.
BY_HEAD = {
    "heads": ("by head", "error"),
    "scores": ("scores", "of scores"),
    "values": ("values", "of values"),
    "weights": ("weights, total variation", "weights moved"),
    "kl": ("weights, KL in nats", "KL, nats"),
}
Module = Attention | LatentAttention


@dataclass(frozen=True)
class Errors:
    """Of a converted module against its source on the same tokens. Relative errors are in L2.

    Keys are compared by the scores they get and values by what the last projection makes of them: a head may
    be turned, and then its channels are others, though it does the same.
    """

    output: float  # of the result
    heads: tuple[float, ...]  # of each head's share of the result
    weights: tuple[float, ...]  # by head: total variation, from 0 to 1, mean over queries
    token: tuple[int, int]  # the sample and the place where the result is worst
    scores: tuple[float, ...]  # by head; a constant added to a row changes nothing, so rows have mean 0
    values: tuple[float, ...]  # by head, after the last projection
    kl: tuple[float, ...]  # by head: KL(source || converted) of the weights in nats, mean over queries

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
class Spectrum:
    """Explained variance of each head's un-rotated keys and of its values under the latent.

    Keys are weighted by the queries that meet them, values by the last projection.

    Attributes:
        rank: channels that are kept.
        heads: by key head, the share of its energy in each principal component, the largest of all first.
        shares: the same of all heads together: the squares of the singular values, of sum 1.
    """

    rank: int
    heads: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]

    def kept(self, rank: int | None = None) -> float:
        """The share of the energy in so many components. Default: those that are kept."""
        return sum(self.shares[: self.rank if rank is None else rank])

    @property
    def kept_by_head(self) -> tuple[float, ...]:
        return tuple(sum(shares[: self.rank]) for shares in self.heads)

    def needed(self, share: float) -> int:
        """The smallest rank that keeps this share."""
        return next((n for n in range(len(self.shares)) if self.kept(n) >= share), len(self.shares))


@dataclass(frozen=True)
class Step:
    """Decoding one token after those of the report."""

    flops: int
    read_bytes: int  # weights and cache


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
        needles: whether heads find what they look for, at the samples' length and at four times that.
        decode: what a step costs, before and after. What quantised caches would save comes on top.
        origin: hashes of source and tokens, and what each tensor was made of.
        spectrum: of a latent.
        absorbed_from: of a latent: cached tokens from which on a step over the latents themselves multiplies
            less than one over keys and values that are made of them.
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
    needles: tuple[Needle, ...]
    decode: tuple[Step, Step]
    origin: Origin
    spectrum: Spectrum | None = None
    absorbed_from: int | None = None

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
            *(f"  {line}" for line in self._more()),
            *(f"  size {p.size:>5}: {p.nbytes:>12,} bytes, error {p.error:.2e}" for p in self.curve),
            f"  verdict: {self.verdict}",
        ]
        return "\n".join(lines)

    def _more(self) -> list[str]:
        """Spectrum, needles, decoding and origin, a line for each."""
        lines = [] if self.spectrum is None else [_energy(self.spectrum)]
        lines += [
            f"needle in {n.length} tokens: found by {n.before:.0%} of heads and places, now {n.after:.0%}"
            for n in self.needles
        ]
        before, after = self.decode
        lines.append(
            f"a step of decoding: {before.flops:,} -> {after.flops:,} FLOP, "
            f"{before.read_bytes:,} -> {after.read_bytes:,} bytes read"
        )
        if self.absorbed_from is not None:
            lines.append(f"absorbed decoding multiplies less from {self.absorbed_from} cached tokens on")
        return [*lines, f"source: sha256 {self.origin.source}"]

    def __rich__(self) -> Any:
        from rich.console import Group

        saved = f"cache of {self.tokens} tokens: {self.bytes_before:,} -> {self.bytes_after:,} bytes"
        proof = f"nothing left out: differs by {self.exact:.1e}"
        return Group(self.title, proof, saved, *self._tables(), *self._more(), f"verdict: {self.verdict}")

    def _tables(self) -> list[Any]:
        from rich.table import Table

        if self.calibration is None or self.held_out is None:
            return []
        titles = ["error, calibration", *(title for _, title in BY_HEAD.values())]
        by_head = Table("head", *titles, title="held-out, but for the first column")
        columns = (self.calibration.heads, *(getattr(self.held_out, name) for name in BY_HEAD))
        for head, row in enumerate(zip(*columns, strict=True)):
            by_head.add_row(str(head), *(f"{x:.2e}" for x in row))
        by_head.add_row("all", f"{self.calibration.output:.2e}", f"{self.held_out.output:.2e}")
        by_size = Table("size", "bytes", "error, held-out")
        for point in self.curve:
            by_size.add_row(str(point.size), f"{point.nbytes:,}", f"{point.error:.2e}")
        return [by_head, by_size]


def verdict(exact: float, error: float | None, tolerance: float) -> str:
    """Returns what the proof and the held-out error mean, in words."""
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
    worst = f"worst at head {errors.worst_head} and token {errors.token}"
    lines = [f"  {name}: error {errors.output:.2e}, {worst}"]
    for field, (what, _) in BY_HEAD.items():
        lines.append(f"    {what}: {' '.join(f'{x:.1e}' for x in getattr(errors, field))}")
    return lines


def _energy(spectrum: Spectrum) -> str:
    needed = ", ".join(f"{share:.1%} in {spectrum.needed(share)}" for share in (0.9, 0.99, 0.999))
    by_head = " ".join(f"{share:.3f}" for share in spectrum.kept_by_head)
    kept = f"energy kept by rank {spectrum.rank}: {spectrum.kept():.4f}, by key head {by_head}"
    return f"{kept}; {needed} channels"


# Measuring


class Look(NamedTuple):
    """What the heads of a module do with a sample, (H, L, ...) in float64, and its result (L, d_model)."""

    heads: Tensor  # (H, L, d_model): what each adds to the result
    values: Tensor  # (H, L, d_model): what the last projection makes of its values
    weights: Tensor  # (H, L, L)
    out: Tensor

    def scores(self, seen: Tensor) -> Tensor:
        """(H, L, L) up to a constant of each row, which the mean over seen keys removes; 0 for the others."""
        logs = _log(self.weights).where(seen, 0)
        return (logs - logs.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).where(seen, 0)


@torch.no_grad()
def compare(before: Attention, after: Module, order: list[int], x: Tensor) -> Errors:
    """Measures errors on x (B, L, d_model). Head i of `after` stands for head order[i] of `before`."""
    back = torch.tensor(order).argsort()
    ratios = {name: torch.zeros(2, before.heads).double() for name in ("heads", "values", "scores")}
    moved, kl = torch.zeros(2, before.heads).double()
    by_token = []
    for sample in x.split(1):
        old, new = _look(before, sample, slice(None)), _look(after, sample, back)
        seen = (old.weights > 0) | (new.weights > 0)
        pairs = {"heads": (old.heads, new.heads), "values": (old.values, new.values),
                 "scores": (old.scores(seen), new.scores(seen))}  # fmt: skip
        for name, (a, b) in pairs.items():
            ratios[name] += torch.stack([y.square().sum((1, 2)) for y in (b - a, a)])
        moved += (new.weights - old.weights).abs().sum(-1).mean(-1) / (2 * len(x))
        kl += (old.weights * (_log(old.weights) - _log(new.weights))).sum(-1).mean(-1) / len(x)
        by_token.append(((new.out - old.out).square().sum(-1), old.out.square().sum(-1)))
    error, size = (torch.stack(found) for found in zip(*by_token, strict=True))  # (B, L)
    by_head = {name: tuple(map(_relative, *found)) for name, found in ratios.items()}
    return Errors(
        output=_relative(error.sum(), size.sum()), weights=tuple(moved.tolist()),
        kl=tuple(kl.clamp_min(0).tolist()), token=divmod(int(error.argmax()), x.shape[1]), **by_head,
    )  # fmt: skip


def _output_error(before: Module, after: Module, x: Tensor) -> float:
    out, converted = _results(before, after, x)
    # By token first, as `compare` sums: the same error is the same number.
    error, size = (y.square().sum(-1).sum() for y in (converted - out, out))
    return _relative(error, size)


def _largest_difference(before: Module, after: Module, x: Tensor) -> float:
    out, converted = _results(before, after, x.to(before.out.weight))
    return float((converted - out).abs().max() / out.abs().max())


@torch.no_grad()
def _results(before: Module, after: Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Float64."""
    with evaluating(before, after):
        return before(x).double(), after(x).double()


@torch.no_grad()
def _cache_bytes(module: Module, x: Tensor) -> int:
    """Returns `nbytes` of a cache with room for just these tokens, after the module has filled it."""
    B, L = x.shape[:2]
    cache = module.new_cache(B, capacity=L)
    with evaluating(module):
        module(x, cache=cache)
    if len(cache) != L:
        raise RuntimeError(f"cache: expected {L} tokens after {L} were attended, got {len(cache)}")
    return int(cache.nbytes)


def _look(module: Module, x: Tensor, order: Tensor | slice) -> Look:
    """Runs the module on x (1, L, d_model) and returns its heads in this order."""
    joined: list[Tensor] = []
    with evaluating(module), module.out.register_forward_pre_hook(lambda _, args: joined.append(args[0])):
        out = module(x)[0].double()
    matrices = module.out.weight.double().unflatten(1, (module.heads, -1))  # (d_model, H, Dv)
    matrices = matrices.permute(1, 2, 0)
    by_head = joined[0][0].double().unflatten(-1, (module.heads, -1)).transpose(0, 1)
    qkv, options = module.arguments(x)
    q, k, v = (y.double() if y.itemsize >= 4 else y for y in qkv)  # 16 bits stay with their sinks and tables
    values = v[0].double().repeat_interleave(module.heads // v.shape[1], 0)
    found = weights(q, k, v, **options)[0].double()
    return Look((by_head @ matrices)[order], (values @ matrices)[order], found[order], out)


def _log(x: Tensor) -> Tensor:
    """Finite for 0."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def _relative(error: Tensor, size: Tensor) -> float:
    """The square root of their ratio; of the error alone if there is nothing to compare it with."""
    return float((error / size if size > 0 else error).sqrt())


def _step(module: Module, tokens: int) -> Step:
    """Estimates the cost of one token of one sample after `tokens` cached ones."""
    found = cost.estimate(cost.from_module(module), 1, past=tokens, dtype=module.out.weight.dtype)
    return Step(found.forward_flops.visible, found.read_bytes)


def report(
    module: nn.Module, before: Attention, after: Module, order: list[int], seen: Tensor | None,
    unseen: Tensor | None, trial: Tensor, *, proof: tuple[Module, Module], steps: Mapping[str, Module],
    sizes: Iterable[int], made: Callable[[int], Module], **more: Any,
) -> Report:  # fmt: skip
    """Measures a conversion.

    Args:
        module, before: as it was given, and as `regard.nn.Attention`.
        order: head i of `after` stands for head order[i] of `before`.
        seen, unseen: calibration and held-out tokens (B, L, d_model), if there are any.
        trial: the held-out tokens, or others for what needs no real ones: the proof, caches.
        proof: a module, and the same after a conversion that leaves nothing out.
        steps: the module after each step.
        sizes, made: of the curve, and the conversion to a size.
        more: other attributes of the report.
    """
    steps, sizes = ({}, ()) if unseen is None else (steps, sizes)
    tokens = trial if unseen is None else unseen
    return Report(
        exact=_largest_difference(*proof, trial),
        calibration=None if seen is None else compare(before, after, order, seen),
        held_out=None if unseen is None else compare(before, after, order, unseen),
        steps=tuple((name, _output_error(before, made, tokens)) for name, made in steps.items()),
        tokens=trial.shape[0] * trial.shape[1],
        bytes_before=_cache_bytes(before, trial),
        bytes_after=_cache_bytes(after, trial),
        curve=tuple(_point(size, before, made(size), tokens) for size in sizes),
        needles=() if unseen is None else needles(before, after, order, unseen),
        decode=(_step(before, trial.shape[1]), _step(after, trial.shape[1])),
        origin=origin(module, before, after, seen, unseen),
        **more,
    )


def _point(size: int, before: Module, after: Module, x: Tensor) -> Point:
    return Point(size, _cache_bytes(after, x), _output_error(before, after, x))
