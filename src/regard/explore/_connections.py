"""The server's sockets, its limit on the number of connections, and deadlines for requests."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
HEADER_SECONDS = 10.0
BOTH = ("127.0.0.1", "::1")


def listen(host: str | None, port: int) -> list[socket.socket]:
    """Returns sockets that listen on `port` of the given host.

    If `host` is None, returns one socket each for the IPv4 and the IPv6 loopback address, with the
    same port.
    """
    first = _bound(host or BOTH[0], port)
    if host is not None:
        return [first]
    try:
        return [first, _bound(BOTH[1], first.getsockname()[1])]
    except OSError:  # there is no IPv6, or the port is in use on ::1
        return [first]


def _bound(host: str, port: int) -> socket.socket:
    if ":" not in host:
        return socket.create_server((host, port))
    dual = socket.has_dualstack_ipv6()  # if True, the address :: includes all IPv4 addresses
    return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=dual)


class Connection(H11Protocol):
    """An HTTP connection with a deadline for the headers of a request.

    With more than MAX_CONNECTIONS connections, the one that has been idle longest is closed, so
    that slow clients cannot keep other clients out.
    """

    _deadline: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_deadline()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and one._is_idle]
            min(idle, key=lambda one: one._idle_since)._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except LocalProtocolError:  # invalid data after an answer: there is no request to answer with 400
            self._close()
        if self._is_answering:
            self._cancel_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._start_deadline()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered and no answer is being sent to a slow reader."""
        return not self._is_answering and self.transport.get_write_buffer_size() == 0

    def _start_deadline(self) -> None:
        """Starts a timer that closes the connection unless a request's headers arrive in time."""
        self._idle_since = self.loop.time()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        """Closes the connection once the rest of an answer is sent."""
        self._cancel_deadline()
        self.connections.discard(self)
        self.transport.close()
