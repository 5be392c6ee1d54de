"""The base class of masks, and the combinations And, Or, Not and PerHead."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._tools.arguments import Offset, broadcasts, common_shape, count, describe, first_position
from .._tools.values import Value, value
from ._pairs import FlexCall, Grid, Mod, Pair, Pairs, Rectangle, cut
from ._program import Op, Pool, Program, node, nodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M = TypeVar("M", bound="Mask")
_classes: dict[int, type[Mask]] = {}  # opcode -> the class that decodes it


class MaskKind(Enum):
    """What a mask depends on. This decides whether the mask also applies to other lengths."""

    DISTANCE = "distance"  # query position - key position
    POSITION = "position"  # positions in a sequence of any length
    INDEX = "index"  # query and key indices, or samples, of one particular call


class CallSizes(NamedTuple):
    """The sizes of the call that a mask is applied to. None means that a size is unknown."""

    batch: tuple[int, ...] | None
    heads: int | None
    Lq: int
    Lk: int

    def batch_fits(self, lead: tuple[int, ...]) -> bool:
        return self.batch is None or broadcasts(lead, self.batch)


def declare(
    *ops: Op, kind: MaskKind = MaskKind.INDEX, cost: int = 1, **dims: int
) -> Callable[[type[M]], type[M]]:
    """Returns a class decorator that registers a mask class.

    Args:
        ops: the class's opcodes in a mask program. `_encode` uses the first unless overridden.
        kind: what the mask depends on.
        cost: sorts the operands of AND: 0 (cheap) comes first, 2 (expensive) last.
        dims: for each tensor field, the number of trailing dims that are not batch dims.
    """

    def decorate(cls: type[M]) -> type[M]:
        cls._op, cls._kind, cls._cost, cls._dims = ops[0], kind, cost, dims
        _classes.update(dict.fromkeys(ops, cls))
        return value(cls)

    return decorate


def decode(code: tuple[int, ...], tensors: Sequence[Tensor]) -> Mask:
    """Returns the mask that a mask program encodes. Tensors are not copied."""
    return _classes[code[0]]._decode(code[2:], tensors)


def part_of(code: tuple[int, ...], tensors: Sequence[Tensor], tile: Rectangle) -> Mask:
    """Returns the mask restricted to a tile of a call.

    The batch dims of `tensors` are flattened to a dim of size 1 or B. Evaluate the result with the
    call's offset plus `tile.rows.start`.
    """
    return decode(code, tensors)._cut(tile)


class Mask(Value):
    """The base class of masks. A mask defines which keys each query may attend to.

    Query i has position `offset + i`, key j has position j. Masks are immutable and can be
    compared, hashed, pickled and printed. They copy the tensors passed to them. Combine masks with
    `&`, `|` and `~`.

    Example:
        >>> mask = masks.Causal() & masks.Lengths([3, 5])
        >>> mask.to_dense(5, 5).shape
        torch.Size([2, 1, 5, 5])
    """

    _op: ClassVar[Op]
    _kind: ClassVar[MaskKind]
    _cost: ClassVar[int]
    _dims: ClassVar[dict[str, int]]

    def to_dense(
        self, Lq: int, Lk: int, offset: Offset = None, heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the mask as a bool tensor; True = may attend.

        This method defines the meaning of a mask.

        Args:
            Lq, Lk: numbers of queries and keys.
            offset: the position of query 0: an int, or integers (*batch,). Default Lk - Lq.
            heads: the number of query heads. Used only to check PerHead and tensors with a head
                dim.
            device: the device of the result. Default: the device of the mask's tensors.

        Returns:
            (Lq, Lk) if heads and samples share the mask, (H, Lq, Lk) if only heads differ,
            (*batch, 1 or H, Lq, Lk) if samples differ.
        """
        mask = self if device is None else self.to(device)
        mask._check(CallSizes(None, heads, count("Lq", Lq), count("Lk", Lk)))
        grid_device = mask.device if device is None else torch.device(device)
        dense = mask._dense(_grid(Lq, Lk, offset, grid_device))
        shape = common_shape(dense.shape, (Lq, Lk))
        return dense.expand(shape).clone(memory_format=torch.contiguous_format)

    def lower(self) -> Program:
        """Returns the mask program, which does not depend on Lq and Lk and is cached."""
        # torch.compile cannot trace the lock of the cached property `_program`.
        return self._lowered() if is_dynamo_compiling() else self._program

    def check(self, batch: Sequence[int], heads: int, Lq: int, Lk: int, offset: Offset = None) -> None:
        """Raises ValueError if the mask does not apply to a call with these sizes."""
        self.check_shapes(batch, heads, Lq, Lk, offset)
        self.check_values(batch, heads, Lq, Lk, offset)

    def check_shapes(self, batch: Sequence[int], heads: int, Lq: int, Lk: int, offset: Offset = None) -> None:
        """Raises ValueError if a tensor of the mask has a shape that does not fit these sizes."""
        self._check(CallSizes(tuple(batch), heads, Lq, Lk))

    def check_values(self, batch: Sequence[int], heads: int, Lq: int, Lk: int, offset: Offset = None) -> None:
        """Raises ValueError if a length of a `Lengths` mask exceeds Lk.

        The largest length is read once and cached. Tokens of `Global` and n of `Prefix` may exceed
        Lk, because the sequence may still grow. Fake and meta tensors are not checked.
        """
        if self._max_length > Lk:
            raise ValueError(f"{self!r}: expected lengths up to Lk = {Lk}, got {self._max_length}")

    def to(self: M, device: torch.device | str) -> M:
        """Returns the mask with its tensors on `device`."""
        return self._map(lambda content: content.to(device))

    @property
    def device(self) -> torch.device:
        """The device of the mask's tensors, or the CPU if the mask has no tensors."""
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))

    def cut(
        self, q0: int, q1: int, k0: int, k1: int, *, Lq: int | None = None, Lk: int | None = None
    ) -> Mask:
        """Returns the mask of queries [q0, q1) and keys [k0, k1) of a call, in their coordinates.

        In the rectangle, query i is query q0 + i of the call and key j is key k0 + j. If the call
        has an offset, the rectangle has the offset `offset + q0 - k0`:

            mask.cut(q0, q1, k0, k1).to_dense(q1 - q0, k1 - k0, offset + q0 - k0)
            == mask.to_dense(Lq, Lk, offset)[..., q0:q1, k0:k1]

        The result refers to the mask's tensors and copies nothing. A mask of distances alone
        (`Causal`, `Window`, `Dilated`) is the same in every rectangle and is returned unchanged.

        Args:
            q0, q1, k0, k1: the rectangle.
            Lq, Lk: lengths of the whole call. Default: those of the mask's tensors. Lk is required
                for `RandomBlocks`, whose choice depends on it.

        Example:
            >>> masks.Prefix(5).cut(0, 8, 4, 8).to_dense(1, 4, offset=0).int()
            tensor([[1, 0, 0, 0]], dtype=torch.int32)
        """
        from ._cut import cut

        return cut(self, (q0, q1), (k0, k1), Lq, Lk)

    def draw(
        self, Lq: int | None = None, Lk: int | None = None, offset: Offset = None, *, head: int = 0,
        sample: int = 0, width: int | None = None,
    ) -> str:  # fmt: skip
        """Returns a drawing of the mask as text, at most `width` characters wide.

        Lq and Lk default to the sizes of the mask's tensors, or to 32.
        """
        from . import _draw

        return _draw.text(_draw.picture(self, Lq, Lk, offset, head, sample), width)

    def show(
        self, Lq: int | None = None, Lk: int | None = None, offset: Offset = None, *, head: int = 0,
        sample: int = 0, file: str | os.PathLike[str] | IO[str] | None = None, width: int | None = None,
    ) -> None:  # fmt: skip
        """Prints a drawing of the mask as text, to the terminal or to the open file `file`.

        If `file` is a path, saves an image there instead.
        """
        if isinstance(file, (str, os.PathLike)):
            self.image(file, Lq, Lk, offset, head=head, sample=sample)
        else:
            print(self.draw(Lq, Lk, offset, head=head, sample=sample, width=width), file=file)

    def image(
        self, path: str | os.PathLike[str] | None = None, Lq: int | None = None, Lk: int | None = None,
        offset: Offset = None, *, head: int = 0, sample: int = 0, dark: bool = False,
    ) -> Figure:  # fmt: skip
        """Returns a matplotlib Figure of the mask. Saves it to `path` if given.

        Needs the extra `plot`.
        """
        from . import _draw

        return _draw.image(_draw.picture(self, Lq, Lk, offset, head, sample), path, dark)

    def _repr_html_(self) -> str:
        from . import _draw

        return _draw.html(_draw.picture(self, None, None, None, 0, 0))

    def __and__(self, other: object) -> Mask:
        if not _combinable(other, "&"):
            return NotImplemented
        both = And(self, other)
        return both if len(both.masks) > 1 else both.masks[0]

    def __or__(self, other: object) -> Mask:
        return Or(self, other) if _combinable(other, "|") else NotImplemented

    # With a tensor as left operand, `_combinable` raises an error that names `masks.Dense`.
    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with &, |, ~, not with and, or, not")

    @property
    def kinds(self) -> frozenset[MaskKind]:
        """What the mask depends on: distances, positions, or indices of one call."""
        return frozenset([self._kind])

    def _children(self) -> tuple[Mask, ...]:
        return ()

    def _tensors(self) -> Iterator[Tensor]:
        yield from (content for _, content in self._items() if isinstance(content, Tensor))
        for child in self._children():
            yield from child._tensors()

    @functools.cached_property
    def _program(self) -> Program:
        return self._lowered()

    def _lowered(self) -> Program:
        pool = Pool()
        code = self._encode(pool)
        return Program(tuple(code), tuple(pool.tensors), tuple(pool.cores))

    @functools.cached_property
    def _max_length(self) -> int:
        """The largest length in the `Lengths` masks of this mask, 0 if there are none."""
        return max((child._max_length for child in self._children()), default=0)

    def _check(self, sizes: CallSizes) -> None:
        for child in self._children():
            child._check(sizes)

    def _sizes(self) -> tuple[int, int]:
        """Returns Lq and Lk as implied by the mask's tensors. 0 means that a size is unknown."""
        known = [child._sizes() for child in self._children()]
        return max((Lq for Lq, _ in known), default=0), max((Lk for _, Lk in known), default=0)

    # Methods that atoms override

    def _allows(self, pairs: Pairs) -> Tensor:
        """Returns whether the query of each pair may attend to its key."""
        raise NotImplementedError

    def _dense(self, grid: Grid) -> Tensor:
        return self._allows(grid)

    def _mod(self, call: FlexCall) -> Mod:
        """Returns a mask_mod for FlexAttention.

        Expects that the mask's tensors have one batch dim, of size 1 or B.
        """
        return lambda b, h, q, k: self._allows(Pair(call, b, h, q, k))

    def _intersection(self, other: Mask) -> Mask | None:
        """Returns `self & other` as a single atom, or None if no atom expresses it."""
        return None

    def _encode(self, pool: Pool) -> list[int]:
        return node(self._op, *self._arguments(pool))

    def _arguments(self, pool: Pool) -> list[int]:
        """Returns the mask's fields as integers, for the mask program.

        A tensor is added to `pool` and represented by its index in the pool.
        """
        dims, fields = self._dims, self.__dict__
        return [pool.add(fields[name], dims[name]) if name in dims else fields[name] for name in self._names]

    @classmethod
    def _decode(cls: type[M], words: tuple[int, ...], tensors: Sequence[Tensor]) -> M:
        fields = itertools.zip_longest(cls._names, words)
        return cls._of(*(tensors[x] if name in cls._dims and x is not None else x for name, x in fields))

    def _cut(self, tile: Rectangle) -> Mask:
        """Returns the mask restricted to a tile.

        Expects that the mask's tensors have one batch dim, of size 1 or B.
        """
        return self._map(lambda x: x._cut(tile) if isinstance(x, Mask) else cut(x, tile.samples))

    @classmethod
    def _of(cls: type[M], *contents: object) -> M:
        """Creates a mask from its fields without checking or copying them."""
        mask = cls.__new__(cls)
        mask.__dict__.update(zip(cls._names, contents, strict=True))
        return mask

    def _map(self: M, change: Callable[[Any], Any]) -> M:
        """Returns a copy of the mask with `change` applied to every tensor and child mask."""
        return self._of(*(_mapped(content, change) for _, content in self._items()))


