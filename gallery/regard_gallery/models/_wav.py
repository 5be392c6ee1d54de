"""Reads wav files in PCM of any width, rate and number of channels."""

# `wave` and not scipy.io.wavfile, which reserves the memory that a header claims.

from __future__ import annotations

import math
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAX_SECONDS = 4 * 3600
WIDTHS, RATES = range(1, 5), range(1000, 384001)
ZEROS = 16  # zero crossings on each side of the low-pass filter


def read_wav(path: Path, rate: int) -> Tensor:
    """Reads samples (L,) in [-1, 1], averaged over the channels and resampled to `rate`."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, file_rate, frames, *_ = file.getparams()
            # `readframes` reserves the memory that it is asked for, and a header may claim too much.
            raw = file.readframes(min(frames, path.stat().st_size // (channels * width)))
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise ValueError(f"{path}: expected a wav file in PCM: {reason}") from None
    if width not in WIDTHS or file_rate not in RATES:
        expected = f"samples of 1 to 4 bytes, {RATES[0]} to {RATES[-1]} a second"
        raise ValueError(f"{path}: expected {expected}, got {width} bytes, {file_rate} a second")
    if len(raw) // (channels * width) > MAX_SECONDS * file_rate:
        raise ValueError(f"{path}: expected up to {MAX_SECONDS} seconds of sound")
    samples = _numbers(raw[: len(raw) // (channels * width) * channels * width], width)
    return resample(samples.reshape(-1, channels).mean(1), file_rate, rate)


def _numbers(raw: bytes, width: int) -> Tensor:
    """Converts little-endian integers of `width` bytes to [-1, 1).

    One-byte integers are unsigned.
    """
    if width == 1:
        return torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.float32)) / 128 - 1
    # Shift the bytes into the upper bytes of 32-bit integers.
    padded = np.zeros((len(raw) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return torch.from_numpy(padded.view("<i4")[:, 0].astype(np.float64) / 2**31).float()


def resample(samples: Tensor, old: int, new: int) -> Tensor:
    """Resamples (L,) from the rate `old` to `new` with a polyphase low-pass filter."""
    from scipy.signal import firwin, resample_poly  # type: ignore[import-untyped]

    if old == new:
        return samples
    widest = max(old, new) // math.gcd(old, new)
    low_pass = firwin(2 * ZEROS * widest + 1, 1 / widest, window=("kaiser", 6.0))
    return torch.from_numpy(resample_poly(samples.numpy(), new, old, window=low_pass)).float()
