"""Claim: GQA reduces computation and memory. `regard claims grouped_flops`

With fewer key heads, every query head still multiplies with as many keys and values as before, so
attention takes the same number of FLOPs. The projections of keys and values, the bytes of keys and
values, and the cache become smaller. The printed code even repeats keys and values for the query
heads before the products. FLOPs are counted while PyTorch executes the formula.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.cost import CallSpec
from regard.nn import Attention

from .finding import Finding, verdict
from .formula import attend

HEADS, KEY_HEADS, D = 16, (16, 4, 1), 64


def attention_flops(n: int, key_heads: int) -> int:
    """Returns the FLOPs of attention with repeated keys and values, as the notes print it."""
    q = torch.empty(HEADS, n, D, device="meta")
    k, v = torch.empty(2, key_heads, n, D, device="meta")
    with FlopCounterMode(display=False) as counter:
        attend(q, *(x.repeat_interleave(HEADS // key_heads, 0) for x in (k, v)))
    return int(counter.get_total_flops())


def projection_flops(n: int, key_heads: int) -> int:
    """Returns the FLOPs of the projections of keys and values."""
    x, w = torch.empty(n, HEADS * D, device="meta"), torch.empty(HEADS * D, 2 * key_heads * D, device="meta")
    with FlopCounterMode(display=False) as counter:
        x @ w
    return int(counter.get_total_flops())


def cache_bytes(n: int, key_heads: int) -> int:
    """Returns the bytes of a cache of n tokens, in float32."""
    layer = Attention(HEADS * D, HEADS, kv_heads=key_heads, device="meta")
    return layer.new_cache(1, n).nbytes


def measure(n: int = 1024) -> Finding:
    attention = {heads: attention_flops(n, heads) for heads in KEY_HEADS}
    projections = {heads: projection_flops(n, heads) for heads in KEY_HEADS}
    ours = {heads: CallSpec(1, HEADS, n, D, Hkv=heads).cost().forward.dense for heads in KEY_HEADS}
    cached = {heads: cache_bytes(n, heads) // n for heads in KEY_HEADS}
    bytes_read = {heads: CallSpec(1, HEADS, n, D, Hkv=heads).cost().read_bytes for heads in KEY_HEADS}
    less_computation = attention[1] < attention[HEADS] and ours[1] < ours[HEADS]
    less_memory = cached[1] < cached[HEADS]
    return Finding(
        claim="GQA reduces computation and memory",
        verdict=verdict(
            less_computation and less_memory, "incomplete" if less_computation or less_memory else "wrong"
        ),
        measured=f"with {' / '.join(map(str, KEY_HEADS))} key heads, attention takes "
        f"{' / '.join(f'{x / 1e9:.2f}' for x in attention.values())} GFLOP, the projections of keys and "
        f"values take {' / '.join(f'{x / 1e9:.2f}' for x in projections.values())} GFLOP, "
        f"and a cached token takes {' / '.join(f'{x:,}' for x in cached.values())} bytes",
        correct="attention's FLOPs depend on the query heads only; fewer key heads reduce the cache, "
        "the bytes read and the projections of keys and values",
        numbers={
            "FLOPs of attention by key heads": {str(h): x for h, x in attention.items()},
            "FLOPs of regard.attention by key heads": {str(h): x for h, x in ours.items()},
            "FLOPs of the projections of keys and values": {str(h): x for h, x in projections.items()},
            "bytes of q, k and v": {str(h): x for h, x in bytes_read.items()},
            "cache bytes per token, float32": {str(h): x for h, x in cached.items()},
        },
    )
