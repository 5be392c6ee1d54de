"""What every mask can do, and the operators that combine masks."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._tools.arguments import Offset, brief, broadcasts, common_shape, count, first_position, readable, same
from ._program import Op, Pool, Program, node

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M = TypeVar("M", bound="Mask")


def value(cls: type[M]) -> type[M]:
    """A frozen class whose equality, hash and repr come from Mask and whose `__init__` is its own."""
    return dataclass(frozen=True, eq=False, repr=False, init=False)(cls)


class Sizes(NamedTuple):
    """What a mask is to be applied to; None means unknown."""

    batch: tuple[int, ...] | None
    heads: int | None
    Lq: int
    Lk: int

    def batch_fits(self, lead: tuple[int, ...]) -> bool:
        return self.batch is None or broadcasts(lead, self.batch)


class Grid(NamedTuple):
    """The positions a mask speaks of."""

    query: Tensor  # (Lq,)
    pos: Tensor  # (Lq,), or (*batch, Lq) when the samples differ
    key: Tensor  # (Lk,)

    @property
    def i(self) -> Tensor:
        return column(self.query)

    @property
    def p(self) -> Tensor:
        return column(self.pos)

    @property
    def j(self) -> Tensor:
        return self.key

    @property
    def Lk(self) -> int:
        return len(self.key)


def column(x: Tensor) -> Tensor:
    """(*batch, Lq) -> (*batch, 1, Lq, 1); without batch dims (Lq, 1)."""
    return x[..., None, :, None] if x.ndim > 1 else x[:, None]


def row(x: Tensor) -> Tensor:
    """(*batch, Lk) -> (*batch, 1, 1, Lk); without batch dims (Lk,)."""
    return x[..., None, None, :] if x.ndim > 1 else x


class Mask:
    """Which keys each query may attend to. True means "may attend".

    Query i stands at position `offset + i`, key j at position j. Masks are values: frozen, comparable,
    hashable, picklable, printable; they keep private copies of the tensors they are given.
    Combine them with `&`, `|`, `~`. `to_dense` defines what a mask means.
    """

    # Where AND puts this operand: 0 narrows cheaply, 2 comes last.
    _cost: ClassVar[int] = 1

    def to_dense(
        self,
        Lq: int,
        Lk: int,
        offset: Offset = None,
        heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The mask as a bool tensor.

        Shape (Lq, Lk) if it is the same for all heads and samples, (H, Lq, Lk) if only heads differ,
        (*batch, 1 or H, Lq, Lk) if samples differ. `offset` is an int or one int for each sample, (B,)
        (any batch shape); the default is Lk - Lq. `heads` only checks PerHead and per-head tensors.
        """
        mask = self if device is None else self.to(device)
        mask._check(Sizes(None, heads, count("Lq", Lq), count("Lk", Lk)))
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
        self._check(Sizes(tuple(batch), heads, Lq, Lk))

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
        moved = object.__new__(type(self))
        moved.__dict__.update({name: _moved(content, device) for name, content in self._items()})
        return moved

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors are; the CPU if it has none."""
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))

    def draw(
        self,
        Lq: int | None = None,
        Lk: int | None = None,
        offset: Offset = None,
        *,
        head: int = 0,
        sample: int = 0,
        width: int | None = None,
    ) -> str:
        """The mask as text, at most `width` characters wide. Sizes default to those of its tensors, or 32."""
        from . import _draw

        return _draw.text(_draw.picture(self, Lq, Lk, offset, head, sample), width)

    def show(
        self,
        Lq: int | None = None,
        Lk: int | None = None,
        offset: Offset = None,
        *,
        head: int = 0,
        sample: int = 0,
        file: str | os.PathLike[str] | IO[str] | None = None,
        width: int | None = None,
    ) -> None:
        """Print the drawing, to the terminal or the open `file`; a path is saved as an image."""
        if isinstance(file, (str, os.PathLike)):
            self.image(file, Lq, Lk, offset, head=head, sample=sample)
        else:
            print(self.draw(Lq, Lk, offset, head=head, sample=sample, width=width), file=file)

    def image(
        self,
        path: str | os.PathLike[str] | None = None,
        Lq: int | None = None,
        Lk: int | None = None,
        offset: Offset = None,
        *,
        head: int = 0,
        sample: int = 0,
        dark: bool = False,
    ) -> Figure:
        """The mask as a matplotlib Figure, saved to `path` if one is given (needs the extra `plot`)."""
        from . import _draw

        return _draw.image(_draw.picture(self, Lq, Lk, offset, head, sample), path, dark)

    def _repr_html_(self) -> str:
        from . import _draw

        return _draw.html(_draw.picture(self, None, None, None, 0, 0))

    def __and__(self, other: object) -> Mask:
        return And(self, other) if _combinable(other, "&") else NotImplemented

    def __or__(self, other: object) -> Mask:
        return Or(self, other) if _combinable(other, "|") else NotImplemented

    def __rand__(self, other: object) -> Mask:
        return And(other, self) if _combinable(other, "&") else NotImplemented

    def __ror__(self, other: object) -> Mask:
        return Or(other, self) if _combinable(other, "|") else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false; combine masks with &, |, ~, not with and, or, not")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or all(_equal(content, getattr(other, name)) for name, content in self._items())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        shown = ", ".join(brief(content) for _, content in self._items())
        return f"{type(self).__name__}({shown})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(self._items())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _set(self, **content: object) -> None:
        self.__dict__.update(content)

    def _items(self) -> Iterator[tuple[str, Any]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def _children(self) -> tuple[Mask, ...]:
        return ()

    def _tensors(self) -> Iterator[Tensor]:
        yield from (content for _, content in self._items() if isinstance(content, Tensor))
        for child in self._children():
            yield from child._tensors()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, *(_fingerprint(content) for _, content in self._items())))

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

    def _check(self, sizes: Sizes) -> None:
        for child in self._children():
            child._check(sizes)

    def _sizes(self) -> tuple[int, int]:
        """The (Lq, Lk) that the mask's tensors are made for, 0 where it has no opinion."""
        known = [child._sizes() for child in self._children()]
        return max((Lq for Lq, _ in known), default=0), max((Lk for _, Lk in known), default=0)

    def _dense(self, grid: Grid) -> Tensor:
        raise NotImplementedError

    def _encode(self, pool: Pool) -> list[int]:
        raise NotImplementedError


