"""Times `regard.nn.Linear` with few rows against `F.linear` and a plain read of the weight.

`python benchmarks/projections.py` prints a row for each weight of 40 shapes of real models and each
number of rows: the time of `F.linear` divided by Regard's ("speedup"), and Regard's speed in percent
of a plain read of the same weights by the same number of threads ("of a read"). Several weights of a
shape, together larger than the CPU's cache, take turns, as the layers of a model do. The last lines
are geometric means. With `--model`, it times a token of SmolLM2-135M after 512 tokens in
`regard.hf.accelerate` against Transformers' sdpa instead. Results are compared before timing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import command
import torch
import torch.nn.functional as F
from checks import WrongResult
from measure import best_times
from torch import Tensor

from regard._api.projection import linear
from regard._backends.native import core

# (width, depth) of weights: q, k or v, output, gate or up, down, fused ones, and heads over vocabularies
SHAPES = {
    "SmolLM2-135M": [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)],
    "Qwen2.5-0.5B": [(896, 896), (128, 896), (4864, 896), (896, 4864), (151936, 896)],
    "Llama-3.2-1B": [(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (128256, 2048)],
    "Gemma-2-2B": [(2048, 2304), (1024, 2304), (9216, 2304), (2304, 9216), (2304, 2048)],
    "Phi-3-mini": [(9216, 3072), (3072, 3072), (16384, 3072), (3072, 8192), (32064, 3072)],
    "Llama-3-8B": [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (6144, 4096)],
    "GPT-2": [(2304, 768), (768, 768), (3072, 768), (768, 3072), (50257, 768)],
    "Whisper, BERT": [(384, 384), (1536, 384), (384, 1536), (1024, 1024), (4096, 1024)],
}
ROWS = (1, 2, 4, 8, 16)
DTYPES = (torch.float32, torch.bfloat16)
BYTES = 200 << 20  # of the weights that take turns; several times the size of a CPU's cache
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 0.1, "call")
    parser.add_argument("--model", action="store_true", help="a token of SmolLM2-135M")
    parser.add_argument("--only", help="a model of SHAPES")
    parser.add_argument("--bytes", type=int, default=BYTES, help="bytes of the weights that take turns")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with torch.inference_mode():
        if options.model:
            tokens(options.seconds)
        else:
            shapes = [s for name, s in SHAPES.items() if options.only in (None, name)]
            table([shape for group in shapes for shape in group], options.bytes, options.seconds)
    print(session.closing("float32"))
    return 0


def table(shapes: list[tuple[int, int]], size: int, seconds: float) -> None:
    print("| weight | dtype | " + " | ".join(f"{n} rows, speedup | of a read" for n in ROWS) + " |")
    print("|---|---|" + "---:|" * 2 * len(ROWS))
    speedups: dict[tuple[torch.dtype, int], list[float]] = {(d, n): [] for d in DTYPES for n in ROWS}
    for width, depth in shapes:
        for dtype in DTYPES:
            count = max(1, size // (width * depth * dtype.itemsize))
            weights = torch.randn(count, width, depth).to(dtype)
            cells = []
            for n in ROWS:
                best = times(weights, torch.randn(n, depth).to(dtype), seconds)
                speedups[dtype, n].append(best["torch"] / best["regard"])
                cells.append(f"{speedups[dtype, n][-1]:.2f} x | {best['read'] / best['regard']:.0%}")
            print(f"| {width} x {depth} | {str(dtype)[6:]} | " + " | ".join(cells) + " |", flush=True)
    for (dtype, n), ratios in speedups.items():
        mean = geometric_mean(ratios)
        print(f"geometric mean, {str(dtype)[6:]}, {n} rows: {mean:.2f} x, least {min(ratios):.2f}")


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def times(weights: Tensor, x: Tensor, seconds: float) -> dict[str, float]:
    """Returns the seconds in which each side goes through all weights."""
    out, expected = linear(x, weights[0]), F.linear(x, weights[0])
    if not float((out - expected).abs().max()) <= NEAR[x.dtype] * float(expected.abs().max()):
        raise WrongResult(f"linear: {tuple(weights[0].shape)} differs from F.linear's")
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        calls: dict[str, Callable[[], Any]] = {
            "read": lambda: read(weights, pool),
            "torch": lambda: [F.linear(x, weight) for weight in weights],
            "regard": lambda: [linear(x, weight) for weight in weights],
        }
        return best_times(calls, seconds)


def read(weights: Tensor, pool: ThreadPoolExecutor) -> None:
    """Reads all weights once. Each thread reads a contiguous part."""
    parts = weights.view(-1).view(torch.float32).tensor_split(torch.get_num_threads())
    list(pool.map(core.read_probe, parts))


# A token of a model

CONTEXT, STEPS = 512, 8


def tokens(seconds: float) -> None:
    from transformers import DynamicCache

    import regard.hf
    from regard_gallery.models import smollm

    for dtype in DTYPES:
        model = smollm.load(attention="sdpa").model.to(dtype)
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # with the same parameters
        print(regard.hf.accelerate(twin))
        ids = torch.randint(1000, 20000, (1, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
        calls, texts = {}, []
        for side, m in {"sdpa": model, "accelerate": twin}.items():
            cache = DynamicCache(config=m.config)
            m(ids[:, :CONTEXT], past_key_values=cache)
            texts.append(generate(m, ids, cache, 64))
            calls[side] = partial(generate, m, ids, cache, STEPS)
        if dtype is torch.float32 and not torch.equal(*texts):
            raise WrongResult("accelerate: greedy tokens differ from sdpa's")
        best = best_times(calls, 60 * seconds)
        sdpa, ours = (1000 * best[side] / STEPS for side in calls)
        ratio = f"sdpa {sdpa:.1f} ms, accelerate {ours:.1f} ms: {sdpa / ours:.2f} x"
        print(f"{str(dtype)[6:]}, a token after {CONTEXT}: {ratio}")


def generate(model: Any, ids: Tensor, cache: Any, count: int) -> Tensor:
    """Generates `count` tokens after the first CONTEXT tokens, which are in the cache."""
    if (extra := cache.get_seq_length() - CONTEXT) > 0:
        cache.crop(-extra)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    out: Tensor = model.generate(ids, past_key_values=cache, **options)
    return out


if __name__ == "__main__":
    raise SystemExit(main())
