"""Connections to brokers, kept for the next call; and silent brokers, which are skipped for a while."""

from __future__ import annotations

import threading
from weakref import WeakSet

from anabranch.backoff import Backoff
from anabranch.clock import SystemClock
from anabranch.kafka.settings import Settings
from anabranch.kafka.wire.connection import Connection, open_connection
from anabranch.ports import LogUnavailable

_LEFT_ALONE_S = 1.0  # how long a silent broker is skipped at first
_LONGEST_ALONE_S = 16.0


class Pool:
    """Idle connections by address. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        self._parked: dict[
            tuple[str, int], list[Connection]
        ] = {}  # connections with answers under way
        # Connections that wait for an answer that may never come.
        self._waiting: WeakSet[Connection] = WeakSet()
        self._closed = False

    def open(self, address: tuple[str, int], deadline: float) -> Connection:
        """A new connection that knows the broker's versions and has authenticated."""
        return open_connection(address, self._settings, deadline)

    def wait_on(self, address: tuple[str, int], deadline: float) -> Connection:
        """As `take`, for a question without effect, which `close` interrupts."""
        connection = self.take(address, deadline)
        with self._lock:
            self._waiting.add(connection)
            if self._closed:
                connection.interrupt()
        return connection

    def take(self, address: tuple[str, int], deadline: float) -> Connection:
        """An idle connection, or a new one. Give it back with `give`."""
        with self._lock:
            if self._closed:
                raise LogUnavailable("the log is closed")
            idle = self._idle.setdefault(address, [])
            waiting = self._parked.pop(address, [])
        parked = []
        for connection in waiting:
            if connection.drain():
                idle.append(connection)
            elif not connection.broken:
                parked.append(connection)
        if parked:
            with self._lock:
                self._parked.setdefault(address, []).extend(parked)
        while True:
            try:
                connection = idle.pop()
            except IndexError:
                return self.open(address, deadline)
            if connection.usable():
                return connection

    def give(self, connection: Connection, address: tuple[str, int]) -> None:
        """Give a connection back. With answers under way it is not reused until they have arrived."""
        with self._lock:
            self._waiting.discard(connection)
            if connection.broken:
                return
            if self._closed:
                connection.close()
            elif connection.idle:
                self._idle.setdefault(address, []).append(connection)
            else:
                self._parked.setdefault(address, []).append(connection)

    def close(self) -> None:
        """Close all idle connections; connections in use are closed when they come back, those of `wait_on` at
        once.
        """
        with self._lock:
            self._closed = True
            for connection in self._waiting:
                connection.interrupt()
            for pool in (self._idle, self._parked):
                for connections in pool.values():
                    for connection in connections:
                        connection.close()
                pool.clear()

    def after_fork(self) -> None:
        """In a forked child: close its copies; the parent's stay open."""
        self._lock = threading.Lock()
        self._waiting.clear()
        self.close()


class SilentBrokers:
    """Brokers that failed to answer. Each is skipped for a second, and longer if it fails again."""

    def __init__(self) -> None:
        self._pauses: dict[int, Backoff] = {}

    def failed(self, node: int) -> None:
        """Skip a broker for a while."""
        pauses = self._pauses.get(node)
        if pauses is None:
            pauses = self._pauses[node] = Backoff(_LEFT_ALONE_S, _LONGEST_ALONE_S, SystemClock())
        pauses.begin()

    def answered(self, node: int) -> None:
        """Trust a broker again."""
        self._pauses.pop(node, None)

    def has(self, node: int, now: float) -> bool:
        """Whether a broker is skipped. ``now``: monotonic seconds."""
        return node in self._pauses and now < self._pauses[node].until
