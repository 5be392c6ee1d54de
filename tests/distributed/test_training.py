"""The training example: the losses do not depend on the number of processes."""

from __future__ import annotations

import pytest
import torch

from support import HAVE_CORE
from support.distributed import train_example
from support.ranks import Ranks


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
def test_same_losses_on_1_2_and_4_ranks(ranks: Ranks) -> None:
    one, two, four = (ranks.run(n, train_example, 24) for n in (1, 2, 4))
    assert one[0][-1] < 0.8 * one[0][0]
    for losses in (*two, *four):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(one[0]), rtol=1e-4, atol=0)
