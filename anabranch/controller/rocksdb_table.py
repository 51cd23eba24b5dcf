"""A control partition's status table in RocksDB: a checkpoint, which can be deleted and rebuilt from the log.

A table is thrown away if it belongs to another cluster, to replaced topics or to another version, if it is ahead of
the log, or if the status topic may lack tombstones that were written since: the table would keep deleted rows.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import dropwhile, takewhile
from pathlib import Path

from rocksdict import DBCompressionType, Options, Rdict, WriteBatch

from anabranch.controller.leadership import STATUS_POSITION
from anabranch.core import rows as k
from anabranch.core.journal_runs import FORM
from anabranch.ports import Clock, Log, LogUnavailable, Table, TableError, TopicPartition
from anabranch.tables.rocks import Walk, named, of_disk, table_error
from anabranch.topics.names import status_topic

log = logging.getLogger("anabranch.controller")

ORIGIN = k.META + b"origin"
WRITTEN = k.META + b"written_ms"
DEFAULT_TOMBSTONE_MS = 86_400_000
SAFETY = 2  # a table is thrown away at half the tombstone retention


def open_checkpoint(
    folder: Path, source: Log, clock: Clock, prefix: str, control_partition: int
) -> Table:
    """Open the folder's table if it can be trusted, else an empty table in its place.

    Raises: TableError; LogError, after which this function may be called again.
    """
    topic = status_topic(prefix)
    info = source.describe_topics([topic]).get(topic)
    if info is None:
        raise LogUnavailable(f"the broker asked does not know {topic} (yet)")
    origin = f"{FORM}/{info.topic_id}/{control_partition}".encode()
    table = RocksTable(folder)
    try:
        why = _distrust(
            table, source, TopicPartition(topic, control_partition), origin, clock, info.config
        )
    except BaseException:
        table.close()
        raise
    if why:
        log.warning("checkpoint %s is thrown away: %s", folder, why)
        table.close()
        shutil.rmtree(folder)
        table = RocksTable(folder)
    if table.get(ORIGIN) is None:
        table.write({ORIGIN: origin})
        # An empty table misses no tombstone. Another table is not touched before it has the log up to the end.
        touch_checkpoint(table, clock)
    return table


def touch_checkpoint(table: Table, clock: Clock) -> None:
    """Note in the table that it has the whole log as of now."""
    table.write({WRITTEN: int(clock.wall() * 1000).to_bytes(8, "big")})


def _distrust(
    table: Table,
    source: Log,
    status: TopicPartition,
    origin: bytes,
    clock: Clock,
    config: Mapping[str, str],
) -> str:
    known = table.get(ORIGIN)
    if known is None:
        return ""  # new and empty
    if known != origin:
        return "it is of another cluster or status topic, or of another version"
    stored = table.get(STATUS_POSITION)
    if (
        stored
        and int.from_bytes(stored, "big") > source.end_offsets([status], committed=False)[status]
    ):
        return "it is ahead of the status log"
    keep_ms = int(config.get("delete.retention.ms", DEFAULT_TOMBSTONE_MS)) // SAFETY
    written = table.get(WRITTEN)
    age_ms = int(clock.wall() * 1000) - int.from_bytes(written or b"", "big")
    if age_ms > keep_ms:
        return f"it is {age_ms / 3_600_000:.1f} hours old, tombstones are sure for {keep_ms / 3_600_000:.1f}"
    return ""


_KEPT_LOG_FILES = 2
_OPEN_FILES = 256


def size_on_disk(folder: Path) -> int:
    """About how many bytes the files of a table's folder have: some may be deleted during the count."""
    size = 0
    with suppress(OSError), os.scandir(folder) as files:
        for file in files:
            with suppress(OSError):
                size += file.stat().st_size
    return size


def open_rows(folder: Path) -> Rdict:
    """Open RocksDB with raw keys and values; only this user may read the folder. Raises what RocksDB raises."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_keep_log_file_num(_KEPT_LOG_FILES)
    options.set_max_open_files(_OPEN_FILES)
    options.set_compression_type(DBCompressionType.lz4())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows hold secrets
    return Rdict(str(folder), options)


class RocksTable:
    """`anabranch.ports.Table` in RocksDB. One process at a time may have a folder open.

    Writes reach the operating system before `write` returns, but are not synced. A power loss may undo the last
    writes, each as a whole; the log has them all.
    """

    def __init__(self, folder: Path) -> None:
        """Open the table in ``folder``, which is created if it does not exist.

        Raises:
            TableError: the folder can't be opened; the message names it and says what to do.
        """
        self.folder = folder
        self._lock = threading.Lock()
        with named(folder, "opened"):
            self._rows: Rdict | None = open_rows(folder)

    def get(self, key: bytes) -> bytes | None:
        rows = self._opened()
        try:
            value: bytes | None = rows.get(key)
        except Exception as error:
            if not of_disk(error):
                raise
            raise table_error(error, self.folder, "read") from error
        return value

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        rows = self._rows_from(max(prefix, first))
        return takewhile(lambda row: row[0].startswith(prefix), rows)

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        # RocksDB begins at the key itself if the key exists.
        return dropwhile(lambda row: row[0] == before, self._rows_from(before, backwards=True))

    def _rows_from(self, key: bytes, *, backwards: bool = False) -> Iterator[tuple[bytes, bytes]]:
        # This makes the snapshot now, not at the first next().
        return iter(Walk(self._opened(), self.folder, key, backwards=backwards))

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        batch = WriteBatch(raw_mode=True)
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        rows = self._opened()
        with named(self.folder, "written"):
            rows.write(batch)

    def close(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, None
        if rows is not None:
            with named(self.folder, "closed"):
                rows.close()

    def _opened(self) -> Rdict:
        rows = self._rows
        if rows is None:
            raise TableError(f"the table in {self.folder} is closed")
        return rows
