"""A pool of pages: their memory, how many sequences use each, which are free."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Pages:
    """Pages of `page` rows for keys and values: k (pages, Hkv, page, D), v (pages, Hkv, page, Dv)."""

    def __init__(
        self, pages: int, page: int, Hkv: int, D: int, Dv: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        with torch.inference_mode(False):  # or they could not be written to outside
            self.k = torch.zeros(pages, Hkv, page, D, dtype=dtype, device=device)
            self.v = torch.zeros(pages, Hkv, page, Dv, dtype=dtype, device=device)
        self.users = [0] * pages
        self.free = list(range(pages))[::-1]

    def next(self, count: int) -> list[int]:
        """The pages that `take` would take, still free; None are missing."""
        return self.free[len(self.free) - count :][::-1]

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each."""
        for number in pages:
            self.users[number] += 1

    def take(self, pages: list[int]) -> None:
        """Pages from `next`, which now have one user each."""
        del self.free[len(self.free) - len(pages) :]
        self.share(pages)

    def release(self, pages: Iterable[int]) -> None:
        """One user less of each; those without are free."""
        for number in pages:
            self.users[number] -= 1
            if not self.users[number]:
                self.free.append(number)

    def copy(self, source: list[int], to: list[int]) -> None:
        if source:
            self.k[to], self.v[to] = self.k[source], self.v[source]
