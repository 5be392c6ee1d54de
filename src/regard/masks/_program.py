"""The program a mask lowers to: a prefix-order list of integers and a few tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from .._tools.arguments import broadcasts, same

UNLIMITED = 2**62


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
    PERHEAD = 11
    AND = 12
    OR = 13
    NOT = 14


@dataclass(frozen=True, eq=False)
class Program:
    """`code` holds nodes `[op, length, arguments..., children...]`; `length` counts the whole node.

    `cores[t]` is how many trailing dims of `tensors[t]` are its own; the dims before them are batch dims.
    """

    code: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    cores: tuple[int, ...]

    def bind(self, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The tensors with their batch dims flattened to 1 (same for every sample) or to B = prod(batch)."""
        return tuple(_flatten(t, core, batch) for t, core in zip(self.tensors, self.cores, strict=True))


def _flatten(tensor: Tensor, core: int, batch: tuple[int, ...]) -> Tensor:
    split = tensor.ndim - core
    lead, own = tuple(tensor.shape[:split]), tuple(tensor.shape[split:])
    if math.prod(lead) == 1:
        return tensor.reshape(1, *own)
    if not broadcasts(lead, batch):
        raise ValueError(
            f"a mask tensor of shape {tuple(tensor.shape)} has batch dims {lead}, "
            f"which do not broadcast to {batch}"
        )
    return tensor.expand(*batch, *own).reshape(math.prod(batch), *own)


class Pool:
    """Collects the tensors of a program; equal ones are stored once. Own dims that are missing become 1."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.cores: list[int] = []

    def add(self, tensor: Tensor, core: int) -> int:
        if tensor.ndim < core:
            tensor = tensor[(None,) * (core - tensor.ndim)]
        for index, known in enumerate(self.tensors):
            if core == self.cores[index] and same(known, tensor):
                return index
        self.tensors.append(tensor)
        self.cores.append(core)
        return len(self.tensors) - 1


def node(op: Op, *arguments: int, children: Iterable[list[int]] = ()) -> list[int]:
    body = [*arguments, *(word for child in children for word in child)]
    return [int(op), len(body) + 2, *body]


def nodes(code: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The nodes that follow each other in a part of a program."""
    while code:
        yield code[: code[1]]
        code = code[code[1] :]
