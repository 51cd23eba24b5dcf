"""Ports of the loopback interface, and whether a broker serves, asked over a plain socket.

A Kafka client would be slow to import, and starts threads.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 20000
_HIGHEST = 32767
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java's server sockets: a port with former connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(avoid: frozenset[int] = frozenset()) -> int:
    """A port that is free now, outside the system's range for client ports.

    The kernel's own choice (port 0) comes from that range, where any outgoing connection can take a restarting
    broker's port. A client that keeps trying can even connect to itself; then the broker can't start. Raises:
    OSError (no free port was found).
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


def free_ports(count: int, avoid: frozenset[int] = frozenset()) -> list[int]:
    """As `free_port`, for several different ports."""
    found: list[int] = []
    while len(found) < count:
        found.append(free_port(avoid | frozenset(found)))
    return found


_METADATA_KEY = 3
_METADATA_VERSION = 2
_FIND_COORDINATOR_KEY = 10
_FIND_COORDINATOR_VERSION = 1
_GROUP = 0
_TRANSACTION = 1
_CLIENT_ID = b"anabranch-ready"


def is_ready(
    host: str, port: int, cluster_id: str, timeout_s: float = 1.0, others: Collection[int] = ()
) -> bool:
    """Whether the broker at ``host:port`` is of that cluster, and lists itself and the ports ``others``.

    A KRaft broker is listed once the controller has unfenced it; then topics can be made. The cluster id shows
    that the answer is not from another broker, which may have taken the port first.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            # A connection from a port to itself, not to a broker.
            if connection.getsockname() == connection.getpeername():
                return False
            connection.sendall(_metadata_request())
            (size,) = struct.unpack(">i", _receive(connection, 4))
            ports, cluster = _parse(_receive(connection, size))
            return {port, *others} <= set(ports) and cluster == cluster_id
    except (OSError, ValueError, struct.error):
        return False


def make_coordinators(host: str, port: int, timeout_s: float = 1.0) -> None:
    """Ask for coordinators, so that a new broker makes their topics now. The answers don't matter.

    Otherwise the first member of a group asks too early, and librdkafka makes it wait for three seconds.
    """
    with suppress(OSError), socket.create_connection((host, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        for kind in (_GROUP, _TRANSACTION):
            asked = _string_of(_CLIENT_ID) + struct.pack(">b", kind)
            connection.sendall(_request(_FIND_COORDINATOR_KEY, _FIND_COORDINATOR_VERSION, asked))
            _receive(connection, *struct.unpack(">i", _receive(connection, 4)))


def _metadata_request() -> bytes:
    # In this version an empty array asks for no topics.
    return _request(_METADATA_KEY, _METADATA_VERSION, struct.pack(">i", 0))


def _request(key: int, version: int, body: bytes) -> bytes:
    """A request with a header of version 1."""
    whole = struct.pack(">hhi", key, version, 1) + _string_of(_CLIENT_ID) + body
    return struct.pack(">i", len(whole)) + whole


def _string_of(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def _parse(response: bytes) -> tuple[list[int], str | None]:
    """The ports of the brokers in a Metadata response of version 2, and the cluster id."""
    _, brokers = struct.unpack_from(">ii", response)
    at = 8
    ports: list[int] = []
    for _ in range(brokers):
        _, at = _string(response, at + 4)
        ports += struct.unpack_from(">i", response, at)
        _, at = _string(response, at + 4)
    cluster_id, _ = _string(response, at)
    return ports, cluster_id


def _string(data: bytes, at: int) -> tuple[str | None, int]:
    """The string (or null) that starts at ``at``, and its end."""
    (size,) = struct.unpack_from(">h", data, at)
    at += 2
    return (None, at) if size < 0 else (data[at : at + size].decode(), at + size)


def _receive(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = connection.recv(min(size, 65536))
        if not part:
            raise ConnectionError("the broker closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
