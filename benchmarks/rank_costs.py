"""Compares the costs that `cost.over_ranks` predicts for attention over processes with measured ones.

`python benchmarks/rank_costs.py` measures the link between processes of one thread and the FLOP/s of
a rank while all ranks compute. It prints a row for each number of ranks, length, pass and method of a
causal call: the predicted and the measured time, their ratio, and the ratio of the memory. It fails
if the processes send other numbers of bytes than predicted.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import command
import torch
import torch.distributed as dist
from checks import WrongResult
from measure import best_times
from processes import Processes
from report import milliseconds
from torch.distributed.device_mesh import DeviceMesh

import regard
from regard import cost, distributed as D, masks as M
from regard.cost import CallSpec, RankLink, RanksCost
from regard.distributed import _group

MESSAGE = 2**20  # bytes: keys or values of a part of a ring
EXCHANGES = 20
PASSES = ("forward", "training")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, 4.0, "table row")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args(arguments)
    session, ratios = command.Session(options), []
    print("| ranks | tokens | pass | method | predicted | measured | ratio | memory, ratio |")
    print("|---:|---:|---|---|---:|---:|---:|---:|")
    for ranks in options.ranks:
        with Processes(ranks) as processes:
            link = measured_link(processes, options.seconds)
            for tokens in options.tokens:
                call = CallSpec(Hq=options.heads, Lq=tokens, D=64, mask=M.Causal())
                for passes in PASSES:
                    ratios += rows(processes, call, ranks, link, passes, options)
        print(f"{ranks} ranks: link {link.bandwidth / 1e9:.2f} GB/s, {link.latency * 1e6:.0f} us", flush=True)
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"\nmeasured / predicted: {low:.2f} to {high:.2f}, median {middle:.2f}")
    print(session.closing(f"causal, {options.heads} heads of 64 channels, float32; processes of one thread"))
    return 0


def measured_link(processes: Processes, seconds: float) -> RankLink:
    """Measures messages that all ranks send to their neighbours at once: empty ones and large ones."""
    times = {
        size: min(max(processes.run(exchange, size)) for _ in range(max(3, int(8 * seconds))))
        for size in (4, MESSAGE)
    }
    beyond_latency = times[MESSAGE] - times[4]  # below 0 only if other processes disturb
    return RankLink(MESSAGE / (beyond_latency if beyond_latency > 0 else times[MESSAGE]), times[4])


def rows(
    processes: Processes, call: CallSpec, ranks: int, link: RankLink, passes: str, options: argparse.Namespace
) -> list[float]:
    """Prints the rows of a call. Returns the ratios of the times."""
    share = CallSpec(Hq=call.Hq // ranks, Lq=call.Lq, D=call.D, mask=call.mask)
    alone = best_times({"": partial(processes.run, own_share, share, passes)}, options.seconds)[""]
    flops = cost.over_ranks(share, 1, flops=1.0, passes=passes)[0].compute / alone
    layout, ratios = D.zigzag(call.Lq, ranks), []
    predictions = cost.over_ranks(call, ranks, layout=layout, flops=flops, link=link, passes=passes)
    calls = {x.method: partial(processes.run, shards, call, layout, x, passes) for x in predictions}
    sent = {method: sum(run()) for method, run in calls.items()}
    measured = best_times(calls, options.seconds * len(calls))
    for x in predictions:
        if sent[x.method] != x.total_bytes:
            raise WrongResult(f"{x.method}: expected {x.total_bytes} bytes, got {sent[x.method]}")
        memory = [n for n in processes.run(memory_of, call, layout, x) if n is not None]
        texts = (f"{ranks} | {call.Lq:,} | {passes} | {x.method} | {milliseconds(x.seconds)}",)
        ratios.append(measured[x.method] / x.seconds)
        of_memory = f"{max(memory) / x.memory_bytes:.2f}" if memory else "-"
        print("|", *texts, "|", milliseconds(measured[x.method]), "|", f"{ratios[-1]:.2f} | {of_memory} |")
    return ratios


# In each process

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def exchange(mesh: DeviceMesh, size: int) -> float:
    """Returns the seconds of a message to the next rank and one from the rank before."""
    group = _group.group_of(mesh)
    sent, received = torch.zeros(2, size // 4)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    dist.barrier()
    begin = perf_counter()
    for _ in range(EXCHANGES):
        _group.start(group, [(after, sent)], [(before, received)]).wait()
    return (perf_counter() - begin) / EXCHANGES


def own_share(_: DeviceMesh, call: CallSpec, passes: str) -> None:
    """Runs a call of as many FLOPs as a rank has."""
    run(partial(regard.attention, mask=call.mask), inputs(call, call.Lq), passes)


def tensors(call: CallSpec, n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(call.B, call.Hq, n, call.D, generator=generator) for _ in range(3)]


inputs = functools.lru_cache(maxsize=2)(tensors)


def run(call: Callable[..., Any], qkv: list[torch.Tensor], passes: str) -> None:
    leaves = [x.requires_grad_(passes == "training") for x in qkv]
    out = call(*leaves)
    if passes == "training":
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def shards(
    mesh: DeviceMesh, call: CallSpec, layout: D.Layout, x: RanksCost, passes: str, make: Any = inputs
) -> int:
    """Runs the call with a method. Returns the bytes that the rank sends."""
    rank = dist.get_rank()
    if x.method == "usp":
        if x.mesh not in _meshes:
            ranks = torch.arange(layout.ranks).view(x.mesh)
            _meshes[x.mesh] = DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "ulysses"))
        mesh = _meshes[x.mesh]
    options = {"mesh": mesh, "layout": layout, "method": x.method, "mask": call.mask}
    before = _group.sent_bytes
    run(partial(D.attention, **options), make(call, layout.lengths[rank]), passes)
    return _group.sent_bytes - before


def memory_of(mesh: DeviceMesh, call: CallSpec, layout: D.Layout, x: RanksCost) -> int | None:
    return cost.peak_memory(lambda: shards(mesh, call, layout, x, "forward", tensors))


if __name__ == "__main__":
    sys.exit(main())
