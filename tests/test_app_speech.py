"""Spoken digits: strings, CTC, time warping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from regard.apps.speech import Recordings, accuracy, strings, warped
from regard.models.recogniser import Recogniser, ctc, greedy


def spelled(path: tuple[int, ...]) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol]


def test_ctc_is_the_sum_over_all_ways() -> None:
    torch.manual_seed(0)
    chances = torch.rand(1, 5, 3).softmax(-1)
    for spoken in ([1], [1, 2], [2, 2], [1, 2, 1]):
        ways = [path for path in itertools.product(range(3), repeat=5) if spelled(path) == spoken]
        total = sum(math.prod(chances[0, t, s].item() for t, s in enumerate(path)) for path in ways)
        found = ctc(chances.log(), torch.tensor([5]), [torch.tensor(spoken)])
        assert found.item() * len(spoken) == pytest.approx(-math.log(total), rel=1e-5)


def test_greedy_joins_repetitions_and_ends_with_the_recording() -> None:
    best = torch.tensor([[0, 2, 2, 0, 2, 1, 1, 3], [3, 3, 0, 0, 0, 1, 1, 1]])
    log_chances = torch.nn.functional.one_hot(best, 4).float()
    assert greedy(log_chances, torch.tensor([8, 5])) == [[2, 2, 1, 3], [3]]


def test_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Recogniser(13, 10, d_model=16, heads=2, layers=2).eval()
    of = Recordings([torch.randn(n, 13) for n in (9, 17)], torch.tensor([3, 8]))
    together = strings(of, [torch.tensor([0]), torch.tensor([1])])
    alone = strings(of, [torch.tensor([0])])
    found = model(together.frames, together.lengths)
    assert found.shape == (2, 17, 11)
    torch.testing.assert_close(found[:1, :9], model(alone.frames, alone.lengths), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 17))


def test_strings_are_joined_recordings() -> None:
    of = Recordings([torch.full((n, 2), float(n)) for n in (1, 2, 3)], torch.tensor([4, 5, 6]))
    made = strings(of, [torch.tensor([2, 0]), torch.tensor([1])])
    assert made.frames[:, :, 0].tolist() == [[3, 3, 3, 1], [2, 2, 0, 0]]
    assert made.lengths.tolist() == [4, 2]
    assert [own.tolist() for own in made.spoken] == [[7, 5], [6]]


class Says(torch.nn.Module):
    """Hears in each frame what the frame's first number says."""

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(frames[..., 0].long(), 11).float()


def test_accuracy_wants_exactly_the_digit() -> None:
    """Symbol 5 is digit 4; a second symbol or none is wrong."""
    heard = ([5, 5, 0], [5, 0, 5], [0, 0, 0], [5, 3, 3])
    frames = [torch.tensor(own).float()[:, None] for own in heard]
    assert accuracy(Says(), Recordings(frames, torch.tensor([4, 4, 4, 4]))) == 0.25


def by_cells(a: Tensor, b: Tensor) -> float:
    total = {(-1, -1): 0.0}
    for i, j in itertools.product(range(len(a)), range(len(b))):
        came = ((i - 1, j), (i, j - 1), (i - 1, j - 1))
        total[i, j] = (a[i] - b[j]).norm().item() + min(total.get(place, math.inf) for place in came)
    return total[len(a) - 1, len(b) - 1] / (len(a) + len(b))


def test_warped_is_the_cheapest_path() -> None:
    torch.manual_seed(0)
    one, others = torch.randn(7, 3), [torch.randn(n, 3) for n in (1, 5, 7, 11)]
    expected = torch.tensor([by_cells(one, other) for other in others])
    torch.testing.assert_close(warped(one, others), expected, atol=1e-5, rtol=1e-5)
    slow = one.repeat_interleave(2, 0)
    assert warped(one, [slow]).item() == pytest.approx(0.0, abs=1e-4)
