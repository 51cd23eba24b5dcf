"""Rows of tables for pages, from replicas that the web process keeps while people look at them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import IllegalState, InvalidArgument, NotReady, UnknownStream
from anabranch.ports import TableError
from anabranch.presentation.system_tables import VersionRow, version_rows
from anabranch.tables.snapshot import TableSnapshot
from anabranch.web.folders import Folders, size_of

MOST_EVENTS = 2_000_000  # of a table whose rows are shown
_MOST_TABLES = 4
_MOST_DISK = 2 << 30  # bytes of the files of all replicas
_BUSY_S = 30.0  # a replica that a page has shown within this time is not replaced by another one
_IDLE_S = 600.0  # a replica is closed once no page has shown it for this time
_REFUSED_S = 600.0  # a table that took too much of the disk is refused for this time
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
    folder: Path
    used: float


class Tables:
    """Keeps replicas of the tables that pages show. For one thread, except for `close`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, _Kept] = {}
        self._refused: dict[str, float] = {}  # tables that took too much of the disk -> until when
        self._folders = Folders()
        self._lock = threading.Lock()  # guards `_kept` and `_closed`
        self._closed = False

    def rows(
        self,
        table: str,
        *,
        prefix: bytes | None,
        first: bytes | None,
        skipped: int = 0,
        at: int | datetime | None,
        limit: int,
        timeout: float,
    ) -> RowsPage:
        """A page of the rows with a prefix, from key ``first`` on (None: all), without the next ``skipped`` rows.

        Raises: NotReady (the replica is loading, too many others are shown, or its disk is full), InvalidArgument
        (not a table, or a big one), NotAuthorized, NotInstalled, and as `Client.replica`.
        """
        with self._view(table, at, timeout) as view:
            found: list[Row] = []
            size = 0
            low = first if first is not None else prefix
            for key, value in islice(self._scan(view, table, low, prefix), skipped, None):
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
            kept = self._open(table, timeout)
            with self._lock:
                is_late = self._closed
                if not is_late:
                    self._kept[table] = kept
            if is_late:
                _end(kept)
                self._folders.close()  # opening the replica has made the folders again
                raise NotReady("the process ends")
        kept.used = time.monotonic()
        return kept.replica

    def _open(self, table: str, timeout: float) -> _Kept:
        events = self._client.count_events(table, timeout=timeout).events
        now = time.monotonic()
        if events > MOST_EVENTS or self._refused.get(table, now) > now:
            most = f"up to {MOST_EVENTS:,} events that take up to {_MOST_DISK >> 20:,} MiB of disk"
            raise InvalidArgument(
                f"{table} has {events:,} events: pages show rows of tables with {most}. Use "
                f"`anabranch table scan {table} --folder DIR`, which keeps its replica"
            )
        while len(by_use := sorted(self._all(), key=lambda each: each[1].used)) >= _MOST_TABLES:
            longest, kept = by_use[0]
            if now - kept.used < _BUSY_S:
                names = ", ".join(sorted(name for name, _ in by_use))
                raise NotReady(
                    f"people look at {len(by_use)} other tables ({names}), and this process keeps no more: "
                    f"this one is shown once no page has shown one of them for {_BUSY_S:g} s"
                )
            self.drop(longest)
        folder = self._folders.new()
        try:
            return _Kept(self._client.replica(table, folder=folder, timeout=timeout), folder, now)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _all(self) -> list[tuple[str, _Kept]]:
        with self._lock:
            return list(self._kept.items())

    def close_idle(self) -> None:
        """Close the replicas that no page has shown for `_IDLE_S`, and the biggest while all take too much disk."""
        now = time.monotonic()
        for table, kept in self._all():
            if kept.used < now - _IDLE_S:
                self.drop(table)
        sizes = {table: size_of(kept.folder) for table, kept in self._all()}
        while sum(sizes.values()) > _MOST_DISK:
            biggest = max(sizes, key=sizes.__getitem__)
            del sizes[biggest]
            self._refused[biggest] = now + _REFUSED_S
            self.drop(biggest)

    def drop(self, table: str) -> None:
        """Close the replica of a table, if there is one."""
        with self._lock:
            kept = self._kept.pop(table, None)
        if kept is not None:
            _end(kept)

    def close(self) -> None:
        """Close all replicas, and one that another thread is opening. For any thread."""
        with self._lock:
            self._closed = True
        for table, _ in self._all():
            self.drop(table)
        self._folders.close()


def _end(kept: _Kept) -> None:
    with suppress(NotReady, TableError):
        kept.replica.close()
    shutil.rmtree(kept.folder, ignore_errors=True)
