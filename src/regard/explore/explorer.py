"""`Explorer`: shows traces in a browser, from a local server or from one file."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._tools.arguments import count
from . import _page
from ._pack import Head, head_facts, heads_of, overview, pack, queries_and_keys
from ._trace import Trace

CELLS = 2**21  # blocks of all heads together that a file holds
EMBED = ("facts", "qk")


@dataclass(frozen=True, eq=False)
class Explorer:
    """One trace, or two to compare. `read` turns a text into a trace, for the server."""

    traces: tuple[Trace, ...]
    read: Callable[[str], Trace] | None = None

    def __post_init__(self) -> None:
        if not self.traces and self.read is None:
            raise ValueError("traces: expected at least one, or a model that reads texts, got neither")

    def __add__(self, other: Explorer) -> Explorer:
        """Shows both in one page, to compare."""
        return Explorer(self.traces + other.traces, self.read or other.read)

    def save(
        self, path: str | Path, *, heads: Sequence[Head] | None = None, rows: Sequence[int] = (),
        embed: str = "facts",
    ) -> Path:  # fmt: skip
        """Writes the page as one file that needs no network and no server.

        Args:
            path: the file, which is replaced if it exists.
            heads: pairs (layer, head) to include; all by default. Fewer heads have finer blocks.
            rows: queries whose weights for all keys are included, beside the largest of every query.
            embed: "qk" includes q and k in 16 bits, so that the browser computes any row.

        Returns:
            The path.
        """
        page = _page.single(self._data(heads, rows, embed))
        Path(path).write_text(page, encoding="utf-8", newline="\n")
        return Path(path)

    def serve(self, *, host: str | None = None, port: int = 0, open_browser: bool = True) -> None:
        """Serves the page on this machine until Ctrl-C. The printed link opens it once.

        A `host` other than the loopback makes the page reachable for others who have the link.
        """
        from ._server import Server

        server = Server(list(self.traces), self.read, host, port)
        print(f"{server.link}\nThe link works once, in one browser. Ctrl-C ends.", flush=True)

        def started() -> None:
            if open_browser:
                webbrowser.open(server.link)

        server.run(started)

    def _data(self, heads: Sequence[Head] | None, rows: Sequence[int], embed: str) -> dict[str, Any]:
        if embed not in EMBED:
            raise ValueError(f"embed: expected one of {', '.join(EMBED)}, got {embed!r}")
        if not self.traces:
            raise ValueError("save: expected a trace, got none; read a text first")
        chosen = [_chosen(trace, heads) for trace in self.traces]
        budget = CELLS // sum(map(len, chosen))
        traces = []
        for trace, some in zip(self.traces, chosen, strict=True):
            known = _rows(trace, rows)
            facts = [_head_data(trace, head, known, embed, budget) for head in some]
            traces.append(overview(trace, some) | {"facts": facts})
        return {"traces": traces}


def _chosen(trace: Trace, heads: Sequence[Head] | None) -> list[Head]:
    known = heads_of(trace)
    if heads is None:
        return known
    wrong = [head for head in heads if tuple(head) not in known]
    if wrong or not heads:
        raise ValueError(f"heads: expected pairs (layer, head) up to {known[-1]}, got {wrong or 'none'}")
    return [(layer, head) for layer, head in heads]


def _rows(trace: Trace, rows: Iterable[int]) -> list[int]:
    found = [count("rows", row) for row in rows]
    if found and max(found) >= len(trace.queries):
        raise ValueError(f"rows: expected queries up to {len(trace.queries) - 1}, got {max(found)}")
    return found


def _head_data(trace: Trace, which: Head, rows: list[int], embed: str, budget: int) -> dict[str, Any]:
    layer, head = which
    data = head_facts(trace, layer, head, _coarser(trace, layer, budget))
    if rows:
        weights = trace.rows(layer, head, rows)
        data["rows"] = {str(row): pack(weights[i]) for i, row in enumerate(rows)}
    if embed == "qk":
        data["qk"] = queries_and_keys(trace, layer, head)
    return data


def _coarser(trace: Trace, layer: int, budget: int) -> int:
    """Returns how many levels to leave out so that each head has at most `budget` blocks."""
    levels = trace.facts(layer).mass
    return next((i for i, level in enumerate(levels) if level[0].size <= budget), len(levels) - 1)
