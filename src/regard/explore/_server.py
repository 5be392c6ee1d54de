"""The explorer's server: rows, blocks and texts are computed when the page requests them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import _page
from ._connections import Connection, listen
from ._guard import Guard
from ._pack import head_facts, heads_of, overview, pack
from ._trace import Trace

MAX_BODY = 1 << 20
MAX_CHARACTERS = 1 << 15
MAX_TRACES = 8  # texts that were typed and are kept
MAX_TILE = 256  # weights on a side
BODY_SECONDS = 10.0

T = TypeVar("T")
Read = Callable[[str], Trace]


class Site:
    """The routes over some traces and, if there is a model, a function that reads texts with it."""

    def __init__(self, traces: list[Trace], read: Read | None) -> None:
        self._traces = dict(enumerate(traces))
        self._given = len(traces)
        self._next = self._given
        self._read = read
        self._reading = False
        # One computation at a time; rows have a place of their own, since a click waits for them.
        self._worker, self._rows = (ThreadPoolExecutor(1, f"regard-{name}") for name in ("explore", "rows"))

    def app(self) -> Starlette:
        head = "/api/{trace:int}/{layer:int}/{head:int}"
        routes = [
            Route("/api", self.summary),
            Route("/api/text", self.text, methods=["POST"]),
            Route("/api/{trace:int}", self.overview),
            Route(head, self.head),
            Route(head + "/rows/{row:int}", self.row),
            Route(head + "/tiles/{row:int}/{key:int}", self.tile),
            Route("/{name:path}", static),
        ]
        return Starlette(routes=routes)

    async def summary(self, request: Request) -> Response:
        return _json({"traces": list(self._traces), "reads": self._read is not None})

    async def overview(self, request: Request) -> Response:
        trace = self._trace(request)
        return _json(await self._run(lambda: overview(trace, heads_of(trace))))

    async def head(self, request: Request) -> Response:
        trace, layer, head = self._head(request)
        return _json(await self._run(lambda: head_facts(trace, layer, head)))

    async def row(self, request: Request) -> Response:
        """Answers with the exact weights of one query."""
        trace, layer, head = self._head(request)
        row = _index(request, "row", len(trace.queries))
        return _json(await self._run(lambda: {"row": pack(trace.rows(layer, head, [row])[0])}, self._rows))

    async def tile(self, request: Request) -> Response:
        """Answers with the exact weights of a square of queries and keys."""
        trace, layer, head = self._head(request)
        row, key = _index(request, "row", len(trace.queries)), _index(request, "key", len(trace.keys))
        queries = range(row, min(row + MAX_TILE, len(trace.queries)))
        keys = range(key, min(key + MAX_TILE, len(trace.keys)))
        return _json(await self._run(lambda: {"tile": pack(trace.tile(layer, head, queries, keys))}))

    async def text(self, request: Request) -> Response:
        """Reads a text with the model that was chosen at the start."""
        if self._read is None:
            raise HTTPException(404)
        text = _text_of(await _body(request))
        if self._reading:
            raise HTTPException(503, "another text is being read")
        self._reading = True
        try:
            trace = await self._run(partial(self._read, text))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        finally:
            self._reading = False
        return _json({"trace": self._keep(trace)})

    def _keep(self, trace: Trace) -> int:
        """Keeps a trace and drops the oldest typed text if there are too many. Returns its number."""
        typed = [number for number in self._traces if number >= self._given]
        if len(typed) >= MAX_TRACES:
            del self._traces[typed[0]]
        self._traces[self._next] = trace
        self._next += 1
        return self._next - 1

    def _trace(self, request: Request) -> Trace:
        trace = self._traces.get(request.path_params["trace"])
        if trace is None:
            raise HTTPException(404, "there is no such text, or it is no longer kept")
        return trace

    def _head(self, request: Request) -> tuple[Trace, int, int]:
        trace = self._trace(request)
        layer = _index(request, "layer", len(trace.layers))
        return trace, layer, _index(request, "head", trace.layers[layer].heads)

    def close(self) -> None:
        for executor in (self._worker, self._rows):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, make: Callable[[], T], executor: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor or self._worker, make)


async def static(request: Request) -> Response:
    name = request.path_params["name"] or "index.html"
    text = _page.files().get(name)
    if text is None:
        raise HTTPException(404)
    return Response(text, media_type=_page.media_type(name))


def _json(value: Any) -> Response:
    """Returns ASCII JSON, since tokens may hold lone surrogates, which cannot be encoded."""
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _index(request: Request, name: str, count: int) -> int:
    index: int = request.path_params[name]
    if index >= count:
        raise HTTPException(404)
    return index


async def _body(request: Request) -> bytes:
    """Reads at most MAX_BODY bytes, whatever the headers say."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY:
        raise HTTPException(413)
    try:
        return await asyncio.wait_for(_pieces(request), BODY_SECONDS)
    except (asyncio.TimeoutError, ClientDisconnect):
        raise HTTPException(408) from None


async def _pieces(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413)
    return bytes(body)


def _text_of(body: bytes) -> str:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "expected JSON") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise HTTPException(400, 'expected {"text": "..."} with some text in it')
    if len(text) > MAX_CHARACTERS:
        raise HTTPException(400, f"expected at most {MAX_CHARACTERS} characters, got {len(text)}")
    return text


class Server:
    """Listens from the start; answers while it runs."""

    def __init__(self, traces: list[Trace], read: Read | None, host: str | None, port: int) -> None:
        self.sockets = listen(host, port)
        self.port: int = self.sockets[0].getsockname()[1]
        self._site = Site(traces, read)
        self._guard = Guard(self._site.app(), self.port, host)
        self.link = self._guard.link()

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Runs until Ctrl-C. `started` is called when the server answers."""
        # An access log would show the token.
        silent: dict[str, Any] = {"log_level": "critical", "access_log": False, "server_header": False}
        limits: dict[str, Any] = {"ws": "none", "proxy_headers": False, "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(self._guard, http=Connection, **silent, **limits)
        self._uvicorn = uvicorn.Server(config)
        try:
            asyncio.run(self._serve(started))
        finally:
            self._site.close()

    async def _serve(self, started: Callable[[], None]) -> None:
        serving = asyncio.create_task(self._uvicorn.serve(self.sockets))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            started()
        await serving

    def stop(self) -> None:
        """Stops the server. May be called from another thread."""
        self._uvicorn.should_exit = True
