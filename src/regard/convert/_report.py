"""Reports of conversions: errors on calibration and held-out tokens, cache sizes, and a verdict."""

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
# Field of `Errors` with one number per head -> its label in `str(report)` and its column in the table.
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
    """Errors of a converted module relative to the source module, on the same tokens.

    Relative errors use the L2 norm. A conversion may rotate a head's channels without changing its
    output. Therefore scores are compared instead of keys, and values are compared after the output
    projection. "By head" means a tuple with one number per head.

    Attributes:
        output: relative error of the output.
        heads: by head, relative error of the head's contribution to the output.
        weights: by head, total variation distance of the attention weights, from 0 to 1, averaged
            over queries.
        token: the sample and the position of the token whose output has the largest error.
        scores: by head, relative error of the scores. Each row is shifted to mean 0, because
            softmax ignores a constant.
        values: by head, relative error of the values after the output projection.
        kl: by head, KL(source || converted) of the attention weights in nats, averaged over
            queries.
    """

    output: float
    heads: tuple[float, ...]
    weights: tuple[float, ...]
    token: tuple[int, int]
    scores: tuple[float, ...]
    values: tuple[float, ...]
    kl: tuple[float, ...]

    @property
    def worst_head(self) -> int:
        """The head with the largest error in `heads`."""
        return max(range(len(self.heads)), key=self.heads.__getitem__)


@dataclass(frozen=True)
class Point:
    """A point of the curve `Report.curve`: the cache size and error of a conversion to one size.

    Attributes:
        size: the number of key heads (`to_grouped`) or the rank (`to_latent`).
        nbytes: bytes of the cache.
        error: relative error of the output on held-out tokens.
    """

    size: int
    nbytes: int
    error: float


@dataclass(frozen=True)
class Spectrum:
    """How the energy of the unrotated keys and of the values is divided among principal components.

    Energy is the mean square on the calibration tokens, with keys weighted by the queries and
    values by the output projection. All heads together have one list of principal components.

    Attributes:
        rank: number of principal components that the latent keeps.
        heads: one tuple per key head: the fraction of this head's energy in each component.
        shares: one number per component: its fraction of the energy summed over all heads.
            Components are sorted by decreasing fraction.
    """

    rank: int
    heads: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]

    def kept(self, rank: int | None = None) -> float:
        """Returns the fraction of the total energy, over all heads, in the first `rank` components.

        `rank` defaults to the attribute `rank`.
        """
        return sum(self.shares[: self.rank if rank is None else rank])

    @property
    def kept_by_head(self) -> tuple[float, ...]:
        """For each key head, the fraction of this head's energy in the first `rank` components."""
        return tuple(sum(shares[: self.rank]) for shares in self.heads)

    def needed(self, share: float) -> int:
        """Returns the smallest rank that keeps at least the fraction `share` of the energy."""
        return next((n for n in range(len(self.shares)) if self.kept(n) >= share), len(self.shares))


@dataclass(frozen=True)
class Step:
    """The estimated cost of one decode step of one sample, with L tokens in the cache.

    L is the length of the samples with which the report measures cache sizes.

    Attributes:
        flops: floating-point operations.
        read_bytes: bytes of weights and cache that are read.
    """

    flops: int
    read_bytes: int


