"""A process that answers commands, each a line of JSON, with lines of JSON."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Sequence
from typing import IO, Any

PATIENCE = 60.0  # seconds to wait for the end of a process


class Worker:
    """A process that waits for commands, without using the CPU, until its stdin is closed."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], log: IO[str] | None = None
    ) -> None:
        """Starts the process. Its stderr goes to `log`, by default to this process's stderr."""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the process's stdin, and kills the process if it does not end."""
        try:
            self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def ask(self, *command: Any, patience: float | None = None) -> Any:
        """Sends a command and waits for the answer.

        Raises RuntimeError if the process has ended. A process that does not answer within
        `patience` seconds is killed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], patience)[0]:
            self.process.kill()
            raise RuntimeError(f"no answer within {patience:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with exit code {self.process.wait()}")
        return json.loads(line)
