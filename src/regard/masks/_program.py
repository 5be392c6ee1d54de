"""Mask programs: a mask as integers in prefix order, and the tensors that the integers refer to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from .._tools.arguments import broadcasts, same

UNLIMITED = 2**62  # encodes None, an unlimited reach of a Window


class Op(IntEnum):
    WINDOW = 1
    LENGTHS = 2
    DOCUMENTS = 3
    TOKENS = 4
    PREFIX = 5
    GLOBAL = 6
    RANDOM = 7
    DILATED = 8
    DENSE = 9
    BLOCKS = 10
    PATTERNS = 11
    PERHEAD = 12
    AND = 13
    OR = 14
    NOT = 15
    CUT = 16


@dataclass(frozen=True, eq=False)
class Program:
    """A mask program.

    `code` is a tree of nodes `[op, length, arguments..., children...]`, where `length` counts the
    integers of the whole node. `cores[t]` is the number of trailing dims of `tensors[t]` that are
    not batch dims.
    """

    code: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    cores: tuple[int, ...]

    def bind(self, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Returns the program's tensors, with all batch dims flattened into one of size 1 or B."""
        return tuple(_flatten(t, core, batch) for t, core in zip(self.tensors, self.cores, strict=True))


def _flatten(tensor: Tensor, core: int, batch: tuple[int, ...]) -> Tensor:
    split = tensor.ndim - core
    lead, inner = tuple(tensor.shape[:split]), tuple(tensor.shape[split:])
    if math.prod(lead) == 1:
        return tensor.reshape(1, *inner)
    if not broadcasts(lead, batch):
        raise ValueError(
            f"mask: expected tensors with batch dims broadcastable to {batch}, got {lead} in shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.expand(*batch, *inner).reshape(math.prod(batch), *inner)


class Pool:
    """Collects the tensors of a program and stores equal tensors once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.cores: list[int] = []

    def add(self, tensor: Tensor, core: int) -> int:
        """Adds a tensor and returns its index.

        `core` is its number of non-batch dims. A tensor with fewer dims gets a batch dim and the
        missing dims in front, all of size 1. So (Lq, Lk) still differs from (1, Lq, Lk), which is
        not allowed in a call with batch dims.
        """
        if tensor.ndim < core:
            tensor = tensor[(None,) * (core + 1 - tensor.ndim)]
        for index, earlier in enumerate(self.tensors):
            if core == self.cores[index] and same(earlier, tensor):
                return index
        self.tensors.append(tensor)
        self.cores.append(core)
        return len(self.tensors) - 1


def node(op: Op, *arguments: int, children: Iterable[list[int]] = ()) -> list[int]:
    """Returns the code of one node, including its children."""
    body = [*arguments, *(word for child in children for word in child)]
    return [int(op), len(body) + 2, *body]


def nodes(code: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the code of each of the consecutive nodes in `code`."""
    while code:
        yield code[: code[1]]
        code = code[code[1] :]
