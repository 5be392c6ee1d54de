"""Binary files, read within their size: no length is believed before it is compared with what is left."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path


class Cursor:
    """A place in a file. Whoever asks for more than is left gets an error that says where, and no memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        self.bytes = memoryview(whole)

    @property
    def left(self) -> int:
        return self.size - self.at

    def fault(self, message: str) -> ValueError:
        return ValueError(f"{self.path.name}, byte {self.at}: {message}")

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes, a view of the file."""
        if count > self.left:
            raise self.fault(f"{what} takes {count} bytes, but {self.left} are left of {self.size}")
        self.at += count
        return self.bytes[self.at - count : self.at]

    def number(self, form: str, what: str) -> int | float | bool:
        """One number in the form of `struct`, little-endian."""
        (value,) = struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))
        number: int | float | bool = value
        return number

    def count(self, form: str, what: str) -> int:
        """One unsigned number."""
        return int(self.number(form, what))

    def text(self, count: int, what: str) -> str:
        raw = bytes(self.take(count, what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8: {raw[:40]!r}") from None
