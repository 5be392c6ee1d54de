"""The base class of caches that store the tokens of a sample in consecutive slots.

A call has three steps. It checks the new tokens and writes them to unused slots or into new
storage. It computes attention. Then it assigns the new content to the cache. So the cache is
unchanged if one of the first two steps raises.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, is_grad_enabled

from .._api.stored import attend_stored
from .._call.spec import Options, fast_new
from .._call.stored import New
from .._tools.arguments import count
from . import _checks as checks
from ._attend import CacheOptions, Result
from ._checks import NO_CHUNK, Integers, Lengths, State
from ._counts import Count, as_tensor, formatted, largest, of_samples, per_sample, plus
from ._retention import Content, Retention
from ._rows import RowLayout

R = TypeVar("R", bound="RowCache")


class RowCache:
    """Base class of caches with a `RowStorage` and a policy that decides which tokens to keep."""

    _sizes: tuple[str, ...]  # the names of the attributes in the repr

    def _begin(self, B: int, layout: RowLayout, keeps: Retention) -> None:
        self.B = count("B", B, 1)
        self.Hkv, self.D, self.Dv, _, self.dtype, self.device = layout
        self._keeps = keeps
        self._content = Content(layout.empty(self.B, keeps.capacity or 0), 0, 0)
        self._checked: tuple[Any, ...] | None = None  # signature of the last step that passed all checks

    # Content

    def __len__(self) -> int:
        """The number of tokens of the longest sample, including dropped tokens."""
        return largest(self._content.lengths)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sample, (B,) int64, including dropped tokens."""
        return as_tensor(self._content.lengths, self.B, self.device)

    @property
    def start(self) -> int | None:
        """The position of the next token if all samples have the same length, otherwise None."""
        lengths = self._content.lengths
        return lengths if isinstance(lengths, int) else None

    @property
    def capacity(self) -> int | None:
        """The number of slots per sample, or None if the storage grows."""
        return self._keeps.capacity

    @property
    def nbytes(self) -> int:
        """The size of the storage in bytes."""
        return self._content.storage.nbytes

    def positions(self, L: int = 1) -> Tensor:
        """Returns the positions of the next L tokens, (B, L) int64."""
        return self.lengths[:, None] + torch.arange(count("L", L), device=self.device)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in self._sizes)
        rows = f"{self._content.storage.rows} rows" + (", grows" if self.capacity is None else "")
        return (
            f"{type(self).__name__}({sizes}, {self.dtype}: "
            f"length {formatted(per_sample(self._content.lengths, self.B))}, {rows}, {self.nbytes:,} bytes)"
        )

    # Appending and attending

    def _append(self, new: New, lengths: Lengths) -> Content:
        """Appends new tokens. Returns the content that the queries of the new tokens attend to."""
        content = self._appended(new, self._content.storage.layout.chunk(new, lengths, self.B).new)
        self._content = self._keeps.settled(content)
        return content

    def _appended(self, new: New, counts: Count) -> Content:
        """Writes new tokens to unused slots. Returns the new content without assigning it."""
        storage, held, dropped = self._keeps.with_room(self._content, counts)
        storage.write(held, counts, new)
        return Content(storage, plus(held, counts), dropped)

    def _attend(
        self, q: Tensor, new: New | None, lengths: Lengths, options: Options, window: int | None, impl: str
    ) -> Result:
        """Appends new tokens, unless `new` is None, then computes attention of q (B, Hq, Lq, D)."""
        is_simple = lengths is None and window is None and options.mask is None and options.bias is None
        if is_simple and new is not None and self._is_checked_step(q, new):
            return self._attend_step(q, new, options, impl)
        content, chunk = self._content, NO_CHUNK
        if new is not None:
            chunk = content.storage.layout.chunk(new, lengths, self.B)
            content = self._appended(new, chunk.new)
        checks.check_queries(q, self.B, self.D, self.dtype, content.held, chunk)
        result = self._keeps.attend(q, content, chunk, CacheOptions(options, window, impl))
        if new is not None:
            self._content = self._keeps.settled(content)
            if chunk.L == q.shape[2] == 1:
                self._checked = signature(q, *new)
        return result

    # Fast path: a decode step with the signature of a step that passed all checks

    def _is_checked_step(self, q: Tensor, new: New) -> bool:
        """Returns whether `_attend_step` can run a decode step.

        The last checked step must have had the same signature, all samples must have equal length
        and a free slot, and k and v must not need a gradient.
        """
        (storage, held, _), (k, v) = self._content, new
        if self._checked is None or self._checked != signature(q, k, v):
            return False
        if not isinstance(held, int) or held >= storage.rows:
            return False
        return not (is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad)))

    def _attend_step(self, q: Tensor, new: New, options: Options, impl: str) -> Result:
        """Does the same as `_attend`, faster, for a checked step without mask, bias and window."""
        storage, slot, dropped = self._content
        if self._keeps.visible is not None:
            options = fast_new(Options, (self._keeps.visible, *options[1:]))
        stored = storage.stored(slot + 1)  # type: ignore[operator]
        result = attend_stored(q, stored, options, impl, new)
        self._content = fast_new(Content, (storage, stored.length, dropped))
        return result

    # Editing

    def crop(self, n: Integers) -> None:
        """Keeps the first n tokens of each sample, or drops the last -n if n < 0.

        n is an int for all samples, or integers (B,). A `SlidingCache` raises ValueError if it no
        longer holds all tokens that the next query attends to.
        """
        lengths = checks.cropped_lengths(n, per_sample(self._content.lengths, self.B))
        self._content = self._keeps.cropped(self._content, lengths)

    def reorder(self, index: Integers) -> None:
        """Replaces sample i by sample index[i], for beam search. B becomes len(index)."""
        samples = checks.sample_indices(index, self.B)
        if samples == list(range(self.B)):
            return
        storage, held, dropped = self._content
        fresh = storage.copy(largest(held), samples=samples)
        self._content = Content(fresh, of_samples(held, samples), of_samples(dropped, samples))
        self.B, self._checked = len(samples), None

    def fork(self: R) -> R:
        """Returns an independent copy of the cache."""
        twin, content = copy.copy(self), self._content
        twin._content = content._replace(storage=content.storage.copy(largest(content.held)))
        return twin

    def reset(self) -> None:
        """Removes all tokens. The storage stays allocated."""
        self._content = Content(self._content.storage, 0, 0)

    # Saving

    def state_dict(self) -> State:
        """Returns a dict of token counts (B,) and of stored tensors, with zeros in unused slots."""
        content = self._content
        counts = {name: as_tensor(getattr(content, name), self.B, self.device) for name in self._keeps.counts}
        return content.storage.state(content.held) | counts

    def load_state_dict(self, state: State) -> None:
        """Loads a `state_dict` of a cache with the same B, sizes and dtype."""
        storage, names = self._content.storage, self._keeps.counts
        state = checks.checked_state(state, {*storage.tensors, *names}, self.device)
        held, dropped = self._keeps.restored(
            **{name: checks.integers(name, state[name], self.B) for name in names}
        )
        storage.layout.check_state(state, self.B, largest(held))
        storage = self._keeps.with_room(Content(storage, 0, 0), held).storage
        storage.load(state, largest(held))
        self._content = Content(storage, held, dropped)


def signature(q: Any, k: Any, v: Any) -> tuple[Any, ...] | None:
    """Returns shapes and dtypes of q, k and v, and the devices of k and v, in a decode step.

    If one step has passed all checks, steps with an equal signature need not be checked. Returns
    None if an argument is not a plain tensor; such a step must be checked. v may be None.
    """
    if type(q) is not Tensor or type(k) is not Tensor:
        return None
    if type(v) is Tensor:
        return q.shape, q.dtype, k.shape, k.dtype, k.device, v.shape, v.dtype, v.device
    return (q.shape, q.dtype, k.shape, k.dtype, k.device) if v is None else None
