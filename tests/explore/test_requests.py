"""The explorer's server under malformed, slow and parallel requests: no status 500 and no hang."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from regard import explore
from regard.explore import Explorer, _connections, _server
from regard.explore._trace import Trace
from support import model_files
from support.explore import HOSTS, Client, running, small

READ = json.dumps({"text": "a b c"}).encode()
BODY_SECONDS = _server.BODY_SECONDS  # the fixture sets a shorter time
LONG = "9" * 4301  # Python's `int` raises for more than 4,300 digits


def read(text: str) -> Trace:
    """Replaces a model: returns a random trace whose tokens are the first 50 words."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TypeError("TextEncodeInput must be Union[...]")  # as the tokenizers of Transformers do
    return small(text.split()[:50]).traces[0]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client that is logged in. Also checks that no request made asyncio log an error."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch, running(Explorer(small().traces, read)) as client:
        patch.setattr(_server, "BODY_SECONDS", 0.2)
        yield client.enter()
    logging.getLogger("asyncio").removeHandler(handler)
    assert records == []


def head_of(client: Client, *lines: str) -> bytes:
    """Returns the start of a request with the headers that the page sends, and with `lines`."""
    page = (
        f"Host: {client.host}",
        f"Cookie: {client.cookie}",
        f"Origin: http://{client.host}",
        "Sec-Fetch-Site: same-origin",
        "Content-Type: application/json",
    )
    return "".join(f"{line}\r\n" for line in (lines[0], *page, *lines[1:], "")).encode("latin-1")


def status(client: Client, request: bytes) -> int:
    """Sends bytes and returns the status of the first final answer."""
    with socket.create_connection(("127.0.0.1", client.server.port), 60) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            for line in answer:
                if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 1"):
                    return int(line.split()[1])
    raise AssertionError("the server closed the connection without an answer")


# --- access ---


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("port", ["", ":80"])
def test_browsers_leave_out_port_80(monkeypatch: pytest.MonkeyPatch, name: str, port: str) -> None:
    with running(Explorer(small().traces, read)) as client:
        monkeypatch.setattr(client.server._guard, "_port", 80)  # binding to port 80 needs privileges
        client.host = f"{name}{port}"
        assert client.enter().ask("/api").status == 200
        assert client.post(READ).status == 200
        for host in HOSTS:
            if host not in ("127.0.0.1", "localhost", "[::1]"):
                assert client.ask("/api", hosts=[host.format(port=80)]).status == 403
        for host in (f"{name}:", f"{name}:8", f"{name}:080", f":{name}", f"{name}.", "::1", "80", ":80"):
            assert client.ask("/api", hosts=[host]).status == 403


def test_only_get_spends_the_token() -> None:
    with running(small()) as client:
        link = client.server.link.partition(str(client.server.port))[2]
        answer = client.ask(link, "HEAD")
        assert answer.status == 200
        assert "Set-Cookie" not in answer.headers
        assert client.post(READ, link).status == 403
        assert client.ask("/?token=guess", "HEAD").status == 403
        assert client.enter().ask("/", "HEAD").status == 200


def test_a_cookie_of_another_server_costs_little(client: Client) -> None:
    """Quoted backslashes take Python's `SimpleCookie` quadratic time, and odd names make it give up."""
    other = Client(client.server)
    other.cookie = 'x="' + "\\" * 50_000 + f'"; {{"json": 1}}=[]; {client.cookie}'
    before = time.process_time()
    assert other.ask("/api").status == 200
    assert time.process_time() - before < 1


# --- bodies and numbers ---


@pytest.mark.parametrize("path", [f"/api/{LONG}", f"/api/0/{LONG}/0", f"/api/0/0/0/tiles/0/{LONG}"])
def test_numbers_that_python_refuses_are_400(client: Client, path: str) -> None:
    assert client.ask(path).status == 400
    assert client.ask(path, "HEAD").status == 400


@pytest.mark.parametrize(
    "body",
    [f'{{"text": {LONG}}}'.encode(), b'{"text": "a \\ud800"}', b'{"text": "\\udc00 a"}',
     b'{"text": "a \xed\xa0\x80"}', '{"text": "a \ud800"}'.encode("utf-16", "surrogatepass")],
)  # fmt: skip
def test_long_numbers_and_lone_surrogates_in_bodies_are_400(client: Client, body: bytes) -> None:
    assert client.post(body).status == 400


