"""Rotary frequencies, and their scaling for contexts longer than in training.

The frequencies equal `inv_freq` of Hugging Face, computed in the same single-precision steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._tools.arguments import count, number


class Scaling:
    """The base class of scalings of the rotary frequencies.

    Subclasses define `turns` (the frequencies) and may override `gain` (the attention factor).
    """

    def turns(self, dims: int, base: float) -> Tensor:
        """Returns the frequencies (dims / 2,) float32, in radians per position."""
        raise NotImplementedError

    def gain(self) -> float:
        """Returns the attention factor, which multiplies cos and sin.

        Scores are thereby multiplied by its square.
        """
        return 1.0


def frequencies(dims: int, base: float = 10000.0, scaling: Scaling | None = None) -> tuple[Tensor, float]:
    """Returns the rotary frequencies (dims / 2,) float32 and the attention factor.

    Frequency i is `base ** (-2i / dims)` radians per position, before scaling. The attention factor
    multiplies cos and sin.

    Args:
        dims: number of rotated channels, even.
        base: the base of the formula above, greater than 1.
        scaling: `LinearScaling`, `NTK`, `YaRN`, `Llama3` or `Frequencies`. Default: no scaling.
    """
    if count("dims", dims, 2) % 2:
        raise ValueError(f"dims: expected an even number of channels, got {dims}")
    if not number("base", base) > 1:
        raise ValueError(f"base: expected a number above 1, got {base}")
    if scaling is None:
        return _unscaled(dims, base), 1.0
    if not isinstance(scaling, Scaling):
        raise TypeError(f"scaling: expected LinearScaling, NTK, YaRN, Llama3 or Frequencies, got {scaling!r}")
    return scaling.turns(dims, base), scaling.gain()


def _unscaled(dims: int, base: float) -> Tensor:
    return 1.0 / _periods(dims, base)


def _periods(dims: int, base: float) -> Tensor:
    """Returns the reciprocals of the unscaled frequencies, (dims / 2,), always on the CPU."""
    exponents: Tensor = torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims
    return torch.pow(base, exponents)


@dataclass(frozen=True)
class Stretching(Scaling):
    """A scaling for contexts `factor` times as long as in training."""

    factor: float

    def __post_init__(self) -> None:
        if not number("factor", self.factor) >= 1:
            raise ValueError(f"factor: expected a number >= 1, got {self.factor!r}")


@dataclass(frozen=True)
class LinearScaling(Stretching):
    """Position interpolation: divides every position by `factor`."""

    def turns(self, dims: int, base: float) -> Tensor:
        return _unscaled(dims, base) / self.factor


@dataclass(frozen=True)
class NTK(Stretching):
    """NTK-aware scaling: increases the base so that the lowest frequency is divided by `factor`.

    High frequencies hardly change. "Dynamic" NTK of a model that was trained with length m and has
    the config entry factor = f is `NTK(f * n / m - (f - 1))` for a sequence of length n > m.
    """

    def turns(self, dims: int, base: float) -> Tensor:
        if dims < 4:
            raise ValueError(f"dims: expected at least 4 with NTK, got {dims}")
        return _unscaled(dims, base * self.factor ** (dims / (dims - 2)))


@dataclass(frozen=True)
class YaRN(Stretching):
    """YaRN scaling: keeps high frequencies, divides low ones by `factor`, and blends in between.

    Args:
        factor: the context length divided by `original_length`.
        original_length: context length in training.
        beta_fast: channel pairs that rotate more often than this within `original_length` positions
            keep their frequency.
        beta_slow: channel pairs that rotate less often than this have their frequency divided by
            `factor`.
        attention_factor: multiplies cos and sin. Default: computed from `factor`, and from `mscale`
            and `mscale_all_dim` if both are given.
        mscale, mscale_all_dim: as in the configurations of DeepSeek.
        truncate: whether to round the bounds of the blended range to whole channel pairs.
    """

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        count("original_length", self.original_length, 1)
        slow, fast = self.beta_slow, self.beta_fast
        if not 0 < slow <= fast:
            raise ValueError(f"beta_slow and beta_fast: expected 0 < slow <= fast, got {slow} and {fast}")

    def turns(self, dims: int, base: float) -> Tensor:
        periods = _periods(dims, base)
        keep = 1 - self._ramp(dims, base)
        return 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep

    def gain(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth()

    def growth(self, mscale: float = 1.0) -> float:
        """Returns 0.1 * mscale * log(factor) + 1, as DeepSeek's `yarn_get_mscale`.

        With mscale = 1 it is the attention factor of the paper.
        """
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _ramp(self, dims: int, base: float) -> Tensor:
        """Returns how much each frequency is scaled, (dims / 2,).

        0 means that it is kept (high frequencies), 1 that it is divided by `factor` (low ones).
        Between them, the result is linear in the index of the channel pair.
        """

        def pair_index(rotations: float) -> float:
            return dims * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_index(self.beta_fast), pair_index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        width = high - low if high != low else 0.001
        return ((torch.arange(dims // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)


@dataclass(frozen=True)
class Llama3(Stretching):
    """The scaling of Llama 3.1: keeps short wavelengths, scales long ones, and blends in between.

    Args:
        factor: the divisor of low frequencies.
        low_freq_factor: above a wavelength of original_length / low_freq_factor, frequencies are
            divided by `factor`.
        high_freq_factor: below a wavelength of original_length / high_freq_factor, frequencies are
            kept.
        original_length: context length in training.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        count("original_length", self.original_length, 1)
        low, high = self.low_freq_factor, self.high_freq_factor
        if not 0 < low < high:
            names = "low_freq_factor and high_freq_factor"
            raise ValueError(f"{names}: expected 0 < low < high, got {low} and {high}")

    def turns(self, dims: int, base: float) -> Tensor:
        turns = _unscaled(dims, base)
        wavelength = 2 * math.pi / turns
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_length / wavelength - low) / (high - low)
        blended = (1 - smooth) * turns / self.factor + smooth * turns
        slowed = torch.where(wavelength > self.original_length / low, turns / self.factor, blended)
        return torch.where(wavelength < self.original_length / high, turns, slowed)


@dataclass(frozen=True)
class Frequencies(Scaling):
    """Frequencies given explicitly, in radians per position, one for each pair of channels.

    The argument `base` of `Rotary` then has no effect.

    Example:
        >>> rotary = Rotary(64, scaling=Frequencies(inv_freq.tolist(), attention_factor))
    """

    values: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(float(x) for x in self.values))
        object.__setattr__(self, "attention_factor", number("attention_factor", self.attention_factor))
        if not all(math.isfinite(x) for x in self.values):
            raise ValueError(f"values: expected finite frequencies, got {self.values}")

    def turns(self, dims: int, base: float) -> Tensor:
        if dims != 2 * len(self.values):
            raise ValueError(
                f"dims: expected {2 * len(self.values)} for {len(self.values)} frequencies, got {dims}"
            )
        return torch.tensor(self.values, dtype=torch.float32, device="cpu")

    def gain(self) -> float:
        return self.attention_factor

    def __repr__(self) -> str:
        return f"Frequencies({len(self.values)} pairs, attention_factor={self.attention_factor:g})"
