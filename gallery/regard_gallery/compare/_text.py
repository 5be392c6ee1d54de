"""Real text that every installation has: the source of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # one line of so many, the last ones


@cache
def source_code(length: int) -> tuple[Tensor, Tensor]:
    """(n, length) bytes as int64: lines to train on, and lines of the last files, to look at afterwards."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
    lines = text[: len(text) // length * length].view(-1, length).long()
    if len(lines) < HELD_OUT:
        raise ValueError(f"length: expected {len(text) // HELD_OUT} bytes or fewer, got {length}")
    kept = len(lines) - len(lines) // HELD_OUT
    return lines[:kept], lines[kept:]
