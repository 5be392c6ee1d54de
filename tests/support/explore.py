"""Helpers for tests of the explorer: small traces, a running server, hostile tokens and paths."""

from __future__ import annotations

import base64
import http.client
import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch

from regard import explore
from regard.explore._server import Server
from regard.masks import Causal

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "it"]


def small(
    tokens: list[str] | None = None, heads: int = 3, layers: int = 2, **options: Any
) -> explore.Explorer:
    """Returns an explorer with random weights over `tokens`, by default 23 words."""
    tokens = [WORDS[i % len(WORDS)] for i in range(23)] if tokens is None else tokens
    q, k = (list(torch.randn(layers, heads, len(tokens), 8)) for _ in range(2))
    return explore.tensors(q, k, tokens, title="small", **({"mask": Causal()} | options))


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Client:
    """An HTTP client of the explorer's server. After `enter` it holds the page's cookie."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.host = f"127.0.0.1:{server.port}"
        self.cookie = ""

    def enter(self) -> Client:
        parts = urlsplit(self.server.link)
        answer = self.ask(f"{parts.path}?{parts.query}")
        assert answer.status == 303, answer
        self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return self

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        hosts: list[str] | None = None,
        **headers: str,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for host in [self.host] if hosts is None else hosts:
                connection.putheader("Host", host)
            if self.cookie:
                connection.putheader("Cookie", self.cookie)
            if body is not None and "Content_Length" not in headers:
                connection.putheader("Content-Length", str(len(body)))
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def post(self, body: bytes, path: str = "/api/text", **headers: str) -> Answer:
        """Posts as the page does; `headers` override the page's headers."""
        page_headers = {
            "Content_Type": "application/json",
            "Origin": f"http://{self.host}",
            "Sec_Fetch_Site": "same-origin",
        }
        return self.ask(path, "POST", body, **{name: x for name, x in (page_headers | headers).items() if x})

    def json(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, answer
        return json.loads(answer.body)


@contextmanager
def running(explorer: explore.Explorer, host: str | None = None) -> Iterator[Client]:
    server = Server(list(explorer.traces), explorer.read, host, 0)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(600)
        yield Client(server)
    finally:
        server.stop()
        thread.join()


# Each payload would run code or escape its context if it were not treated as text.
_PAYLOADS = (
    "</script><script>pwned()</script>", "<img src=x onerror=pwned()>", "<svg onload=pwned()>", "<!--", "-->",
    "<!--<script>", "]]>", "</title><script>pwned()</script>", "</style><script>pwned()</script>",
    "javascript:pwned()", "<iframe srcdoc='<script>parent.pwned()</script>'>", "<base href=//evil.example>",
    "<a href=//evil.example ping=//evil.example>x</a>", "<link rel=stylesheet href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>", "<object data=//evil.example>",
    "${pwned()}", "`;pwned();`", "';pwned();'", '";pwned();"', "\\u003cscript\\u003e", "\\", "\\'", '\\"',
    "{{constructor.constructor('pwned()')()}}",
    "<math><mtext></table><mglyph><style><!--</style><img onerror=pwned()>",
    "<details open ontoggle=pwned()>", "<video><source onerror=pwned()>", "<body onload=pwned()>",
    "&lt;script&gt;",
    "&#60;script&#62;pwned()&#60;/script&#62;", "%3Cscript%3Epwned()%3C/script%3E", "__proto__",
    "constructor",
    "<script src=//evil.example></script>", "</textarea><script>pwned()</script>", "<x onclick=pwned()>",
    "\x00<b>",
)  # fmt: skip
_ODD = (
    "\x00",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\ufeff",
    "\x1b[31m",
    "\ud800",
    "\r\n",
    "\t",
    "\U0001f600",
    "",
)


def harmful_tokens() -> list[str]:
    """Returns 200 distinct tokens, one of them a megabyte long."""
    tokens = [*_PAYLOADS, *_ODD, "<img src=x onerror=pwned()>" * 40_000]
    for odd in _ODD[:-1]:
        tokens += [f"{odd}{payload}{odd}" for payload in _PAYLOADS]
    return tokens[:200]


HOSTS = (
    "evil.com", "127.0.0.1.evil.com:{port}", "0.0.0.0:{port}", "localhost.evil.com:{port}", "evil.com:{port}",
    "127.0.0.1", "localhost", "127.0.0.1:1", "localhost:{port}1", "[::1]", "[::]:{port}",
    "[::ffff:127.0.0.1]:{port}",
    "127.1:{port}", "2130706433:{port}", "0x7f.0.0.1:{port}", "127.0.0.2:{port}", "LOCALHOST.:{port}",
    "127.0.0.1:{port}@evil.com", "evil.com@127.0.0.1:{port}", "127.0.0.1:{port},evil.com", "",
)  # fmt: skip

_UP = (
    "../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "%252e%252e%252f", "....//", "..;/",
    "%c0%ae%c0%ae/",
    "/", "//", "\\\\host\\share\\", "%5c%5chost%5cshare%5c", "C:/", "C:%5c", "file:///", "./", "%00",
    "page/../../",
)  # fmt: skip
_FILES = ("etc/passwd", "_page.py", "index.html%00.js", "explorer.py", "page/index.html")


def traversals() -> list[str]:
    """Returns 100 paths that leave the page's folder or reach a file in it indirectly."""
    return [f"/{up}{file}" for up in _UP for file in _FILES]


def unpacked(packed: dict[str, Any]) -> np.ndarray[Any, Any]:
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(raw, {"f4": "<f4", "f2": "<f2", "i4": "<i4"}[packed["type"]]).reshape(
        packed["shape"]
    )


def data_of(page: str) -> Any:
    """Returns the data embedded in a page that was saved as one file."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match.group(1))
