"""Options of `regard run`: seeds, attention implementation, output folder and so on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..._checks import count

MANY = 2**31  # seeds are below MANY, so that a step's seed (about seed * 10^6) is below 2^63


@dataclass(frozen=True)
class Options:
    """Options of `regard run`. Checkpoints and pictures are written to the folder `out`."""

    quick: bool = False
    attention: str = "regard"
    resume: bool = False
    seed: int = 0
    seeds: int | None = None  # number of seeds: seed, seed + 1, ...; None: the application's default
    out: Path = Path("build/apps")

    def __post_init__(self) -> None:
        if count("seed", self.seed) >= MANY:
            raise ValueError(f"seed: expected less than {MANY}, got {self.seed}")
        if self.seeds is not None:
            count("seeds", self.seeds, 1)

    def place(self, name: str, ending: str) -> Path:
        """Returns the path of the output file {name}{ending}.

        In quick runs and in runs with PyTorch's attention, the name has a suffix before `ending`.
        """
        kind = "-quick" * self.quick + "-torch" * (self.attention == "torch")
        return self.out / f"{name}{kind}{ending}"

    def checkpoint(self, name: str, seed: int | None = None) -> Path:
        return self.place(name, f"-{self.seed if seed is None else seed}.safetensors")
