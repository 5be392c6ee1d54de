"""The counter-based random generator of `RandomBlocks`, in int64 that wraps like uint64."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def signed(value: int) -> int:
    """Returns the int64 with the same 64 bits as a uint64."""
    return (value + 2**63) % 2**64 - 2**63


def chosen_blocks(rows: Tensor, blocks: int, per_row: int, seed: int) -> Tensor:
    """Returns bool (R, blocks): `per_row` random key blocks for each query block in `rows` (R,)."""
    if per_row >= blocks:
        return torch.ones(len(rows), blocks, dtype=torch.bool, device=rows.device)
    table = torch.zeros(len(rows), blocks, dtype=torch.bool, device=rows.device)
    state = _mix((rows + 1) * signed(GOLDEN) + signed(seed))
    draw = 1
    while (unfinished := table.sum(-1) < per_row).any():
        candidate = _unsigned_remainder(_mix(state + signed(GOLDEN * draw)), blocks)
        table[unfinished, candidate[unfinished]] = True
        draw += 1
    return table


def _mix(z: Tensor) -> Tensor:
    """Applies the finaliser of splitmix64."""
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return z.bitwise_xor(_shift(z, 31))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shifts right by `bits`, filling with zeros. (`>>` of int64 would copy the sign bit.)"""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)


def _unsigned_remainder(z: Tensor, n: int) -> Tensor:
    """Returns z % n, where z is read as uint64.

    PyTorch's remainder is signed. So the result is computed from z >> 1, which is not negative, and
    the last bit of z is added afterwards.
    """
    return torch.remainder(torch.remainder(_shift(z, 1), n) * 2 + (z & 1), n)
