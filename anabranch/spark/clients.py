"""Clients of clusters. A Python worker of Spark has one client for each cluster, and keeps it for the next task.

Spark forks its workers from a daemon that has no client, and reuses each worker for many tasks.
"""

from __future__ import annotations

import os
import threading

import anabranch
from anabranch.client.connect import connect_to
from anabranch.spark.options import Connection

_clients: dict[Connection, anabranch.Client] = {}
_lock = threading.Lock()
_pid = os.getpid()


def connect(connection: Connection) -> anabranch.Client:
    """A new client for a cluster. The caller closes it."""
    return connect_to(
        connection.bootstrap,
        connection.prefix,
        connection.lane,
        dict(connection.librdkafka),
        timeout=connection.timeout,
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
    """Close the clients of this process. The next task makes a new one."""
    with _lock:
        mine = list(_clients.values()) if _pid == os.getpid() else []
        _clients.clear()
    for client in mine:
        client.close()
