"""Asks a broker, over a plain socket, whether it serves: quick to import, no client threads."""

from __future__ import annotations

import socket
import struct

_METADATA_KEY = 3
_METADATA_VERSION = 1
_CLIENT_ID = b"anabranch-ready"


def is_ready(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether the broker at ``host:port`` answers Metadata and lists itself there.

    A KRaft broker is listed only once the controller has unfenced it; then topics can be made.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            # Client and server on one port: a connection to oneself, which is no broker.
            if connection.getsockname() == connection.getpeername():
                return False
            connection.sendall(_metadata_request())
            (size,) = struct.unpack(">i", _receive(connection, 4))
            return port in _broker_ports(_receive(connection, size))
    except (OSError, ValueError, struct.error):
        return False


def _metadata_request() -> bytes:
    # Header version 1, then an empty array: version 1's way of asking for no topics.
    header = struct.pack(">hhih", _METADATA_KEY, _METADATA_VERSION, 1, len(_CLIENT_ID)) + _CLIENT_ID
    body = header + struct.pack(">i", 0)
    return struct.pack(">i", len(body)) + body


def _broker_ports(response: bytes) -> list[int]:
    """The ports of the brokers in a Metadata response of version 1."""
    _, brokers = struct.unpack_from(">ii", response)
    at, ports = 8, []
    for _ in range(brokers):
        (host_size,) = struct.unpack_from(">h", response, at + 4)
        at += 6 + host_size
        port, rack_size = struct.unpack_from(">ih", response, at)
        ports.append(port)
        at += 6 + max(rack_size, 0)
    return ports


def _receive(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = connection.recv(min(size, 65536))
        if not part:
            raise ConnectionError("the broker closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