@dataclass(frozen=True)
class Report:
    """The errors and savings of a conversion.

    Attributes:
        title: text with the sizes before and after the conversion.
        exact: largest difference between the outputs of the source and of its conversion to full
            size, relative to the largest output. The conversion to full size should be exact, so a
            small number shows that head order, rotations and biases are right.
        calibration, held_out: errors on calibration and on held-out tokens, or None without tokens.
        steps: one pair per step of the conversion: the name of the step, and the relative error of
            the output on held-out tokens after this step.
        tokens: total number of tokens of all samples in the caches whose sizes are reported.
        bytes_before, bytes_after: `nbytes` of the source's and of the converted module's cache.
        curve: cache size and error of the same conversion to various sizes. Empty if `held_out`
            is None.
        tolerance: the largest relative error of the output that is accepted without training.
        needles: results of a needle-in-a-haystack test of the heads, at the samples' length and at
            four times that length.
        decode: cost of a decode step of the source and of the converted module, with caches that
            are not quantised.
        origin: hashes of the source module and of the tokens, and the names of the source tensors
            from which each new tensor was computed.
        spectrum: after `to_latent`, the fraction of energy in each component of the latent.
        absorbed_from: after `to_latent`, the number of cached tokens from which the absorbed form
            of a decode step needs fewer operations than the expanded form.
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
        """A sentence that says whether the module can be used without training."""
        return verdict(self.exact, None if self.held_out is None else self.held_out.output, self.tolerance)

    def smallest(self, tolerance: float | None = None) -> Point | None:
        """Returns the point with the smallest cache among the points of `curve` within `tolerance`.

        Returns None if no point has an error within `tolerance`, which defaults to
        `self.tolerance`.
        """
        limit = self.tolerance if tolerance is None else tolerance
        fitting = [point for point in self.curve if point.error <= limit]
        return min(fitting, key=lambda point: point.nbytes, default=None)

    def __str__(self) -> str:
        lines = [
            self.title,
            f"  at full size: differs by {self.exact:.1e}",
            f"  cache of {self.tokens} tokens: {self.bytes_before:,} -> {self.bytes_after:,} bytes "
            f"({self.bytes_before / self.bytes_after:.1f} x smaller)",
            *(f"  after {name}: error {error:.2e}" for name, error in self.steps),
            *_errors("calibration", self.calibration),
            *_errors("held-out", self.held_out),
            *(f"  {line}" for line in self._summary()),
            *(f"  size {p.size:>5}: {p.nbytes:>12,} bytes, error {p.error:.2e}" for p in self.curve),
            f"  verdict: {self.verdict}",
        ]
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        """Returns lines of text on the spectrum, the needles, decoding and the origin."""
        lines = [] if self.spectrum is None else [_energy(self.spectrum)]
        lines += [
            f"needle in {n.length} tokens: found by {n.before:.0%} -> {n.after:.0%} of heads and positions"
            for n in self.needles
        ]
        before, after = self.decode
        lines.append(
            f"decode step: {before.flops:,} -> {after.flops:,} FLOP, "
            f"{before.read_bytes:,} -> {after.read_bytes:,} bytes read"
        )
        if self.absorbed_from is not None:
            lines.append(f"absorbed decoding needs fewer operations from {self.absorbed_from} cached tokens")
        return [*lines, f"source: sha256 {self.origin.source}"]

    def __rich__(self) -> Any:
        from rich.console import Group

        saved = f"cache of {self.tokens} tokens: {self.bytes_before:,} -> {self.bytes_after:,} bytes"
        proof = f"at full size: differs by {self.exact:.1e}"
        return Group(self.title, proof, saved, *self._tables(), *self._summary(), f"verdict: {self.verdict}")

    def _tables(self) -> list[Any]:
        from rich.table import Table

        if self.calibration is None or self.held_out is None:
            return []
        titles = ["error, calibration", *(title for _, title in BY_HEAD.values())]
        by_head = Table("head", *titles, title="held-out tokens (first column: calibration)")
        columns = (self.calibration.heads, *(getattr(self.held_out, name) for name in BY_HEAD))
        for head, row in enumerate(zip(*columns, strict=True)):
            by_head.add_row(str(head), *(f"{x:.2e}" for x in row))
        by_head.add_row("all", f"{self.calibration.output:.2e}", f"{self.held_out.output:.2e}")
        by_size = Table("size", "bytes", "error, held-out")
        for point in self.curve:
            by_size.add_row(str(point.size), f"{point.nbytes:,}", f"{point.error:.2e}")
        return [by_head, by_size]


def verdict(exact: float, error: float | None, tolerance: float) -> str:
    """Returns a sentence that says whether a converted module can be used without training.

    `exact` is the error of a conversion to full size. `error` is the error of the actual conversion
    on held-out tokens, or None without such tokens.
    """
    if not exact < EQUIVALENT:
        return f"broken: even at full size, results differ by {exact:.1e}; do not deploy"
    if error is None:
        return "not measured: pass calibration tokens; do not deploy"
    if error < EQUIVALENT:
        return "equivalent"
    if error <= tolerance:
        return f"usable without training at tolerance {tolerance:g}"
    return (
        f"needs training; do not deploy: held-out error {error:.2g} is above the tolerance {tolerance:g}. "
        "Train the converted module with the output of the source as target"
    )


def _errors(name: str, errors: Errors | None) -> list[str]:
    if errors is None:
        return []
    worst = f"worst at head {errors.worst_head} and token {errors.token}"
    lines = [f"  {name}: error {errors.output:.2e}, {worst}"]
    for field, (label, _) in BY_HEAD.items():
        lines.append(f"    {label}: {' '.join(f'{x:.1e}' for x in getattr(errors, field))}")
    return lines


def _energy(spectrum: Spectrum) -> str:
    needed = ", ".join(f"{share:.1%} in {spectrum.needed(share)}" for share in (0.9, 0.99, 0.999))
    by_head = " ".join(f"{share:.3f}" for share in spectrum.kept_by_head)
    kept = f"energy kept by rank {spectrum.rank}: {spectrum.kept():.4f}, by key head {by_head}"
    return f"{kept}; {needed} channels"


# Measurement


class HeadOutputs(NamedTuple):
    """Weights and outputs of a module's heads on one sample, in float64."""

    heads: Tensor  # (H, L, d_model): each head's contribution to the output
    values: Tensor  # (H, L, d_model): each head's values after the output projection
    weights: Tensor  # (H, L, L)
    out: Tensor  # (L, d_model)

    def scores(self, allowed: Tensor) -> Tensor:
        """Returns scores (H, L, L). In each row, the scores of the allowed keys have mean 0.

        Scores of other keys are 0.
        """
        logs = _log(self.weights).where(allowed, 0)
        count = allowed.sum(-1, keepdim=True).clamp_min(1)
        return (logs - logs.sum(-1, keepdim=True) / count).where(allowed, 0)


