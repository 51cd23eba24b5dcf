"""A question to a broker over a plain socket, whether it serves: quick to import, no client threads."""

from __future__ import annotations

import socket
import struct

_METADATA_KEY = 3
_METADATA_VERSION = 2
_CLIENT_ID = b"anabranch-ready"


def is_ready(host: str, port: int, cluster_id: str, timeout_s: float = 1.0) -> bool:
    """Whether the broker at ``host:port`` is of that cluster and lists itself in its metadata.

    A KRaft broker is listed once the controller has unfenced it; then topics can be made. The cluster id tells it
    from another broker, which may have taken the port first.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            # Client and server on one port: a connection to itself, not to a broker.
            if connection.getsockname() == connection.getpeername():
                return False
            connection.sendall(_metadata_request())
            (size,) = struct.unpack(">i", _receive(connection, 4))
            ports, cluster = _parse(_receive(connection, size))
            return port in ports and cluster == cluster_id
    except (OSError, ValueError, struct.error):
        return False


def _metadata_request() -> bytes:
    # Header version 1, then an empty array: in this version it asks for no topics.
    header = struct.pack(">hhih", _METADATA_KEY, _METADATA_VERSION, 1, len(_CLIENT_ID)) + _CLIENT_ID
    body = header + struct.pack(">i", 0)
    return struct.pack(">i", len(body)) + body


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
    """The string (or null) that starts at ``at``, and where it ends."""
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
