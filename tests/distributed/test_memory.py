"""The memory of a rank: its part of a single process's memory, and two blocks of keys and values."""

from __future__ import annotations

import pytest

from support import HAVE_CORE
from support.distributed_memory import D, H, L, peak_of_rank, peak_of_whole
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


@pytest.mark.parametrize("work", ["forward", "backward"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_ring_needs_its_part_and_two_blocks(ranks: Ranks, n: int, work: str) -> None:
    (whole,) = ranks.run(1, peak_of_whole, work)
    block = 2 * H * (L // n) * D * 4  # keys and values, float32
    largest = max(ranks.run(n, peak_of_rank, work))
    assert largest <= whole / n + 2 * block
