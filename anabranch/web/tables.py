"""Rows of tables for pages, from replicas that the web process keeps while people look at them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import IllegalState, InvalidArgument, NotReady, UnknownStream
from anabranch.ports import TableError
from anabranch.presentation.system_tables import VersionRow, version_rows
from anabranch.tables.snapshot import TableSnapshot

MOST_EVENTS = 2_000_000  # of a table whose rows are shown
_MOST_TABLES = 4
_IDLE_S = 600.0  # a replica is closed once no page has shown it for this time
_WAIT_S = 1.0  # for a replica that is loading
_MOST_BYTES = 8 << 20  # of the rows or versions of a page
_MOST_VERSIONS = 200


class Row(NamedTuple):
    """A row of a table."""

    key: bytes
    value: bytes


class RowsPage(NamedTuple):
    """Rows in the order of their keys, as of a hybrid time. ``next_key``: the next page's first one, or None."""

    rows: list[Row]
    timestamp: int
    next_key: bytes | None


@dataclass(slots=True)
class _Kept:
    replica: Replica
    used: float


class Tables:
    """Keeps replicas of the tables that pages show. For one thread, except for `close`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()  # guards `_kept` and `_closed`
        self._closed = False

    def rows(
        self,
        table: str,
        *,
        prefix: bytes | None,
        first: bytes | None,
        at: int | datetime | None,
        limit: int,
        timeout: float,
    ) -> RowsPage:
        """A page of rows: those with a prefix, from a key on, or from the first key on.

        Raises: NotReady (the replica is loading, or its disk is full), InvalidArgument (not a table, or a big one),
        NotAuthorized, NotInstalled, and as `Client.replica`.
        """
        with self._view(table, at, timeout) as view:
            found: list[Row] = []
            size = 0
            low = first if first is not None else prefix
            for key, value in self._scan(view, table, low, prefix):
                if len(found) == limit or size > _MOST_BYTES:
                    return RowsPage(found, view.timestamp, key)
                size += len(key) + len(value)
                found.append(Row(key, value))
            return RowsPage(found, view.timestamp, None)

    @staticmethod
    def _scan(
        view: TableSnapshot, table: str, low: bytes | None, prefix: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        for key, value in view.scan(table, low):
            if prefix is not None and not key.startswith(prefix):
                return
            yield key, value

    def versions(
        self, table: str, key: bytes, *, at: int | datetime | None, timeout: float
    ) -> list[VersionRow]:
        """The newest versions of a row, the newest first, of bounded number and bytes. Raises: as `rows`."""
        with self._view(table, at, timeout) as view:
            found: list[VersionRow] = []
            size = 0
            for version in version_rows(table, view.versions(table, key)):
                if len(found) == _MOST_VERSIONS or size > _MOST_BYTES:
                    break
                size += len(version.key) + len(version.value)
                found.append(version)
            return found

    @contextmanager
    def _view(
        self, table: str, at: int | datetime | None, timeout: float
    ) -> Iterator[TableSnapshot]:
        self.close_idle()
        try:
            replica = self._replica(table, timeout)
            with self._snapshot(replica, table, at) as view:
                yield view
        except TableError as error:
            self.drop(table)
            raise NotReady(f"the replica of {table} can't be read or written: {error}") from error
        except (UnknownStream, IllegalState):
            self.drop(table)  # the next look opens it again
            raise

    @staticmethod
    def _snapshot(replica: Replica, table: str, at: int | datetime | None) -> TableSnapshot:
        try:
            if at is not None:
                # Only for a snapshot of now is the controller asked for the right.
                replica.snapshot(timeout=_WAIT_S).close()
            return replica.snapshot(at, timeout=_WAIT_S)
        except NotReady as error:
            behind = replica.lag()[table].records
            raise NotReady(
                f"the table is being loaded ({behind:,} commits are left): {error}"
            ) from error

    def _replica(self, table: str, timeout: float) -> Replica:
        """The kept replica of a table, or a new one. Raises: NotReady (this is closed), and as `rows`."""
        with self._lock:
            kept = self._kept.get(table)
        if kept is None:
            kept = _Kept(self._open(table, timeout), 0.0)
            with self._lock:
                is_late = self._closed
                if not is_late:
                    self._kept[table] = kept
            if is_late:
                _end(kept.replica)
                raise NotReady("the process ends")
        kept.used = time.monotonic()
        return kept.replica

    def _open(self, table: str, timeout: float) -> Replica:
        events = self._client.count_events(table, timeout=timeout).events
        if events > MOST_EVENTS:
            raise InvalidArgument(
                f"{table} has {events:,} events: pages show rows of tables with up to {MOST_EVENTS:,}. Use "
                f"`anabranch table scan {table} --folder DIR`, which keeps its replica"
            )
        while len(by_use := sorted(self._all(), key=lambda each: each[1].used)) >= _MOST_TABLES:
            self.drop(by_use[0][0])
        return self._client.replica(table, timeout=timeout)

    def _all(self) -> list[tuple[str, _Kept]]:
        with self._lock:
            return list(self._kept.items())

    def close_idle(self) -> None:
        """Close the replicas that no page has shown for `_IDLE_S`."""
        least = time.monotonic() - _IDLE_S
        for table, kept in self._all():
            if kept.used < least:
                self.drop(table)

    def drop(self, table: str) -> None:
        """Close the replica of a table, if there is one."""
        with self._lock:
            kept = self._kept.pop(table, None)
        if kept is not None:
            _end(kept.replica)

    def close(self) -> None:
        """Close all replicas, and one that another thread is opening. For any thread."""
        with self._lock:
            self._closed = True
        for table, _ in self._all():
            self.drop(table)


def _end(replica: Replica) -> None:
    with suppress(NotReady, TableError):
        replica.close()
