"""Sound from a wav file: PCM of any width, rate and number of channels, as samples at one rate."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAX_SECONDS = 4 * 3600
ZEROS = 16  # zero crossings of the low-pass filter on each side


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
    if found < 1 or len(raw) // (channels * width) > MAX_SECONDS * found:
        raise ValueError(
            f"{path}: expected up to {MAX_SECONDS} seconds of sound, at {found} samples a second"
        )
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
    cutoff = min(old, new) * 0.99
    reach = math.ceil(ZEROS * old / cutoff)
    # Phase p gives the sample at time p / new; tap i of the filter stands at time (i - reach) / old.
    taps = torch.arange(-reach, reach + old, dtype=torch.float64) / old
    phases = torch.arange(new, dtype=torch.float64)[:, None] / new
    distance = (taps - phases) * cutoff  # (new, taps)
    window = torch.cos(distance.clamp(-ZEROS, ZEROS) * math.pi / ZEROS / 2) ** 2
    filters = torch.sinc(distance) * window * cutoff / old
    padded = torch.nn.functional.pad(samples, (reach, reach + old))
    steps = torch.nn.functional.conv1d(padded[None, None], filters.float()[:, None], stride=old)
    return steps[0].T.flatten()[: math.ceil(len(samples) * new / old)]
