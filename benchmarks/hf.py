"""Times SmolLM2-135M in Transformers with `attn_implementation="regard"` and with "sdpa".

`python benchmarks/hf.py` prints three tables:
- prefill of 2,048 tokens, and of a left-padded batch, with peak memory;
- a decode step after 4,096 tokens, with the caches of Transformers and with `regard.hf.Cache`;
- continuous batching: tokens per second of 8 requests with 1,024 tokens each, while all of them
  decode.
"Speedup" is the time of sdpa with its default cache divided by Regard's time. "Ceiling" is the
speedup of the same model if attention does nothing, which is an upper bound for any attention. The
decode table has two ceilings: with a cache that copies all tokens, and with a cache that stores
nothing. Before timing, the logits and generated tokens of both implementations are compared.
`--random N` uses random weights and N layers of the same sizes.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import command
import torch
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor

import regard.hf
from regard.cost import peak_memory

SIDES = ("sdpa", "regard")
NOTHING = "nothing"  # the implementation name of attention that does nothing
NEAR = 1e-4  # tolerance of logits relative to the largest
PADDING = (0, 0.2, 0.4, 0.6)  # share of padding in each prompt of the batch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 20.0, "row")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--padded", type=int, default=1024, help="tokens of each padded prompt")
    parser.add_argument("--context", type=int, default=4096, help="tokens before the decode step")
    parser.add_argument("--request", type=int, default=1024, help="tokens of each of the 8 requests")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--random", type=int, metavar="N", help="random weights, N layers")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    regard.hf.register()
    register_nothing()
    model = random_model(options.random) if options.random else real_model()
    with torch.inference_mode():
        check_text(model, options.new)
        show(prompts(model, options))
        show(steps(model, options))
    show(requests(model, options))
    print(session.closing("float32"))
    return 0


def register_nothing() -> None:
    """Registers attention that returns the queries, to time the rest of the model."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NOTHING, lambda module, query, *_, **__: (query.transpose(1, 2), None))
    AttentionMaskInterface.register(NOTHING, lambda *_, **__: None)


def show(table: Iterator[str]) -> None:
    for line in table:
        print(line, flush=True)
    print()


def real_model() -> Any:
    return importlib.import_module("regard_gallery.models.smollm").load(attention="regard").model


