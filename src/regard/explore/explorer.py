"""`Explorer`: shows traces in a browser, from a local server or from one file."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._tools.arguments import count
from .._tools.replacing import replacing
from . import _page
from ._pack import Head, head_facts, heads_of, overview, pack, queries_and_keys
from ._trace import Trace

CELLS = 2**21  # the largest number of blocks in a file, summed over all heads
EMBED = ("facts", "qk")


@dataclass(frozen=True, eq=False)
class Explorer:
    """A page that shows one or more traces.

    `read` runs a model on a text and returns the trace. The server calls it for texts that a user
    types into the page.
    """

    traces: tuple[Trace, ...]
    read: Callable[[str], Trace] | None = None

    def __post_init__(self) -> None:
        if not self.traces and self.read is None:
            raise ValueError("traces: expected at least one, or a model that runs on texts, got neither")

    def __add__(self, other: Explorer) -> Explorer:
        """Returns an explorer that shows the traces of both explorers on one page."""
        return Explorer(self.traces + other.traces, self.read or other.read)

    def save(
        self, path: str | Path, *, heads: Sequence[Head] | None = None, rows: Sequence[int] = (),
        embed: str = "facts",
    ) -> Path:  # fmt: skip
        """Writes the page as one file that needs no network and no server, and returns the path.

        Args:
            path: the file to write. An existing file is replaced once the page is complete.
            heads: pairs (layer, head) to include. Default: all heads. With fewer heads, heat maps
                have finer blocks.
            rows: indices of queries whose weights for all keys are included. The 8 largest weights
                of every query are always included.
            embed: "facts", or "qk" to include also q and k in float16, so that the browser can
                compute the weights of any query.
        """
        page = _page.single(self._data(heads, rows, embed))
        with replacing(path) as temporary:
            temporary.write_text(page, encoding="utf-8", newline="\n")
        return Path(path)

    def serve(self, *, host: str | None = None, port: int = 0, open_browser: bool = True) -> None:
        """Serves the page until Ctrl-C and prints a link to it, which works once.

        By default, the page is reachable only from this machine. A `host` other than the loopback
        address makes it reachable from the network for anyone who has the link.
        """
        from ._server import Server

        server = Server(list(self.traces), self.read, host, port)
        print(f"{server.link}\nThe link works once, in one browser. Ctrl-C stops the server.", flush=True)

        def started() -> None:
            if open_browser:  # in a thread, because a text browser such as lynx blocks until it is closed
                threading.Thread(target=webbrowser.open, args=(server.link,), daemon=True).start()

        server.run(started)

    def _data(self, heads: Sequence[Head] | None, rows: Sequence[int], embed: str) -> dict[str, Any]:
        if embed not in EMBED:
            raise ValueError(f"embed: expected one of {', '.join(EMBED)}, got {embed!r}")
        if not self.traces:
            raise ValueError("save: expected a trace, got none; pass a text to explore.text")
        heads_by_trace = [_check_heads(trace, heads) for trace in self.traces]
        budget = CELLS // sum(map(len, heads_by_trace))
        traces = []
        for trace, included in zip(self.traces, heads_by_trace, strict=True):
            queries = _check_rows(trace, rows)
            facts = [_head_data(trace, head, queries, embed, budget) for head in included]
            traces.append(overview(trace, included) | {"facts": facts})
        return {"traces": traces}


def _check_heads(trace: Trace, heads: Sequence[Head] | None) -> list[Head]:
    """Returns `heads`, or all heads of the trace if `heads` is None.

    Raises ValueError for a head that the trace does not have.
    """
    existing = heads_of(trace)
    if heads is None:
        return existing
    wrong = [head for head in heads if tuple(head) not in existing]
    if wrong or not heads:
        raise ValueError(f"heads: expected pairs (layer, head) up to {existing[-1]}, got {wrong or 'none'}")
    return [(layer, head) for layer, head in heads]


def _check_rows(trace: Trace, rows: Iterable[int]) -> list[int]:
    """Returns the rows as integers. Raises ValueError for a row that the trace does not have."""
    queries = [count("rows", row) for row in rows]
    if queries and max(queries) >= len(trace.queries):
        raise ValueError(f"rows: expected queries up to {len(trace.queries) - 1}, got {max(queries)}")
    return queries


def _head_data(trace: Trace, which: Head, rows: list[int], embed: str, budget: int) -> dict[str, Any]:
    """Returns a head's facts, the weights of the queries `rows`, and q and k if embed="qk".

    The facts include at most `budget` blocks.
    """
    layer, head = which
    data = head_facts(trace, layer, head, _coarser(trace, layer, budget))
    if rows:
        weights = trace.rows(layer, head, rows)
        data["rows"] = {str(row): pack(weights[i]) for i, row in enumerate(rows)}
    if embed == "qk":
        data["qk"] = queries_and_keys(trace, layer, head)
    return data


def _coarser(trace: Trace, layer: int, budget: int) -> int:
    """Returns the finest pyramid level at which a head has at most `budget` blocks."""
    levels = trace.facts(layer).mass
    return next((i for i, level in enumerate(levels) if level[0].size <= budget), len(levels) - 1)
