"""Rows of tables for pages, from replicas that the web process keeps while people look at them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
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
    """Keeps replicas of the tables that pages show. For one thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, _Kept] = {}

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

        Raises: NotReady (the replica is loading), InvalidArgument (not a table, or a big one), NotAuthorized,
        NotInstalled, and as `Client.replica`.
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

    def _view(self, table: str, at: int | datetime | None, timeout: float) -> TableSnapshot:
        self.close_idle()
        kept = self._kept.get(table)
        if kept is None:
            kept = self._kept[table] = _Kept(self._open(table, timeout), 0.0)
        kept.used = time.monotonic()
        try:
            if at is not None:
                # Only for a snapshot of now is the controller asked for the right.
                kept.replica.snapshot(timeout=_WAIT_S).close()
            return kept.replica.snapshot(at, timeout=_WAIT_S)
        except NotReady as error:
            behind = kept.replica.lag()[table].records
            raise NotReady(
                f"the table is being loaded ({behind:,} commits are left): {error}"
            ) from error
        except (UnknownStream, IllegalState, TableError):
            self.drop(table)  # the next look opens it again
            raise

    def _open(self, table: str, timeout: float) -> Replica:
        events = self._client.count_events(table, timeout=timeout).events
        if events > MOST_EVENTS:
            raise InvalidArgument(
                f"{table} has {events:,} events: pages show rows of tables with up to {MOST_EVENTS:,}. Use "
                f"`anabranch table scan {table} --folder DIR`, which keeps its replica"
            )
        while len(self._kept) >= _MOST_TABLES:
            self.drop(min(self._kept, key=lambda name: self._kept[name].used))
        return self._client.replica(table, timeout=timeout)

    def close_idle(self) -> None:
        """Close the replicas that no page has shown for `_IDLE_S`."""
        least = time.monotonic() - _IDLE_S
        for table in [table for table, kept in self._kept.items() if kept.used < least]:
            self.drop(table)

    def drop(self, table: str) -> None:
        """Close the replica of a table, if there is one."""
        kept = self._kept.pop(table, None)
        if kept is not None:
            with suppress(NotReady):
                kept.replica.close()

    def close(self) -> None:
        for table in list(self._kept):
            self.drop(table)
