"""Compares our masks for Transformers with the dense masks of Transformers.

Our masks hold no tensor of size Lq x Lk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as hf

from regard.hf._masks import mask_tensor
from regard.hf._standin import MaskTensor
from regard.masks import Dense, Mask

pytestmark = pytest.mark.usefixtures("one_thread")


def ids(B: int, L: int, first: int = 0) -> Tensor:
    """Returns ids (B, L) that ascend in steps of 0 or 1."""
    return (torch.rand(B, L) < 0.3).cumsum(1) + first


def causal(B: int, L: int, W: int) -> Any:
    return hf.causal_mask_function


def everything(B: int, L: int, W: int) -> Any:
    return hf.bidirectional_mask_function


def window(B: int, L: int, W: int) -> Any:
    return hf.sliding_window_causal_mask_function(W)


def around(B: int, L: int, W: int) -> Any:
    return hf.sliding_window_bidirectional_mask_function(W)


def chunk(B: int, L: int, W: int) -> Any:
    return hf.chunked_causal_mask_function(W, torch.randint(0, 4, (B,)))


def packed(B: int, L: int, W: int) -> Any:
    return hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(ids(B, L)))


def blocks(B: int, L: int, W: int) -> Any:
    return hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids(B, L, -1)))


def prefix(B: int, L: int, W: int) -> Any:
    """Returns the causal mask function, combined by OR with a user's function for a prefix."""
    return hf.or_masks(hf.causal_mask_function, lambda b, h, q, kv: kv < W)


KINDS: list[Callable[[int, int, int], Any]] = [
    causal, everything, window, around, chunk, packed, blocks, prefix,
]  # fmt: skip


def real_tokens(B: int, L: int, kind: str) -> Tensor | None:
    if kind == "none":
        return None
    at, n = torch.arange(L), torch.randint(0, L, (B, 1))
    return {"left": at >= n, "right": at < n + 1, "holes": torch.rand(B, L) < 0.7, "all": at >= 0 * n}[kind]


def draw_sizes(rng: random.Random) -> dict[str, Any]:
    """Draws sizes as caches pass them: queries after cached keys, a key offset, unused slots."""
    Lq, past, unused = rng.randint(1, 40), rng.choice([0, 0, rng.randint(1, 40)]), rng.choice([0, 0, 5])
    kv_offset = rng.choice([0, 0, rng.randint(0, past)])
    return {
        "batch_size": rng.randint(1, 3), "q_length": Lq, "kv_length": past - kv_offset + Lq + unused,
        "q_offset": past, "kv_offset": kv_offset,
    }  # fmt: skip


def check(kind: Callable[[int, int, int], Any], rng: random.Random) -> int:
    sizes = draw_sizes(rng)
    tokens = sizes["kv_offset"] + sizes["kv_length"]
    B, W = sizes["batch_size"], rng.randint(1, 12)
    function = kind(B, tokens, W)
    keep = real_tokens(B, tokens, rng.choice(["none", "left", "right", "holes", "all"]))
    mask_options = {"mask_function": function, "attention_mask": keep, "use_vmap": kind is prefix}
    skips = {"allow_is_bidirectional_skip": kind in (everything, around)}
    if kind is around:
        skips["local_size"] = W
    expected = hf.sdpa_mask(**sizes, **mask_options, allow_is_causal_skip=False)
    if rng.random() < 0.5:
        sizes["q_offset"] = torch.tensor(sizes["q_offset"])  # static caches pass a tensor
    mask = mask_tensor(**sizes, **mask_options, **skips, dtype=torch.float32, config=None)
    if mask is None:
        assert sizes["q_length"] == 1 or skips["allow_is_bidirectional_skip"]
        assert expected.all()
        return expected.numel()
    assert isinstance(mask, MaskTensor)
    assert mask.shape == expected.shape
    assert torch.equal(mask.dense(), expected), (kind.__name__, sizes, W)
    if kind is not prefix and mask.mask is not None:
        assert all(x.numel() <= 3 * 90 for x in mask.mask.lower().tensors)
    return expected.numel()


