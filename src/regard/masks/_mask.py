"""What every mask can do, and the operators that combine masks."""

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

from .._tools.arguments import Offset, broadcasts, common_shape, count, first_position
from .._tools.values import Value, value
from ._pairs import At, Grid, Mod, Pair, Rectangle, Scene, cut
from ._program import Op, Pool, Program, node, nodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M = TypeVar("M", bound="Mask")
_classes: dict[int, type[Mask]] = {}  # Op -> the class that reads it


class MaskKind(Enum):
    """What a mask speaks of. It decides where else than in its own call the mask can be applied."""

    DISTANCE = "distance"  # the query's position less the key's
    POSITION = "position"  # in a sequence of any length
    INDEX = "index"  # the queries and keys of one call


class CallSizes(NamedTuple):
    """The sizes of a call that a mask is to be applied to; None means unknown."""

    batch: tuple[int, ...] | None
    heads: int | None
    Lq: int
    Lk: int

    def batch_fits(self, lead: tuple[int, ...]) -> bool:
        return self.batch is None or broadcasts(lead, self.batch)


def declare(
    *ops: Op, kind: MaskKind = MaskKind.INDEX, cost: int = 1, **dims: int
) -> Callable[[type[M]], type[M]]:
    """Declares what other code asks of a class of masks.

    Args:
        ops: its codes in a program; instances have the first, unless they say otherwise.
        kind: what it speaks of.
        cost: where AND puts this operand: 0 narrows cheaply, 2 comes last.
        dims: its tensors, and how many trailing dims are their own. The dims before them are batch dims.
    """

    def declared(cls: type[M]) -> type[M]:
        cls._op, cls._kind, cls._cost, cls._dims = ops[0], kind, cost, dims
        _classes.update(dict.fromkeys(ops, cls))
        return value(cls)

    return declared


def decode(code: tuple[int, ...], tensors: Sequence[Tensor]) -> Mask:
    """The mask that lowers to this program. Its tensors are not copied."""
    return _classes[code[0]]._decode(code[2:], tensors)


def part_of(code: tuple[int, ...], tensors: Sequence[Tensor], part: Rectangle) -> Mask:
    """The mask over a part of a call; `tensors` have their batch dims flattened to 1 or B.

    Row 0 of the part stands `part.rows.start` further than row 0 of the call.
    """
    return decode(code, tensors)._cut(part)