@value
class Combination(Mask):
    """A mask that combines other masks."""

    masks: tuple[Mask, ...]

    @property
    def kinds(self) -> frozenset[MaskKind]:
        return frozenset().union(*(mask.kinds for mask in self.masks))

    def _children(self) -> tuple[Mask, ...]:
        return self.masks

    def _combined(self, allowed: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """Combines the bool tensors `allowed`, one for each of the masks, into one tensor."""
        raise NotImplementedError

    def _dense(self, grid: Grid) -> Tensor:
        return self._combined([mask._dense(grid) for mask in self.masks], grid)

    def _mod(self, call: FlexCall) -> Mod:
        mods = [mask._mod(call) for mask in self.masks]
        return lambda b, h, q, k: self._combined([mod(b, h, q, k) for mod in mods], Pair(call, b, h, q, k))

    def _encode(self, pool: Pool) -> list[int]:
        return node(self._op, children=[mask._encode(pool) for mask in self.masks])

    @classmethod
    def _decode(cls: type[M], words: tuple[int, ...], tensors: Sequence[Tensor]) -> M:
        return cls._of(tuple(decode(code, tensors) for code in nodes(words)))


@value
class _NaryOperator(Combination):
    def __init__(self, *masks: Any) -> None:
        for mask in masks:
            if not isinstance(mask, Mask):
                raise TypeError(f"{type(self).__name__}(*masks): expected masks, got {describe(mask)}")
        if len(masks) < 2:
            raise ValueError(f"{type(self).__name__}(*masks): expected at least two masks, got {len(masks)}")
        # Flatten nested combinations of the same class.
        groups = [m.masks if isinstance(m, type(self)) else (m,) for m in masks]
        self._set(masks=self._simplified([mask for group in groups for mask in group]))

    def _simplified(self, masks: list[Mask]) -> tuple[Mask, ...]:
        return tuple(masks)


@declare(Op.AND)
class And(_NaryOperator):
    """A mask that allows the pairs that all of its masks allow: `a & b`.

    Several windows are merged into one.
    """

    def _simplified(self, masks: list[Mask]) -> tuple[Mask, ...]:
        merged: list[Mask] = []
        for mask in masks:
            for n, earlier in enumerate(merged):
                both = earlier._intersection(mask)
                if both is not None:
                    merged[n] = both
                    break
            else:
                merged.append(mask)
        return tuple(merged)

    def __repr__(self) -> str:
        return " & ".join(f"({m!r})" if isinstance(m, Or) else repr(m) for m in self.masks)

    def _combined(self, allowed: Sequence[Tensor], pairs: Pairs) -> Tensor:
        return functools.reduce(operator.and_, allowed)

    def _encode(self, pool: Pool) -> list[int]:
        ordered = sorted(self.masks, key=lambda mask: mask._cost)
        return node(Op.AND, children=[mask._encode(pool) for mask in ordered])


@declare(Op.OR)
class Or(_NaryOperator):
    """A mask that allows the pairs that at least one of its masks allows: `a | b`."""

    def __repr__(self) -> str:
        return " | ".join(repr(m) for m in self.masks)

    def _combined(self, allowed: Sequence[Tensor], pairs: Pairs) -> Tensor:
        return functools.reduce(operator.or_, allowed)


@declare(Op.NOT)
class Not(Combination):
    """A mask that allows the pairs that its mask does not allow: `~a`."""

    def __init__(self, mask: Mask) -> None:
        if not isinstance(mask, Mask):
            raise TypeError(f"Not(mask): expected a mask, got {describe(mask)}")
        self._set(masks=(mask,))

    @property
    def mask(self) -> Mask:
        return self.masks[0]

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _NaryOperator) else f"~{self.mask!r}"

    def _combined(self, allowed: Sequence[Tensor], pairs: Pairs) -> Tensor:
        return ~allowed[0]


