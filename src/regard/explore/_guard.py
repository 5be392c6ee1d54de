"""Access control for every route: checks Host, Origin and token before a handler runs."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
SAFE = ("GET", "HEAD")  # methods that change nothing
NEAR = ("same-origin", "none")  # accepted Sec-Fetch-Site values; "none": not sent by a page


class Guard:
    """ASGI middleware that checks the Host header, the origin and the token or cookie of a request.

    A request that fails a check gets a 403 that says which check failed. Starlette's
    TrustedHostMiddleware is not used, because it ignores the port and repeated Host headers.
    """

    def __init__(self, app: ASGIApp, port: int, host: str | None = None) -> None:
        self._app = app
        self._port = port
        self._host = host
        self._token: str | None = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._cookie = f"regard-{port}"  # has the port in its name, because all ports of a host share cookies

    def link(self) -> str:
        """Returns the URL of the page, with the token as a parameter. The token is valid once."""
        host = self._host if self._host not in (None, "0.0.0.0", "::") else "127.0.0.1"
        return f"http://{_bracketed(str(host))}:{self._port}/?token={self._token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) or self._entry(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns a 403 for a request to another host, from another site or with invalid headers.

        Such a request is refused even if its token or cookie is right. For any other request,
        returns None.
        """
        if scope["type"] != "http":
            return _forbidden("only HTTP is supported")
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return _forbidden("the Host header names another machine")
        if headers.get("sec-fetch-site", "none") not in NEAR:
            return _forbidden("the request comes from another site")
        if scope["method"] in SAFE:
            return None
        if headers.getlist("origin") != [f"http://{hosts[0]}"]:
            return _forbidden("the Origin header is not this page")
        if "sec-fetch-site" not in headers:
            return _forbidden("the Sec-Fetch-Site header is missing")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _forbidden("the body is not application/json")
        return None

    def _is_ours(self, host: str) -> bool:
        if self._port == 80 and ":" not in host.rpartition("]")[2]:
            host += ":80"  # browsers leave out the default port
        name, _, port = host.rpartition(":")
        if port != str(self._port):
            return False
        if name in LOOPBACK:
            return True
        if self._host in ("0.0.0.0", "::"):  # accept IP addresses but no names, against DNS rebinding
            return _is_address(name)
        return self._host is not None and name == _bracketed(self._host)

    def _entry(self, scope: Scope) -> Response | None:
        """Returns None for a request with the session cookie.

        For a GET of "/" with the token, invalidates the token and returns a redirect that sets the
        cookie. A HEAD of "/" with the token gets a 200 and leaves the token valid. For any other
        request, returns a 403.
        """
        if _matches(_cookies(scope, self._cookie), self._session):
            return None
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        is_link = scope["path"] == "/" and scope["method"] in SAFE
        if self._token is None or not is_link or not _matches(tokens, self._token):
            return _forbidden("open the link that the server printed at its start; it works once")
        if scope["method"] == "HEAD":
            return Response()
        self._token = None
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        return answer


def _matches(values: Iterable[str], secret: str) -> bool:
    return any(secrets.compare_digest(value.encode(), secret.encode()) for value in values)


def _cookies(scope: Scope, name: str) -> list[str]:
    """Returns the values of all cookies with this name.

    `http.cookies.SimpleCookie` drops all cookies if one is malformed, and can take quadratic time.
    """
    cookies = ";".join(Headers(scope=scope).getlist("cookie")).split(";")
    pairs = (cookie.strip().partition("=") for cookie in cookies)
    return [value for key, _, value in pairs if key == name]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _forbidden(reason: str) -> Response:
    return PlainTextResponse(f"403: {reason}\n", status_code=403)