class Mask(Value):
    """Which keys each query may attend to. True means "may attend".

    Query i stands at position `offset + i`, key j at position j. Masks are values: frozen, comparable,
    hashable, picklable, printable; they keep private copies of the tensors they are given.
    Combine them with `&`, `|`, `~`. `to_dense` defines what a mask means.
    """

    _op: ClassVar[Op]
    _kind: ClassVar[MaskKind]
    _cost: ClassVar[int]
    _dims: ClassVar[dict[str, int]]

    def to_dense(
        self, Lq: int, Lk: int, offset: Offset = None, heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:  # fmt: skip
        """The mask as a bool tensor.

        Shape (Lq, Lk) if it is the same for all heads and samples, (H, Lq, Lk) if only heads differ,
        (*batch, 1 or H, Lq, Lk) if samples differ. `offset` is an int or one int for each sample, (B,)
        (any batch shape); the default is Lk - Lq. `heads` only checks PerHead and per-head tensors.
        """
        mask = self if device is None else self.to(device)
        mask._check(CallSizes(None, heads, count("Lq", Lq), count("Lk", Lk)))
        where = mask.device if device is None else torch.device(device)  # of a mask without tensors
        dense = mask._dense(_grid(Lq, Lk, offset, where))
        shape = common_shape(dense.shape, (Lq, Lk))
        return dense.expand(shape).clone(memory_format=torch.contiguous_format)

    def lower(self) -> Program:
        """The mask as a short program. It does not depend on any length and is made once."""
        # A compiler follows the code below, but not the lock of a cached property.
        return self._lowered() if is_dynamo_compiling() else self._program

    def check(self, batch: Sequence[int], heads: int, Lq: int, Lk: int, offset: Offset = None) -> None:
        """Raise ValueError if the mask cannot be applied to attention of these sizes."""
        self.check_shapes(batch, heads, Lq, Lk, offset)
        self.check_values(batch, heads, Lq, Lk, offset)

    def check_shapes(self, batch: Sequence[int], heads: int, Lq: int, Lk: int, offset: Offset = None) -> None:
        """The part of `check` that looks at shapes only."""
        self._check(CallSizes(tuple(batch), heads, Lq, Lk))

    def check_values(self, batch: Sequence[int], heads: int, Lq: int, Lk: int, offset: Offset = None) -> None:
        """The part of `check` that looks at data: no length may exceed Lk.

        The largest length is read once and remembered. Global tokens and prefixes may lie beyond the keys:
        they speak of positions in a sequence that may still be growing. Tensors that cannot be read
        (fake, meta) are not checked.
        """
        if self._longest > Lk:
            raise ValueError(f"{self!r}: a length of {self._longest} is beyond the keys, Lk = {Lk}")

    def to(self: M, device: torch.device | str) -> M:
        """The same mask with its tensors on `device`."""
        return self._map(lambda part: part.to(device))

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors are; the CPU if it has none."""
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))

    def draw(
        self, Lq: int | None = None, Lk: int | None = None, offset: Offset = None, *, head: int = 0,
        sample: int = 0, width: int | None = None,
    ) -> str:  # fmt: skip
        """The mask as text, at most `width` characters wide. Sizes default to those of its tensors, or 32."""
        from . import _draw

        return _draw.text(_draw.picture(self, Lq, Lk, offset, head, sample), width)

    def show(
        self, Lq: int | None = None, Lk: int | None = None, offset: Offset = None, *, head: int = 0,
        sample: int = 0, file: str | os.PathLike[str] | IO[str] | None = None, width: int | None = None,
    ) -> None:  # fmt: skip
        """Print the drawing, to the terminal or the open `file`; a path is saved as an image."""
        if isinstance(file, (str, os.PathLike)):
            self.image(file, Lq, Lk, offset, head=head, sample=sample)
        else:
            print(self.draw(Lq, Lk, offset, head=head, sample=sample, width=width), file=file)

    def image(
        self, path: str | os.PathLike[str] | None = None, Lq: int | None = None, Lk: int | None = None,
        offset: Offset = None, *, head: int = 0, sample: int = 0, dark: bool = False,
    ) -> Figure:  # fmt: skip
        """The mask as a matplotlib Figure, saved to `path` if one is given (needs the extra `plot`)."""
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

    # Reached when the left operand is no mask: a tensor gets the message of `_combinable`.
    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false; combine masks with &, |, ~, not with and, or, not")

    @property
    def kinds(self) -> frozenset[MaskKind]:
        """What the mask speaks of: distances, positions, or the indices of one call."""
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
    def _longest(self) -> int:
        """The largest length any Lengths in this mask gives, 0 if there is none."""
        return max((child._longest for child in self._children()), default=0)

    def _check(self, sizes: CallSizes) -> None:
        for child in self._children():
            child._check(sizes)

    def _sizes(self) -> tuple[int, int]:
        """The (Lq, Lk) that the mask's tensors are made for, 0 where it has no opinion."""
        known = [child._sizes() for child in self._children()]
        return max((Lq for Lq, _ in known), default=0), max((Lk for _, Lk in known), default=0)

    # What an atom states of itself, beside `declare`

    def _sees(self, at: At) -> Tensor:
        """The formula: whether each query may attend to each key."""
        raise NotImplementedError

    def _dense(self, grid: Grid) -> Tensor:
        return self._sees(grid)

    def _mod(self, scene: Scene) -> Mod:
        """The formula for FlexAttention. Tensors have one batch dim, of 1 or B."""
        return lambda b, h, q, k: self._sees(Pair(scene, b, h, q, k))

    def _joined(self, other: Mask) -> Mask | None:
        """One mask that means `self & other`, if there is one."""
        return None

    def _encode(self, pool: Pool) -> list[int]:
        return node(self._op, *self._arguments(pool))

    def _arguments(self, pool: Pool) -> list[int]:
        """The fields as integers, tensors by their number in the pool."""
        dims, given = self._dims, self.__dict__
        return [pool.add(given[name], dims[name]) if name in dims else given[name] for name in self._names]

    @classmethod
    def _decode(cls: type[M], words: tuple[int, ...], tensors: Sequence[Tensor]) -> M:
        fields = itertools.zip_longest(cls._names, words)
        return cls._of(*(tensors[x] if name in cls._dims and x is not None else x for name, x in fields))

    def _cut(self, part: Rectangle) -> Mask:
        """The mask over a part of a call. Tensors have one batch dim, of 1 or B."""
        return self._map(lambda x: x._cut(part) if isinstance(x, Mask) else cut(x, part.samples))

    @classmethod
    def _of(cls: type[M], *contents: object) -> M:
        """A mask with these contents, neither checked nor copied."""
        mask = cls.__new__(cls)
        mask.__dict__.update(zip(cls._names, contents, strict=True))
        return mask

    def _map(self: M, change: Callable[[Any], Any]) -> M:
        """The same mask with other tensors and masks in it."""
        return self._of(*(_changed(content, change) for _, content in self._items()))


@value
class _Combination(Mask):
    """A mask made of others."""

    masks: tuple[Mask, ...]

    @property
    def kinds(self) -> frozenset[MaskKind]:
        return frozenset().union(*(mask.kinds for mask in self.masks))

    def _children(self) -> tuple[Mask, ...]:
        return self.masks

    def _combined(self, seen: Sequence[Tensor], at: At) -> Tensor:
        """The formula, from those of the masks."""
        raise NotImplementedError

    def _dense(self, grid: Grid) -> Tensor:
        return self._combined([mask._dense(grid) for mask in self.masks], grid)

    def _mod(self, scene: Scene) -> Mod:
        mods = [mask._mod(scene) for mask in self.masks]
        return lambda b, h, q, k: self._combined([mod(b, h, q, k) for mod in mods], Pair(scene, b, h, q, k))

    def _encode(self, pool: Pool) -> list[int]:
        return node(self._op, children=[mask._encode(pool) for mask in self.masks])

    @classmethod
    def _decode(cls: type[M], words: tuple[int, ...], tensors: Sequence[Tensor]) -> M:
        return cls._of(tuple(decode(code, tensors) for code in nodes(words)))


@value
class _Several(_Combination):
    def __init__(self, *masks: Any) -> None:
        for mask in masks:
            if not isinstance(mask, Mask):
                raise TypeError(f"{type(self).__name__} combines masks, got {type(mask).__name__}")
        if len(masks) < 2:
            raise ValueError(f"{type(self).__name__} combines at least two masks, got {len(masks)}")
        # Nested combinations of the same kind become one flat list.
        flat = [m.masks if isinstance(m, type(self)) else (m,) for m in masks]
        self._set(masks=self._simplified([part for parts in flat for part in parts]))

    def _simplified(self, masks: list[Mask]) -> tuple[Mask, ...]:
        return tuple(masks)


@declare(Op.AND)
class And(_Several):
    """Keys that every one of the masks allows: `a & b`. Windows among them are joined to one."""

    def _simplified(self, masks: list[Mask]) -> tuple[Mask, ...]:
        joined: list[Mask] = []
        for mask in masks:
            for n, known in enumerate(joined):
                both = known._joined(mask)
                if both is not None:
                    joined[n] = both
                    break
            else:
                joined.append(mask)
        return tuple(joined)

    def __repr__(self) -> str:
        return " & ".join(f"({m!r})" if isinstance(m, Or) else repr(m) for m in self.masks)

    def _combined(self, seen: Sequence[Tensor], at: At) -> Tensor:
        return functools.reduce(operator.and_, seen)

    def _encode(self, pool: Pool) -> list[int]:
        ordered = sorted(self.masks, key=lambda mask: mask._cost)
        return node(Op.AND, children=[mask._encode(pool) for mask in ordered])


@declare(Op.OR)
class Or(_Several):
    """Keys that any one of the masks allows: `a | b`."""

    def __repr__(self) -> str:
        return " | ".join(repr(m) for m in self.masks)

    def _combined(self, seen: Sequence[Tensor], at: At) -> Tensor:
        return functools.reduce(operator.or_, seen)


@declare(Op.NOT)
class Not(_Combination):
    """Keys that the mask does not allow: `~a`."""

    def __init__(self, mask: Mask) -> None:
        if not isinstance(mask, Mask):
            raise TypeError(f"Not inverts a mask, got {type(mask).__name__}")
        self._set(masks=(mask,))

    @property
    def mask(self) -> Mask:
        return self.masks[0]

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Several) else f"~{self.mask!r}"

    def _combined(self, seen: Sequence[Tensor], at: At) -> Tensor:
        return ~seen[0]