@declare(Op.PERHEAD)
class PerHead(Combination):
    """A mask that applies `masks[h]` to query head h. There are Hq masks."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        if isinstance(masks, (Mask, Tensor)) or not hasattr(masks, "__iter__"):
            got = type(masks).__name__
            raise TypeError(f"PerHead(masks): expected a list with one mask for each head, got {got}")
        masks = tuple(masks)
        for index, mask in enumerate(masks):
            if not isinstance(mask, Mask):
                raise TypeError(f"PerHead(masks[{index}]): expected a mask, got {describe(mask)}")
        if not masks:
            raise ValueError("PerHead(masks): expected one mask for each head, got an empty list")
        self._set(masks=masks)

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.masks))}])"

    def _check(self, sizes: CallSizes) -> None:
        if sizes.heads not in (None, len(self.masks)):
            raise ValueError(f"PerHead(masks): expected Hq = {sizes.heads} masks, got {len(self.masks)}")
        super()._check(sizes._replace(heads=len(self.masks)))

    def _combined(self, allowed: Sequence[Tensor], pairs: Pairs) -> Tensor:
        return pairs.by_head(allowed)

    def _cut(self, tile: Rectangle) -> Mask:
        return PerHead([mask._cut(tile) for mask in self.masks[tile.heads]])


def _grid(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Grid:
    query = torch.arange(Lq, device=device)
    pos = first_position(Lq, Lk, offset, device) + query
    return Grid(query, pos, torch.arange(Lk, device=device), Lk)


def _combinable(other: object, symbol: str) -> bool:
    if isinstance(other, Tensor):
        raise TypeError(f"{symbol}: expected a mask, got a tensor; wrap the bool tensor: masks.Dense(tensor)")
    if isinstance(other, type) and issubclass(other, Mask):
        raise TypeError(f"{symbol}: expected a mask, got {describe(other)}")
    return isinstance(other, Mask)


def _mapped(content: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(content, tuple):
        return tuple(_mapped(item, change) for item in content)
    return change(content) if isinstance(content, (Tensor, Mask)) else content
