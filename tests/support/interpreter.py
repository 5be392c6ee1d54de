"""Evaluates a mask program pair by pair in plain Python, from the table in native/mask/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN, MODULUS = 0x9E3779B97F4A7C15, 2**64


class Pair(NamedTuple):
    """Query i of head h in sample b, standing at pos, and key j."""

    b: int
    h: int
    i: int
    pos: int
    j: int
    Lk: int


def dense(code: tuple[int, ...], tensors: tuple[Tensor, ...], B: int, H: int, Lq: int, Lk: int,
          offsets: list[int]) -> Tensor:  # fmt: skip
    """Bool (B, H, Lq, Lk) from tensors bound to a batch of B."""
    lists = [tensor.tolist() for tensor in tensors]
    out = torch.zeros(B, H, Lq, Lk, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for i in range(Lq):
                for j in range(Lk):
                    out[b, h, i, j] = sees(list(code), lists, Pair(b, h, i, offsets[b] + i, j, Lk))
    return out


def at(nested: list, *index: int):
    """Read nested lists; a list of one element serves every index."""
    for n in index:
        nested = nested[n if len(nested) > 1 else 0]
    return nested


def sees(code: list[int], tensors: list, pair: Pair) -> bool:
    op, length, *rest = code
    assert length == len(code)
    b, h, i, pos, j, Lk = pair
    if op == 1:
        return pos - rest[0] <= j <= pos + rest[1]
    if op == 2:
        return j < at(tensors[rest[0]], b)
    if op == 3:
        return at(tensors[rest[0]], b)[i] == at(tensors[rest[1]], b)[j]
    if op == 4:
        ids = at(tensors[rest[0]], b)
        return 0 <= pos < Lk and ids[pos] == ids[j]
    if op == 5:
        return j < rest[0]
    if op == 6:
        tokens = [t for t in at(tensors[rest[0]], b) if t != -1]
        return pos in tokens or j in tokens
    if op == 7:
        per_row, block, seed = rest
        return j // block in drawn(seed, pos // block, -(-Lk // block), per_row)
    if op == 8:
        return (pos - j) % rest[0] == 0
    if op == 9:
        return at(tensors[rest[0]], b, h, i, j)
    if op == 10:
        return at(tensors[rest[0]], b, h)[i // rest[1]][j // rest[1]]
    nodes = list(children(rest))
    if op == 11:
        return sees(nodes[h], tensors, pair)
    if op == 12:
        return all(sees(node, tensors, pair) for node in nodes)
    if op == 13:
        return any(sees(node, tensors, pair) for node in nodes)
    assert op == 14
    (node,) = nodes
    return not sees(node, tensors, pair)


def children(code: list[int]) -> Iterator[list[int]]:
    while code:
        yield code[: code[1]]
        code = code[code[1] :]


def drawn(seed: int, r: int, blocks: int, per_row: int) -> set[int]:
    if per_row >= blocks:
        return set(range(blocks))
    found: set[int] = set()
    state, i = mix(seed + GOLDEN * (r + 1)), 0
    while len(found) < per_row:
        found.add(mix(state + GOLDEN * (i + 1)) % blocks)
        i += 1
    return found


def mix(z: int) -> int:
    z %= MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)