@pytest.mark.parametrize("times", [60, pytest.param(600, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_masks_match_transformers(kind: Callable[[int, int, int], Any], times: int) -> None:
    rng = random.Random(kind.__name__)
    assert sum(check(kind, rng) for _ in range(times)) > 1000 * times // 4


@pytest.mark.parametrize("W", range(1, 13))
def test_window_and_chunk_at_every_offset(W: int) -> None:
    for past in range(28):
        for kind in (window, chunk):
            function = kind(1, 40, W)
            sizes = {"batch_size": 1, "q_length": 12, "kv_length": 12 + past, "q_offset": past}
            expected = hf.sdpa_mask(**sizes, mask_function=function, allow_is_causal_skip=False)
            mask = mask_tensor(**sizes, mask_function=function)
            assert mask is not None
            assert torch.equal(mask.clone(), expected)


@pytest.mark.parametrize("W", [0, -1, -5])
def test_a_window_that_allows_only_later_keys(W: int) -> None:
    """Qwen2-MoE without a window creates the mask of a window of 0, but does not use it."""
    for function in (window(1, 9, W), hf.sliding_window_overlay(W)):
        sizes = {"batch_size": 2, "q_length": 5, "kv_length": 9, "q_offset": 3}
        expected = hf.sdpa_mask(**sizes, mask_function=function, allow_is_causal_skip=False)
        mask = mask_tensor(**sizes, mask_function=function)
        assert mask is not None
        assert torch.equal(mask.clone(), expected)


def atoms(mask: Mask) -> list[Mask]:
    return [atom for child in mask._children() for atom in atoms(child)] or [mask]


def test_known_mask_functions_need_no_dense_mask() -> None:
    keep = torch.arange(50) >= torch.tensor([[0], [7]])
    for kind in (window, chunk, packed, blocks):
        mask: Any = mask_tensor(2, 50, 50, mask_function=kind(2, 50, 5), attention_mask=keep)
        assert not any(isinstance(atom, Dense) for atom in atoms(mask.mask))
        assert max(x.numel() for x in mask.mask.lower().tensors) <= 100


def test_a_query_that_attends_to_all_keys_needs_no_mask() -> None:
    assert mask_tensor(2, 1, 9, q_offset=8) is None
    assert mask_tensor(2, 1, 9, q_offset=8, mask_function=hf.sliding_window_causal_mask_function(9)) is None
    assert (
        mask_tensor(2, 1, 9, q_offset=8, mask_function=hf.sliding_window_causal_mask_function(8)) is not None
    )
    assert mask_tensor(2, 1, 9, q_offset=8, allow_is_causal_skip=False) is not None


# MaskTensor


def causal_mask_tensor() -> MaskTensor:
    mask = mask_tensor(2, 4, 4)
    assert isinstance(mask, MaskTensor)
    return mask


def test_operations_use_the_dense_tensor() -> None:
    mask, expected = causal_mask_tensor(), torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4)
    assert (mask.dtype, tuple(mask.shape), mask.ndim, mask.device.type) == (
        torch.bool,
        (2, 1, 4, 4),
        4,
        "cpu",
    )
    assert torch.equal(mask[:, :, :, :3], expected[:, :, :, :3])
    assert torch.equal(~mask, ~expected)
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([expected, expected], -1))
    assert torch.equal(mask.to(torch.float32), expected.float())
    assert type(mask.clone()) is Tensor


def test_a_mask_tensor_cannot_be_changed_in_place() -> None:
    with pytest.raises(RuntimeError, match=r"MaskTensor stands for a tensor .* change a clone"):
        causal_mask_tensor().fill_(True)
    assert torch.zeros(2, 1, 4, 4).copy_(causal_mask_tensor()).sum() == 20
