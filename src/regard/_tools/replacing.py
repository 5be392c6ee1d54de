"""Saves files atomically: a save is complete or has no effect."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

PREFIX = ".regard-saving-"
TOKEN = os.urandom(4).hex()  # differs from that of an earlier process with the same id


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path. At the end of the `with` block, the file there replaces `path`.

    If the block raises, `path` is unchanged. The temporary path is in a hidden folder beside
    `path`, because safetensors adds temporary files of its own. If the process is killed, this
    folder stays until the next save into the directory.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target  # a device is written in place, a directory raises
        return
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path: expected a file in an existing folder, got {path}; create {target.parent}"
        )
    for leftover in target.parent.glob(f"{PREFIX}*-*-*"):
        if _is_left_over(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-{TOKEN}-", dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)


def _is_left_over(name: str) -> bool:
    """Returns whether the process that created the temporary folder `name` has ended.

    Without /proc, processes other than this one count as running.
    """
    process, token = name.removeprefix(PREFIX).split("-")[:2]
    if process == str(os.getpid()):
        return token != TOKEN
    return os.path.exists("/proc/self") and not os.path.exists(f"/proc/{process}")