@torch.no_grad()
def compare(before: Attention, after: Module, order: list[int], x: Tensor) -> Errors:
    """Returns the errors of `after` relative to `before` on x (B, L, d_model).

    Head i of `after` replaces head order[i] of `before`.
    """
    back = torch.tensor(order).argsort()
    squares = {name: torch.zeros(2, before.heads).double() for name in ("heads", "values", "scores")}
    variation, kl = torch.zeros(2, before.heads).double()
    by_token = []
    for sample in x.split(1):
        old, new = _head_outputs(before, sample, slice(None)), _head_outputs(after, sample, back)
        allowed = (old.weights > 0) | (new.weights > 0)
        pairs = {"heads": (old.heads, new.heads), "values": (old.values, new.values),
                 "scores": (old.scores(allowed), new.scores(allowed))}  # fmt: skip
        for name, (a, b) in pairs.items():
            squares[name] += torch.stack([y.square().sum((1, 2)) for y in (b - a, a)])
        variation += (new.weights - old.weights).abs().sum(-1).mean(-1) / (2 * len(x))
        kl += (old.weights * (_log(old.weights) - _log(new.weights))).sum(-1).mean(-1) / len(x)
        by_token.append(((new.out - old.out).square().sum(-1), old.out.square().sum(-1)))
    error, size = (torch.stack(samples) for samples in zip(*by_token, strict=True))  # (B, L)
    by_head = {name: tuple(map(_relative, *sums)) for name, sums in squares.items()}
    return Errors(
        output=_relative(error.sum(), size.sum()), weights=tuple(variation.tolist()),
        kl=tuple(kl.clamp_min(0).tolist()), token=divmod(int(error.argmax()), x.shape[1]), **by_head,
    )  # fmt: skip


def _output_error(before: Module, after: Module, x: Tensor) -> float:
    out, converted = _outputs(before, after, x)
    # Sums over channels first, like `compare`, so that rounding gives exactly the same error.
    error, size = (y.square().sum(-1).sum() for y in (converted - out, out))
    return _relative(error, size)


def _largest_difference(before: Module, after: Module, x: Tensor) -> float:
    out, converted = _outputs(before, after, x.to(before.out.weight))
    return float((converted - out).abs().max() / out.abs().max())


