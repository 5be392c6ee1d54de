"""Reads PCM wav files with samples of 1 to 4 bytes, any number of channels, and 1 to 384 kHz."""

# scipy.io.wavfile is not used: it allocates as much memory as the file's header claims to need.

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
    """Reads a wav file. Returns samples (L,) in [-1, 1], averaged over channels, at `rate` Hz."""
    if not path.exists():
        raise FileNotFoundError(f"path: expected a wav file, got {path}, which does not exist")
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, file_rate, frames, *_ = file.getparams()
            # `readframes` allocates the memory first, and a header may claim more frames than the file has.
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
    """Converts little-endian integers of `width` bytes to floats in [-1, 1).

    Integers of one byte are unsigned, all others signed, as in wav files.
    """
    if width == 1:
        return torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.float32)) / 128 - 1
    # Put each integer into the upper bytes of a 32-bit integer, which keeps the sign.
    padded = np.zeros((len(raw) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return torch.from_numpy(padded.view("<i4")[:, 0].astype(np.float64) / 2**31).float()


def resample(samples: Tensor, old: int, new: int) -> Tensor:
    """Converts samples (L,) from the rate `old` to `new` with a polyphase low-pass filter."""
    from scipy.signal import firwin, resample_poly  # type: ignore[import-untyped]

    if old == new:
        return samples
    widest = max(old, new) // math.gcd(old, new)
    low_pass = firwin(2 * ZEROS * widest + 1, 1 / widest, window=("kaiser", 6.0))
    return torch.from_numpy(resample_poly(samples.numpy(), new, old, window=low_pass)).float()