@declare(Op.PERHEAD)
class PerHead(_Combination):
    """Query head h follows `masks[h]`. There is one mask for each query head."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        if isinstance(masks, (Mask, Tensor)) or not hasattr(masks, "__iter__"):
            came = type(masks).__name__
            raise TypeError(f"PerHead(masks) must be a list with one mask for each head, got {came}")
        masks = tuple(masks)
        for index, mask in enumerate(masks):
            if not isinstance(mask, Mask):
                raise TypeError(f"PerHead(masks): masks[{index}] must be a mask, got {type(mask).__name__}")
        if not masks:
            raise ValueError("PerHead(masks) must have one mask for each head, got an empty list")
        self._set(masks=masks)

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.masks))}])"

    def _check(self, sizes: CallSizes) -> None:
        if sizes.heads not in (None, len(self.masks)):
            raise ValueError(
                f"PerHead has {len(self.masks)} masks, but there are Hq = {sizes.heads} query heads"
            )
        super()._check(sizes._replace(heads=len(self.masks)))

    def _combined(self, seen: Sequence[Tensor], at: At) -> Tensor:
        return at.by_head(seen)

    def _cut(self, part: Rectangle) -> Mask:
        return PerHead([mask._cut(part) for mask in self.masks[part.heads]])


def _grid(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Grid:
    query = torch.arange(Lq, device=device)
    return Grid(query, first_position(Lq, Lk, offset, device) + query, torch.arange(Lk, device=device))


def _combinable(other: object, symbol: str) -> bool:
    if isinstance(other, Tensor):
        raise TypeError(
            f"cannot combine a mask and a tensor with {symbol}; wrap the bool tensor: masks.Dense(tensor)"
        )
    return isinstance(other, Mask)


def _changed(content: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(content, tuple):
        return tuple(_changed(part, change) for part in content)
    return change(content) if isinstance(content, (Tensor, Mask)) else content
