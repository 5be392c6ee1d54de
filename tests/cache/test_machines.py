"""Caches beside the plainest model of one: all tokens of every sample in a list. Any order of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import regard.cache._attend as core
from regard import cache as C
from support import assert_close
from support.cache import KINDS, SCALE, Cache, D, Dv, Hkv, append, attend, expected, new, tokens

DTYPE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
Sample = list[Tensor]  # q, k, v of all tokens: (heads, n, size) each

counts = st.one_of(st.integers(0, 3), st.integers(0, 20))


class Fault(Exception):
    """What a backend may raise."""


def failing(*args: Any, **options: Any) -> Tensor:
    raise Fault


def with_fault(call: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "attend_stored", failing)
        with pytest.raises((Fault, ValueError)):  # ValueError: it was full before
            call()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def joined(sample: Sample, new: Sample) -> Sample:
    return [torch.cat([a, b], 1) for a, b in zip(sample, new, strict=True)]


class Machine(RuleBasedStateMachine):
    """Caches of rows: B samples that are appended to together."""

    kind: str

    @initialize(B=st.integers(1, 3))
    def begin(self, B: int) -> None:
        torch.manual_seed(0)
        self.cache: Cache = new(self.kind, B, DTYPE)
        self.samples: list[Sample] = [self.nothing() for _ in range(B)]
        self.peaks = [0] * B  # how long the samples have been; a rollback counts from there

    def nothing(self) -> Sample:
        return [x[0] for x in tokens(self.kind, 1, 0, DTYPE)]

    def chunk(self, lengths: list[int]) -> tuple[list[Tensor], list[Sample]]:
        """New tokens for all samples, and what of them each sample gets."""
        q, k, v = tokens(self.kind, len(lengths), max(lengths), DTYPE)
        return [q, k, v], [[x[b, :, :m] for x in (q, k, v)] for b, m in enumerate(lengths)]

    def drawn(self, data: Any, ragged: bool) -> list[int]:
        B = len(self.samples)
        return data.draw(st.lists(counts, min_size=B, max_size=B)) if ragged else [data.draw(counts)] * B

    def fits(self, lengths: list[int]) -> bool:
        most = max(sample[0].shape[1] + m for sample, m in zip(self.samples, lengths, strict=True))
        return self.cache.capacity is None or self.kind in ("sliding", "streaming") or most <= 96

    @rule(data=st.data(), ragged=st.booleans(), look=st.booleans(), fault=st.integers(0, 4))
    def feed(self, data: Any, ragged: bool, look: bool, fault: int) -> None:
        lengths = self.drawn(data, ragged)
        chunk, parts = self.chunk(lengths)
        options = {"lengths": lengths} if ragged else {}
        before = self.cache.state_dict()
        if not self.fits(lengths):
            with pytest.raises(ValueError, match="is full"):
                append(self.cache, *chunk[1:], **options)
            assert same(before, self.cache.state_dict())
            return
        if not fault:
            with_fault(lambda: attend(self.cache, *chunk, **options))
            assert same(before, self.cache.state_dict())
        found = attend(self.cache, *chunk, **options) if look else append(self.cache, *chunk[1:], **options)
        self.samples = [joined(sample, new) for sample, new in zip(self.samples, parts, strict=True)]
        self.peaks = [max(p, x[0].shape[1]) for p, x in zip(self.peaks, self.samples, strict=True)]
        if look:
            self.check(found, lengths)

    def check(self, found: Tensor, lengths: list[int]) -> None:
        for out, sample, m in zip(found, self.samples, lengths, strict=True):
            n = sample[0].shape[1]
            alone = expected(self.kind, *(x[None] for x in sample))[0, :, n - m :]
            assert_close(out[:, :m], alone, **CLOSE)
            assert not out[:, m:].any()

    @rule(data=st.data())
    def crop(self, data: Any) -> None:
        lengths = [sample[0].shape[1] for sample in self.samples]
        left = [data.draw(st.integers(max(0, n - 4), n) | st.integers(0, n)) for n in lengths]
        before = self.cache.state_dict()
        try:
            self.cache.crop(left)
        except ValueError:
            assert self.kind in ("sliding", "streaming")
            assert any(p - m > 2 and m > self.cache.sinks for p, m in zip(self.peaks, left, strict=True))
            assert same(before, self.cache.state_dict())
        else:
            pairs = zip(self.samples, left, strict=True)
            self.samples = [[x[:, :m] for x in sample] for sample, m in pairs]
            if self.kind in ("sliding", "streaming"):
                again = zip(self.peaks, left, strict=True)
                self.peaks = [m if m <= self.cache.sinks else peak for peak, m in again]

    @rule(m=st.integers(0, 2))
    def take_back(self, m: int) -> None:
        pairs = zip(self.samples, self.peaks, strict=True)
        m = min(m, *(sample[0].shape[1] - max(0, peak - 2) for sample, peak in pairs))
        if m > 0:
            self.cache.crop(-m)
            self.samples = [[x[:, :-m] for x in sample] for sample in self.samples]

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        index = data.draw(st.lists(st.integers(0, len(self.samples) - 1), min_size=1, max_size=3))
        self.cache.reorder(torch.tensor(index))
        self.samples = [self.samples[b] for b in index]
        self.peaks = [self.peaks[b] for b in index]

    @rule(other=st.booleans())
    def fork(self, other: bool) -> None:
        twin = self.cache.fork()
        self.cache, twin = (twin, self.cache) if other else (self.cache, twin)
        before = self.cache.state_dict()
        two = [2] * len(self.samples)
        if self.fits(two):
            append(twin, *self.chunk(two)[0][1:])
        twin.reorder([0])
        twin.reset()
        assert same(before, self.cache.state_dict())

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.samples = [self.nothing() for _ in self.samples]
        self.peaks = [0] * len(self.samples)

    @rule()
    def save_and_restore(self) -> None:
        state = self.cache.state_dict()
        self.cache = new(self.kind, len(self.samples), DTYPE)
        self.cache.load_state_dict(state)
        assert same(state, self.cache.state_dict())

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "samples"):
            lengths = [sample[0].shape[1] for sample in self.samples]
            assert self.cache.lengths.tolist() == lengths
            assert len(self.cache) == max(lengths)
            assert len(lengths) == self.cache.B


class PagedMachine(RuleBasedStateMachine):
    """Sequences in pages: added, freed and shared one by one."""

    @initialize()
    def begin(self) -> None:
        torch.manual_seed(0)
        self.caches = [C.PagedCache(14, Hkv, D, Dv, dtype=DTYPE)]
        self.held: list[dict[int, Sample]] = [{}]

    def one(self, data: Any) -> tuple[C.PagedCache, dict[int, Sample]]:
        at = data.draw(st.integers(0, len(self.caches) - 1))
        return self.caches[at], self.held[at]

    def some(self, data: Any, held: dict[int, Sample]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, unique=True))

    @rule(data=st.data())
    def add(self, data: Any) -> None:
        cache, held = self.one(data)
        if len(held) < 5:
            held[cache.add()] = [x[0] for x in tokens("paged", 1, 0, DTYPE)]

    @rule(data=st.data())
    def share(self, data: Any) -> None:
        cache, held = self.one(data)
        if held and len(held) < 5:
            like = data.draw(st.sampled_from(sorted(held)))
            n = data.draw(st.integers(0, held[like][0].shape[1]))
            free = cache.free_pages
            held[cache.add(like=like, tokens=n)] = [x[:, :n] for x in held[like]]
            assert cache.free_pages == free

    @rule(data=st.data())
    def free(self, data: Any) -> None:
        cache, held = self.one(data)
        if held:
            name = data.draw(st.sampled_from(sorted(held)))
            cache.free(name)
            del held[name]

    @rule(data=st.data(), ragged=st.booleans(), fault=st.booleans())
    def feed(self, data: Any, ragged: bool, fault: bool) -> None:
        cache, held = self.one(data)
        if not held:
            return
        ids = self.some(data, held)
        B = len(ids)
        lengths = data.draw(st.lists(counts, min_size=B, max_size=B)) if ragged else [data.draw(counts)] * B
        chunk = tokens("paged", B, max(lengths), DTYPE)
        options: dict[str, Any] = {"ids": ids, "scale": SCALE} | ({"lengths": lengths} if ragged else {})
        before = self.states()
        if fault:
            with_fault(lambda: cache.attend(*chunk, **options))
            self.assert_unchanged(before)
        try:
            found: Any = cache.attend(*chunk, **options)
        except ValueError:  # full, as nothing else is wrong with the call
            self.assert_unchanged(before)
            assert cache.free_pages < 3 * B
            return
        for b, (name, m) in enumerate(zip(ids, lengths, strict=True)):
            held[name] = joined(held[name], [x[b, :, :m] for x in chunk])
            n = held[name][0].shape[1]
            alone = expected("paged", *(x[None] for x in held[name]))[0, :, n - m :]
            assert_close(found[b, :, :m], alone, **CLOSE)

    def states(self) -> list[dict[str, Tensor]]:
        return [cache.state_dict() for cache in self.caches]

    def assert_unchanged(self, before: list[dict[str, Tensor]]) -> None:
        assert all(same(a, b) for a, b in zip(before, self.states(), strict=True))

    @rule(data=st.data())
    def crop(self, data: Any) -> None:
        cache, held = self.one(data)
        if held:
            ids = self.some(data, held)
            left = [data.draw(st.integers(0, held[name][0].shape[1])) for name in ids]
            cache.crop(left, ids=ids)
            for name, m in zip(ids, left, strict=True):
                held[name] = [x[:, :m] for x in held[name]]

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        cache, held = self.one(data)
        if held:
            ids = self.some(data, held)
            rows = st.integers(0, len(ids) - 1)
            index = data.draw(st.lists(rows, min_size=len(ids), max_size=len(ids)))
            cache.reorder(index, ids=ids)
            held.update({name: held[ids[row]] for name, row in dict(zip(ids, index, strict=True)).items()})

    @precondition(lambda self: len(self.caches) < 3)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        cache, held = self.one(data)
        self.caches.append(cache.fork())
        self.held.append(dict(held))

    @precondition(lambda self: len(self.caches) > 1)
    @rule()
    def forget(self) -> None:
        self.caches.pop()
        self.held.pop()

    @rule(data=st.data())
    def save_and_restore(self, data: Any) -> None:
        cache, _ = self.one(data)
        state = cache.state_dict()
        cache.load_state_dict(state)
        assert same(state, cache.state_dict())
        elsewhere = C.PagedCache(14, Hkv, D, Dv, dtype=DTYPE)
        elsewhere.load_state_dict(state)
        assert same(state, elsewhere.state_dict())

    @rule(data=st.data())
    def look_again(self, data: Any) -> None:
        """All content, through the last query of each sequence."""
        cache, held = self.one(data)
        ids = [name for name, sample in held.items() if sample[0].shape[1]]
        if ids:
            q = torch.stack([held[name][0][:, -1:] for name in ids])
            found = cache.attend(q, ids=ids, scale=SCALE)
            for out, name in zip(found, ids, strict=True):
                alone = expected("paged", *(x[None] for x in held[name]))[0, :, -1:]
                assert_close(out, alone, **CLOSE)

    @invariant()
    def pages_are_counted(self) -> None:
        if not hasattr(self, "caches"):
            return
        pool = self.caches[0]._pool
        users = [0] * 14
        for cache in self.caches:
            for sequence in cache._sequences.values():
                assert len(sequence.pages) == -(-sequence.length // 16)
                for number in sequence.pages:
                    users[number] += 1
        assert pool.users == users
        assert sorted(pool.free) == [number for number, n in enumerate(users) if not n]

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "caches"):
            for cache, held in zip(self.caches, self.held, strict=True):
                assert cache.ids == tuple(held)
                assert cache.lengths.tolist() == [sample[0].shape[1] for sample in held.values()]


def test_case(name: str, machine: type[RuleBasedStateMachine], **fields: Any) -> Any:
    case = type(name, (machine,), fields).TestCase
    case.settings = settings(stateful_step_count=20)
    return case


test_case.__test__ = False  # type: ignore[attr-defined]

TestGrowing = test_case("Growing", Machine, kind="growing")
TestFixed = test_case("Fixed", Machine, kind="fixed")
TestSliding = test_case("Sliding", Machine, kind="sliding")
TestStreaming = test_case("Streaming", Machine, kind="streaming")
TestInt8 = test_case("Int8", Machine, kind="int8")
TestInt4 = test_case("Int4", Machine, kind="int4")
TestLatent = test_case("Latent", Machine, kind="latent")
TestPaged = test_case("Paged", PagedMachine)


def test_every_kind_has_a_machine() -> None:
    assert {f"Test{kind.capitalize()}" for kind in KINDS} <= globals().keys()
