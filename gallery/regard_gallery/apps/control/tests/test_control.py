"""CartPole without velocities: the policy's reach, acting with caches, episodes and advantages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gymnasium")

from regard_gallery.apps._parts.blocks import Blocks
from regard_gallery.apps.control import DISCOUNT, SEEN, TRACE, UNITS, App, Played, advantages, observed, play
from regard_gallery.apps.control.model import HistoryPolicy


def policy(history: int) -> HistoryPolicy:
    torch.manual_seed(0)
    return HistoryPolicy(2, 2, history, Blocks(16, 2, 2)).eval()


@pytest.mark.parametrize(("history", "reach"), [(0, 0), (3, 6)])
def test_reach(history: int, reach: int) -> None:
    """An output of two layers with `history` depends on the last 2 * `history` + 1 observations."""
    model, observations = policy(history), torch.randn(1, 12, 2)
    (gradient,) = torch.autograd.grad(model(observations.requires_grad_())[0][0, -1].sum(), observations)
    has_influence = gradient[0].abs().sum(-1) > 0
    assert has_influence.tolist() == [False] * (11 - reach) + [True] * (reach + 1)


def test_acting_with_caches_equals_one_call_for_the_whole_sequence() -> None:
    model = policy(3)
    played = play(model, 5, 0, 30, torch.Generator().manual_seed(0))
    assert played.seen.shape[1] > 8
    with torch.no_grad():
        values = model(played.seen)[1]
    torch.testing.assert_close(
        values[played.alive], played.values[:, :-1][played.alive], atol=1e-5, rtol=1e-5
    )


def test_episodes_end_when_the_pole_falls_or_at_the_limit() -> None:
    model = policy(3)
    torch.nn.init.zeros_(model.act.weight)
    model.act.bias.data = torch.tensor([0.0, 1.0])  # always pushes to the right
    played = play(model, 4, 1)
    assert bool(played.fell.all())
    assert all(8 <= n <= 11 for n in played.lengths.tolist())
    assert bool((played.actions == 1).all())
    early = play(model, 4, 1, limit=5)
    assert not bool(early.fell.any())
    assert early.lengths.tolist() == [5] * 4
    torch.testing.assert_close(early.seen, played.seen[:, :5])


def test_velocities_are_hidden() -> None:
    state = torch.arange(8.0).reshape(2, 4)
    torch.testing.assert_close(observed(state.numpy()), state[:, SEEN] * UNITS)
    assert SEEN == (0, 2)


@pytest.mark.parametrize("fell", [True, False])
def test_advantages(fell: bool) -> None:
    """An advantage is the sum over k of (DISCOUNT * TRACE)^k times the TD error of step t + k."""
    values = torch.rand(2, 5)
    alive = torch.tensor([[True] * 4, [True, True, False, False]])
    lengths = [4, 2]
    played = Played(torch.zeros(2, 4, 2), torch.zeros(2, 4), values, alive, torch.tensor([fell, fell]))
    expected = torch.zeros(2, 4)
    for i, length in enumerate(lengths):
        for t in range(length):
            for k in range(length - t):
                terminal = fell and t + k == length - 1
                next_value = 0.0 if terminal else DISCOUNT * values[i, t + k + 1]
                td_error = 1 - DISCOUNT + next_value - values[i, t + k]
                expected[i, t] += (DISCOUNT * TRACE) ** k * td_error
    torch.testing.assert_close(advantages(played), expected)


def test_batches_depend_only_on_the_seed() -> None:
    app, model = App(quick=True), policy(3)
    first, second = (app.batch(model, torch.Generator().manual_seed(4)) for _ in range(2))
    other = app.batch(model, torch.Generator().manual_seed(5))
    assert torch.equal(first.seen, second.seen)
    assert torch.equal(first.actions, second.actions)
    assert first.seen.shape != other.seen.shape or not torch.equal(first.seen, other.seen)


def test_use_refuses_a_request_that_is_not_a_seed() -> None:
    with pytest.raises(ValueError, match=r"use: expected a seed .* got 'left'"):
        App(quick=True).use(policy(3), "left")
