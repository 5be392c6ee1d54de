"""Cut: a mask in the coordinates of a rectangle of the call that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .._tools.arguments import count
from ._mask import CallSizes, Combination, Mask, MaskKind, _NaryOperator, declare, decode
from ._pairs import FlexCall, Grid, Mod, Rectangle
from ._program import Op, Pool, node

FIELDS = ("head", "heads", "query", "key", "Lq", "Lk")  # in the order of the mask program


@declare(Op.CUT)
class Cut(Combination):
    """A mask restricted to a rectangle of a call: made by `Mask.cut`."""

    head: int  # the first head
    heads: int  # number of heads, 0: all
    query: int
    key: int
    Lq: int  # of the call that the mask was made for
    Lk: int
    rows: int | None = None  # of the rectangle; None in a mask that was decoded from a program
    keys: int | None = None

    def __repr__(self) -> str:
        inner = f"({self.mask!r})" if isinstance(self.mask, Combination) else repr(self.mask)
        ends = (f"{a}, {'?' if n is None else a + n}" for a, n in self._ranges())
        heads = f", heads=({self.head}, {self.head + self.heads})" if self.heads else ""
        return f"{inner}.cut({', '.join(ends)}{heads})"

    @property
    def mask(self) -> Mask:
        return self.masks[0]

    def _ranges(self) -> tuple[tuple[int, int | None], tuple[int, int | None]]:
        return (self.query, self.rows), (self.key, self.keys)

    def _sizes(self) -> tuple[int, int]:
        return self.rows or 0, self.keys or 0

    def _check(self, sizes: CallSizes) -> None:
        for letter, size, made_for in (("Lq", sizes.Lq, self.rows), ("Lk", sizes.Lk, self.keys)):
            if made_for not in (None, size):
                raise ValueError(f"{self!r}: expected a call with {letter} = {made_for}, got {size}")
        if self.heads and sizes.heads not in (None, self.heads):
            raise ValueError(f"{self!r}: expected a call with Hq = {self.heads}, got {sizes.heads}")
        heads = None if self.heads else sizes.heads
        self.mask._check(CallSizes(sizes.batch, heads, self.Lq, self.Lk))

    @property
    def _max_length(self) -> int:
        return 0  # lengths count keys of the whole call

    def _dense(self, grid: Grid) -> Tensor:
        whole = Grid(grid.query + self.query, grid.pos + self.key, grid.j + self.key, self.Lk, True)
        dense = self.mask._dense(whole)
        if self.heads and dense.ndim > 2 and dense.shape[-3] > 1:
            dense = dense.narrow(-3, self.head, self.heads)
        return dense

    def _mod(self, call: FlexCall) -> Mod:
        shift = self.key - self.query
        mod = self.mask._mod(
            FlexCall(
                self.Lk, call.offset + shift, call.lowest + self.key, call.highest + self.key, call.device
            )
        )
        return lambda b, h, q, k: mod(b, h + self.head, q + self.query, k + self.key)

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.CUT, *(getattr(self, name) for name in FIELDS), children=[self.mask._encode(pool)])

    @classmethod
    def _decode(cls, words: tuple[int, ...], tensors: Sequence[Tensor]) -> Cut:
        fields, child = words[: len(FIELDS)], words[len(FIELDS) :]
        return cls._of((decode(child, tensors),), *fields, None, None)

    def _cut(self, tile: Rectangle) -> Mask:
        """Returns a Dense mask of the tile."""
        start, stop = tile.rows.start + self.query, tile.rows.stop + self.query
        heads = slice(*tile.heads.indices(max(tile.heads.stop or 0, 1)))
        shifted = slice(heads.start + self.head, heads.stop + self.head)
        part = self.mask._cut(Rectangle(tile.samples, shifted, slice(start, stop), self.Lk))
        return Cut._of((part,), 0, 0, 0, self.key, stop - start, self.Lk, None, None)


def cut(
    mask: Mask, queries: tuple[int, int], keys: tuple[int, int], Lq: int | None, Lk: int | None,
    heads: tuple[int, int] | None = None,
) -> Mask:  # fmt: skip
    """Returns `mask.cut(*queries, *keys, Lq, Lk)`, restricted to query heads [heads[0], heads[1])."""
    (q0, q1), (k0, k1) = _range("q", *queries), _range("k", *keys)
    Lq = _length("Lq", "q1", mask, Lq, q1, 0)
    Lk = _length("Lk", "k1", mask, Lk, k1, 1)
    h0, n_heads = (0, 0) if heads is None else (heads[0], heads[1] - heads[0])
    if mask.kinds == {MaskKind.DISTANCE} and not any(_is_of_call(x, heads) for x in _all(mask)):
        return mask  # distances are the same in every rectangle
    if isinstance(mask, Cut):
        h0, q0, k0 = mask.head + h0, mask.query + q0, mask.key + k0
        Lq, Lk, n_heads, sizes = (
            mask.Lq,
            mask.Lk,
            n_heads or mask.heads,
            (q1 - q0 + mask.query, k1 - k0 + mask.key),
        )
        return Cut._of(mask.masks, h0, n_heads, q0, k0, Lq, Lk, *sizes)
    return Cut._of((mask,), h0, n_heads, q0, k0, Lq, Lk, q1 - q0, k1 - k0)


def _range(letter: str, begin: int, end: int) -> tuple[int, int]:
    begin, end = count(f"cut({letter}0)", begin), count(f"cut({letter}1)", end)
    if begin > end:
        raise ValueError(f"cut({letter}0, {letter}1): expected {letter}0 <= {letter}1, got {begin} > {end}")
    return begin, end


def _length(letter: str, name: str, mask: Mask, given: int | None, end: int, dim: int) -> int:
    """Returns Lq (dim 0) or Lk (dim 1) of the call that the mask was made for, or an upper bound.

    A mask without such a length gets `end`.
    """
    known = [n for n in (atom._sizes()[dim] for atom in _all(mask)) if n]
    if given is None and dim == 1 and any(atom._op is Op.RANDOM for atom in _all(mask)):
        raise ValueError(
            "cut(Lk): expected Lk, because the blocks that RandomBlocks chooses depend on it, got None"
        )
    length = min(known, default=end) if given is None else count(f"cut({letter})", given)
    if end > length:
        raise ValueError(f"cut({name}): expected at most {letter} = {length}, got {end}")
    return length


def _all(mask: Mask) -> Iterator[Mask]:
    """Yields the mask's atoms and PerHead masks. A Cut counts as an atom."""
    if isinstance(mask, Cut) or not mask._children():
        yield mask
        return
    if not isinstance(mask, _NaryOperator):
        yield mask
    for child in mask._children():
        yield from _all(child)


def _is_of_call(mask: Mask, heads: tuple[int, int] | None) -> bool:
    """Returns whether a mask of distances is that of one size, or changes if heads are selected."""
    return isinstance(mask, Cut) or (heads is not None and mask._op is Op.PERHEAD)