@torch.no_grad()
def _outputs(before: Module, after: Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the float64 outputs of both modules for x (B, L, d_model), in evaluation mode.

    Runs one sample at a time, like `compare`: linear layers round differently with few rows.
    """
    with evaluating(before, after):
        pairs = [(before(sample).double(), after(sample).double()) for sample in x.split(1)]
    out, converted = (torch.cat(outputs) for outputs in zip(*pairs, strict=True))
    return out, converted


@torch.no_grad()
def _cache_bytes(module: Module, x: Tensor) -> int:
    """Returns `nbytes` of the module's cache with capacity L after a call on x (B, L, d_model)."""
    B, L = x.shape[:2]
    cache = module.new_cache(B, capacity=L)
    with evaluating(module):
        module(x, cache=cache)
    if len(cache) != L:
        raise RuntimeError(f"cache: expected {L} tokens after a call with {L} tokens, got {len(cache)}")
    return int(cache.nbytes)


def _head_outputs(module: Module, x: Tensor, order: Tensor | slice) -> HeadOutputs:
    """Runs the module on x (1, L, d_model) and returns the outputs of its heads.

    Entry i of the result belongs to head order[i].
    """
    joined: list[Tensor] = []
    with evaluating(module), module.out.register_forward_pre_hook(lambda _, args: joined.append(args[0])):
        out = module(x)[0].double()
    matrices = module.out.weight.double().unflatten(1, (module.heads, -1))  # (d_model, H, Dv)
    matrices = matrices.permute(1, 2, 0)
    by_head = joined[0][0].double().unflatten(-1, (module.heads, -1)).transpose(0, 1)
    qkv, options = module.arguments(x)
    # 16-bit tensors are not converted, because the module's sink and bias have the same 16-bit dtype.
    q, k, v = (y.double() if y.itemsize >= 4 else y for y in qkv)
    values = v[0].double().repeat_interleave(module.heads // v.shape[1], 0)
    w = weights(q, k, v, **options)[0].double()
    return HeadOutputs((by_head @ matrices)[order], (values @ matrices)[order], w[order], out)


def _log(x: Tensor) -> Tensor:
    """Returns log(x), with zeros in x replaced by the smallest normal number to avoid -inf."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def _relative(error: Tensor, size: Tensor) -> float:
    """Returns sqrt(error / size) of two squared norms, or sqrt(error) if size is 0."""
    return float((error / size if size > 0 else error).sqrt())


def _step(module: Module, tokens: int) -> Step:
    """Estimates the cost of a decode step of one sample with `tokens` cached tokens."""
    estimate = cost.estimate(cost.from_module(module), 1, past=tokens, dtype=module.out.weight.dtype)
    return Step(estimate.forward_flops.visible, estimate.read_bytes)


def report(
    module: nn.Module, before: Attention, after: Module, order: list[int], seen: Tensor | None,
    unseen: Tensor | None, trial: Tensor, *, proof: tuple[Module, Module], steps: Mapping[str, Module],
    sizes: Iterable[int], convert: Callable[[int], Module], **fields: Any,
) -> Report:  # fmt: skip
    """Returns the report of a conversion from `before` to `after`.

    Args:
        module: the source module, as the caller passed it.
        before: the source module as a `regard.nn.Attention`.
        after: the converted module.
        order: head i of `after` replaces head order[i] of `before`.
        seen, unseen: calibration and held-out tokens (B, L, d_model), or None.
        trial: tokens with which `exact` and the cache sizes are measured: the held-out tokens, or
            random tokens.
        proof: a module and its conversion at full size, whose outputs give the field `exact`.
        steps: maps each step of the conversion to the module after this step.
        sizes: the sizes (numbers of key heads, or ranks) for the curve.
        convert: a function that converts `before` to one of these sizes.
        fields: other attributes of the report.
    """
    steps, sizes = ({}, ()) if unseen is None else (steps, sizes)
    tokens = trial if unseen is None else unseen
    return Report(
        exact=_largest_difference(*proof, trial),
        calibration=None if seen is None else compare(before, after, order, seen),
        held_out=None if unseen is None else compare(before, after, order, unseen),
        steps=tuple((name, _output_error(before, step, tokens)) for name, step in steps.items()),
        tokens=trial.shape[0] * trial.shape[1],
        bytes_before=_cache_bytes(before, trial),
        bytes_after=_cache_bytes(after, trial),
        curve=tuple(_point(size, before, convert(size), tokens) for size in sizes),
        needles=() if unseen is None else needles(before, after, order, unseen),
        decode=(_step(before, trial.shape[1]), _step(after, trial.shape[1])),
        origin=origin(module, before, after, seen, unseen),
        **fields,
    )


def _point(size: int, before: Module, after: Module, x: Tensor) -> Point:
    return Point(size, _cache_bytes(after, x), _output_error(before, after, x))
