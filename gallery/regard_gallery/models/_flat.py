"""Reads binary files. Checks every length in a file against the number of bytes left."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path


class Cursor:
    """A file and a read position in it. Reading past the end raises ValueError.

    The argument `what` of a method names the value that is read, for the error message.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        if not path.exists():
            raise FileNotFoundError(f"model: expected a file, got {path}, which does not exist")
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        self.bytes = memoryview(mapped)

    @property
    def left(self) -> int:
        return self.size - self.at

    def fault(self, message: str) -> ValueError:
        return ValueError(f"{self.path.name}, byte {self.at}: {message}")

    def take(self, count: int, what: str) -> memoryview:
        """Returns a view of the next `count` bytes and advances the position."""
        if count > self.left:
            raise self.fault(f"{what} takes {count} bytes, but {self.left} are left of {self.size}")
        self.at += count
        return self.bytes[self.at - count : self.at]

    def number(self, form: str, what: str) -> int | float | bool:
        """Reads one little-endian number. `form` is its format character in `struct`."""
        (value,) = struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))
        number: int | float | bool = value
        return number

    def count(self, form: str, what: str) -> int:
        """Reads one unsigned integer. `form` is its `struct` format, `what` its name in errors."""
        return int(self.number(form, what))

    def text(self, count: int, what: str) -> str:
        raw = bytes(self.take(count, what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8: {raw[:40]!r}") from None
