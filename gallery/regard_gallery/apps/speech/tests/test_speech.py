"""Spoken digits: strings, CTC, time warping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from regard_gallery.apps._parts.blocks import Blocks
from regard_gallery.apps.speech import Recordings, cut, errors, strings
from regard_gallery.apps.speech.baseline import Templates, of_recordings, of_words
from regard_gallery.apps.speech.model import Recogniser, ctc, greedy


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
    model = Recogniser(13, 10, Blocks(16, 2, 2)).eval()
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


def test_errors_are_counted_by_digit() -> None:
    of = Recordings([torch.zeros(1, 2)] * 6, torch.tensor([4, 4, 1, 2, 3, 9]))
    heard = strings(of, [torch.tensor([0]), torch.tensor([1, 2]), torch.tensor([3, 4, 5])])
    assert errors([[5], [5, 2], [3, 4, 10]], heard) == 0.0
    assert errors([[], [5, 5, 2], [3, 7, 10]], heard) == pytest.approx(3 / 6)  # left out, inserted, changed


def test_every_recording_is_in_one_string() -> None:
    of = Recordings([torch.full((1, 1), float(n)) for n in range(50)], torch.arange(50) % 10)
    made = cut(of, 0)
    real = torch.arange(made.frames.shape[1]) < made.lengths[:, None]
    assert sorted(made.frames[real].flatten().tolist()) == list(range(50))
    assert {len(own) for own in made.spoken} == {1, 2, 3, 4}


def cheapest(heard: Tensor, of: Recordings, penalty: float) -> list[int]:
    """By trying every path of places (template, frame)."""
    places = [(n, j) for n, own in enumerate(of.frames) for j in range(len(own))]

    def step(before: tuple[int, int] | None, now: tuple[int, int]) -> float:
        if before is not None and before[0] == now[0] and 0 <= now[1] - before[1] <= 2:
            stays = 0.0
        else:
            stays = math.inf
        ended = before is None or before[1] == len(of.frames[before[0]]) - 1
        return min(stays, penalty if ended and now[1] <= 1 else math.inf)

    best, found = math.inf, []
    for path in itertools.product(places, repeat=len(heard)):
        if path[-1][1] != len(of.frames[path[-1][0]]) - 1:
            continue
        cost, said = 0.0, []
        for before, now, frame in zip((None, *path), path, heard, strict=False):
            more = step(before, now)
            if more:
                said.append(int(of.digits[now[0]]) + 1)
            cost += more + (frame - of.frames[now[0]][now[1]]).norm().item()
        if cost < best:
            best, found = cost, said
    return found


@pytest.mark.parametrize("penalty", [0.1, 1.0])
def test_warping_is_the_cheapest_path(penalty: float) -> None:
    torch.manual_seed(1)
    of = Recordings([torch.randn(n, 2) for n in (2, 3)], torch.tensor([7, 3]))
    lengths = set()
    for _ in range(6):
        heard = torch.randn(5, 2)
        expected = cheapest(heard, of, penalty)
        assert of_recordings(of.frames, of.digits + 1).read(heard, penalty) == expected
        lengths.add(len(expected))
    assert len(lengths) > 1


def test_warping_reads_stretched_templates() -> None:
    torch.manual_seed(0)
    of = Recordings([torch.randn(n, 13) for n in (6, 9, 7)], torch.tensor([4, 0, 8]))
    slow, fast = of.frames[1].repeat_interleave(2, 0), of.frames[2][::2]
    heard = torch.cat([slow, of.frames[0], fast])
    assert of_recordings(of.frames, of.digits + 1).read(heard, 1.0) == [1, 5, 9]


def test_hmm_finds_its_states() -> None:
    """Words that pass through means of their own, for random times in each."""
    torch.manual_seed(0)
    means = {1: torch.randn(4, 13), 2: torch.randn(4, 13)}

    def say(symbol: int) -> Tensor:
        stays = torch.randint(1, 6, (4,))
        return means[symbol].repeat_interleave(stays, 0) + 0.1 * torch.randn(int(stays.sum()), 13)

    symbols = torch.tensor([1, 2] * 40)
    words = of_words([say(symbol) for symbol in symbols.tolist()], symbols, states=4)
    assert words.symbols == [1, 2]
    torch.testing.assert_close(words.mean, torch.stack([means[1], means[2]]), atol=0.1, rtol=0)
    assert words.spread is not None
    assert words.spread.mean() < 0.15
    spoken = [1, 2, 2, 1]
    assert words.read(torch.cat([say(symbol) for symbol in spoken]), 1.0) == spoken


def test_cost_of_a_state_is_minus_the_log_of_its_density() -> None:
    mean, spread, heard = torch.randn(1, 3, 5), 0.5 + torch.rand(1, 3, 5), torch.randn(4, 5)
    found = Templates(mean, spread, torch.tensor([2]), [1]).costs(heard)
    density = torch.distributions.Normal(mean, spread).log_prob(heard[:, None, None]).sum(-1)
    torch.testing.assert_close(found, -density)