def random_model(layers: int) -> Any:
    """Returns a model with SmolLM2's sizes, random weights and a small vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=997, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(model: Any, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, model.config.vocab_size, shape, generator=generator)


def run(model: Any, implementation: str, inputs: dict[str, Any]) -> Tensor:
    """Returns the logits of the last token of each sample."""
    model.set_attn_implementation(implementation)
    logits: Tensor = model(**inputs, logits_to_keep=1).logits
    return logits


def check_text(model: Any, new: int) -> None:
    """Checks that both implementations and all exact caches generate the same tokens."""
    from transformers import StaticCache

    inputs = {"input_ids": tokens(model, 1, 40), "max_new_tokens": new, "do_sample": False}
    caches = {
        ("sdpa", "dynamic"): None,
        ("regard", "dynamic"): None,
        ("regard", "static"): StaticCache(config=model.config, max_cache_len=40 + new),
        ("regard", "ours"): regard.hf.Cache(model.config),
    }
    texts = {}
    for (side, title), cache in caches.items():
        model.set_attn_implementation(side)
        texts[side, title] = model.generate(**inputs, past_key_values=cache)[0].tolist()
    for who, text in texts.items():
        if text != texts["sdpa", "dynamic"]:
            raise WrongResult(f"{who}: generated tokens differ from sdpa's")


def check_logits(name: str, by_side: dict[str, Tensor]) -> None:
    expected = by_side["sdpa"]
    for side, logits in by_side.items():
        error = float((logits - expected).abs().max() / expected.abs().max())
        if not error < NEAR:
            raise WrongResult(f"{side}, {name}: logits differ from sdpa's by {error:.1e}")


# Prompts


def prompts(model: Any, options: argparse.Namespace) -> Iterator[str]:
    yield "| prefill | sdpa | regard | speedup | ceiling | target | sdpa, MiB | regard, MiB |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    one = {"input_ids": tokens(model, 1, options.prompt), "use_cache": False}
    yield prompt_row(model, f"{options.prompt} tokens", one, 1.05, options.seconds)
    L = options.padded
    starts = torch.tensor([int(share * L) for share in PADDING])
    keep = (torch.arange(L) >= starts[:, None]).long()
    batch = {"input_ids": tokens(model, len(PADDING), L), "attention_mask": keep, "use_cache": False}
    yield prompt_row(model, f"{len(PADDING)} x {L}, left-padded", batch, 1.25, options.seconds)


def prompt_row(model: Any, name: str, inputs: dict[str, Any], target: float, seconds: float) -> str:
    calls = {side: partial(run, model, side, inputs) for side in SIDES}
    check_logits(name, {side: call() for side, call in calls.items()})
    best = best_times({**calls, NOTHING: partial(run, model, NOTHING, inputs)}, seconds)
    times = " | ".join(milliseconds(best[side]) for side in SIDES)
    ratios = " | ".join(f"{best['sdpa'] / best[side]:.2f} x" for side in ("regard", NOTHING))
    return f"| {name} | {times} | {ratios} | {target} x | {' | '.join(peaks(calls))} |"


def peaks(calls: dict[str, Callable[[], Tensor]]) -> list[str]:
    """Returns the peak memory of each call in MiB, or "" if the system does not report it."""
    extras = [peak(call) for call in calls.values()]
    return ["" if extra is None else f"{extra / 2**20:.0f}" for extra in extras]


def peak(call: Callable[[], Tensor]) -> int | None:
    """Returns the peak memory of a call in bytes."""

    def without_grad() -> Tensor:  # inference mode is thread-local, and the call runs in another thread
        with torch.inference_mode():
            return call()

    return peak_memory(without_grad)


# Decode steps


def steps(model: Any, options: argparse.Namespace) -> Iterator[str]:
    from transformers import DynamicCache, StaticCache

    config, n = model.config, options.context
    capacity = n + 4096
    makers: dict[tuple[str, str], tuple[Callable[[], Any], str]] = {
        ("sdpa", "dynamic"): (lambda: DynamicCache(config=config), ""),
        ("regard", "dynamic"): (lambda: DynamicCache(config=config), "1.25 x"),
        ("sdpa", "static"): (lambda: StaticCache(config=config, max_cache_len=capacity), ""),
        ("regard", "static"): (lambda: StaticCache(config=config, max_cache_len=capacity), "1.25 x"),
        ("regard", "ours"): (lambda: regard.hf.Cache(config, capacity=capacity), "1.7 x"),
        ("regard", "ours, bfloat16"): (
            lambda: regard.hf.Cache(config, capacity=capacity, dtype=torch.bfloat16),
            "1.7 x",
        ),
        ("regard", "ours, int8"): (lambda: regard.hf.Cache(config, capacity=capacity, bits=8), "1.7 x"),
        ("regard", "ours, int4"): (lambda: regard.hf.Cache(config, capacity=capacity, bits=4), ""),
        (NOTHING, "dynamic"): (lambda: DynamicCache(config=config), "ceiling"),
        (NOTHING, "none"): (lambda: without_memory(config.num_hidden_layers), "ceiling"),
    }
    calls = {who: step(model, who[0], make(), n) for who, (make, _) in makers.items()}
    logits = {" ".join(who): call() for who, call in calls.items()}
    expected = logits.pop("sdpa dynamic")
    exact = {
        who: x for who, x in logits.items() if not any(part in who for part in ("int", "bfloat", NOTHING))
    }
    check_logits("decode step", {"sdpa": expected, **exact})
    best = best_times({" ".join(who): call for who, call in calls.items()}, 4 * options.seconds)
    yield f"| decode step after {n} | cache | time | speedup | target |"
    yield "|---|---|---:|---:|---:|"
    for who, (_, target) in makers.items():
        time = best[" ".join(who)]
        speedup = best["sdpa dynamic"] / time
        yield f"| {who[0]} | {who[1]} | {milliseconds(time)} | {speedup:.2f} x | {target} |"


def step(model: Any, side: str, cache: Any, n: int) -> Callable[[], Tensor]:
    """Fills a cache with n random tokens and returns a call that appends one more."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    for layer in range(config.num_hidden_layers):
        shape = (2, 1, config.num_key_value_heads, n, config.head_dim)
        cache.update(*torch.randn(shape, generator=generator), layer)
    return partial(run, model, side, {"input_ids": tokens(model, 1, 1), "past_key_values": cache})


def without_memory(layers: int) -> Any:
    """Returns a cache that counts tokens but stores none. So queries attend only to new tokens."""
    from transformers import cache_utils

    class Layer(cache_utils.DynamicLayer):
        tokens = 0

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            self.tokens += key_states.shape[-2]
            return key_states, value_states

        def get_seq_length(self) -> int:
            return self.tokens

    return cache_utils.Cache(layers=[Layer() for _ in range(layers)])


# Continuous batching


def requests(model: Any, options: argparse.Namespace) -> Iterator[str]:
    prompts = tokens(model, 8, options.request).tolist()
    rates: dict[str, float] = dict.fromkeys(SIDES, 0.0)
    texts = {}
    for _ in range(3 if options.seconds else 1):
        for side in SIDES:
            texts[side], rate = batch(model, side, prompts, options.new)
            rates[side] = max(rates[side], rate)
    if texts["sdpa"] != texts["regard"]:
        raise WrongResult("continuous batching: regard's generated tokens differ from sdpa's")
    yield "| 8 requests | sdpa, tokens/s | regard, tokens/s | speedup | target |"
    yield "|---|---:|---:|---:|---:|"
    shown = " | ".join(f"{rates[side]:.1f}" for side in SIDES)
    yield f"| {options.request} tokens each | {shown} | {rates['regard'] / rates['sdpa']:.2f} x | 1.5 x |"


def batch(model: Any, side: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Runs continuous batching. Returns the generated tokens, and tokens per second.

    The rate is measured from the moment when every request has its first token.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model.set_attn_implementation(side)
    pages = len(prompts) * -(-(len(prompts[0]) + new) // 256)
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=1024),
        record_timestamps=True,
    )
    outputs = [results[key] for key in sorted(results, key=lambda key: int(key.rsplit("_", 1)[1]))]
    timestamps = [output.timestamps for output in outputs]
    begin, end = max(times[0] for times in timestamps), max(times[-1] for times in timestamps)
    count = sum(time > begin for times in timestamps for time in times)
    return [output.generated_tokens for output in outputs], count / max(end - begin, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
