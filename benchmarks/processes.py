"""Processes of a one-dimensional gloo mesh that run functions for a benchmark, and such benchmarks."""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import command
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checks import WrongResult
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from regard import distributed

LIMIT = 1e-5  # largest relative error against the single process


class Processes:
    """`size` processes with one thread each, for use in a `with` block.

    The functions that they run are importable, and get the mesh as their first argument.
    """

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that reading raises EOFError if the process ends

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls function(mesh, *arguments) in all processes and returns the result of each rank."""
        for connection in self.connections:
            connection.send((function, arguments))
        results = [connection.recv() for connection in self.connections]
        for rank, result in enumerate(results):
            if isinstance(result, _Error):
                raise RuntimeError(f"rank {rank}: {result}")
        return results

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
            process.kill()
        self.folder.cleanup()


class _Error(str):
    """The traceback of a rank."""


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send(function(mesh, *arguments))
        except Exception:
            connection.send(_Error(traceback.format_exc()))
    dist.destroy_process_group()


def run_benchmark(
    doc: str | None, arguments: Sequence[str] | None, table: Callable[..., list[str]], call: str,
    configure: Callable[[argparse.ArgumentParser], object] | None = None,
) -> int:  # fmt: skip
    """Prints the table of a benchmark that compares processes of one thread with one process.

    `table` gets the options of the command line and the processes. `call` describes the calls.
    """
    parser = command.parser(doc, 60.0, "table")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=8)
    if configure is not None:
        configure(parser)
    options = parser.parse_args(arguments)
    session = command.Session(options)
    with Processes(options.threads) as processes:
        print("\n".join(table(options, processes)))
    shape = f"{call}1, {options.heads}, {options.tokens}, 64"
    print(session.closing(f"{shape}, float32; {options.threads} processes of one thread"))
    return 0


def agree(
    name: str, layout: distributed.Layout, expected: Sequence[Tensor], of_ranks: Sequence[Sequence[Tensor]]
) -> None:
    """Raises WrongResult if the shards of a rank differ from the single process."""
    for rank, shares in enumerate(of_ranks):
        for got, whole in zip(shares, expected, strict=True):
            share = distributed.shard(whole, layout, rank, 2)
            error = float((got - share).norm() / share.norm())
            if not error < LIMIT:
                raise WrongResult(f"{name}: relative error {error:.1e} on rank {rank}")
