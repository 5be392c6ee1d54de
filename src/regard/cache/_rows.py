"""Storage in rows: tensors (B, Hkv, rows, ...) in which each row is a token. Of pages, B is their number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.spec import fast_new
from .._call.stored import GROUP, HALF, New, Stored
from .._tools.arguments import count
from ._checks import Chunk, Lengths, State, check_float, check_new, check_saved, chunk_of
from ._counts import Count, each, most

Tails = dict[str, tuple[tuple[int, ...], torch.dtype]]


class RowLayout(NamedTuple):
    """What rows hold: numbers ("float") or codes ("int8", "int4") of keys and values, or latents ("latent").

    A latent is one key of size D, whose first Dv channels are the value.
    """

    Hkv: int
    D: int
    Dv: int
    kind: str
    dtype: torch.dtype  # of the tensors passed in and out
    device: torch.device

    @property
    def tails(self) -> Tails:
        """The tensors (B, Hkv, rows, *tail) of a storage: name, tail and dtype."""
        if self.kind == "latent":
            return {"latent": ((self.D,), self.dtype)}
        if self.kind == "float":
            return {"k": ((self.D,), self.dtype), "v": ((self.Dv,), self.dtype)}
        return self._coded("k", self.D) | self._coded("v", self.Dv)

    def _coded(self, name: str, D: int) -> Tails:
        """Returns codes and scales, as `Stored` describes them."""
        groups, scale = -(-D // GROUP), f"{name}_scale"
        if self.kind == "int8":
            return {name: ((groups * GROUP,), torch.int8), scale: ((groups,), torch.half)}
        return {name: ((groups * HALF,), torch.uint8), scale: ((groups, 2), torch.half)}

    def empty(self, B: int, rows: int) -> RowStorage:
        """Allocates zeros: a NaN in a row that was never written would send kernels to their slow path."""
        with torch.inference_mode(False):  # otherwise it could not be written to outside of inference mode
            return RowStorage(self, {
                name: torch.zeros((B, self.Hkv, rows, *tail), dtype=dtype, device=self.device)
                for name, (tail, dtype) in self.tails.items()
            })  # fmt: skip

    def chunk(self, new: New, lengths: Lengths, B: int) -> Chunk:
        """Checks new tokens: k (B, Hkv, L, D) and v (B, Hkv, L, Dv), or latents (B, L, D)."""
        k, v = new
        at = 1 if self.kind == "latent" else 2
        L = k.shape[at] if isinstance(k, Tensor) and k.ndim == at + 2 else 0
        if self.kind == "latent":
            check_new("latent", k, (B, L, self.D), self.dtype, self.device)
        else:
            check_new("k", k, (B, self.Hkv, L, self.D), self.dtype, self.device)
            check_new("v", v, (B, self.Hkv, L, self.Dv), self.dtype, self.device)
        return chunk_of(L, lengths, B)

    def check_state(self, state: State, B: int, rows: int) -> None:
        """Checks that the tensors of a state have the shapes of a storage with so many rows."""
        for name, (tail, dtype) in self.tails.items():
            check_saved(name, state[name], (B, self.Hkv, rows, *tail), dtype)


def layout_of(
    Hkv: int, D: int, Dv: int | None, kind: str, dtype: torch.dtype, device: torch.device | str | None
) -> RowLayout:
    """Checks the sizes of a cache."""
    D = count("D", D, 1)
    Dv = D if Dv is None else count("Dv", Dv, 1)
    where = torch.empty(0, device=device).device
    return RowLayout(count("Hkv", Hkv, 1), D, Dv, kind, check_float(dtype), where)


class RowStorage:
    """Tensors of one layout, by name. The owner knows how many rows of each sample are filled."""

    def __init__(self, layout: RowLayout, tensors: State) -> None:
        self.layout, self.tensors = layout, tensors
        self.B, _, self.rows, *_ = next(iter(tensors.values())).shape
        is_latent = layout.kind == "latent"
        k = tensors["latent" if is_latent else "k"]
        v = k.narrow(3, 0, layout.Dv) if is_latent else tensors["v"]
        kind, D, Dv = "float" if is_latent else layout.kind, layout.D, layout.Dv
        whole = Stored(k, v, tensors.get("k_scale"), tensors.get("v_scale"), None, 0, kind, self.rows, D, Dv)
        self._before, self._after = whole[:7], whole[8:]  # the length

    def __reduce__(self) -> tuple[type[RowStorage], tuple[RowLayout, State]]:
        return RowStorage, (self.layout, self.tensors)  # a copy makes its own view of latents

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def stored(self, length: int) -> Stored:
        """Returns the first `length` rows of each sample, in place, as kernels read them."""
        return fast_new(Stored, (*self._before, length, *self._after))

    def paged(self, length: int, table: Tensor) -> Stored:
        """Returns the first `length` rows of each sequence, in the pages of a table (B, max_pages)."""
        *tensors, _, _, kind = self._before
        return fast_new(Stored, (*tensors, table, self.rows, kind, length, *self._after))

    def write(self, starts: Count, counts: Count, new: New) -> None:
        """Writes the first `counts` new tokens of each sample into its rows from `starts` on."""
        write_stored(self.stored(0), each(starts, self.B), each(counts, self.B), *new)

    def copy(self, filled: int, rows: int | None = None, samples: list[int] | None = None) -> RowStorage:
        """Copies the first `filled` rows of all or some samples into new storage."""
        fresh = self.layout.empty(len(samples or range(self.B)), self.rows if rows is None else rows)
        for name, x in self.tensors.items():
            source = x[:, :, :filled]
            fresh.tensors[name][:, :, :filled] = source if samples is None else source[samples]
        return fresh

    def state(self, held: Count) -> State:
        """Returns copies of the filled rows; behind shorter samples they are zero."""
        saved = {}
        for name, x in self.tensors.items():
            saved[name] = x[:, :, : most(held)].clone(memory_format=torch.contiguous_format)
            if not isinstance(held, int):
                for sample, rows in zip(saved[name], held, strict=True):
                    sample[:, rows:] = 0
        return saved

    def load(self, state: State, filled: int) -> None:
        for name, x in self.tensors.items():
            x[:, :, :filled] = state[name]
