"""Why queries and keys instead of learned weights? `python docs/why/fixed_weights.py`

Instead of computing the weights of n tokens from queries and keys, a layer could learn them: an
n x n matrix of parameters. This experiment trains both layers on two tasks. Each token has a name,
a symbol, and the name of another token that it asks for.

- *by position*: each token must return the symbol of the token before it.
- *by content*: each token must return the symbol of the token whose name it asks for. In every
  sequence, that token is at another place.

The layers are the same except for the weights. Positions are added to the tokens of both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import Attention
from regard.positions import sinusoidal

N, NAMES, SYMBOLS, WIDTH = 12, 24, 8, 64
TASKS = "by position", "by content"
Mixer = Callable[[], nn.Module]


class FixedWeights(nn.Module):
    """A layer whose weights are parameters: (B, n, WIDTH) -> (B, n, WIDTH)."""

    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(n, n))
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(self.scores.softmax(-1) @ self.value(x))
        return mixed


MIXERS: dict[str, Mixer] = {"fixed weights": FixedWeights, "attention": lambda: Attention(WIDTH, 1)}


class Model(nn.Module):
    """Predicts the symbol that each token should return: tokens (B, n, 3) -> (B, n, SYMBOLS)."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.name, self.symbol, self.wanted = (nn.Embedding(k, WIDTH) for k in (NAMES, SYMBOLS, NAMES))
        self.mixer, self.answer = mixer(), nn.Linear(WIDTH, SYMBOLS)

    def states(self, tokens: Tensor) -> Tensor:
        name, symbol, wanted = tokens.unbind(-1)
        embedded: Tensor = self.name(name) + self.symbol(symbol) + self.wanted(wanted)
        return embedded + sinusoidal(torch.arange(tokens.shape[1]), WIDTH)

    def weights(self, tokens: Tensor) -> Tensor:
        """Returns the weights of the tokens (n, n) in one sequence (1, n, 3)."""
        if isinstance(self.mixer, FixedWeights):
            return self.mixer.scores.softmax(-1)
        weights: Tensor = self.mixer(self.states(tokens), return_weights=True)[1]
        return weights[0, 0]

    def forward(self, tokens: Tensor) -> Tensor:
        answers: Tensor = self.answer(self.mixer(self.states(tokens)))
        return answers


def sample(task: str, B: int, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Returns tokens (B, n, 3), each a name, a symbol and a wanted name, and targets (B, n).

    The names of a sequence differ. The target of the first token by position is its own symbol.
    """
    names = torch.rand(B, NAMES, generator=generator).argsort(-1)[:, :n]
    symbols = torch.randint(SYMBOLS, (B, n), generator=generator)
    at = torch.randint(n, (B, n), generator=generator)  # index of the wanted token
    source = (torch.arange(n) - 1).clamp(min=0).expand(B, n) if task == "by position" else at
    return torch.stack((names, symbols, names.gather(1, at)), -1), symbols.gather(1, source)


def train(task: str, mixer: Mixer, steps: int = 300) -> Model:
    torch.manual_seed(0)
    model = Model(mixer)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        tokens, targets = sample(task, 64, N)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def answered(model: Model, task: str, n: int = N) -> float | None:
    """Returns the share of tokens with the right answer, or None if the layer refuses n tokens."""
    tokens, targets = sample(task, 256, n, torch.Generator().manual_seed(1))
    try:
        answers = model(tokens)
    except RuntimeError:
        return None
    return float((answers.argmax(-1) == targets).float().mean())


def guessed(task: str, n: int = N) -> float:
    """Returns the share of right answers if every answer is the sequence's most frequent symbol.

    A layer that does not know which token is wanted cannot do better in the task by content.
    """
    tokens, targets = sample(task, 256, n, torch.Generator().manual_seed(1))
    most_frequent = F.one_hot(tokens[..., 1], SYMBOLS).sum(1).argmax(-1, keepdim=True)
    return float((most_frequent == targets).float().mean())


def parameters(n: int, d: int = 512) -> dict[str, int]:
    """Returns the numbers of parameters of the weights: n^2, and 3 d^2 for W_Q, W_K and W_V."""
    return {"fixed weights": n * n, "attention": 3 * d * d}


def measure(steps: int = 300) -> dict[str, dict[str, float | None]]:
    """Returns shares of right answers, for the task by content also with twice as many tokens."""
    rows: dict[str, dict[str, float | None]] = {}
    for name, mixer in MIXERS.items():
        models = {task: train(task, mixer, steps) for task in TASKS}
        rows[name] = {task: answered(model, task) for task, model in models.items()}
        rows[name]["by content, 2 n tokens"] = answered(models["by content"], "by content", 2 * N)
    rows["most frequent symbol"] = {task: guessed(task) for task in TASKS}
    return rows


if __name__ == "__main__":
    for name, row in measure().items():
        shares = (f"{task} {'refused' if share is None else f'{share:.0%}'}" for task, share in row.items())
        print(f"{name:<20}:", ", ".join(shares))
    for n in (128, 1024, 8192):
        counts = (f"{name} {count:,} parameters" for name, count in parameters(n).items())
        print(f"n = {n:>4}:", ", ".join(counts))
