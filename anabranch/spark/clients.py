"""Clients of clusters; that of a Python worker is one for each cluster, kept for the next task.

Spark forks its workers from a daemon that makes no client, and reuses them for many tasks.
"""

from __future__ import annotations

import os
import threading

import anabranch
from anabranch.spark.options import Connection

_clients: dict[Connection, anabranch.Client] = {}
_lock = threading.Lock()
_pid = os.getpid()


def connect(connection: Connection) -> anabranch.Client:
    """A client for a cluster; close it."""
    return anabranch.connect(
        connection.bootstrap,
        prefix=connection.prefix,
        lane=connection.lane,
        timeout=connection.timeout,
        config=dict(connection.librdkafka),
    )


def client_of(connection: Connection) -> anabranch.Client:
    """The client of this process for a cluster."""
    global _pid
    with _lock:
        if _pid != os.getpid():  # forked: the parent's clients belong to the parent
            _clients.clear()
            _pid = os.getpid()
        client = _clients.get(connection)
        if client is None:
            client = _clients[connection] = connect(connection)
        return client


def close_clients() -> None:
    """Close this process' clients; the next task makes its own."""
    with _lock:
        mine = list(_clients.values()) if _pid == os.getpid() else []
        _clients.clear()
    for client in mine:
        client.close()
