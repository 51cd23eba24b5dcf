"""The `Table` on RocksDB. It is a cache of what stands in the log: it can always be deleted and rebuilt."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from rocksdict import DBCompressionType, Options, Rdict, WriteBatch

from anabranch.ports import TableError

_KEPT_LOG_FILES = 2
_OPEN_FILES = 256
# What RocksDB says when another process, or this one, has the folder open.
_LOCK_SIGNS = ("LOCK", "lock hold")
_FULL_SIGNS = ("No space left", "Disk quota exceeded")


def size_on_disk(folder: Path) -> int:
    """Bytes of the files of a table's folder, about: some may go while they are looked at."""
    size = 0
    with suppress(OSError), os.scandir(folder) as files:
        for file in files:
            with suppress(OSError):
                size += file.stat().st_size
    return size


class RocksTable:
    """See `anabranch.ports.Table`. One process at a time may have a folder open.

    Writes reach the operating system before `write` returns, but are not synced: a machine that loses
    its power may lose the last ones, each of them whole, and the log has them all.
    """

    def __init__(self, folder: Path) -> None:
        """Open the table in ``folder``, which is made if it is not there.

        Raises:
            TableError: it can't be opened; the message names the folder and says what to do.
        """
        self.folder = folder
        self._lock = threading.Lock()
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_keep_log_file_num(_KEPT_LOG_FILES)
        options.set_max_open_files(_OPEN_FILES)
        options.set_compression_type(DBCompressionType.lz4())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._rows: Rdict | None = Rdict(str(folder), options)
        except Exception as error:
            raise self._error(error, "opened") from error

    def get(self, key: bytes) -> bytes | None:
        """See `anabranch.ports.Table.get`."""
        rows = self._opened()
        try:
            value: bytes | None = rows.get(key)
        except Exception as error:
            raise self._error(error, "read") from error
        return value

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """See `anabranch.ports.Table.scan`."""
        rows = self._rows_from(max(prefix, first))
        return takewhile(lambda row: row[0].startswith(prefix), rows)

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See `anabranch.ports.Table.scan_back`."""
        # RocksDB begins at the key itself where it is there.
        return dropwhile(lambda row: row[0] == before, self._rows_from(before, backwards=True))

    def _rows_from(self, key: bytes, *, backwards: bool = False) -> Iterator[tuple[bytes, bytes]]:
        # RocksDB's iterator pins a snapshot when it is made, so it is made here, not at the first next().
        rows = self._opened()
        try:
            items = rows.items(backwards=backwards, from_key=key)
        except Exception as error:
            raise self._error(error, "read") from error
        return self._walk(items)

    def _walk(self, items: Iterator[tuple[Any, Any]]) -> Iterator[tuple[bytes, bytes]]:
        while True:
            try:
                row = next(items)
            except StopIteration:
                return
            except Exception as error:
                raise self._error(error, "read") from error
            yield row

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """See `anabranch.ports.Table.write`."""
        batch = WriteBatch(raw_mode=True)
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        rows = self._opened()
        try:
            rows.write(batch)
        except Exception as error:
            raise self._error(error, "written") from error

    def close(self) -> None:
        """See `anabranch.ports.Table.close`."""
        with self._lock:
            rows, self._rows = self._rows, None
        if rows is not None:
            try:
                rows.close()
            except Exception as error:
                raise self._error(error, "closed") from error

    def _opened(self) -> Rdict:
        rows = self._rows
        if rows is None:
            raise TableError(f"the table in {self.folder} is closed")
        return rows

    def _error(self, error: Exception, what: str) -> TableError:
        text = str(error)
        if any(sign in text for sign in _LOCK_SIGNS):
            return TableError(
                f"the table in {self.folder} is open in another process: "
                "stop that one, or give this one a folder of its own"
            )
        if any(sign in text for sign in _FULL_SIGNS):
            return TableError(f"the disk of {self.folder} is full: {text}")
        return TableError(
            f"the table in {self.folder} can't be {what}: {text}. It holds nothing that the log "
            "lacks: delete the folder, and it is built again"
        )