def test_a_tokenizer_gets_no_lone_surrogates() -> None:
    pytest.importorskip("transformers")
    pair = model_files.tiny_llama(len(model_files.byte_words())), model_files.byte_tokenizer()
    with running(explore.text(model=pair)) as client:
        assert client.enter().post(b'{"text": "a \\ud800"}').status == 400
        assert client.post(b'{"text": "a \\ud83d\\ude00"}').status == 200


@pytest.mark.parametrize("error", [ValueError("name \ud800"), TypeError("bad \ud800"), MemoryError()])
def test_failures_of_the_model_are_reported(error: Exception) -> None:
    def failing(text: str) -> Trace:
        raise error

    with running(Explorer((), failing)) as client:
        answer = client.enter().post(READ)
        assert answer.status == 400
        assert answer.body.startswith(
            {ValueError: b"name ", TypeError: b"TypeError(", MemoryError: b"Mem"}[type(error)]
        )
        assert client.post(READ).status == 400  # not 503: the model is not running any more


def test_withheld_bodies_are_408_within_5_seconds(client: Client) -> None:
    assert BODY_SECONDS <= 3
    for lines in (["Content-Length: 5"], ["Content-Length: 5", "Expect: 100-continue"],
                  ["Transfer-Encoding: chunked"]):  # fmt: skip
        assert status(client, head_of(client, "POST /api/text HTTP/1.1", *lines)) == 408
    part = head_of(client, "POST /api/text HTTP/1.1", "Content-Length: 50") + b'{"text": '
    assert status(client, part) == 408


# --- hangs ---


@pytest.mark.parametrize("path", ["/", "/api/0", "/api/0/1/2", "/api/0/0/0/rows/1", "/api/0/0/0/tiles/1/2"])
def test_200_parallel_requests_are_answered(client: Client, path: str) -> None:
    together = threading.Barrier(200)

    def ask(_: int) -> int:
        together.wait(60)
        return client.ask(path).status

    with ThreadPoolExecutor(200) as threads:
        assert set(threads.map(ask, range(200))) == {200}


def test_parallel_requests_for_the_same_data_share_one_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    head_facts = _server.head_facts

    def counted(trace: Trace, layer: int, head: int) -> dict[str, Any]:
        computed.append(head)
        return head_facts(trace, layer, head)

    monkeypatch.setattr(_server, "head_facts", counted)
    monkeypatch.setattr(_server, "MAX_ANSWERS", 2)
    with running(small()) as client, ThreadPoolExecutor(20) as threads:
        client.enter()
        answers = list(threads.map(lambda _: client.ask("/api/0/0/1").body, range(50)))
        assert set(answers) == {answers[0]}
        assert computed == [1]
        for head in (0, 2, 1):  # the third computation removes the first answer
            assert client.json(f"/api/0/0/{head}")["head"] == head
        assert computed == [1, 0, 2, 1]


def test_the_page_answers_while_the_model_runs() -> None:
    started, may_end = threading.Event(), threading.Event()

    def slow(text: str) -> Trace:
        started.set()
        assert may_end.wait(60)
        return read(text)

    with running(Explorer(small().traces, slow)) as client, ThreadPoolExecutor(8) as threads:
        posted = threads.submit(client.enter().post, READ)
        assert started.wait(30)
        paths = ["/api/0", "/api/0/0/0", "/api/0/0/0/rows/1", "/api/0/0/0/tiles/1/2"]
        answers = [threads.submit(client.ask, path) for path in paths]
        try:
            assert [answer.result(30).status for answer in answers] == [200] * 4
        finally:
            may_end.set()
        assert posted.result(30).status == 200


@pytest.mark.parametrize("limit", [("HEADER_SECONDS", 0.2), ("MAX_CONNECTIONS", 2)])
def test_a_slow_reader_gets_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch, limit: tuple[str, float]
) -> None:
    """Neither the deadline nor the limit on connections cuts off an answer that is being sent."""
    monkeypatch.setattr(_connections, *limit)
    with running(small(["x" * 10_000_000])) as client:
        client.enter()
        with socket.create_connection(("127.0.0.1", client.server.port), 30) as slow:
            slow.sendall(head_of(client, "GET /api/0 HTTP/1.1", "Connection: close"))
            answer = slow.recv(1000)
            others = [socket.create_connection(("127.0.0.1", client.server.port), 30) for _ in range(5)]
            time.sleep(0.5)  # longer than HEADER_SECONDS
            while data := slow.recv(1 << 20):
                answer += data
            for other in others:
                other.close()
        assert len(answer) > 10_000_000


