"""Compares decode steps of latent attention with Hugging Face's DeepSeek-V3 on the same weights.

`python benchmarks/latent.py` prints one row for each number of cached tokens: the time of one
decode step with `LatentAttention`, absorbed and expanded, and with `DeepseekV3Attention`, which
expands the keys and values of all tokens at every step. There are 16 heads of DeepSeek-V3's sizes:
latents of rank 512, 128 unrotated and 64 rotated channels of a key, 128 channels of a value. A
second table has the time of a chunk of new tokens, absorbed and expanded, and the module's
automatic choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command
import torch
from checks import WrongResult
from measure import best_times
from report import milliseconds
from torch import Tensor

from regard.cache import LatentCache
from regard.nn import LatentAttention

WIDTH, HEADS, RANK, ROPE, NOPE, V, Q_RANK = 2048, 16, 512, 64, 128, 128, 1536
NAMES = {
    "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "o_proj": "out",
}  # fmt: skip
Step = Callable[[], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 3.0, "row")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="cached before the step")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 16, 64, 128, 256], help="new tokens")
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with torch.no_grad():
        ours, theirs = modules()
        print("\n".join(steps(ours, theirs, options)), "\n")
        print("\n".join(chunks(ours, options)))
    print(session.closing(f"{HEADS} heads, float32"))
    return 0


def modules() -> tuple[LatentAttention, Any]:
    """Returns Regard's module and Hugging Face's, with the same weights.

    The attribute `table` of Hugging Face's module is set to its rotary embedding.
    """
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=Q_RANK,
        kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=V,
        attn_implementation="sdpa",
    )  # fmt: skip
    theirs = deepseek.DeepseekV3Attention(config, 0).eval()
    ours = LatentAttention(
        WIDTH, HEADS, rank=RANK, nope_dim=NOPE, rope_dim=ROPE, value_dim=V, q_rank=Q_RANK
    ).eval()
    state = {name.rsplit(".", 1)[0]: value for name, value in theirs.state_dict().items()}
    ours.load_state_dict({f"{NAMES[name]}.weight": value for name, value in state.items()})
    theirs.table = deepseek.DeepseekV3RotaryEmbedding(config)
    return ours, theirs


def steps(ours: LatentAttention, theirs: Any, options: argparse.Namespace) -> Iterator[str]:
    yield "| cached tokens | absorbed | expanded | Hugging Face | speedup | cache, MiB |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for n in options.tokens:
        cache, token = filled(ours, n), torch.randn(1, 1, WIDTH)
        calls: dict[str, Step] = {
            "absorbed": lambda cache=cache, token=token: step(ours, token, cache, True),
            "expanded": lambda cache=cache, token=token: step(ours, token, cache, False),
            "theirs": peer(theirs, cache, token),
        }
        check(calls)
        best = best_times(calls, options.seconds)
        ratio = best["theirs"] / best["absorbed"]
        times = " | ".join(milliseconds(t) for t in best.values())
        yield f"| {n} | {times} | {ratio:.1f} x | {n * cache_bytes(cache) / 2**20:.1f} |"


def chunks(ours: LatentAttention, options: argparse.Namespace) -> Iterator[str]:
    n = max(options.tokens)
    yield f"| new tokens after {n} | absorbed | expanded | automatic choice |"
    yield "|---:|---:|---:|---|"
    cache = filled(ours, n)
    for L in options.chunks:
        x = torch.randn(1, L, WIDTH)
        best = best_times(
            {
                "absorbed": lambda x=x: step(ours, x, cache, True),
                "expanded": lambda x=x: step(ours, x, cache, False),
            },
            options.seconds,
        )
        operations = ours.operations(L, n + L)
        choice = "absorbed" if operations.absorbed < operations.expanded else "expanded"
        yield f"| {L} | " + " | ".join(milliseconds(t) for t in best.values()) + f" | {choice} |"


def filled(ours: LatentAttention, n: int) -> LatentCache:
    """Returns a cache with n random tokens."""
    cache = ours.new_cache(1, capacity=2 * n + 512)
    cache.append(torch.randn(1, n, RANK + ROPE))
    return cache


def cache_bytes(cache: LatentCache) -> float:
    """Returns the cache's allocated bytes per token of capacity."""
    return cache.nbytes / (2 * len(cache) + 512)


def step(ours: LatentAttention, x: Tensor, cache: LatentCache, absorb: bool) -> Tensor:
    """Runs the module on new tokens x and removes them from the cache, so that steps are alike."""
    out: Tensor = ours(x, cache=cache, absorb=absorb)
    cache.crop(-x.shape[1])
    return out


def peer(theirs: Any, cache: LatentCache, token: Tensor) -> Step:
    """Returns a decode step of Hugging Face's attention over the latents of `cache`.

    The step removes its token afterwards, so that all steps are alike.
    """
    from transformers import DynamicCache

    latents, n = cache.state_dict()["latent"], len(cache)
    hf_cache = DynamicCache()
    hf_cache.update(latents[..., :RANK].contiguous(), halves(latents[..., RANK:]), 0)
    rotation = theirs.table(token, torch.tensor([[n]]))

    def call() -> Tensor:
        out: Tensor = theirs(token, rotation, None, hf_cache)[0]
        hf_cache.crop(-1)
        return out

    return call


def halves(keys: Tensor) -> Tensor:
    """Reorders rotated pairs (2i, 2i + 1) to Hugging Face's layout, even channels first."""
    return torch.cat((keys[..., 0::2], keys[..., 1::2]), -1)


def check(calls: dict[str, Step]) -> None:
    expected = calls["theirs"]()
    for side in ("absorbed", "expanded"):
        error = float((calls[side]() - expected).norm() / expected.norm())
        if not error < 2e-6:
            raise WrongResult(f"{side} and Hugging Face differ by {error:.1e}")


if __name__ == "__main__":
    sys.exit(main())
