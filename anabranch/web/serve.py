"""The web process: its socket, its HTTP server and its log."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.errors import InvalidArgument
from anabranch.infra.errors import PortTaken
from anabranch.web.app import SEND_S, Site, application

MOST_CONNECTIONS = 400
_STUCK_MS = 20_000  # the kernel ends a connection whose other side takes no data for this long


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises: PortTaken, InvalidArgument (the address is not of this machine)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_MS)
    try:
        made.bind((host, port))
        made.listen(128)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(port) from None
        raise InvalidArgument(
            f"--host {host}: can't listen there: {error.strerror or error}"
        ) from error
    return made


class _Protocol(H11Protocol):
    """A connection that ends if no whole request comes within `SEND_S`, or sooner if there are too many."""

    ends: asyncio.TimerHandle | None = None  # ends the connection unless the request is complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MOST_CONNECTIONS:
            others: Any = self.connections
            halves = [(each.ends.when(), each) for each in others if each.ends is not None]
            min(halves, key=itemgetter(0), default=(0.0, self))[1].cut()
        self._follow()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset()

    def cut(self) -> None:
        self._unset()
        self.transport.abort()

    def _follow(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unset()
        elif self.ends is None and not self.transport.is_closing():
            self.ends = self.loop.call_later(SEND_S, self.cut)

    def _unset(self) -> None:
        if self.ends is not None:
            self.ends.cancel()
        self.ends = None


def serve(site: Site, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again at the end. ``ready``: called once pages are served."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        application(site),
        http=_Protocol,
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    Server(config).run(sockets=[listening])
