"""Parameters of which each rank holds some rows."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ._group import Group, swap
from ._pairs import Run
from ._sums import summed
from ._travel import local_rows
from .layouts import take


@dataclass(frozen=True)
class Division:
    """The rows (dim 0) or columns (dim 1) of a parameter that each rank holds.

    Several ranks may hold the same run. A rank holds the concatenation of its runs.
    """

    dim: int
    runs: tuple[tuple[Run, ...], ...]  # of each rank

    @functools.cached_property
    def copies(self) -> Counter[Run]:
        """The number of ranks that hold each run."""
        return Counter(run for runs in self.runs for run in runs)

    def whole_shape(self, local: Tensor) -> tuple[int, ...]:
        """Returns the shape of the whole parameter of which a rank has the rows `local`."""
        length = max(end for _, end in self.copies)
        return (*local.shape[: self.dim], length, *local.shape[self.dim + 1 :])

    @functools.cached_property
    def repeated(self) -> dict[Run, slice]:
        """The runs that several ranks hold, with their rows in a tensor of these runs."""
        return local_rows(tuple(sorted(run for run, n in self.copies.items() if n > 1)))

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a copy of the rows of a rank."""
        return take(whole, self.runs[rank], self.dim).clone()

    def whole(self, group: Group, local: Tensor) -> Tensor:
        """Returns the whole tensor. All ranks call it with their rows."""
        if local.is_meta:
            return local.new_empty(self.whole_shape(local))
        dim, lengths = self.dim, [sum(b - a for a, b in runs) for runs in self.runs]
        shapes = [(*local.shape[:dim], n, *local.shape[dim + 1 :]) for n in lengths]
        whole = local.new_empty(self.whole_shape(local))
        for runs, rows in zip(self.runs, swap(group, [local] * group.size, shapes), strict=True):
            for (begin, end), at in local_rows(runs).items():
                whole.narrow(dim, begin, end - begin).copy_(_rows(rows, dim, at))
        return whole

    def sum_repeated(self, group: Group, grad: Tensor) -> Tensor:
        """Returns a rank's gradient, with the gradients of repeated runs summed over their ranks."""
        if not self.repeated:
            return grad
        dim, own = self.dim, local_rows(self.runs[group.rank])
        length = sum(at.stop - at.start for at in self.repeated.values())
        addend, total = grad.new_zeros(*grad.shape[:dim], length, *grad.shape[dim + 1 :]), grad.clone()
        both = [(own[run], at) for run, at in self.repeated.items() if run in own]
        for here, there in both:
            _rows(addend, dim, there).copy_(_rows(grad, dim, here))
        addend = summed(group, addend)
        for here, there in both:
            _rows(total, dim, here).copy_(_rows(addend, dim, there))
        return total

    def square(self, grad: Tensor, rank: int) -> Tensor:
        """Returns a rank's addend of the squared norm of the whole gradient."""
        squares = grad.new_zeros((), dtype=torch.float64)
        for run, at in local_rows(self.runs[rank]).items():
            squares += _rows(grad, self.dim, at).double().square().sum() / self.copies[run]
        return squares


def _rows(x: Tensor, dim: int, at: slice) -> Tensor:
    return x.narrow(dim, at.start, at.stop - at.start)
