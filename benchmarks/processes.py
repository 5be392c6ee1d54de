"""Processes of a one-dimensional gloo mesh that run functions for a benchmark."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh


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
