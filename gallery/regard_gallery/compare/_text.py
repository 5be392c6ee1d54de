"""Training text that every installation has: the bytes of Python's standard library."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # the last 1 / HELD_OUT of the sequences are held out


@cache
def source_code(length: int) -> tuple[Tensor, Tensor]:
    """Returns training sequences and held-out sequences of bytes, each (n, length) int64.

    The text is the bytes of all files, concatenated in the order of file names and cut into
    sequences. The last sequences are held out.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
    sequences = text[: len(text) // length * length].view(-1, length).long()
    if len(sequences) < HELD_OUT:
        raise ValueError(f"length: expected {len(text) // HELD_OUT} bytes or fewer, got {length}")
    trained = len(sequences) - len(sequences) // HELD_OUT
    return sequences[:trained], sequences[trained:]
