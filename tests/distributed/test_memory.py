"""The memory of a rank: its part of a single process's memory, and two blocks of keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import HAVE_CORE
from support.distributed_memory import D, H, L, peak_of_rank, peak_of_whole
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes whose memory shrinks when a tensor is freed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
        patch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**16))
        ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("work", ["forward", "backward"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_ring_needs_its_part_and_two_blocks(pool: Ranks, n: int, work: str) -> None:
    (whole,) = pool.run(1, peak_of_whole, work)
    block = 2 * H * (L // n) * D * 4  # keys and values, float32
    largest = max(pool.run(n, peak_of_rank, work))
    assert largest <= whole / n + 2 * block
