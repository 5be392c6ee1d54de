"""The storage of caches: tensors (B, Hkv, rows, ...), or (pages, Hkv, page size, ...) if paged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._api.stored import write_stored
from .._call.spec import fast_new
from .._call.stored import GROUP, HALF, New, Stored
from .._tools.arguments import count
from .._tools.memory_errors import memory_errors
from ._checks import Chunk, Lengths, State, check_float, check_new, check_saved, chunk_of
from ._counts import Count, largest, per_sample

Tails = dict[str, tuple[tuple[int, ...], torch.dtype]]


class RowLayout(NamedTuple):
    """The sizes and the kind of a storage.

    `kind` is "float" (keys and values), "int8" or "int4" (quantised keys and values), or "latent"
    (one tensor of keys of size D, whose first Dv channels are the values).
    """

    Hkv: int
    D: int
    Dv: int
    kind: str
    dtype: torch.dtype  # dtype of queries, keys, values and outputs
    device: torch.device

    @property
    def tails(self) -> Tails:
        """Maps the name of each stored tensor (B, Hkv, rows, *tail) to (tail, dtype)."""
        if self.kind == "latent":
            return {"latent": ((self.D,), self.dtype)}
        if self.kind == "float":
            return {"k": ((self.D,), self.dtype), "v": ((self.Dv,), self.dtype)}
        return self._coded("k", self.D) | self._coded("v", self.Dv)

    def _coded(self, name: str, D: int) -> Tails:
        """Returns the entries of `tails` for quantised keys or values: codes and scales.

        The docstring of `Stored` describes the formats.
        """
        groups, scale = -(-D // GROUP), f"{name}_scale"
        if self.kind == "int8":
            return {name: ((groups * GROUP,), torch.int8), scale: ((groups,), torch.half)}
        return {name: ((groups * HALF,), torch.uint8), scale: ((groups, 2), torch.half)}

    @memory_errors
    def empty(self, B: int, rows: int) -> RowStorage:
        """Allocates storage for B samples with `rows` rows each, filled with zeros.

        Uninitialised rows could contain NaN, which would make the kernels take a slow path.
        """
        with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
            return RowStorage(self, {
                name: torch.zeros((B, self.Hkv, rows, *tail), dtype=dtype, device=self.device)
                for name, (tail, dtype) in self.tails.items()
            })  # fmt: skip

    def chunk(self, new: New, lengths: Lengths, B: int) -> Chunk:
        """Checks new tokens and returns their Chunk.

        The tokens are k (B, Hkv, L, D) and v (B, Hkv, L, Dv), or latents (B, L, D) and None.
        """
        k, v = new
        dim = 1 if self.kind == "latent" else 2  # the dim of the tokens
        L = k.shape[dim] if isinstance(k, Tensor) and k.ndim == dim + 2 else 0
        if self.kind == "latent":
            check_new("latent", k, (B, L, self.D), self.dtype, self.device)
        else:
            check_new("k", k, (B, self.Hkv, L, self.D), self.dtype, self.device)
            check_new("v", v, (B, self.Hkv, L, self.Dv), self.dtype, self.device)
        return chunk_of(L, lengths, B)

    def check_state(self, state: State, B: int, rows: int) -> None:
        """Checks that the tensors of a state have the shapes and dtypes of `empty(B, rows)`."""
        for name, (tail, dtype) in self.tails.items():
            check_saved(name, state[name], (B, self.Hkv, rows, *tail), dtype)


def layout_of(
    Hkv: int, D: int, Dv: int | None, kind: str, dtype: torch.dtype, device: torch.device | str | None
) -> RowLayout:
    """Checks the sizes of a cache and returns its layout."""
    D = count("D", D, 1)
    Dv = D if Dv is None else count("Dv", Dv, 1)
    target = torch.empty(0, device=device).device
    return RowLayout(count("Hkv", Hkv, 1), D, Dv, kind, check_float(dtype), target)


class RowStorage:
    """The tensors that a `RowLayout` describes, by name.

    The cache that owns the storage tracks how many rows of each sample are in use.
    """

    def __init__(self, layout: RowLayout, tensors: State) -> None:
        self.layout, self.tensors = layout, tensors
        self.B, _, self.rows, *_ = next(iter(tensors.values())).shape
        is_latent = layout.kind == "latent"
        k = tensors["latent" if is_latent else "k"]
        v = k.narrow(3, 0, layout.Dv) if is_latent else tensors["v"]
        kind, D, Dv = "float" if is_latent else layout.kind, layout.D, layout.Dv
        stored = Stored(k, v, tensors.get("k_scale"), tensors.get("v_scale"), None, 0, kind, self.rows, D, Dv)
        self._before, self._after = stored[:7], stored[8:]  # the fields of `Stored` before and after `length`

    def __reduce__(self) -> tuple[type[RowStorage], tuple[RowLayout, State]]:
        return RowStorage, (self.layout, self.tensors)  # unpickling recreates the view of the latents

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def stored(self, length: int) -> Stored:
        """Returns the first `length` rows of each sample as a `Stored`, without copying them."""
        return fast_new(Stored, (*self._before, length, *self._after))

    def paged(self, length: int, table: Tensor) -> Stored:
        """Returns the first `length` tokens of B sequences in pages as a `Stored`, without a copy.

        `table` (B, max_pages) holds the page indices of each sequence.
        """
        *tensors, _, _, kind = self._before
        return fast_new(Stored, (*tensors, table, self.rows, kind, length, *self._after))

    def write(self, starts: Count, counts: Count, new: New) -> None:
        """Writes the first counts[b] new tokens of sample b to the rows that begin at starts[b]."""
        write_stored(self.stored(0), per_sample(starts, self.B), per_sample(counts, self.B), *new)

    def copy(self, filled: int, rows: int | None = None, samples: list[int] | None = None) -> RowStorage:
        """Copies the first `filled` rows of the given samples into new storage with `rows` rows.

        The default is all samples and the same number of rows.
        """
        fresh = self.layout.empty(len(samples or range(self.B)), self.rows if rows is None else rows)
        for name, x in self.tensors.items():
            source = x[:, :, :filled]
            fresh.tensors[name][:, :, :filled] = source if samples is None else source[samples]
        return fresh

    def state(self, held: Count) -> State:
        """Returns copies of the rows in use, by tensor name. Sample b uses the first held[b] rows.

        Shorter samples are padded with zeros.
        """
        saved = {}
        for name, x in self.tensors.items():
            saved[name] = x[:, :, : largest(held)].clone(memory_format=torch.contiguous_format)
            if not isinstance(held, int):
                for sample, rows in zip(saved[name], held, strict=True):
                    sample[:, rows:] = 0
        return saved

    def load(self, state: State, filled: int) -> None:
        for name, x in self.tensors.items():
            x[:, :, :filled] = state[name]
