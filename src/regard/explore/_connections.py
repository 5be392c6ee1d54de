"""Sockets and their limits: loopback by default, few connections, and a deadline for each request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 16
HEADER_SECONDS = 10.0
BOTH = ("127.0.0.1", "::1")


def listen(host: str | None, port: int) -> list[socket.socket]:
    """Returns listening sockets on one port: of both loopbacks, or of the given host."""
    first = _bound(host or BOTH[0], port)
    if host is not None:
        return [first]
    try:
        return [first, _bound(BOTH[1], first.getsockname()[1])]
    except OSError:  # no IPv6 here, or the port is taken there
        return [first]


def _bound(host: str, port: int) -> socket.socket:
    if ":" not in host:
        return socket.create_server((host, port))
    both = socket.has_dualstack_ipv6()  # :: is also every IPv4 address
    return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=both)


class Connection(H11Protocol):
    """An HTTP connection with a deadline for the headers of a request.

    If there are too many connections, the longest idle one is closed, so that slow clients cannot keep
    others out.
    """

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and not one._is_busy]
            min(idle, key=lambda one: one._since)._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy:
            self._arrived()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy:
            self._wait()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        """Starts the deadline for the headers of the next request."""
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._abort)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort(self) -> None:
        self._arrived()
        self.connections.discard(self)
        self.transport.abort()
