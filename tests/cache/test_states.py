"""Saved states: a cache loads one and behaves as saved, or raises and stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import regard
from regard import cache as C
from regard._call.stored import decode
from support import assert_close
from support.cache import KINDS, PAGE, SCALE, Cache, D, Dv, Hkv, as_stored, attend, mask_of, new, tokens

DTYPE = torch.float64
LINEAR = ("linear", "normalized")
State = dict[Any, Any]
MESSAGE = r"^(state|ids|lengths|held|table): expected|^\w+Cache is (full|too small): "
COUNTS = (-1, 0, 1, 2, 3, 8, 15, 16, 17, 20, 31, 32, 33, 40, 96, 97)
HUGE = (2**31, 2**40, 2**48, 2**48 + 1, 2**62 - 1, 2**62, 2**63 - 1, -(2**63))


def empty(kind: str) -> Cache:
    if kind in LINEAR:
        return C.LinearCache(2, Hkv, D, Dv, normalize=kind == "normalized", dtype=DTYPE)
    return new(kind, 2, DTYPE)


def feed(cache: Cache, kind: str, L: int, lengths: list[int] | None = None) -> tuple[Any, list[Tensor]]:
    """Appends L tokens and attends. Returns the output and the tokens q, k and v."""
    B = len(cache.ids) if kind == "paged" else 2
    new_tokens = list(tokens(kind, B, L, DTYPE))
    if kind in LINEAR:
        return cache.attend(*new_tokens, feature_map="elu+1", lengths=lengths), new_tokens
    return attend(cache, *new_tokens, lengths=lengths), new_tokens


def filled(kind: str, *lengths: int) -> Cache:
    cache = empty(kind)
    feed(cache, kind, max(lengths), list(lengths))
    return cache


# Ways to change one tensor of a state

Change = Callable[[Any], Any]


def with_element(value: int) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.to(torch.int64)
        x.view(-1)[-1:] = value
        return x

    return change


def with_first_element(value: int) -> Change:
    return lambda x: with_element(value)(x.flip(0)).flip(0)


TYPES: dict[str, Change] = {
    "none": lambda x: None,
    "int": lambda x: 7,
    "text": lambda x: "abc",
    "list": lambda x: x.tolist(),
    "scalar": lambda x: torch.zeros((), dtype=x.dtype),
    "float": lambda x: x.float(),
    "bool": lambda x: x.bool(),
    "int32": lambda x: x.int(),
    "uint8": lambda x: x.to(torch.uint8),
    "complex": lambda x: x.to(torch.complex128),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "learned": lambda x: x.requires_grad_() if x.is_floating_point() else x,
    "strided": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "expanded": lambda x: x[:1].expand(x.shape) if len(x) else x,
    "shorter": lambda x: x[:-1],
    "longer": lambda x: torch.cat([x, x[:1]]),
    "fewer rows": lambda x: x[:, :, :-1] if x.ndim > 2 else x[..., :-1],
    "more rows": lambda x: torch.cat([x, x], 2) if x.ndim > 2 else torch.cat([x, x], -1),
    "flat": lambda x: x.flatten(),
    "unchanged": lambda x: x,
}


@st.composite
def changes(draw: Any, names: list[str]) -> list[tuple[str, Change]]:
    integers = [name for name in names if name in ("ids", "lengths", "held", "table")]
    values = st.sampled_from(COUNTS) | st.sampled_from(HUGE)
    element = values.map(with_element) | values.map(with_first_element)
    one = st.one_of(
        st.tuples(st.sampled_from(integers), element),
        st.tuples(st.sampled_from(names), st.sampled_from(sorted(TYPES)).map(TYPES.__getitem__)),
    )
    return draw(st.lists(one, min_size=1, max_size=2))


def changed(state: State, made: list[tuple[str, Change]]) -> State:
    for name, change in made:
        dtype = state[name].dtype if isinstance(state[name], Tensor) else None
        try:
            state = state | {name: change(state[name])}
        except (AttributeError, IndexError, RuntimeError, TypeError, UserWarning):
            continue  # the first change made the second impossible
        if name == "table" and isinstance(state[name], Tensor) and state[name].dtype is torch.int64:
            state[name] = state[name].clamp(-(2**31), 2**31 - 1).to(dtype)
    return state


# What a state means


def saved_sequences(kind: str, state: State) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields the length of each sequence and its stored rows (heads, rows, ...)."""
    names = [name for name in state if name not in ("ids", "lengths", "held", "table")]
    lengths = torch.as_tensor(state["lengths"]).tolist()
    for b, n in enumerate(lengths):
        if kind in LINEAR:
            yield n, [state[name][b] for name in names]
        elif kind == "paged":
            pages = state["table"][b][: -(-n // PAGE)].long()
            yield n, [state[name][pages].transpose(0, 1).flatten(1, 2)[:, :n] for name in names]
        else:
            held = int(state["held"][b]) if "held" in state else n
            yield n, [state[name][b, :, :held] for name in names]


def keys_and_values(kind: str, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    if kind == "latent":
        return rows[0], rows[0][..., :Dv]
    if kind in ("int8", "int4"):
        k, k_scale, v, v_scale = rows
        return decode(k, k_scale, kind, D).to(DTYPE), decode(v, v_scale, kind, Dv).to(DTYPE)
    return rows[0], rows[1]


def assert_behaves(cache: Cache, kind: str, state: State) -> None:
    """Checks that a cache holds the sequences of a state, and attends to them."""
    saved = list(saved_sequences(kind, state))
    again = list(saved_sequences(kind, cache.state_dict()))
    assert len(saved) == len(again)
    for (n, rows), (m, others) in zip(saved, again, strict=True):
        assert n == m
        for x, y in zip(rows, others, strict=True):
            torch.testing.assert_close(x.detach(), y, rtol=0, atol=0)
    if not saved:
        return
    try:
        out, (q, k, v) = feed(cache, kind, 1)
    except ValueError as error:
        assert "is full" in str(error)  # noqa: PT017
        return
    assert cache.lengths.tolist() == [n + 1 for n, _ in saved]
    assert not out.requires_grad
    for b, (_, rows) in enumerate(saved):
        one = q[b], k[b], v[b]
        assert_close(out[b], expected(kind, [x.detach() for x in rows], *one), rtol=1e-9, atol=1e-11)


def expected(kind: str, rows: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the output of one new token after the rows of a saved sequence."""
    if kind in LINEAR:
        state = regard.LinearState(rows[0][None], rows[1][None] if len(rows) > 1 else None)
        new_token = q[None], k[None], v[None]
        options: Any = {"feature_map": "elu+1", "normalize": len(rows) > 1, "state": state}
        return regard.linear_attention(*new_token, **options)[0]
    old_k, old_v = keys_and_values(kind, rows)
    keys = torch.cat([old_k, as_stored(kind, k)], 1)
    values = torch.cat([old_v, as_stored(kind, v)], 1)
    return regard.attention(q, keys, values, mask=mask_of(kind), scale=SCALE)


def assert_refused(kind: str, cache: Cache, state: Any) -> None:
    """Checks that loading the state raises an error with a message and changes nothing."""
    before, text = cache.state_dict(), repr(cache)
    with pytest.raises((ValueError, TypeError), match=MESSAGE):
        cache.load_state_dict(state)
    assert repr(cache) == text
    assert all(torch.equal(x, before[name]) for name, x in cache.state_dict().items())
    assert_behaves(cache, kind, before)


every_cache = pytest.mark.parametrize("kind", [*KINDS, *LINEAR])


@every_cache
@given(data=st.data())
def test_any_state_loads_as_saved_or_changes_nothing(kind: str, data: Any) -> None:
    torch.manual_seed(0)
    state: State = filled(kind, 20, data.draw(st.sampled_from([0, 9, 20]))).state_dict()
    state = changed(state, data.draw(changes(sorted(state))))
    cache = filled(kind, 5, 17)
    try:
        cache.load_state_dict(state)
    except (ValueError, TypeError):
        assert_refused(kind, filled(kind, 5, 17), state)
    else:
        assert_behaves(cache, kind, state)


@every_cache
def test_a_state_with_wrong_names_changes_nothing(kind: str) -> None:
    state = filled(kind, 20, 9).state_dict()
    name = next(iter(state))
    for wrong in (
        None, [], 3, {}, state | {"more": torch.zeros(1)}, state | {1: torch.zeros(1)},
        {key: x for key, x in state.items() if key != name}, {name: state[name]},
    ):  # fmt: skip
        assert_refused(kind, filled(kind, 5, 17), wrong)


@every_cache
@pytest.mark.parametrize("change", TYPES)
def test_each_tensor_of_another_type(kind: str, change: str) -> None:
    """A copy that fails after some tensors are written would leave a mixture of two states."""
    for name in filled(kind, 20, 9).state_dict():
        state = changed(filled(kind, 20, 9).state_dict(), [(name, TYPES[change])])
        cache = filled(kind, 5, 17)
        try:
            cache.load_state_dict(state)
        except (ValueError, TypeError):
            assert_refused(kind, filled(kind, 5, 17), state)
        else:
            assert_behaves(cache, kind, state)


@pytest.mark.parametrize("length", [33, 40, 2**40, 2**63 - 1, -1])
def test_lengths_beyond_the_saved_pages(length: int) -> None:
    """The tokens beyond the pages would be those of a freed sequence."""
    state = filled("paged", 20, 9).state_dict()
    assert_refused("paged", filled("paged", 5, 17), state | {"lengths": torch.tensor([length, 9])})
    assert_refused("paged", filled("paged", 40, 40), state | {"lengths": torch.tensor([length, 9])})


@pytest.mark.parametrize("sequence", [-1, 2**62, 2**63 - 1, -(2**63)])
def test_ids_out_of_range(sequence: int) -> None:
    state = filled("paged", 20, 9).state_dict()
    assert_refused("paged", filled("paged", 5, 17), state | {"ids": torch.tensor([0, sequence])})


def test_the_largest_id() -> None:
    cache = filled("paged", 20, 9)
    cache.load_state_dict(cache.state_dict() | {"ids": torch.tensor([0, 2**62 - 1])})
    assert cache.ids == (0, 2**62 - 1)
    with pytest.raises(ValueError, match=r"ids: expected an integer from 0 to 2\^62 - 1"):
        cache.add()
    restored = empty("paged")
    restored.load_state_dict(cache.state_dict())
    assert restored.ids == cache.ids


@pytest.mark.parametrize("length", [2**48 + 1, 2**63 - 1])
@pytest.mark.parametrize("kind", ["sliding", "streaming", *LINEAR])
def test_lengths_beyond_the_positions_of_attention(kind: str, length: int) -> None:
    state = filled(kind, 20, 9).state_dict()
    assert_refused(kind, filled(kind, 5, 17), state | {"lengths": torch.tensor([length, 9])})


def test_a_sliding_cache_cannot_have_dropped_a_sink() -> None:
    state = filled("streaming", 2, 1).state_dict()
    state |= {"held": torch.tensor([1, 1])} | {name: state[name][:, :, :1] for name in ("k", "v")}
    assert_refused("streaming", filled("streaming", 5, 17), state)


@every_cache
def test_a_loaded_state_keeps_no_graph(kind: str) -> None:
    state = {
        name: x.requires_grad_() if x.is_floating_point() else x
        for name, x in filled(kind, 20, 9).state_dict().items()
    }
    cache = filled(kind, 5, 17)
    cache.load_state_dict(state)
    assert not any(x.requires_grad for x in cache.state_dict().values())
    assert_behaves(cache, kind, state)
