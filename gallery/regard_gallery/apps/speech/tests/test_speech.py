"""Spoken digits: digit strings, CTC, and the baselines by time warping and HMMs."""

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


def collapse(path: tuple[int, ...]) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol]


def test_ctc_is_the_sum_over_all_alignments() -> None:
    torch.manual_seed(0)
    probabilities = torch.rand(1, 5, 3).softmax(-1)
    for spoken in ([1], [1, 2], [2, 2], [1, 2, 1]):
        alignments = [path for path in itertools.product(range(3), repeat=5) if collapse(path) == spoken]
        total = sum(
            math.prod(probabilities[0, t, s].item() for t, s in enumerate(path)) for path in alignments
        )
        loss = ctc(probabilities.log(), torch.tensor([5]), [torch.tensor(spoken)])
        assert loss.item() * len(spoken) == pytest.approx(-math.log(total), rel=1e-5)


def test_greedy_merges_repeats_and_stops_at_the_length() -> None:
    best = torch.tensor([[0, 2, 2, 0, 2, 1, 1, 3], [3, 3, 0, 0, 0, 1, 1, 1]])
    log_probs = torch.nn.functional.one_hot(best, 4).float()
    assert greedy(log_probs, torch.tensor([8, 5])) == [[2, 2, 1, 3], [3]]


def test_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Recogniser(13, 10, Blocks(16, 2, 2)).eval()
    recordings = Recordings([torch.randn(n, 13) for n in (9, 17)], torch.tensor([3, 8]))
    together = strings(recordings, [torch.tensor([0]), torch.tensor([1])])
    alone = strings(recordings, [torch.tensor([0])])
    log_probs = model(together.frames, together.lengths)
    assert log_probs.shape == (2, 17, 11)
    torch.testing.assert_close(log_probs[:1, :9], model(alone.frames, alone.lengths), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 17))


def test_strings_are_joined_recordings() -> None:
    recordings = Recordings([torch.full((n, 2), float(n)) for n in (1, 2, 3)], torch.tensor([4, 5, 6]))
    joined = strings(recordings, [torch.tensor([2, 0]), torch.tensor([1])])
    assert joined.frames[:, :, 0].tolist() == [[3, 3, 3, 1], [2, 2, 0, 0]]
    assert joined.lengths.tolist() == [4, 2]
    assert [symbols.tolist() for symbols in joined.spoken] == [[7, 5], [6]]


def test_errors_are_counted_by_digit() -> None:
    recordings = Recordings([torch.zeros(1, 2)] * 6, torch.tensor([4, 4, 1, 2, 3, 9]))
    references = strings(recordings, [torch.tensor([0]), torch.tensor([1, 2]), torch.tensor([3, 4, 5])])
    assert errors([[5], [5, 2], [3, 4, 10]], references) == 0.0
    assert errors([[], [5, 5, 2], [3, 7, 10]], references) == pytest.approx(
        3 / 6
    )  # a deletion, an insertion and a substitution


def test_every_recording_is_in_one_string() -> None:
    recordings = Recordings([torch.full((1, 1), float(n)) for n in range(50)], torch.arange(50) % 10)
    joined = cut(recordings, 0)
    real = torch.arange(joined.frames.shape[1]) < joined.lengths[:, None]
    assert sorted(joined.frames[real].flatten().tolist()) == list(range(50))
    assert {len(symbols) for symbols in joined.spoken} == {1, 2, 3, 4}


def cheapest_symbols(observed: Tensor, recordings: Recordings, penalty: float) -> list[int]:
    """Returns the symbols of the cheapest path, found by brute force over all paths.

    A state of a path is a pair (template, frame of the template).
    """
    states = [(n, j) for n, frames in enumerate(recordings.frames) for j in range(len(frames))]

    def step(previous: tuple[int, int] | None, current: tuple[int, int]) -> float:
        if previous is not None and previous[0] == current[0] and 0 <= current[1] - previous[1] <= 2:
            within = 0.0
        else:
            within = math.inf
        may_start = previous is None or previous[1] == len(recordings.frames[previous[0]]) - 1
        return min(within, penalty if may_start and current[1] <= 1 else math.inf)

    best_cost, best_symbols = math.inf, []
    for path in itertools.product(states, repeat=len(observed)):
        if path[-1][1] != len(recordings.frames[path[-1][0]]) - 1:
            continue
        cost, symbols = 0.0, []
        for previous, current, frame in zip((None, *path), path, observed, strict=False):
            step_cost = step(previous, current)
            if step_cost:
                symbols.append(int(recordings.digits[current[0]]) + 1)
            cost += step_cost + (frame - recordings.frames[current[0]][current[1]]).norm().item()
        if cost < best_cost:
            best_cost, best_symbols = cost, symbols
    return best_symbols


@pytest.mark.parametrize("penalty", [0.1, 1.0])
def test_warping_is_the_cheapest_path(penalty: float) -> None:
    torch.manual_seed(1)
    recordings = Recordings([torch.randn(n, 2) for n in (2, 3)], torch.tensor([7, 3]))
    lengths = set()
    for _ in range(6):
        observed = torch.randn(5, 2)
        expected = cheapest_symbols(observed, recordings, penalty)
        assert of_recordings(recordings.frames, recordings.digits + 1).read(observed, penalty) == expected
        lengths.add(len(expected))
    assert len(lengths) > 1


def test_warping_reads_stretched_templates() -> None:
    torch.manual_seed(0)
    recordings = Recordings([torch.randn(n, 13) for n in (6, 9, 7)], torch.tensor([4, 0, 8]))
    slow, fast = recordings.frames[1].repeat_interleave(2, 0), recordings.frames[2][::2]
    observed = torch.cat([slow, recordings.frames[0], fast])
    assert of_recordings(recordings.frames, recordings.digits + 1).read(observed, 1.0) == [1, 5, 9]


def test_hmm_recovers_its_state_means() -> None:
    """The data are words that stay at each of their state means for a random number of frames."""
    torch.manual_seed(0)
    means = {1: torch.randn(4, 13), 2: torch.randn(4, 13)}

    def draw_word(symbol: int) -> Tensor:
        durations = torch.randint(1, 6, (4,))
        return means[symbol].repeat_interleave(durations, 0) + 0.1 * torch.randn(int(durations.sum()), 13)

    symbols = torch.tensor([1, 2] * 40)
    words = of_words([draw_word(symbol) for symbol in symbols.tolist()], symbols, states=4)
    assert words.symbols == [1, 2]
    torch.testing.assert_close(words.mean, torch.stack([means[1], means[2]]), atol=0.1, rtol=0)
    assert words.spread is not None
    assert words.spread.mean() < 0.15
    spoken = [1, 2, 2, 1]
    assert words.read(torch.cat([draw_word(symbol) for symbol in spoken]), 1.0) == spoken


def test_cost_of_a_state_is_its_negative_log_density() -> None:
    mean, spread, observed = torch.randn(1, 3, 5), 0.5 + torch.rand(1, 3, 5), torch.randn(4, 5)
    costs = Templates(mean, spread, torch.tensor([2]), [1]).costs(observed)
    log_density = torch.distributions.Normal(mean, spread).log_prob(observed[:, None, None]).sum(-1)
    torch.testing.assert_close(costs, -log_density)
