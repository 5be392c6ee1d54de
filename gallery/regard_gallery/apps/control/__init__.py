"""CartPole without velocities: a policy balances a pole on a cart. A single observation does not
show which way the pole falls, so the policy needs memory.

The environment is gymnasium's CartPole-v1, with episodes of at most 500 steps. Of the four
values of a state, the policy observes two: the position of the cart and the angle of the pole. The
policy is trained as an advantage actor-critic.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._frame.application import Application, Recipe, Scores
from .._frame.options import MANY
from .._frame.pictures import BLUE, GREY, ORANGE, figure, save
from .._frame.training import rival_scores
from .model import HistoryPolicy

SEEN = (0, 2)  # indices of position and angle in a state; 1 and 3 are the velocities
UNITS = torch.tensor([1.0, 10.0])  # factors that scale position and angle to about 1
ACTIONS = 2
HISTORY = 7  # number of observations before the current one that the policy attends to
LIMIT, TRAINED_LIMIT = 500, 300  # maximal steps of an episode, in the test and in training
EPISODES, VALIDATED, TESTED, SOLVED = 24, 40, 20, 450.0
DISCOUNT, TRACE = 0.99, 0.95
ENTROPY = 0.001
SPREAD = 0.1  # advantages are divided by their standard deviation, but by at least this
VALIDATION_SEED, TEST_SEED = 1_000_000, 2_000_000


class Played(NamedTuple):
    """A batch of episodes, padded at the end."""

    seen: Tensor  # (B, L, 2), the observations
    actions: Tensor  # (B, L)
    values: Tensor  # (B, L + 1), the critic's estimates while acting
    alive: Tensor  # (B, L) bool: False in the padding
    fell: Tensor  # (B,) bool: False if the episode reached the step limit

    @property
    def lengths(self) -> Tensor:
        return self.alive.sum(1)


@torch.no_grad()
def play(
    model: nn.Module, episodes: int, seed: int, limit: int = LIMIT, generator: torch.Generator | None = None
) -> Played:
    """Plays `episodes` episodes in parallel, each of at most `limit` steps.

    Samples actions with `generator`, or takes the most probable actions if `generator` is None.
    `seed` determines the start states.
    """
    import gymnasium

    world: Any = gymnasium.make_vec("CartPole-v1", episodes, "vector_entry_point", max_episode_steps=limit)
    state = world.reset(seed=seed)[0]
    caches = model.stack.new_caches(episodes, limit + 1)  # type: ignore[operator, union-attr]
    alive, fell = torch.ones(episodes, dtype=torch.bool), torch.zeros(episodes, dtype=torch.bool)
    steps: list[tuple[Tensor, ...]] = []
    while alive.any():
        seen = observed(state)
        scores, value = model(seen[:, None], caches)
        action = chosen(scores[:, 0], generator)
        steps.append((seen, action, value[:, 0], alive))
        state, _, terminated, truncated, _ = world.step(action.numpy())
        fell = fell | (alive & torch.from_numpy(terminated))
        alive = alive & ~torch.from_numpy(terminated | truncated)
    seen, actions, values, alive = (torch.stack(column, 1) for column in zip(*steps, strict=True))
    last = model(observed(state)[:, None], caches)[1]
    return Played(seen, actions, torch.cat([values, last], 1), alive, fell)


def observed(state: Any) -> Tensor:
    """Maps the environment's states (B, 4) to the policy's observations (B, 2)."""
    return torch.from_numpy(state)[:, SEEN] * UNITS


def chosen(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return scores.argmax(-1)
    return scores.softmax(-1).multinomial(1, generator=generator)[:, 0]


def advantages(played: Played) -> Tensor:
    """Returns generalised advantage estimates (GAE), (B, L).

    The reward of a step is 1 minus the discount factor, so that balancing for ever has the value 1.
    After the last step of an episode, rewards are 0 if the pole fell. If the episode reached the
    step limit, the critic's value of the last state replaces the rewards after it.
    """
    B, L = played.alive.shape
    ends = torch.zeros(B, L, dtype=torch.bool)
    ends[torch.arange(B), played.lengths - 1] = True
    continues = 1 - (ends & played.fell[:, None]).float()
    estimates, following = torch.zeros(B, L), torch.zeros(B)
    for t in reversed(range(L)):
        error = 1 - DISCOUNT + DISCOUNT * continues[:, t] * played.values[:, t + 1] - played.values[:, t]
        following = error + DISCOUNT * TRACE * (~ends[:, t]) * following
        following = following * played.alive[:, t]
        estimates[:, t] = following
    return estimates


class App(Application):
    name = "control"
    more = ("return",)
    request = "a seed for the start of an episode, such as 7"
    full = Recipe(steps=80, rate=1e-3, warmup=10, clip=0.5, every=5)
    tested, validated = (TESTED, TEST_SEED), (VALIDATED, VALIDATION_SEED)  # (number of episodes, seed)

    def load(self) -> None:
        self.limits = (20, 20) if self.quick else (TRAINED_LIMIT, LIMIT)

    def model(self) -> nn.Module:
        return HistoryPolicy(len(SEEN), ACTIONS, HISTORY)

    def batch(self, model: nn.Module, generator: torch.Generator) -> Played:
        seed = int(torch.randint(VALIDATION_SEED, (1,), generator=generator))
        return play(model, EPISODES, seed, self.limits[0], generator)

    def loss(self, model: nn.Module, batch: Played) -> Tensor:
        logits, values = (output[batch.alive] for output in model(batch.seen))
        advantage = advantages(batch)[batch.alive]
        returns = advantage + batch.values[:, :-1][batch.alive]
        log_probs = logits.log_softmax(-1)
        taken = log_probs.gather(-1, batch.actions[batch.alive][:, None])[:, 0]
        normalised = (advantage - advantage.mean()) / advantage.std().clamp(min=SPREAD)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        objective: Tensor = (taken * normalised).mean() + ENTROPY * entropy
        return F.mse_loss(values, returns) - objective

    def measure(self, model: nn.Module, held: tuple[int, int]) -> Scores:
        """Returns the mean length of episodes in which the policy takes its most probable actions.

        `held` has the number of episodes and the seed of their start states.
        """
        episodes, seed = held
        lengths = play(model, episodes, seed + self.seed, self.limits[1]).lengths
        return {"return": lengths.double().mean().item()}

    def baselines(self) -> dict[str, Scores]:
        rival = partial(HistoryPolicy, len(SEEN), ACTIONS, history=0)
        return {"the same policy without history": rival_scores(self, rival)}

    def goals(self, own: Scores, baselines: dict[str, Scores]) -> dict[str, bool]:
        solved = {f"a mean return of {SOLVED:g} or more": own["return"] >= SOLVED}
        return super().goals(own, baselines) | solved

    def answer(self, model: nn.Module, request: str) -> str:
        played = play(model, 1, self.number(request, range(MANY)))
        place, angle = (played.seen[0] / UNITS).abs().amax(0).tolist()
        how = "when the pole fell" if played.fell[0] else "and the pole still stands"
        return (
            f"{int(played.lengths[0])} steps of {LIMIT}, {how}; the cart went up to {place:.2f} m "
            f"from the middle, the pole leant up to {torch.tensor(angle).rad2deg():.1f} degrees"
        )

    def draw(self, model: nn.Module, path: Path) -> None:
        """Plots an episode, and each head's mean attention weight by the age of the observation."""
        played = play(model, 1, TEST_SEED + self.seed, self.limits[1])
        picture, (left, right) = figure(9, 3.6, ncols=2)
        place, angle = (played.seen[0] / UNITS).T
        left.plot(place.tolist(), color=BLUE, label="cart, metres from the middle")
        left.plot((angle.rad2deg() / 12).tolist(), color=ORANGE, label="pole, share of 12 degrees")
        left.axhline(0, color=GREY, linewidth=0.5)
        left.set(xlabel="step", title="one episode")
        left.legend(frameon=False, fontsize=8)
        self._draw_reach(model, played.seen[0], right)
        save(picture, path)

    def _draw_reach(self, model: nn.Module, seen: Tensor, axes: Any) -> None:
        for layer, weights in enumerate(model.weights(seen)):  # type: ignore[operator]
            full = weights[:, HISTORY:]  # queries with a complete history
            by_age = [full.diagonal(HISTORY - ago, -2, -1).mean(-1) for ago in range(HISTORY + 1)]
            axes.plot(torch.stack(by_age).tolist(), color=(BLUE, ORANGE)[layer % 2], linewidth=1)
        axes.set(xlabel="steps ago", ylabel="mean weight", title="heads of layer 1 (blue), 2 (orange)")
