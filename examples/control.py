"""A pole balanced without seeing its velocity: train a policy that attends to its history, and let it act.

The same as `regard run control`, then the trained policy in Python, step by step with a cache.
"""

import sys

import gymnasium
import torch

from regard.apps import arguments, command, load
from regard.apps.control import App, observed


def main() -> int:
    options = arguments(__doc__)
    code = command(App, options)
    _, policy = load(App, options)  # from the checkpoint
    world = gymnasium.make("CartPole-v1")
    state, _ = world.reset(seed=7)
    caches = policy.stack.new_caches(1, 500)  # keys and values of what was seen
    steps, over = 0, False
    while not over:
        with torch.no_grad():
            scores, value = policy(observed(state[None])[:, None], caches)  # (1, 1, actions), (1, 1)
        state, _, fell, late, _ = world.step(int(scores.argmax()))
        steps, over = steps + 1, fell or late
    print(f"The pole stood for {steps} steps of 500; the last state was worth {value.item():.2f} of 1.")
    return code


if __name__ == "__main__":
    sys.exit(main())
