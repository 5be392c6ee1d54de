"""Evaluates a mask program pair by pair in Python, following the table in native/mask/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN, MODULUS = 0x9E3779B97F4A7C15, 2**64


class Pair(NamedTuple):
    """Query i at position `pos` of head h in sample b, and key j."""

    b: int
    h: int
    i: int
    pos: int
    j: int
    Lk: int


def dense(code: tuple[int, ...], tensors: tuple[Tensor, ...], B: int, H: int, Lq: int, Lk: int,
          offsets: list[int]) -> Tensor:  # fmt: skip
    """Evaluates a mask program with its tensors for B samples. Returns bool (B, H, Lq, Lk)."""
    lists = [tensor.tolist() for tensor in tensors]
    out = torch.zeros(B, H, Lq, Lk, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for i in range(Lq):
                for j in range(Lk):
                    out[b, h, i, j] = is_visible(list(code), lists, Pair(b, h, i, offsets[b] + i, j, Lk))
    return out


def at(nested: list, *index: int):
    """Returns an element of nested lists. A list of one element broadcasts."""
    for n in index:
        nested = nested[n if len(nested) > 1 else 0]
    return nested


def is_visible(code: list[int], tensors: list, pair: Pair) -> bool:
    op, length, *operands = code
    assert length == len(code)
    b, h, i, pos, j, Lk = pair
    if op == 1:
        return pos - operands[0] <= j <= pos + operands[1]
    if op == 2:
        return j < at(tensors[operands[0]], b)
    if op == 3:
        return at(tensors[operands[0]], b)[i] == at(tensors[operands[1]], b)[j]
    if op == 4:
        ids = at(tensors[operands[0]], b)
        return 0 <= pos < Lk and ids[pos] == ids[j]
    if op == 5:
        return j < operands[0]
    if op == 6:
        tokens = [t for t in at(tensors[operands[0]], b) if t != -1]
        return pos in tokens or j in tokens
    if op == 7:
        per_row, block, seed = operands
        return j // block in random_blocks(seed, pos // block, -(-Lk // block), per_row)
    if op == 8:
        return (pos - j) % operands[0] == 0
    if op == 9:
        return at(tensors[operands[0]], b, h, i, j)
    if op == 10:
        return at(tensors[operands[0]], b, h)[i // operands[1]][j // operands[1]]
    if op == 11:
        table, (patterns,) = at(tensors[operands[0]], b, h), tensors[operands[1]]
        rows, columns = len(patterns[0]), len(patterns[0][0])
        return patterns[table[i // rows][j // columns]][i % rows][j % columns]
    if op == 16:
        head, _, query, key, _, whole_Lk, *child = operands
        return is_visible(child, tensors, Pair(b, h + head, i + query, pos + key, j + key, whole_Lk))
    nodes = list(children(operands))
    if op == 12:
        return is_visible(nodes[h], tensors, pair)
    if op == 13:
        return all(is_visible(node, tensors, pair) for node in nodes)
    if op == 14:
        return any(is_visible(node, tensors, pair) for node in nodes)
    assert op == 15
    (node,) = nodes
    return not is_visible(node, tensors, pair)


def children(code: list[int]) -> Iterator[list[int]]:
    while code:
        yield code[: code[1]]
        code = code[code[1] :]


def random_blocks(seed: int, r: int, blocks: int, per_row: int) -> set[int]:
    if per_row >= blocks:
        return set(range(blocks))
    chosen_blocks: set[int] = set()
    state, i = mix(seed + GOLDEN * (r + 1)), 0
    while len(chosen_blocks) < per_row:
        chosen_blocks.add(mix(state + GOLDEN * (i + 1)) % blocks)
        i += 1
    return chosen_blocks


def mix(z: int) -> int:
    z %= MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)
