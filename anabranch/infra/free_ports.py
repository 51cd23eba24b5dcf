"""The choice of TCP ports for the embedded broker."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 20000
_HIGHEST = 32767
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java's server sockets do: a port whose former connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(avoid: frozenset[int] = frozenset()) -> int:
    """A port that is free now, outside the system's range for client ports.

    The kernel's own choice (port 0) comes from that range. There any outgoing connection can take a
    restarting broker's port. A client that keeps trying can even connect to itself, and then the broker can't
    come back.

    Raises:
        OSError: no free port was found.
    """
    low, high = _LOWEST, _HIGHEST
    with suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if first > low + 1000:
            high = min(high, first - 1)
    for _ in range(_TRIES):
        port = random.randint(low, high)
        if port not in avoid and is_free(port):
            return port
    raise OSError(f"no free port found between {low} and {high}")