def test_garbage_after_an_answer_closes_the_connection(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", client.server.port), 30) as connection:
        connection.sendall(head_of(client, "GET /api HTTP/1.1", "Transfer-Encoding: chunked"))
        assert b" 200 " in connection.recv(1000)
        connection.sendall(b"not a chunk\r\n")
        while connection.recv(1000):
            pass
    assert client.ask("/api").status == 200
    assert caplog.messages == []


def test_a_browser_in_the_terminal_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """`webbrowser.open` returns only when a text browser such as lynx is closed."""
    statuses: list[int] = []
    servers: list[Any] = []

    class Recorded(_server.Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            servers.append(self)

    def browse(link: str) -> None:
        client = Client(servers[0])
        try:
            statuses.append(client.ask(link.partition(client.host)[2]).status)
        finally:
            servers[0].stop()

    monkeypatch.setattr(_server, "Server", Recorded)
    monkeypatch.setattr("webbrowser.open", browse)
    small().serve()
    assert statuses == [303]


# --- fuzz ---

ROUTES = [
    "/api/{}",
    "/api/{}/{}/{}",
    "/api/{}/{}/{}/rows/{}",
    "/api/{}/{}/{}/tiles/{}/{}",
    "/{}",
    "/?token={}",
]
ODD = ["9", LONG, "-1", "+1", "1_0", "%31", "%d9%a3", "", "%00", "%ED%A0%80"]
SEGMENTS = st.sampled_from("01") | st.sampled_from(ODD) | st.text(max_size=9)
PATHS = st.tuples(st.sampled_from(ROUTES), st.lists(SEGMENTS, min_size=5, max_size=5)).map(
    lambda drawn: drawn[0].format(*drawn[1])
)
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "X"]
NAMES = [
    "Host", "Cookie", "Origin", "Content-Type", "Content-Length", "Transfer-Encoding", "Expect", "Upgrade",
    "Connection", "Sec-Fetch-Site", "Range", "X",
]  # fmt: skip
VALUES = [
    "", "0", "5", "-1", LONG, "chunked", "100-continue", "close", "upgrade", "websocket", "127.0.0.1", "null",
    'regard="\\777"', "bytes=0-1",
]  # fmt: skip
LATIN = st.text(alphabet=st.characters(max_codepoint=255), max_size=20)
HEADERS = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES) | LATIN).map(": ".join)
TEXTS = st.text(st.sampled_from("a \n\0\ud800\udfff\U0001f600"), min_size=1) | st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["text", "x"]), inner),
    max_leaves=5,
)
BODIES = st.binary(max_size=50) | (JSON | st.fixed_dictionaries({"text": TEXTS})).map(
    lambda value: json.dumps(value).encode()
)


def as_latin(text: str) -> str:
    """Returns a string whose Latin-1 bytes are the UTF-8 bytes of the text."""
    return text.encode(errors="surrogatepass").decode("latin-1")


@settings(max_examples=200)
@given(st.sampled_from(METHODS), PATHS)
def test_no_path_is_answered_with_500(client: Client, method: str, path: str) -> None:
    assert 200 <= status(client, head_of(client, f"{method} {as_latin(path)} HTTP/1.1")) < 500


@settings(max_examples=200)
@given(st.sampled_from(["GET /api", "POST /api/text"]), st.lists(HEADERS, min_size=1, max_size=3), BODIES)
def test_no_header_is_answered_with_500(client: Client, start: str, lines: list[str], body: bytes) -> None:
    assert 200 <= status(client, head_of(client, f"{start} HTTP/1.1", *lines) + body) < 500


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_no_bytes_are_answered_with_500(client: Client, data: bytes) -> None:
    assert 200 <= status(client, data + b"\r\n\r\n" + head_of(client, "GET /api HTTP/1.1")) < 500


@settings(max_examples=200)
@given(BODIES)
def test_no_text_is_answered_with_500(client: Client, body: bytes) -> None:
    assert client.post(body).status in (200, 400)
