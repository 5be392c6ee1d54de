"""Tests of masks: dense form, mask programs, value semantics (equality, hash, copies), errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import masks as M
from regard.masks._cut import cut as cut_mask
from regard.masks._mask import decode
from support import interpreter as program_interpreter
from support.strategies import Case, mask_strategy


def cut_of(case: Case, data: st.DataObject) -> tuple[Case, tuple[int, int, int, int]]:
    """Cuts a random rectangle (q0, q1, k0, k1) from a mask. Returns it and the rectangle."""
    q0, k0 = data.draw(st.integers(0, case.Lq)), data.draw(st.integers(0, case.Lk))
    q1, k1 = data.draw(st.integers(q0, case.Lq)), data.draw(st.integers(k0, case.Lk))
    mask = case.mask.cut(q0, q1, k0, k1, Lq=case.Lq, Lk=case.Lk)
    offset = (case.Lk - case.Lq if case.offset is None else case.offset) + q0 - k0
    return Case(mask, case.batch, case.heads, q1 - q0, k1 - k0, offset), (q0, q1, k0, k1)


ODD = (1, 3, 17, 63, 65)


def patterns(rows: int, columns: int) -> torch.Tensor:
    """Returns three patterns of blocks: nothing, everything, and a triangle."""
    ones = torch.ones(rows, columns)
    return torch.stack([ones * 0, ones, ones.tril()]).bool()


def examples() -> list[M.Mask]:
    """Returns one mask of every kind, for B = 2, H = 3, Lq = 5, Lk = 7."""
    return [
        M.Causal(),
        M.Window(2, 1),
        M.Window(None, None),
        M.Lengths(4),
        M.Lengths(torch.tensor([3, 7])),
        M.Documents(torch.tensor([0, 0, 1, 1, 1, 2, 2])),
        M.Documents(torch.tensor([[0, 0, 1, 1, 2]] * 2), torch.tensor([0, 0, 1, 1, 1, 2, 2])),
        M.Prefix(3),
        M.Global([0, 5]),
        M.Global(torch.tensor([[0, -1], [3, 6]])),
        M.RandomBlocks(2, 2, 7),
        M.Dilated(3),
        M.Dense(torch.rand(2, 1, 5, 7) > 0.5),
        M.Blocks(torch.rand(3, 3, 4) > 0.5, 2),
        M.BlockPatterns(torch.randint(3, (2, 1, 3, 3)), patterns(2, 3)),
        M.PerHead([M.Causal(), M.Window(1, 0), M.Prefix(2)]),
        M.Causal() & M.Lengths(torch.tensor([3, 7])),
        M.Window(1, 0) | M.Global([0]),
        ~M.Dilated(2),
    ]


EXAMPLES = examples()
each_example = pytest.mark.parametrize("mask", EXAMPLES, ids=[repr(m) for m in EXAMPLES])


@given(mask_strategy())
def test_program_matches_dense_mask(case: Case) -> None:
    program = case.mask.lower()
    tensors = program.bind(case.batch)
    assert all(len(t) in (1, case.B) and t.is_contiguous() for t in tensors)
    interpreted = program_interpreter.dense(
        program.code, tensors, case.B, case.heads, case.Lq, case.Lk, case.offsets
    )
    assert torch.equal(interpreted, case.dense())


@given(mask_strategy(), st.data())
def test_cut_is_a_rectangle_of_the_dense_mask(case: Case, data: st.DataObject) -> None:
    part, (q0, q1, k0, k1) = cut_of(case, data)
    assert torch.equal(part.dense(), case.dense()[..., q0:q1, k0:k1])
    tensors = part.mask.lower().bind(case.batch)
    args = (case.B, case.heads, part.Lq, part.Lk, part.offsets)
    assert torch.equal(program_interpreter.dense(part.mask.lower().code, tensors, *args), part.dense())


@given(mask_strategy(), st.data())
def test_cut_of_a_cut(case: Case, data: st.DataObject) -> None:
    part, (q0, _, k0, _) = cut_of(case, data)
    inner, (a0, a1, b0, b1) = cut_of(part, data)
    assert torch.equal(inner.dense(), case.dense()[..., q0 + a0 : q0 + a1, k0 + b0 : k0 + b1])


@given(mask_strategy(), st.data())
def test_cut_of_heads(case: Case, data: st.DataObject) -> None:
    h0 = data.draw(st.integers(0, case.heads - 1))
    h1 = data.draw(st.integers(h0 + 1, case.heads))
    mask = cut_mask(case.mask, (0, case.Lq), (0, case.Lk), case.Lq, case.Lk, (h0, h1))
    part = case._replace(mask=mask, heads=h1 - h0)
    assert torch.equal(part.dense(), case.dense()[:, h0:h1])
    inner, (q0, q1, k0, k1) = cut_of(part, data)
    assert torch.equal(inner.dense(), part.dense()[..., q0:q1, k0:k1])
    combined, (q0, q1, k0, k1) = cut_of(part._replace(mask=mask & ~M.Dilated(2)), data)
    allowed = part._replace(mask=~M.Dilated(2)).dense() & part.dense()
    assert torch.equal(combined.dense(), allowed[..., q0:q1, k0:k1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 2, 0, 4), r"cut\(q0, q1\): expected q0 <= q1, got 3 > 2"),
        ((0, 2, -1, 4), r"cut\(k0\): expected an integer from 0"),
        ((0, 2, 0, 9), r"cut\(k1\): expected at most Lk = 8, got 9"),
    ],
)
def test_cut_names_an_invalid_rectangle(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        M.Documents([0] * 8).cut(*arguments)


def test_cut_of_heads_has_the_size_of_its_rectangle() -> None:
    """Masks of distances are the same in every rectangle, but not a mask of the heads of one call."""
    heads = cut_mask(M.PerHead([M.Causal(), M.Window(0, 0)]), (0, 8), (0, 6), 8, 6, (0, 1))
    for mask in (heads, heads & M.Causal()):
        mask.cut(2, 6, 1, 4).check((1,), 1, 4, 3)
        with pytest.raises(ValueError, match="expected a call with Lq = 4, got 8"):
            mask.cut(2, 6, 1, 4).check((1,), 1, 8, 6)


def test_cut_of_random_blocks_needs_the_length() -> None:
    mask = M.RandomBlocks(1, 2) & M.Causal()
    with pytest.raises(ValueError, match=r"cut\(Lk\): expected Lk"):
        mask.cut(0, 4, 0, 4)
    assert repr(mask.cut(0, 4, 2, 6, Lk=8)) == "(RandomBlocks(1, 2, 0) & Causal()).cut(0, 4, 2, 6)"


def test_cut_applies_to_calls_of_its_size_alone() -> None:
    part = M.Prefix(3).cut(0, 4, 2, 6)
    with pytest.raises(ValueError, match="expected a call with Lk = 4, got 5"):
        part.to_dense(4, 5)
    assert M.Causal().cut(3, 5, 1, 9) == M.Causal()


@given(mask_strategy())
def test_check_accepts_generated_masks(case: Case) -> None:
    case.mask.check(case.batch, case.heads, case.Lq, case.Lk, case.offset)


@given(mask_strategy())
def test_copies_of_generated_masks_are_equal(case: Case) -> None:
    for twin in (pickle.loads(pickle.dumps(case.mask)), copy.deepcopy(case.mask), case.mask.to("cpu")):
        assert twin == case.mask
        assert hash(twin) == hash(case.mask)
        assert twin.lower().code == case.mask.lower().code
        assert repr(twin) == repr(case.mask)


@pytest.mark.parametrize("L", ODD)
def test_causal_is_bottom_right_aligned_by_default(L: int) -> None:
    assert torch.equal(M.Causal().to_dense(L, L), torch.ones(L, L).tril().bool())
    assert torch.equal(M.Causal().to_dense(L, L + 4), torch.ones(L, L + 4).tril(4).bool())
    assert torch.equal(M.Causal().to_dense(L, L + 4, offset=0), torch.ones(L, L + 4).tril().bool())


@pytest.mark.parametrize("L", ODD)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 1), (None, 3), (4, None), (100, 100)])
def test_window(L: int, left: int | None, right: int | None) -> None:
    ones = torch.ones(L, L, dtype=torch.bool)
    expected = ones.triu(-L if left is None else -left).tril(L if right is None else right)
    assert torch.equal(M.Window(left, right).to_dense(L, L), expected)


def test_offset_per_sample() -> None:
    mask, offsets = M.Causal(), torch.tensor([0, 2, 9])
    dense = mask.to_dense(3, 5, offsets)
    assert dense.shape == (3, 1, 3, 5)
    for b, offset in enumerate(offsets.tolist()):
        assert torch.equal(dense[b, 0], mask.to_dense(3, 5, offset))


def test_queries_outside_the_documents_are_fully_masked() -> None:
    dense = M.Documents([0, 0, 1]).to_dense(6, 3, offset=-2)
    assert dense.int().tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_global_tokens_are_full_rows_and_columns() -> None:
    dense = M.Global([1]).to_dense(3, 3)
    assert dense.int().tolist() == [[0, 1, 0], [1, 1, 1], [0, 1, 0]]
    assert not M.Global([]).to_dense(3, 3).any()
    assert not M.Global([-1]).to_dense(3, 3, offset=-1).any(), "padding is not position -1"


def test_global_tokens_are_sorted_without_repeats() -> None:
    assert M.Global([5, 0, 5, 3]).tokens.tolist() == [0, 3, 5]
    assert M.Global(torch.tensor([[4, -1, 2], [1, 1, 1]])).tokens.tolist() == [[2, 4], [-1, 1]]
    marks = torch.tensor([[True, False, True], [False, False, True]])
    assert M.Global(marks) == M.Global(torch.tensor([[0, 2], [-1, 2]]))


def test_random_blocks_are_reproducible() -> None:
    dense = M.RandomBlocks(2, 1, 1).to_dense(4, 9, offset=-1)
    assert dense.sum(-1).tolist() == [2] * 4
    expected = [program_interpreter.random_blocks(1, row, 9, 2) for row in range(-1, 3)]
    assert [set(keys.nonzero().flatten().tolist()) for keys in dense] == expected


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (M.Causal(), (5, 7)),
        (M.Lengths(3), (5, 7)),
        (M.Prefix(3), (5, 7)),
        (M.Lengths(torch.tensor([3, 4])), (2, 1, 5, 7)),
        (M.Lengths(torch.tensor([[3, 4]])), (1, 2, 1, 5, 7)),
        (M.PerHead([M.Causal()] * 3), (3, 5, 7)),
        (M.PerHead([M.Causal(), M.Lengths([1, 2])]), (2, 2, 5, 7)),
        (M.Dense(torch.ones(1, 7, dtype=torch.bool)), (5, 7)),
        (M.Dense(torch.ones(2, 1, 1, 7, dtype=torch.bool)) & M.Causal(), (2, 1, 5, 7)),
    ],
)
def test_dense_has_only_the_dims_that_vary(mask: M.Mask, shape: tuple[int, ...]) -> None:
    assert mask.to_dense(5, 7).shape == shape


@each_example
def test_dense_can_be_empty(mask: M.Mask) -> None:
    if mask._sizes() == (0, 0):
        assert mask.to_dense(0, 0, 0).shape[-2:] == (0, 0)


def test_to_dense_returns_a_copy() -> None:
    mask = M.Dense(torch.ones(2, 2, dtype=torch.bool))
    mask.to_dense(2, 2)[:] = False
    assert mask.to_dense(2, 2).all()


def test_program_codes() -> None:
    big = 2**62
    assert M.Causal().lower().code == (1, 4, big, 0)
    assert M.Window(3, None).lower().code == (1, 4, 3, big)
    assert M.Lengths(3).lower().code == (2, 3, 0)
    assert M.Documents([1, 2], [1, 2, 3]).lower().code == (3, 4, 0, 1)
    assert M.Documents([1, 2]).lower().code == (4, 3, 0)
    assert M.Prefix(5).lower().code == (5, 3, 5)
    assert M.Global([5]).lower().code == (6, 3, 0)
    assert M.RandomBlocks(2, 16, 2**64 - 1).lower().code == (7, 5, 2, 16, -1)
    assert M.Dilated(4).lower().code == (8, 3, 4)
    assert M.Dense(torch.ones(2, 2).bool()).lower().code == (9, 3, 0)
    assert M.Blocks(torch.ones(2, 2).bool(), 8).lower().code == (10, 4, 0, 8)
    assert M.BlockPatterns([[0, 2]], patterns(4, 8)).lower().code == (11, 4, 0, 1)
    assert M.PerHead([M.Prefix(1), M.Prefix(2)]).lower().code == (12, 8, 5, 3, 1, 5, 3, 2)
    assert (M.Dilated(2) | ~M.Prefix(1)).lower().code == (14, 10, 8, 3, 2, 15, 5, 5, 3, 1)


def test_and_puts_cheap_masks_first() -> None:
    mask = M.Dilated(2) & M.Global([0]) & M.Lengths(3) & M.Causal()
    nodes = list(program_interpreter.children(list(mask.lower().code[2:])))
    assert [node[0] for node in nodes] == [M.Op.LENGTHS, M.Op.WINDOW, M.Op.GLOBAL, M.Op.DILATED]


def test_programs_are_cached_and_share_equal_tensors() -> None:
    ids = torch.tensor([0, 0, 1])
    mask = M.Documents(ids, ids) | (M.Documents(ids) & M.Lengths(3))
    program = mask.lower()
    assert program is mask.lower()
    assert program.cores == (1, 0)
    assert [tuple(t.shape) for t in program.tensors] == [(3,), ()]


def test_bind_expands_tensors_to_the_batch() -> None:
    keep = torch.rand(3, 1, 4, 5) > 0.5
    program = (M.Lengths(torch.tensor([[1], [2]])) & M.Dense(keep) & M.Global([0])).lower()
    lengths, tokens, dense = program.bind((2, 3))
    assert lengths.tolist() == [1, 1, 1, 2, 2, 2]
    assert torch.equal(dense, torch.cat([keep, keep]))
    assert tokens.tolist() == [[0]]
    with pytest.raises(ValueError, match=r"batch dims broadcastable to \(2,\), got \(2, 1\)"):
        program.bind((2,))


# Value semantics


@each_example
def test_masks_are_frozen(mask: M.Mask) -> None:
    with pytest.raises(AttributeError):
        mask.left = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        del mask.left  # type: ignore[attr-defined]


def test_different_masks_differ() -> None:
    for a, one in enumerate(EXAMPLES):
        for b, other in enumerate(EXAMPLES):
            assert (one == other) is (a == b)
    assert len({*EXAMPLES, *examples()[:3]}) == len(EXAMPLES)


def test_equality_compares_tensor_values() -> None:
    assert M.Lengths([1, 2]) == M.Lengths(torch.tensor([1, 2], dtype=torch.int32))
    assert M.Lengths([1, 2]) != M.Lengths([2, 1])
    assert hash(M.Lengths([1, 2])) == hash(M.Lengths(torch.tensor([1, 2])))
    assert M.Causal() != M.Window(None, 0)
    assert M.Causal() != "Causal()"


def test_masks_copy_their_tensors() -> None:
    lengths = torch.tensor([1, 2])
    mask = M.Lengths(lengths)
    lengths += 5
    assert mask == M.Lengths([1, 2])


def test_operators_flatten() -> None:
    a, b, c = M.Causal(), M.Prefix(1), M.Dilated(2)
    assert (a & b) & c == a & (b & c) == M.And(a, b, c)
    assert (a | b) | c == M.Or(a, b, c)
    assert ~~a == a
    assert repr((a | b) & ~c) == "(Causal() | Prefix(1)) & ~Dilated(2)"
    assert repr(~(a & b)) == "~(Causal() & Prefix(1))"


def test_and_joins_windows() -> None:
    causal, prefix = M.Causal(), M.Prefix(1)
    assert causal & M.Window(4, 0) == M.Window(4, 0) & causal == M.Window(4, 0)
    assert repr(causal & M.Window(4, 2)) == "Window(4, 0)"
    assert M.Window(None, 3) & M.Window(5, None) & M.Window(2, 7) == M.Window(2, 3)
    assert causal & causal == causal & M.Window(None, None) == causal
    assert (
        (M.Window(3, 0) & prefix) & M.Window(2, 0)
        == M.Window(3, 0) & (prefix & M.Window(2, 0))
        == M.Window(2, 0) & prefix
    )
    assert (M.Window(3, 0) & prefix & M.Window(2, 0)).lower().code == (M.Window(2, 0) & prefix).lower().code
    assert M.And(causal, M.Window(4, 0)).masks == (M.Window(4, 0),)
    assert torch.equal(M.And(causal, M.Window(2, 1)).to_dense(5, 7), M.Window(2, 0).to_dense(5, 7))
    assert (causal | M.Window(4, 0)).masks == (causal, M.Window(4, 0))


def test_kinds() -> None:
    distance, position, index = M.MaskKind.DISTANCE, M.MaskKind.POSITION, M.MaskKind.INDEX
    assert (M.Causal() | ~M.Dilated(2)).kinds == {distance}
    assert M.PerHead([M.Window(1, 0), M.Prefix(2)]).kinds == {distance, position}
    assert M.Global([0]).kinds == M.RandomBlocks(1, 2).kinds == {position}
    assert M.Lengths(3).kinds == M.Documents([0]).kinds == M.Dense(torch.ones(1, 1) > 0).kinds == {index}


@each_example
def test_decode_inverts_lower(mask: M.Mask) -> None:
    program = mask.lower()
    decoded = decode(program.code, program.tensors)
    assert decoded.lower().code == program.code
    assert torch.equal(decoded.to_dense(5, 7), mask.to_dense(5, 7))


def test_reprs_are_short() -> None:
    assert repr(M.Global([3, 1])) == "Global([1, 3])"
    assert repr(M.Lengths(4)) == "Lengths(4)"
    assert repr(M.Dense(torch.ones(2, 3).bool())) == "Dense(<bool (2, 3)>)"
    assert repr(M.Documents(torch.arange(100))) == "Documents(<int64 (100,)>)"
    assert repr(M.PerHead([M.Causal(), M.Window(2, 0)])) == "PerHead([Causal(), Window(2, 0)])"


def test_masks_move_between_devices() -> None:
    mask = M.Lengths([1, 2]) & M.PerHead([M.Causal(), M.Global([0])])
    assert mask.device.type == "cpu"
    assert all(t.device.type == "meta" for t in mask.to("meta").lower().tensors)
    assert M.Causal().to("meta") == M.Causal()


def test_lists_become_cpu_tensors_whatever_the_default_device() -> None:
    with torch.device("meta"):
        mask = M.longformer((1, 1), global_tokens=[0]) & M.Lengths([1, 2]) & M.Documents([0, 0, 1])
    assert all(t.device.type == "cpu" for t in mask.lower().tensors)
    assert mask == M.longformer((1, 1), global_tokens=[0]) & M.Lengths([1, 2]) & M.Documents([0, 0, 1])


def test_dense_takes_a_mask_of_the_keys() -> None:
    keep = torch.tensor([True, False, True])
    assert M.Dense(keep) == M.Dense(keep[None])
    assert torch.equal(M.Dense(keep).to_dense(2, 3), keep.expand(2, 3))


def test_masks_work_on_fake_tensors() -> None:
    with FakeTensorMode():
        mask = M.Lengths(torch.tensor([3, 4])) & M.Global(torch.tensor([[0, 1], [2, 3]])) & M.Causal()
        mask.check((2,), 4, 5, 7)
        assert hash(mask) == hash(mask)
        assert mask == mask
        assert [tuple(t.shape) for t in mask.lower().bind((2,))] == [(2,), (2, 2)]


# Errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: M.Window(-3, 0),
            ValueError,
            r"Window\(left\): expected a distance >= 0, or None for no limit, got -3",
        ),
        (
            lambda: M.Window(4),
            TypeError,
            r"Window: .* write sliding\(4\) for 4 keys.* Window\(left=4, right=0\)",
        ),
        (
            lambda: M.Window(left=4),
            TypeError,
            r"Window: expected two distances, got only 4; write sliding\(4\)",
        ),
        (lambda: M.Window(None), TypeError, r"Window: expected two distances.*, got only NoneType None"),
        (lambda: M.create_window_mask(9, 4), TypeError, r"Window: expected two distances, got only 4"),
        (
            lambda: M.longformer(4),
            ValueError,
            r"longformer\(window\): .* odd number of keys.* is 5 or \(2, 2\)",
        ),
        (lambda: M.longformer(0), ValueError, r"longformer\(window\): expected an integer from 1"),
        (lambda: M.longformer([1, 2, 3]), ValueError, r"longformer\(window\): .*distances \(left, right\)"),
        (lambda: M.longformer((1, 2, 3)), ValueError, r"longformer\(window\): .*distances \(left, right\)"),
        (lambda: M.Window(1, -1), ValueError, r"Window\(right\)"),
        (lambda: M.Window(1.5, 0), TypeError, r"Window\(left\): expected an int, got float 1.5"),
        (lambda: M.Window(True, 0), TypeError, r"Window\(left\): expected an int, got bool True"),
        (lambda: M.Window(2**62, 0), ValueError, r"Window\(left\)"),
        (lambda: M.Prefix(-1), ValueError, r"Prefix\(n\)"),
        (lambda: M.Prefix(torch.tensor(3)), TypeError, r"Prefix\(n\): expected an int, got int64 tensor"),
        (lambda: M.Lengths(-1), ValueError, r"Lengths\(n\): expected lengths >= 0, got -1"),
        (lambda: M.Lengths(torch.tensor([2, -4])), ValueError, r"Lengths\(n\).* got -4"),
        (
            lambda: M.Lengths(2.0),
            TypeError,
            r"Lengths\(n\): expected integers, got float32 tensor of shape \(\)",
        ),
        (
            lambda: M.Lengths(True),
            TypeError,
            r"Lengths\(n\): expected integers, got bool tensor of shape \(\)",
        ),
        (lambda: M.Lengths("many"), TypeError, r"Lengths\(n\): expected a tensor or a list, got str 'many'"),
        (
            lambda: M.Documents(torch.rand(3)),
            TypeError,
            r"Documents\(q_ids\): expected integers, got float32",
        ),
        (lambda: M.Documents(3), ValueError, r"Documents\(q_ids\): expected at least 1 dimensions"),
        (lambda: M.Documents([1], [0.5]), TypeError, r"Documents\(k_ids\)"),
        (lambda: M.Global([-2]), ValueError, r"Global\(tokens\): expected positions >= 0, or -1 .*, got -2"),
        (lambda: M.Global([0.5]), TypeError, r"Global\(tokens\)"),
        (lambda: M.RandomBlocks(0, 4, 0), ValueError, r"RandomBlocks\(per_row\).* from 1 "),
        (lambda: M.RandomBlocks(1, 0, 0), ValueError, r"RandomBlocks\(block\)"),
        (
            lambda: M.RandomBlocks(1, 1, 2**64),
            ValueError,
            r"RandomBlocks\(seed\): expected an int of 64 bits",
        ),
        (lambda: M.RandomBlocks(1, 1, 0.5), TypeError, r"RandomBlocks\(seed\): expected an int"),
        (lambda: M.Dilated(0), ValueError, r"Dilated\(step\)"),
        (lambda: M.Dense(torch.ones(2, 2, dtype=torch.int64)), TypeError, r"Dense\(keep\): expected a bool"),
        (lambda: M.Dense(torch.ones(2, 2)), TypeError, r"float tensor as `bias`"),
        (lambda: M.Dense(torch.tensor(True)), ValueError, r"Dense\(keep\): expected at least 1 dim"),
        (lambda: M.Blocks(torch.ones(2, 2).bool(), 0), ValueError, r"Blocks\(block\)"),
        (
            lambda: M.BlockPatterns([[0]], patterns(2, 2)[:1]),
            ValueError,
            r"expected \(n >= 2, rows, columns\)",
        ),
        (lambda: M.BlockPatterns([[0]], ~patterns(2, 2)), ValueError, r"expected all False, all True, ..."),
        (lambda: M.BlockPatterns([[3]], patterns(2, 2)), ValueError, r"table\): expected patterns 0 to 2"),
        (lambda: M.PerHead([]), ValueError, r"PerHead\(masks\).* empty list"),
        (lambda: M.PerHead(M.Causal()), TypeError, r"PerHead\(masks\): expected a list.*, got Causal"),
        (lambda: M.PerHead([M.Causal(), 3]), TypeError, r"PerHead\(masks\[1\]\): expected a mask, got int"),
        (lambda: M.Causal() & torch.ones(2, 2).bool(), TypeError, r"wrap the bool tensor: masks.Dense"),
        (lambda: torch.ones(2, 2).bool() | M.Causal(), TypeError, r"wrap the bool tensor: masks.Dense"),
        (lambda: M.Causal() & 3, TypeError, r"unsupported operand"),
        (lambda: M.Causal() and M.Causal(), TypeError, r"combine masks with &, \|, ~"),
        (lambda: M.And(M.Causal()), ValueError, r"And\(\*masks\): expected at least two masks, got 1"),
        (lambda: M.Or(M.Causal(), 1), TypeError, r"Or\(\*masks\): expected masks, got int"),
        (
            lambda: M.Prefix(3) & M.Causal,
            TypeError,
            r"&: expected a mask, got the class Causal; call it: Causal\(\)",
        ),
        (lambda: M.Causal | M.Prefix(3), TypeError, r"\|: expected a mask, got the class Causal; call it"),
        (
            lambda: M.PerHead([M.Causal]),
            TypeError,
            r"PerHead\(masks\[0\]\): .* got the class Causal; call it",
        ),
        (lambda: M.Not(M.Causal), TypeError, r"Not\(mask\): .* got the class Causal; call it"),
        (lambda: M.Not(1), TypeError, r"Not\(mask\): expected a mask, got int"),
        (lambda: M.Causal().to_dense(-1, 3), ValueError, r"Lq: expected"),
        (
            lambda: M.Causal().to_dense(2, 3, 0.5),
            TypeError,
            r"offset: expected an int or a \(B,\) int tensor",
        ),
        (lambda: M.Causal().to_dense(2, 3, torch.rand(2)), TypeError, r"offset: expected integers"),
    ],
)
def test_constructors_reject_wrong_arguments(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@each_example
def test_check_accepts_matching_sizes(mask: M.Mask) -> None:
    mask.check((2,), 3, 5, 7)
    mask.check((4, 2), 3, 5, 7, torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (M.Lengths([1, 2, 3]), r"Lengths\(n\): expected shape broadcastable to batch \(2,\), got \(3,\)"),
        (M.Lengths([1, 8]), r"Lengths\(\[1, 8\]\): expected lengths up to Lk = 7, got 8"),
        (~M.PerHead([M.Lengths(9)] * 3), r"expected lengths up to Lk = 7, got 9"),
        (M.Documents([0] * 5), r"Documents\(q_ids\): expected shape \(..., Lk = 7\) .*, got \(5,\)"),
        (M.Documents([0] * 5, [0] * 6), r"Documents\(k_ids\): expected .*, got \(6,\)"),
        (M.Documents([[0] * 7] * 3), r"batch \(2,\)"),
        (M.Global([[0]] * 3), r"Global\(tokens\): expected shape \(..., n\) .* batch \(2,\), got \(3, 1\)"),
        (M.Dense(torch.ones(5, 6).bool()), r"^mask: expected .* 5, 7\) .*, got \(5, 6\)"),
        (M.Dense(torch.ones(2, 1, 2, 5, 7).bool()), r"got \(2, 1, 2, 5, 7\); the third dim .* is the heads"),
        (
            M.Dense(torch.ones(2, 5, 7).bool()),
            r"mask: .* got \(2, 5, 7\); write mask\[:, None\] .* mask\[None\]",
        ),
        (M.Causal() & ~M.Dense(torch.ones(3, 5, 7).bool()), r"mask\[:, None\] .* mask\[None\]"),
        (M.Dense(torch.ones(5, 1, 5, 7).bool()), r"batch \(2,\)"),
        (
            M.Blocks(torch.ones(3, 3).bool(), 2),
            r"Blocks\(table, block=2\): expected .* 3, 4\) .*, got \(3, 3\)",
        ),
        (M.Blocks(torch.ones(1, 4).bool(), 2), r"Blocks\(table, block=2\): expected .*, got \(1, 4\)"),
        (
            M.BlockPatterns([[0] * 4] * 3, patterns(2, 3)),
            r"BlockPatterns\(table\), block=\(2, 3\): expected .* 3, 3\) .*, got \(3, 4\)",
        ),
        (M.PerHead([M.Causal()] * 2), r"PerHead\(masks\): expected Hq = 3 masks, got 2"),
        (M.Causal() & ~M.PerHead([M.Causal()] * 4), r"PerHead\(masks\): expected Hq = 3 masks, got 4"),
    ],
)
def test_check_rejects_other_sizes(mask: M.Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.check((2,), 3, 5, 7)


def test_check_reads_tensor_values_once() -> None:
    mask = M.Lengths([3, 4]) & M.Causal()
    mask.check_values((2,), 1, 4, 4)
    mask.masks[0].n.fill_(99)
    mask.check_values((2,), 1, 4, 4)
    mask.check_shapes((2,), 1, 4, 4)


def test_check_accepts_positions_beyond_the_keys() -> None:
    (M.Global([100]) | M.Prefix(50)).check((), 1, 2, 3)


# Patterns


def test_a_window_as_one_number_counts_keys() -> None:
    """Wherever a single number gives a window, a query attends to that many keys, its own included."""
    L, n = 11, 5
    q, k = torch.randn(2, L, 1, 4)  # packed: (total, H, D)
    eye = torch.eye(L)[:, None]  # with one-hot values, outputs are weights
    heads_first = [x[None].transpose(1, 2) for x in (q, k, eye)]
    cache, latest = regard.cache.KVCache(1, 1, 4, L), regard.cache.SlidingCache(1, 1, 4, L, window=n)
    seen = {
        "sliding": regard.attention(*heads_first, mask=M.sliding(n))[0, 0],
        "longformer": regard.attention(*heads_first, mask=M.longformer(n))[0, 0],
        "streaming": regard.attention(*heads_first, mask=M.streaming(n, 0))[0, 0],
        "varlen_attention": regard.packing.varlen_attention(q, k, eye, [0, L], window=n)[:, 0],
        "attend": cache.attend(*heads_first, window=n)[0, 0],
        "SlidingCache": latest.attend(*heads_first)[0, 0],
    }
    for name, weights in seen.items():
        assert (weights > 0).sum(-1).max() == n, name
        assert (weights.diagonal() > 0).all(), name
    layer = regard.cost.AttentionSpec(8, 2, window=n)
    assert layer.most_kept == n


def test_named_patterns() -> None:
    assert M.sliding(4) == M.Window(3, 0)
    assert M.streaming(4, 2) == (M.Window(3, 0) | M.Prefix(2)) & M.Causal()
    assert M.prefix_lm(3) == M.Causal() | M.Prefix(3)
    assert M.longformer(5) == M.longformer((2, 2)) == M.Window(2, 2)
    assert M.longformer(1) == M.Window(0, 0)
    assert M.longformer(4, causal=True) == M.sliding(4)
    assert M.longformer(4, dilation=3, causal=True) == M.Window(9, 0) & M.Dilated(3)
    dilated = M.longformer((2, 2), [0], dilation=3, causal=True)
    assert dilated == ((M.Window(6, 6) & M.Dilated(3)) | M.Global([0])) & M.Causal()
    big = M.bigbird(4, window=3, random=1, global_blocks=1, seed=5)
    assert big == M.Window(6, 6) | M.RandomBlocks(1, 4, 5) | M.Global([0, 1, 2, 3])
    assert M.bigbird(4, random=0, global_blocks=0) == M.Window(6, 6)
    with pytest.raises(ValueError, match=r"sliding\(window\)"):
        M.sliding(0)
    with pytest.raises(TypeError, match=r"bigbird\(random\)"):
        M.bigbird(4, random=0.5)  # type: ignore[arg-type]


def test_chunked_masks_other_chunks() -> None:
    L, size = 17, 5
    i, j = torch.arange(L)[:, None], torch.arange(L)
    assert torch.equal(M.chunked(size, L).to_dense(L, L), (j <= i) & (i // size == j // size))


@pytest.mark.parametrize("L", ODD)
def test_tutorial_helpers(L: int) -> None:
    ones = torch.ones(L, L, dtype=torch.bool)
    tokens = torch.randint(0, 3, (2, L))
    real = (tokens != 0)[:, None, None] & ones
    for mask, expected in (
        (M.create_causal_mask(L), ones.tril()),
        (M.create_causal_mask(L, L), ones.tril()),
        (M.create_window_mask(L, 2, 1), ones.tril(1).triu(-2)),
        (M.create_prefix_mask(L, 2), ones.tril() | (torch.arange(L) < 2)),
        (M.create_padding_mask(tokens), real),
        (M.create_decoder_mask(tokens), real.tril()),
        (M.create_document_mask(tokens), (tokens[:, :, None] == tokens[:, None])[:, None]),
    ):
        assert isinstance(mask, M.Mask)
        assert torch.equal(mask.to_dense(L, L), expected)
    assert torch.equal(M.create_causal_mask(2, 4).to_dense(2, 4), torch.ones(2, 4).tril(2).bool())
    with pytest.raises(ValueError, match=r"tokens: expected shape \(B, L\)"):
        M.create_padding_mask(tokens[0])
    with pytest.raises(TypeError, match=r"expected a tensor or a list, got str 'a b'"):
        M.create_decoder_mask("a b")  # type: ignore[arg-type]
