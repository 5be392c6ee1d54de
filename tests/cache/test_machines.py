"""Stateful tests: random calls of a cache, compared with a model that keeps all tokens in lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from regard import cache as C
from regard.cache import _attend, _row_cache
from support import assert_close
from support.cache import KINDS, SCALE, Cache, D, Dv, Hkv, append, attend, expected, new, tokens

DTYPE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
Sample = list[Tensor]  # q, k, v of all tokens: (heads, n, size) each

counts = st.one_of(st.integers(0, 3), st.integers(0, 20))


class Fault(Exception):
    """An error raised in place of attention, for any error of a backend."""


def raise_fault(*args: Any, **options: Any) -> Tensor:
    raise Fault


def call_with_fault(call: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (_attend, _row_cache):  # `_row_cache`: the fast path of a decode step
            patch.setattr(module, "attend_stored", raise_fault)
        with pytest.raises((Fault, ValueError)):  # ValueError if the cache is full
            call()


def equal_states(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def extended(sample: Sample, new: Sample) -> Sample:
    return [torch.cat([a, b], 1) for a, b in zip(sample, new, strict=True)]


class Machine(RuleBasedStateMachine):
    """Tests caches whose B samples are appended to together."""

    kind: str

    @initialize(B=st.integers(1, 3))
    def begin(self, B: int) -> None:
        torch.manual_seed(0)
        self.cache: Cache = new(self.kind, B, DTYPE)
        self.samples: list[Sample] = [self.empty_sample() for _ in range(B)]
        self.peaks = [0] * B  # each sample's longest length so far; roll_back stays within 2 of it

    def empty_sample(self) -> Sample:
        return [x[0] for x in tokens(self.kind, 1, 0, DTYPE)]

    def chunk(self, lengths: list[int]) -> tuple[list[Tensor], list[Sample]]:
        """Returns padded new tokens (q, k, v) and the tokens that each sample appends."""
        q, k, v = tokens(self.kind, len(lengths), max(lengths), DTYPE)
        return [q, k, v], [[x[b, :, :m] for x in (q, k, v)] for b, m in enumerate(lengths)]

    def draw_lengths(self, data: Any, ragged: bool) -> list[int]:
        B = len(self.samples)
        return data.draw(st.lists(counts, min_size=B, max_size=B)) if ragged else [data.draw(counts)] * B

    def fits(self, lengths: list[int]) -> bool:
        max_length = max(sample[0].shape[1] + m for sample, m in zip(self.samples, lengths, strict=True))
        return self.cache.capacity is None or self.kind in ("sliding", "streaming") or max_length <= 96

    @rule(data=st.data(), ragged=st.booleans(), with_queries=st.booleans(), fault=st.integers(0, 4))
    def feed(self, data: Any, ragged: bool, with_queries: bool, fault: int) -> None:
        lengths = self.draw_lengths(data, ragged)
        chunk, new_tokens = self.chunk(lengths)
        options = {"lengths": lengths} if ragged else {}
        before = self.cache.state_dict()
        if not self.fits(lengths):
            with pytest.raises(ValueError, match="is full"):
                append(self.cache, *chunk[1:], **options)
            assert equal_states(before, self.cache.state_dict())
            return
        if not fault:
            call_with_fault(lambda: attend(self.cache, *chunk, **options))
            assert equal_states(before, self.cache.state_dict())
        out = (
            attend(self.cache, *chunk, **options)
            if with_queries
            else append(self.cache, *chunk[1:], **options)
        )
        self.samples = [extended(sample, tail) for sample, tail in zip(self.samples, new_tokens, strict=True)]
        self.peaks = [max(p, x[0].shape[1]) for p, x in zip(self.peaks, self.samples, strict=True)]
        if with_queries:
            self.check(out, lengths)

    def check(self, outs: Tensor, lengths: list[int]) -> None:
        for out, sample, new_length in zip(outs, self.samples, lengths, strict=True):
            length = sample[0].shape[1]
            alone = expected(self.kind, *(x[None] for x in sample))[0, :, length - new_length :]
            assert_close(out[:, :new_length], alone, **CLOSE)
            assert not out[:, new_length:].any()

    @rule(data=st.data())
    def crop(self, data: Any) -> None:
        lengths = [sample[0].shape[1] for sample in self.samples]
        new_lengths = [data.draw(st.integers(max(0, n - 4), n) | st.integers(0, n)) for n in lengths]
        before = self.cache.state_dict()
        try:
            self.cache.crop(new_lengths)
        except ValueError:
            assert self.kind in ("sliding", "streaming")
            assert any(
                p - m > 2 and m > self.cache.sinks for p, m in zip(self.peaks, new_lengths, strict=True)
            )
            assert equal_states(before, self.cache.state_dict())
        else:
            pairs = zip(self.samples, new_lengths, strict=True)
            self.samples = [[x[:, :m] for x in sample] for sample, m in pairs]
            if self.kind in ("sliding", "streaming"):
                peak_pairs = zip(self.peaks, new_lengths, strict=True)
                self.peaks = [m if m <= self.cache.sinks else peak for peak, m in peak_pairs]

    @rule(m=st.integers(0, 2))
    def roll_back(self, m: int) -> None:
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

    @rule(use_fork=st.booleans())
    def fork(self, use_fork: bool) -> None:
        twin = self.cache.fork()
        self.cache, twin = (twin, self.cache) if use_fork else (self.cache, twin)
        before = self.cache.state_dict()
        lengths = [2] * len(self.samples)
        if self.fits(lengths):
            append(twin, *self.chunk(lengths)[0][1:])
        twin.reorder([0])
        twin.reset()
        assert equal_states(before, self.cache.state_dict())

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.samples = [self.empty_sample() for _ in self.samples]
        self.peaks = [0] * len(self.samples)

    @rule()
    def save_and_restore(self) -> None:
        state = self.cache.state_dict()
        self.cache = new(self.kind, len(self.samples), DTYPE)
        self.cache.load_state_dict(state)
        assert equal_states(state, self.cache.state_dict())

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "samples"):
            lengths = [sample[0].shape[1] for sample in self.samples]
            assert self.cache.lengths.tolist() == lengths
            assert len(self.cache) == max(lengths)
            assert len(lengths) == self.cache.B


class PagedMachine(RuleBasedStateMachine):
    """Tests PagedCache: sequences are added, freed and shared one at a time."""

    @initialize()
    def begin(self) -> None:
        torch.manual_seed(0)
        self.caches = [C.PagedCache(14, Hkv, D, Dv, dtype=DTYPE)]
        self.models: list[dict[int, Sample]] = [{}]

    def draw_cache(self, data: Any) -> tuple[C.PagedCache, dict[int, Sample]]:
        index = data.draw(st.integers(0, len(self.caches) - 1))
        return self.caches[index], self.models[index]

    def draw_ids(self, data: Any, samples: dict[int, Sample]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(samples)), min_size=1, unique=True))

    @rule(data=st.data())
    def add(self, data: Any) -> None:
        cache, samples = self.draw_cache(data)
        if len(samples) < 5:
            samples[cache.add()] = [x[0] for x in tokens("paged", 1, 0, DTYPE)]

    @rule(data=st.data())
    def share(self, data: Any) -> None:
        cache, samples = self.draw_cache(data)
        if samples and len(samples) < 5:
            like = data.draw(st.sampled_from(sorted(samples)))
            n = data.draw(st.integers(0, samples[like][0].shape[1]))
            free = cache.free_pages
            samples[cache.add(like=like, tokens=n)] = [x[:, :n] for x in samples[like]]
            assert cache.free_pages == free

    @rule(data=st.data())
    def free(self, data: Any) -> None:
        cache, samples = self.draw_cache(data)
        if samples:
            sequence_id = data.draw(st.sampled_from(sorted(samples)))
            cache.free(sequence_id)
            del samples[sequence_id]

    @rule(data=st.data(), ragged=st.booleans(), fault=st.booleans())
    def feed(self, data: Any, ragged: bool, fault: bool) -> None:
        cache, samples = self.draw_cache(data)
        if not samples:
            return
        ids = self.draw_ids(data, samples)
        B = len(ids)
        lengths = data.draw(st.lists(counts, min_size=B, max_size=B)) if ragged else [data.draw(counts)] * B
        chunk = tokens("paged", B, max(lengths), DTYPE)
        options: dict[str, Any] = {"ids": ids, "scale": SCALE} | ({"lengths": lengths} if ragged else {})
        before = self.states()
        if fault:
            call_with_fault(lambda: cache.attend(*chunk, **options))
            self.assert_unchanged(before)
        try:
            outs: Any = cache.attend(*chunk, **options)
        except ValueError:  # the cache is full; the call is valid otherwise
            self.assert_unchanged(before)
            assert cache.free_pages < 3 * B
            return
        for b, (sequence_id, m) in enumerate(zip(ids, lengths, strict=True)):
            samples[sequence_id] = extended(samples[sequence_id], [x[b, :, :m] for x in chunk])
            n = samples[sequence_id][0].shape[1]
            alone = expected("paged", *(x[None] for x in samples[sequence_id]))[0, :, n - m :]
            assert_close(outs[b, :, :m], alone, **CLOSE)

    def states(self) -> list[dict[str, Tensor]]:
        return [cache.state_dict() for cache in self.caches]

    def assert_unchanged(self, before: list[dict[str, Tensor]]) -> None:
        assert all(equal_states(a, b) for a, b in zip(before, self.states(), strict=True))

    @rule(data=st.data())
    def crop(self, data: Any) -> None:
        cache, samples = self.draw_cache(data)
        if samples:
            ids = self.draw_ids(data, samples)
            left = [data.draw(st.integers(0, samples[sequence_id][0].shape[1])) for sequence_id in ids]
            cache.crop(left, ids=ids)
            for sequence_id, m in zip(ids, left, strict=True):
                samples[sequence_id] = [x[:, :m] for x in samples[sequence_id]]

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        cache, samples = self.draw_cache(data)
        if samples:
            ids = self.draw_ids(data, samples)
            rows = st.integers(0, len(ids) - 1)
            index = data.draw(st.lists(rows, min_size=len(ids), max_size=len(ids)))
            cache.reorder(index, ids=ids)
            samples.update(
                {
                    sequence_id: samples[ids[row]]
                    for sequence_id, row in dict(zip(ids, index, strict=True)).items()
                }
            )

    @precondition(lambda self: len(self.caches) < 3)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        cache, samples = self.draw_cache(data)
        self.caches.append(cache.fork())
        self.models.append(dict(samples))

    @precondition(lambda self: len(self.caches) > 1)
    @rule()
    def drop_last_fork(self) -> None:
        self.caches.pop()
        self.models.pop()

    @rule(data=st.data())
    def save_and_restore(self, data: Any) -> None:
        cache, _ = self.draw_cache(data)
        state = cache.state_dict()
        cache.load_state_dict(state)
        assert equal_states(state, cache.state_dict())
        restored = C.PagedCache(14, Hkv, D, Dv, dtype=DTYPE)
        restored.load_state_dict(state)
        assert equal_states(state, restored.state_dict())

    @rule(data=st.data())
    def attend_without_append(self, data: Any) -> None:
        """Compares the output of each sequence's last query, which depends on all stored keys."""
        cache, samples = self.draw_cache(data)
        ids = [sequence_id for sequence_id, sample in samples.items() if sample[0].shape[1]]
        if ids:
            q = torch.stack([samples[sequence_id][0][:, -1:] for sequence_id in ids])
            outs = cache.attend(q, ids=ids, scale=SCALE)
            for out, sequence_id in zip(outs, ids, strict=True):
                alone = expected("paged", *(x[None] for x in samples[sequence_id]))[0, :, -1:]
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
                for page in sequence.pages:
                    users[page] += 1
        assert pool.users == users
        assert sorted(pool.free) == [page for page, n in enumerate(users) if not n]

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "caches"):
            for cache, samples in zip(self.caches, self.models, strict=True):
                assert cache.ids == tuple(samples)
                assert cache.lengths.tolist() == [sample[0].shape[1] for sample in samples.values()]


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