@value
class _Combination(Mask):
    masks: tuple[Mask, ...]

    def __init__(self, *masks: Any) -> None:
        for mask in masks:
            if not isinstance(mask, Mask):
                raise TypeError(f"{type(self).__name__} combines masks, got {type(mask).__name__}")
        if len(masks) < 2:
            raise ValueError(f"{type(self).__name__} combines at least two masks, got {len(masks)}")
        # Nested combinations of the same kind become one flat list.
        flat = (m.masks if isinstance(m, type(self)) else (m,) for m in masks)
        self._set(masks=tuple(part for parts in flat for part in parts))

    def _children(self) -> tuple[Mask, ...]:
        return self.masks


@value
class And(_Combination):
    """Keys that every one of the masks allows: `a & b`."""

    def __repr__(self) -> str:
        return " & ".join(f"({m!r})" if isinstance(m, Or) else repr(m) for m in self.masks)

    def _dense(self, grid: Grid) -> Tensor:
        return functools.reduce(operator.and_, (m._dense(grid) for m in self.masks))

    def _encode(self, pool: Pool) -> list[int]:
        ordered = sorted(self.masks, key=lambda mask: mask._cost)
        return node(Op.AND, children=[mask._encode(pool) for mask in ordered])


@value
class Or(_Combination):
    """Keys that any one of the masks allows: `a | b`."""

    def __repr__(self) -> str:
        return " | ".join(repr(m) for m in self.masks)

    def _dense(self, grid: Grid) -> Tensor:
        return functools.reduce(operator.or_, (m._dense(grid) for m in self.masks))

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.OR, children=[mask._encode(pool) for mask in self.masks])


@value
class Not(Mask):
    """Keys that the mask does not allow: `~a`."""

    mask: Mask

    def __init__(self, mask: Mask) -> None:
        if not isinstance(mask, Mask):
            raise TypeError(f"Not inverts a mask, got {type(mask).__name__}")
        self._set(mask=mask)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Combination) else f"~{self.mask!r}"

    def _children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def _dense(self, grid: Grid) -> Tensor:
        return ~self.mask._dense(grid)

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.NOT, children=[self.mask._encode(pool)])


@value
class PerHead(Mask):
    """Query head h follows `masks[h]`. There is one mask for each query head."""

    masks: tuple[Mask, ...]

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

    def _children(self) -> tuple[Mask, ...]:
        return self.masks

    def _check(self, sizes: Sizes) -> None:
        if sizes.heads not in (None, len(self.masks)):
            raise ValueError(
                f"PerHead has {len(self.masks)} masks, but there are Hq = {sizes.heads} query heads"
            )
        super()._check(sizes._replace(heads=len(self.masks)))

    def _dense(self, grid: Grid) -> Tensor:
        full = (len(grid.query), grid.Lk)
        heads = [_one_head(mask._dense(grid), head) for head, mask in enumerate(self.masks)]
        shape = common_shape(full, *(dense.shape for dense in heads))
        return torch.stack([dense.expand(shape) for dense in heads], dim=-3)

    def _encode(self, pool: Pool) -> list[int]:
        return node(Op.PERHEAD, children=[mask._encode(pool) for mask in self.masks])


def _one_head(dense: Tensor, head: int) -> Tensor:
    """(..., 1 or H, Lq, Lk) -> (..., Lq, Lk)."""
    if dense.ndim < 3:
        return dense
    return dense.select(-3, head if dense.shape[-3] > 1 else 0)


def _grid(Lq: int, Lk: int, offset: Offset, device: torch.device) -> Grid:
    query = torch.arange(Lq, device=device)
    return Grid(query, first_position(Lq, Lk, offset, device) + query, torch.arange(Lk, device=device))


def _combinable(other: object, symbol: str) -> bool:
    if isinstance(other, Tensor):
        raise TypeError(
            f"cannot combine a mask and a tensor with {symbol}; wrap the bool tensor: masks.Dense(tensor)"
        )
    return isinstance(other, Mask)


def _moved(content: Any, device: torch.device | str) -> Any:
    if isinstance(content, (Tensor, Mask)):
        return content.to(device)
    if isinstance(content, tuple):
        return tuple(_moved(part, device) for part in content)
    return content


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    return bool(a == b)


def _fingerprint(content: Any) -> object:
    """Something hashable that is equal for equal contents, and cheap for large tensors."""
    if not isinstance(content, Tensor):
        return content
    total = content.sum().item() if readable(content) else None
    return content.dtype, tuple(content.shape), total
