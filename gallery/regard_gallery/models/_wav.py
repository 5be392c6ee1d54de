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
        wanted = f"samples of 1 to 4 bytes, {RATES[0]} to {RATES[-1]} a second"
        raise ValueError(f"{path}: expected {wanted}, got {width} bytes, {found} a second")
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
    """Samples (L,) at the rate `new`, by a low-pass filter in polyphase form."""
    from scipy.signal import firwin, resample_poly  # type: ignore[import-untyped]

    if old == new:
        return samples
    widest = max(old, new) // math.gcd(old, new)
    low_pass = firwin(2 * ZEROS * widest + 1, 1 / widest, window=("kaiser", 6.0))
    return torch.from_numpy(resample_poly(samples.numpy(), new, old, window=low_pass)).float()
