"""The explorer's server: responses, access control, and limits on requests."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import psutil

from regard.explore import Explorer, _connections, _page
from regard.explore._guard import HEADERS, Guard
from regard.explore._server import MAX_BODY, MAX_CHARACTERS, MAX_TRACES
from regard.explore._trace import Trace
from support.explore import HOSTS, Client, harmful_tokens, running, small, traversals, unpacked

READ = json.dumps({"text": "a b c"}).encode()


def read(text: str) -> Trace:
    """Replaces a model: returns a random trace whose tokens are the first 50 words."""
    words = text.split()
    if len(words) > 4096:
        raise ValueError(f"text: expected at most 4096 tokens, got {len(words)}")
    return small(words[:50]).traces[0]


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return small(harmful_tokens())


@pytest.fixture(scope="module")
def client(explorer: Explorer) -> Iterator[Client]:
    with running(Explorer(explorer.traces, read)) as client:
        yield client.enter()


# --- responses ---


def test_rows_and_tiles_are_exact(client: Client, explorer: Explorer) -> None:
    trace = explorer.traces[0]
    assert client.json("/api") == {"traces": [0], "reads": True}
    assert client.json("/api/0")["keys"] == list(trace.keys)
    row = unpacked(client.json("/api/0/1/2/rows/5")["row"])
    assert np.array_equal(row, trace.rows(1, 2, [5])[0])
    tile = unpacked(client.json("/api/0/1/2/tiles/3/7")["tile"])
    np.testing.assert_allclose(tile, trace.rows(1, 2, range(3, 200))[:, 7:], atol=1e-6)
    assert np.array_equal(unpacked(client.json("/api/0/0/1")["mass"]), trace.facts(0).mass[0][1])


@pytest.mark.parametrize(
    "path",
    ["/api/9", "/api/0/2/0", "/api/0/0/3", "/api/0/0/0/rows/200", "/api/0/0/0/tiles/0/200",
    "/api/0/0/0/rows/-1",
     "/api/0/0/0/rows/x", "/api/0/0/0/rows/" + "9" * 400, "/api/x", "/nothing"],
)  # fmt: skip
def test_unknown_paths_are_404(client: Client, path: str) -> None:
    assert client.ask(path).status == 404


def test_reading_texts_drops_the_oldest_trace(client: Client) -> None:
    trace_ids = []
    for i in range(MAX_TRACES + 2):
        answer = client.post(json.dumps({"text": f"the cat {i}"}).encode())
        assert answer.status == 200, answer
        trace_ids.append(json.loads(answer.body)["trace"])
    remaining = client.json("/api")["traces"]
    assert remaining == [0, *trace_ids[-MAX_TRACES:]]
    assert client.json(f"/api/{trace_ids[-1]}")["keys"] == ["the", "cat", str(MAX_TRACES + 1)]
    assert client.ask(f"/api/{trace_ids[0]}").status == 404


def test_one_text_is_read_at_a_time() -> None:
    started, may_end = threading.Event(), threading.Event()

    def slow(text: str) -> Trace:
        started.set()
        assert may_end.wait(600)
        return read(text)

    with running(Explorer((), slow)) as client:
        client.enter()
        statuses: list[int] = []
        first = threading.Thread(target=lambda: statuses.append(client.post(READ).status))
        first.start()
        assert started.wait(600)
        assert client.post(READ).status == 503
        assert client.ask("/").status == 200
        may_end.set()
        first.join()
        assert statuses == [200]
        assert client.post(READ).status == 200


def test_a_server_without_a_model_reads_nothing() -> None:
    with running(small()) as client:
        assert client.enter().post(READ).status == 404


# --- access control ---


@pytest.mark.parametrize("host", HOSTS)
def test_other_hosts_are_refused(client: Client, host: str) -> None:
    answer = client.ask("/", hosts=[host.format(port=client.server.port)])
    assert answer.status == 403
    assert b"Host" in answer.body


@pytest.mark.parametrize(
    "names", [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "evil.com"), ("evil.com", "127.0.0.1")]
)
def test_two_hosts_are_refused(client: Client, names: tuple[str, str]) -> None:
    port = client.server.port
    answer = client.ask("/", hosts=[f"{name}:{port}" for name in names])
    assert answer.status in (400, 403)  # the HTTP library may refuse it first
    assert b"<html" not in answer.body


def test_a_missing_host_is_refused(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.server.port)) as raw:
        raw.sendall(f"GET / HTTP/1.0\r\nCookie: {client.cookie}\r\n\r\n".encode())
        assert b" 403 " in raw.recv(200)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_this_machine_is_served(client: Client, name: str) -> None:
    assert client.ask("/", hosts=[f"{name}:{client.server.port}"]).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.com"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": ""},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": ""},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Content_Type": "multipart/form-data; boundary=application/json"},
        {"Content_Type": ""},
    ],
)
def test_posts_from_elsewhere_are_refused(client: Client, headers: dict[str, str]) -> None:
    answer = client.post(READ, **headers)
    assert answer.status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_loads_by_other_sites_are_refused(client: Client, site: str) -> None:
    assert client.ask("/api/0", Sec_Fetch_Site=site).status == 403


@pytest.mark.parametrize(
    "path", ["/", "/main.js", "/api", "/api/0", "/nothing", "/?token=", "/?token=x", "/?token=x&token=y"]
)
def test_requests_without_the_token_are_refused(client: Client, path: str) -> None:
    assert Client(client.server).ask(path).status == 403


def test_a_wrong_cookie_is_refused(client: Client) -> None:
    other = Client(client.server)
    name = client.cookie.partition("=")[0]
    for cookie in (
        f"{name}=x",
        f"{name}=",
        "x=y",
        ";;;",
        f"{name}=é",
        client.cookie[:-1],
        f"{client.cookie}x",
    ):
        other.cookie = cookie
        assert other.ask("/").status == 403


def test_the_link_works_once() -> None:
    with running(small()) as client:
        link = client.server.link.partition(str(client.server.port))[2]
        assert len(link.partition("=")[2]) == 43  # 256 bits
        first, second = client.ask(link), client.ask(link)
        assert (first.status, second.status) == (303, 403)
        assert first.headers["Location"] == "/"
        cookie = first.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Domain" not in cookie
        assert link.partition("=")[2] not in cookie
        assert "Set-Cookie" not in second.headers


def test_every_answer_has_the_security_headers(client: Client) -> None:
    port, answers = client.server.port, []
    for path in ("/", "/main.js", "/api", "/api/0", "/nothing", "/../x"):
        answers += [client.ask(path, Origin="http://evil.com"), Client(client.server).ask(path)]
    answers += [
        client.ask("/", hosts=["evil.com"]),
        client.post(READ),
        client.post(b"{"),
        client.post(READ, Origin="x"),
    ]
    answers += [
        client.ask("/", "OPTIONS", Origin=f"http://127.0.0.1:{port}", Access_Control_Request_Method="POST")
    ]
    for answer in answers:
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    for directive in (
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "form-action 'none'",
    ):
        assert directive in HEADERS["Content-Security-Policy"]


def test_only_loopback_listens(client: Client) -> None:
    connections = psutil.Process().net_connections("tcp")
    listening = {
        connection.laddr.ip
        for connection in connections
        if connection.status == "LISTEN" and connection.laddr.port == client.server.port
    }
    assert listening <= {"127.0.0.1", "::1"}
    assert "127.0.0.1" in listening


async def no_app(scope: Any, receive: Any, send: Any) -> None: ...


def test_other_hosts_require_the_token_too() -> None:
    guard = Guard(no_app, 80, "0.0.0.0")
    assert guard._is_ours("192.0.2.7:80")
    assert guard._is_ours("localhost:80")
    assert not guard._is_ours("evil.com:80")
    assert not Guard(no_app, 80, "192.0.2.7")._is_ours("192.0.2.8:80")
    with running(small(), "0.0.0.0") as client:
        assert client.ask("/").status == 403
        assert client.enter().ask("/").status == 200


# --- files ---

opened: list[str] | None = None


def watch(event: str, arguments: Any) -> None:
    """An audit hook that records events while `opened` is a list. Audit hooks cannot be removed."""
    if opened is not None and event in ("open", "socket.connect", "os.listdir", "os.scandir"):
        opened.append(f"{event} {arguments[0]}")


def test_no_path_leaves_the_page(client: Client) -> None:
    """Only exact names are served, and no request opens a file."""
    global opened
    paths = traversals()
    assert len(paths) == 100
    client.ask("/")
    sys.addaudithook(watch)
    opened = []
    try:
        statuses = {path: client.ask(path).status for path in paths}
        file_events = [event for event in opened if "socket.connect" not in event]
    finally:
        opened = None
    assert {path: status for path, status in statuses.items() if status not in (404, 400)} == {}
    assert sum(status == 400 for status in statuses.values()) <= 5  # malformed requests
    assert file_events == []


def test_every_file_has_its_media_type(client: Client) -> None:
    for name in _page.files():
        answer = client.ask(f"/{name}")
        assert answer.body.decode() == _page.files()[name]
        assert answer.headers["Content-Type"] == _page.media_type(name)
    assert client.ask("/").body.decode() == _page.files()["index.html"]


# --- limits ---


def test_bodies_without_a_length_are_counted(client: Client) -> None:
    def chunks() -> bytes:
        return b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(40)) + b"0\r\n\r\n"

    with socket.create_connection(("127.0.0.1", client.server.port)) as raw:
        raw.sendall(
            f"POST /api/text HTTP/1.1\r\nHost: {client.host}\r\nCookie: {client.cookie}\r\n"
            f"Origin: http://{client.host}\r\nSec-Fetch-Site: same-origin\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        with suppress(OSError):  # the server may hang up before the end of the body
            raw.sendall(chunks())
        assert b" 413 " in raw.recv(200)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"text"', b"{}", b'{"text": 3}', b'{"text": ""}', b'{"text": " \\n"}',
        b'{"text": null}',
        b"\xff\xfe", b"[" * 10_000, b'{"text":' * 10_000, b"NaN",
        json.dumps({"text": "a " * (MAX_CHARACTERS // 2 + 1)}).encode(),
        json.dumps({"text": "a " * 5000}).encode(),
        b'{"text": "' + b"a" * (MAX_BODY - 20) + b'"}',
    ],
    ids=range(16),
)  # fmt: skip
def test_invalid_bodies_are_400(client: Client, body: bytes) -> None:
    answer = client.post(body)
    assert answer.status == 400
    assert b"Traceback" not in answer.body


def quickest(client: Client, status: int, body: bytes, **headers: str) -> float:
    """Returns the shortest CPU time of seven requests in seconds; the server is a thread."""
    times = []
    for _ in range(7):
        start = time.process_time()
        assert client.post(body, **headers).status == status
        times.append(time.process_time() - start)
    return min(times)


def test_huge_input_costs_little(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits on time and memory hold for large bodies, deep JSON and 300 slow connections."""
    monkeypatch.setattr(_connections, "HEADER_SECONDS", 1e6)  # slow connections stay open
    client.post(READ)
    before = psutil.Process().memory_info().rss
    assert quickest(client, 400, b'{"text": "' + b"a " * 500_000 + b'"}') < 0.05
    assert quickest(client, 400, b"[" * 10_000) < 0.05
    assert quickest(client, 413, b"", Content_Length=str(10 << 20)) < 0.05
    check_slow_connections(client)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def check_slow_connections(client: Client) -> None:
    connections = []
    try:
        for i in range(_connections.MAX_CONNECTIONS + 44):
            connection = socket.create_connection(("127.0.0.1", client.server.port))
            connection.sendall([b"", b"G", b"GET / HTTP/1.1\r\nHost: "][i % 3])
            connections.append(connection)
        assert client.ask("/api").status == 200
        established = [c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]
        served = [c for c in established if c.laddr.port == client.server.port]
        assert len(served) <= _connections.MAX_CONNECTIONS
    finally:
        for connection in connections:
            connection.close()


def test_headers_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connections, "HEADER_SECONDS", 0.3)
    start = time.monotonic()
    with running(small()) as client, socket.create_connection(("127.0.0.1", client.server.port)) as raw:
        raw.sendall(b"GET / HT")
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""
        assert time.monotonic() - start > 0.2
        assert client.enter().ask("/").status == 200


def test_bodies_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.explore._server.BODY_SECONDS", 0.3)
    with running(Explorer((), read)) as client:
        assert client.enter().post(b"", Content_Length="5").status == 408


# --- the command ---


def test_serving_other_hosts_requires_i_know(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from regard.cli._app import app

    result = CliRunner().invoke(app, ["explore", "--host", "0.0.0.0"])
    assert result.exit_code == 1
    assert "expected --i-know" in result.stderr


def test_the_link_is_printed_and_the_log_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with running(small()) as client:
        client.enter().ask("/nothing")
        Client(client.server).ask("/?token=guess")
        assert re.fullmatch(
            rf"http://127\.0\.0\.1:{client.server.port}/\?token=[\w-]{{43}}", client.server.link
        )
    assert capfd.readouterr() == ("", "")
