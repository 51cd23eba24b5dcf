"""The web process: its socket, its server, its log."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable

import uvicorn

from anabranch.errors import InvalidArgument
from anabranch.infra.errors import PortTaken
from anabranch.web.app import Site, application

MOST_CONNECTIONS = 400
_STUCK_MS = 20_000  # a connection whose other side takes nothing for so long is cut by the kernel


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises: PortTaken; InvalidArgument: the address is not of this machine."""
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


def serve(site: Site, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again at the end. ``ready``: called once pages are served."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        application(site),
        http="h11",
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    Server(config).run(sockets=[listening])
