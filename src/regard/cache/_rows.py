"""Storage in rows: tensors (B, Hkv, rows, ...) in which each row is a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.stored import GROUP, HALF, New, Stored
from .._tools.arguments import count
from ._checks import State, check_float, check_saved
from ._counts import Count, each, most


class RowTensor(NamedTuple):
    """One of the tensors of a storage, (B, Hkv, rows, *tail)."""

    name: str
    tail: tuple[int, ...]
    dtype: torch.dtype


class RowLayout(NamedTuple):
    """What rows hold: the numbers ("float") or codes ("int8", "int4") of keys and values, or latents.

    The values of a latent are its first Dv channels.
    """

    Hkv: int
    D: int
    Dv: int
    kind: str
    dtype: torch.dtype  # of what comes in and goes out
    device: torch.device

    @property
    def tensors(self) -> tuple[RowTensor, ...]:
        if self.kind == "latent":
            return (RowTensor("latent", (self.D,), self.dtype),)
        if self.kind == "float":
            return RowTensor("k", (self.D,), self.dtype), RowTensor("v", (self.Dv,), self.dtype)
        return *self._codes("k", self.D), *self._codes("v", self.Dv)

    def _codes(self, name: str, D: int) -> tuple[RowTensor, RowTensor]:
        """Returns codes and scales, as `Stored` describes them."""
        groups, scale = -(-D // GROUP), f"{name}_scale"
        if self.kind == "int8":
            return RowTensor(name, (groups * GROUP,), torch.int8), RowTensor(scale, (groups,), torch.half)
        return RowTensor(name, (groups * HALF,), torch.uint8), RowTensor(scale, (groups, 2), torch.half)

    def empty(self, B: int, rows: int) -> RowStorage:
        """Allocates zeros: a NaN in a row that was never written would send kernels to their slow path."""
        with torch.inference_mode(False):  # otherwise it could not be written to outside of inference mode
            zeros = [
                torch.zeros((B, self.Hkv, rows, *tail), dtype=dtype, device=self.device)
                for _, tail, dtype in self.tensors
            ]
        return RowStorage(self, tuple(zeros))


def layout_of(
    Hkv: int, D: int, Dv: int | None, kind: str, dtype: torch.dtype, device: torch.device | str | None
) -> RowLayout:
    """Checks the sizes of a cache."""
    D = count("D", D, 1)
    Dv = D if Dv is None else count("Dv", Dv, 1)
    where = torch.empty(0, device=device).device
    return RowLayout(count("Hkv", Hkv, 1), D, Dv, kind, check_float(dtype), where)


class RowStorage:
    """Tensors of one layout. The owner knows how many rows of each sample are filled."""

    def __init__(self, layout: RowLayout, tensors: tuple[Tensor, ...]) -> None:
        self.layout, self.tensors = layout, tensors
        self.B, _, self.rows, *_ = tensors[0].shape
        self.names = [x.name for x in layout.tensors]
        self._whole = _stored(layout, tensors)
        self._before, self._after = self._whole[:7], self._whole[8:]  # the length

    def __reduce__(self) -> tuple[type[RowStorage], tuple[RowLayout, tuple[Tensor, ...]]]:
        return RowStorage, (self.layout, self.tensors)  # a copy makes its own view of latents

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    def stored(self, length: int) -> Stored:
        """Returns the first `length` rows, in place, as kernels read them."""
        return Stored(*self._before, length, *self._after)  # quicker than `_replace`

    def write(self, starts: Count, counts: Count, new: New) -> None:
        """Writes the first `counts` new tokens of each sample into its rows from `starts` on."""
        write_stored(self._whole, each(starts, self.B), each(counts, self.B), *new)

    def copy(self, filled: int, rows: int | None = None, samples: list[int] | None = None) -> RowStorage:
        """Copies the first `filled` rows of all or some samples into new storage."""
        B, rows = self.B if samples is None else len(samples), self.rows if rows is None else rows
        fresh = self.layout.empty(B, rows)
        for to, x in zip(fresh.tensors, self.tensors, strict=True):
            source = x[:, :, :filled]
            to[:, :, :filled] = source if samples is None else source[samples]
        return fresh

    # Saving

    def state(self, held: Count) -> State:
        """Returns copies of the filled rows; behind shorter samples they are zero."""
        saved = {}
        for name, x in zip(self.names, self.tensors, strict=True):
            saved[name] = x[:, :, : most(held)].clone(memory_format=torch.contiguous_format)
            if not isinstance(held, int):
                for sample, rows in zip(saved[name], held, strict=True):
                    sample[:, rows:] = 0
        return saved

    def check_state(self, state: State, filled: int) -> None:
        """Checks that the tensors of a state have `filled` rows of this layout."""
        for name, tail, dtype in self.layout.tensors:
            check_saved(name, state[name], (self.B, self.layout.Hkv, filled, *tail), dtype)

    def load(self, state: State, filled: int) -> None:
        for name, x in zip(self.names, self.tensors, strict=True):
            x[:, :, :filled] = state[name]


def _stored(layout: RowLayout, tensors: tuple[Tensor, ...]) -> Stored:
    """Returns all rows."""
    _, D, Dv, kind, _, _ = layout
    if kind in ("int8", "int4"):
        k, k_scale, v, v_scale = tensors
        return Stored(k, v, k_scale, v_scale, None, 0, kind, k.shape[2], D, Dv)
    k, v = tensors if kind == "float" else (tensors[0], tensors[0].narrow(3, 0, Dv))
    return Stored(k, v, None, None, None, 0, "float", k.shape[2], D, Dv)
