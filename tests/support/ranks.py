"""A pool of gloo processes that tests share: starting a process takes longer than most tests."""

from __future__ import annotations

import datetime
import faulthandler
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

WORLD = 4
TIMEOUT = 240.0  # seconds until a rank gives up waiting for another
STUCK = 300  # seconds after which a task prints its stack and ends its process
RETURN_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
POLL = 1.0  # seconds between checks that a process lives


class Failure(Exception):
    """An exception of a rank, with its traceback as text."""


class Ranks:
    """WORLD processes. `run(n, function, ...)` calls a function on the first n of them.

    They return memory to the system when a tensor is freed, so that tests can measure it.
    """

    def __init__(self, world: int = WORLD, timeout: float = TIMEOUT) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.tasks = [context.Queue() for _ in range(world)]
        self.results = [context.Queue() for _ in range(world)]
        self.processes = [
            context.Process(target=_work, args=(rank, world, store, timeout, *queues), daemon=True)
            for rank, queues in enumerate(zip(self.tasks, self.results, strict=True))
        ]
        with mock.patch.dict(os.environ, RETURN_MEMORY):
            for process in self.processes:
                process.start()

    def run(self, shape: int | tuple[int, int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns `function(mesh, *args)` of each rank of a mesh. Raises Failure if a rank raised."""
        outcomes = self.outcomes(shape, function, *args)
        failures = [f"rank {rank}:\n{x}" for rank, x in enumerate(outcomes) if isinstance(x, Failure)]
        if failures:
            raise Failure("\n".join(failures))
        return outcomes

    def outcomes(self, shape: int | tuple[int, int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns results, and a Failure for each rank that raised."""
        n = shape if isinstance(shape, int) else shape[0] * shape[1]
        for tasks in self.tasks[:n]:
            tasks.put((shape, function, args))
        return [self.result(rank) for rank in range(n)]

    def result(self, rank: int) -> Any:
        """Waits for the result of a rank. Raises Failure if its process ended without one."""
        while True:
            alive = self.processes[rank].is_alive()
            try:
                return self.results[rank].get(timeout=POLL)
            except queue.Empty:
                if not alive:
                    raise Failure(f"rank {rank}: its process ended") from None

    def close(self) -> None:
        """Ends the processes, also those of ranks that wait for others."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _work(rank: int, world: int, store: str, timeout: float, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    meshes: dict[Any, DeviceMesh] = {}
    for n in range(1, world + 1):
        # A mesh made by DeviceMesh itself would have the default time-out.
        group = dist.new_group(list(range(n)), timeout=datetime.timedelta(seconds=timeout))
        if rank < n:
            meshes[n] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    for rows, columns in ((2, 2), (1, 2), (2, 1)):
        if rows * columns <= world:
            ranks = torch.arange(rows * columns).view(rows, columns)
            meshes[rows, columns] = DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "ulysses"))
    while True:
        shape, function, args = tasks.get()
        faulthandler.dump_traceback_later(STUCK, exit=True)
        try:
            results.put(function(meshes[shape], *args))
        except BaseException as error:
            results.put(Failure(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        faulthandler.cancel_dump_traceback_later()
