"""Sound from a wav file: PCM of any width, rate and number of channels, as samples at one rate."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAX_SECONDS = 4 * 3600
WIDTHS, RATES = range(1, 5), range(1000, 384001)
ZEROS = 16  # zero crossings of the low-pass filter on each side
AT_ONCE = 1 << 16  # samples made in one step


def read_wav(path: Path, rate: int) -> Tensor:
    """Samples (L,) in [-1, 1], the mean of the channels, at `rate` a second."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, found, frames, *_ = file.getparams()
            # A header may claim more than there is; asking for it would reserve the memory first.
            raw = file.readframes(min(frames, path.stat().st_size // (channels * width)))
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise ValueError(f"{path}: expected a wav file in PCM: {reason}") from None
    if width not in WIDTHS or found not in RATES:
        raise ValueError(
            f"{path}: expected samples of 1 to 4 bytes, {RATES[0]} to {RATES[-1]} a second, "
            f"got {width} bytes, {found} a second"
        )
    if len(raw) // (channels * width) > MAX_SECONDS * found:
        raise ValueError(f"{path}: expected up to {MAX_SECONDS} seconds of sound")
    samples = _numbers(raw[: len(raw) // (channels * width) * channels * width], width)
    return resample(samples.reshape(-1, channels).mean(1), found, rate)


def _numbers(raw: bytes, width: int) -> Tensor:
    """Little-endian integers of `width` bytes, as numbers in [-1, 1). One byte is unsigned."""
    if width == 1:
        return torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.float32)) / 128 - 1
    # The bytes become the upper ones of 32-bit integers.
    whole = np.zeros((len(raw) // width, 4), np.uint8)
    whole[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return torch.from_numpy(whole.view("<i4")[:, 0].astype(np.float64) / 2**31).float()


def resample(samples: Tensor, old: int, new: int) -> Tensor:
    """Samples (L,) at the rate `new`, by a windowed sinc, one filter for each phase."""
    if old == new:
        return samples
    shared = math.gcd(old, new)
    old, new = old // shared, new // shared
    filters = _filters(old, new)
    reach = filters.shape[1] // 2
    padded = torch.nn.functional.pad(samples, (reach - 1, reach))
    windows = padded.unfold(0, 2 * reach, 1)  # row i is centred between samples i and i + 1
    places = torch.arange(math.ceil(len(samples) * new / old)) * old
    parts = [(windows[p // new] * filters[p % new]).sum(1) for p in places.split(AT_ONCE)]
    return torch.cat(parts)


def _filters(old: int, new: int) -> Tensor:
    """Weights (new, taps): row p gives the sample that stands p / new behind the middle of its window."""
    cutoff = 0.99 * min(1.0, new / old)  # of the old rate
    reach = math.ceil(ZEROS / cutoff)
    taps = torch.arange(1 - reach, reach + 1, dtype=torch.float64)
    phases = torch.arange(new, dtype=torch.float64)[:, None] / new
    distance = (taps - phases) * cutoff
    window = torch.cos(distance.clamp(-ZEROS, ZEROS) * math.pi / ZEROS / 2) ** 2
    return (torch.sinc(distance) * window * cutoff).float()
