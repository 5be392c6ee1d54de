"""Times `see.read` and pictures of all heads: MiniLM with pretrained weights, 128 tokens.

`python benchmarks/seeing.py` prints the time to load the model, the time of the first picture (with
the import of matplotlib), and the time of the fastest repeat of each step. Times are in wall-clock
seconds and, in parentheses, in CPU seconds, which depend less on other processes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import command
import torch

from regard import see
from regard_gallery.models import minilm

TOKENS = 128
WORDS = "the quick brown fox jumps over the lazy dog and the old cat sat on the mat while it rained "


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="the fastest is printed")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), options.repeats)
    print(session.closing("float32"))
    return 0


def measure(directory: Path, repeats: int) -> None:
    loaded = timed("load MiniLM", minilm.load, 1)
    text = loaded.tokenizer.decode(loaded.tokenizer(WORDS * 10)["input_ids"][1 : TOKENS - 1])

    def read() -> see.Capture:
        return see.read(loaded.model, loaded.tokenizer, text)

    def picture() -> None:
        see.grid(read(), path=directory / "heads.png")

    timed(f"text to picture of 72 heads, {TOKENS} tokens, first", picture, 1)
    timed("text to picture of 72 heads, again", picture, repeats)
    timed(
        "text to heat map of one head", lambda: see.heatmap(read()[0, 2], path=directory / "a.png"), repeats
    )
    inputs = loaded.tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        timed("model without recording", lambda: loaded.model(**inputs), repeats)
    seen = timed("model with recording", read, repeats)
    assert seen[0].shape[2] == TOKENS


def timed(name: str, call: Callable[[], Any], repeats: int) -> Any:
    times = []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        result = call()
        times.append((time.perf_counter() - start, time.process_time() - cpu_start))
    wall, cpu = map(min, zip(*times, strict=True))
    print(f"{name}: {wall:.2f} s ({cpu:.2f} s)", flush=True)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
