"""The explorer's server: runs the model on texts and computes rows and tiles of weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
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
MAX_TRACES = 8  # the largest number of stored traces of typed texts
MAX_TILE = 256  # the largest number of weights on a side of a tile
MAX_ANSWERS = 16  # the largest number of cached answers
BODY_SECONDS = 3.0

T = TypeVar("T")
Read = Callable[[str], Trace]


class IndexConvertor(IntegerConvertor):
    """Converts an index in a URL path. More digits than Python converts (4,300) give status 400."""

    def convert(self, value: str) -> int:
        try:
            return super().convert(value)
        except ValueError:
            raise HTTPException(400, "expected a number of fewer digits") from None


register_url_convertor("index", IndexConvertor())


class Site:
    """The routes of the server. `read` runs the model on a text, or is None without a model."""

    def __init__(self, traces: list[Trace], read: Read | None) -> None:
        self._traces = dict(enumerate(traces))
        self._initial = len(traces)
        self._next = self._initial
        self._read = read
        self._reading = False
        self._answers: dict[str, str] = {}  # path -> JSON
        # Each executor has one thread. A click does not wait for tiles, and neither waits for the model.
        names = ("explore", "rows", "model")
        self._worker, self._rows, self._model = (ThreadPoolExecutor(1, f"regard-{name}") for name in names)

    def app(self) -> Starlette:
        head = "/api/{trace:index}/{layer:index}/{head:index}"
        routes = [
            Route("/api", self.summary),
            Route("/api/text", self.text, methods=["POST"]),
            Route("/api/{trace:index}", self.overview),
            Route(head, self.head),
            Route(head + "/rows/{row:index}", self.row),
            Route(head + "/tiles/{row:index}/{key:index}", self.tile),
            Route("/{name:path}", static),
        ]
        return Starlette(routes=routes)

    async def summary(self, request: Request) -> Response:
        return _json({"traces": list(self._traces), "reads": self._read is not None})

    async def overview(self, request: Request) -> Response:
        trace = self._trace(request)
        return await self._cached(request, lambda: overview(trace, heads_of(trace)))

    async def head(self, request: Request) -> Response:
        trace, layer, head = self._head(request)
        return await self._cached(request, lambda: head_facts(trace, layer, head))

    async def row(self, request: Request) -> Response:
        """Responds with the exact weights of one query for all keys."""
        trace, layer, head = self._head(request)
        row = _index(request, "row", len(trace.queries))
        return _json(await _run(self._rows, lambda: {"row": pack(trace.rows(layer, head, [row])[0])}))

    async def tile(self, request: Request) -> Response:
        """Responds with the exact weights of a tile of consecutive queries and keys."""
        trace, layer, head = self._head(request)
        row, key = _index(request, "row", len(trace.queries)), _index(request, "key", len(trace.keys))
        queries = range(row, min(row + MAX_TILE, len(trace.queries)))
        keys = range(key, min(key + MAX_TILE, len(trace.keys)))
        return await self._cached(request, lambda: {"tile": pack(trace.tile(layer, head, queries, keys))})

    async def text(self, request: Request) -> Response:
        """Runs the model on a text and responds with the number of the new trace."""
        if self._read is None:
            raise HTTPException(404)
        text = _text_of(await _body(request))
        if self._reading:
            raise HTTPException(503, "the model is running on another text")
        self._reading = True
        try:
            trace = await _run(self._model, partial(self._read, text))
        except Exception as error:  # whatever the model raises is shown on the page
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise HTTPException(400, reason.encode(errors="replace").decode()) from None
        finally:
            self._reading = False
        return _json({"trace": self._keep(trace)})

    def _keep(self, trace: Trace) -> int:
        """Stores the trace of a typed text and returns its number.

        If there are more than MAX_TRACES such traces, the oldest is dropped.
        """
        typed = [number for number in self._traces if number >= self._initial]
        if len(typed) >= MAX_TRACES:
            del self._traces[typed[0]]
        self._traces[self._next] = trace
        self._next += 1
        return self._next - 1

    def _trace(self, request: Request) -> Trace:
        trace = self._traces.get(request.path_params["trace"])
        if trace is None:
            raise HTTPException(404, "this text does not exist or is no longer kept")
        return trace

    def _head(self, request: Request) -> tuple[Trace, int, int]:
        trace = self._trace(request)
        layer = _index(request, "layer", len(trace.layers))
        return trace, layer, _index(request, "head", trace.layers[layer].heads)

    def close(self) -> None:
        for executor in (self._worker, self._rows, self._model):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _cached(self, request: Request, compute: Callable[[], Any]) -> Response:
        """Responds with the result of `compute` as JSON.

        The last MAX_ANSWERS results are cached by URL path, so they must depend on the path only.
        """
        path: str = request.scope["path"]

        def answer() -> str:
            if path not in self._answers:
                self._answers[path] = _dumps(compute())
                if len(self._answers) > MAX_ANSWERS:
                    del self._answers[next(iter(self._answers))]
            return self._answers[path]

        return Response(await _run(self._worker, answer), media_type="application/json")


async def _run(executor: ThreadPoolExecutor, compute: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, compute)


async def static(request: Request) -> Response:
    name = request.path_params["name"] or "index.html"
    text = _page.files().get(name)
    if text is None:
        raise HTTPException(404)
    return Response(text, media_type=_page.media_type(name))


def _dumps(value: Any) -> str:
    """Returns ASCII JSON, because JSON in UTF-8 would fail for tokens with lone surrogates."""
    return json.dumps(value, allow_nan=False)


def _json(value: Any) -> Response:
    return Response(_dumps(value), media_type="application/json")


def _index(request: Request, name: str, count: int) -> int:
    index: int = request.path_params[name]
    if index >= count:
        raise HTTPException(404)
    return index


async def _body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises HTTPException with status 413 if the body has more than MAX_BODY bytes, and with status
    408 if it does not arrive within BODY_SECONDS.
    """
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY:
        raise HTTPException(413)
    try:
        return await asyncio.wait_for(_read_limited(request), BODY_SECONDS)
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408) from None


async def _read_limited(request: Request) -> bytes:
    """Returns the body of a request. Raises HTTPException after more than MAX_BODY bytes.

    The limit applies to the bytes read, because the Content-Length header may be missing or wrong.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
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
        raise HTTPException(400, 'expected {"text": "..."} with a text that is not empty')
    if len(text) > MAX_CHARACTERS:
        raise HTTPException(400, f"expected at most {MAX_CHARACTERS} characters, got {len(text)}")
    if text != text.encode(errors="replace").decode():
        raise HTTPException(400, "expected a text without lone surrogates")
    return text


class Server:
    """The explorer's HTTP server. The constructor opens its sockets, and `run` answers requests."""

    def __init__(self, traces: list[Trace], read: Read | None, host: str | None, port: int) -> None:
        self.sockets = listen(host, port)
        self.port: int = self.sockets[0].getsockname()[1]
        self._site = Site(traces, read)
        self._guard = Guard(self._site.app(), self.port, host)
        self.link = self._guard.link()

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Runs the server until Ctrl-C. Calls `started` once the server can answer requests."""
        # No access log, because it would contain the token.
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
