"""Reads of RocksDB, shared by all its users: complete reads, or a `TableError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

from rocksdict import DbClosedError, Rdict, RdictIter, Snapshot

from anabranch.errors import chain_of
from anabranch.ports import TableError

# Parts of RocksDB's error when this or another process has the folder open.
_LOCK_SIGNS = ("LOCK", "lock hold")
_FULL_SIGNS = ("No space left", "Disk quota exceeded")
_MISSING_ROWS = "rows are missing, and the disk reported no error"
_DAMAGE_SIGNS = ("Corruption", "No such file or directory", _MISSING_ROWS)


class TableDamaged(TableError):
    """Files of the folder are damaged or missing."""


class Walk:
    """Rows from a key on, or ``backwards`` from it, as of the walk's creation.

    After a disk error rocksdict's ``rows`` just end, as after the last row. So a loop over ``rows`` has to call
    `check` at the end; iterating over the walk itself calls `check`.
    """

    def __init__(self, db: Rdict, folder: Path, first: bytes, *, backwards: bool = False) -> None:
        self._folder, self._first, self._backwards = folder, first, backwards
        try:
            # Without a snapshot, `check` would take rows written meanwhile for missing ones.
            self._snapshot = db.snapshot()
            self.rows: Iterator[tuple[Any, Any]] = self._snapshot.items(backwards, first)
        except Exception as error:
            if not of_disk(error):
                raise
            raise table_error(error, folder, "read") from error

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        row = None
        for row in self.rows:
            yield row
        self.check(row and row[0])

    def check(self, last: bytes | None) -> None:
        """Raise `TableError` if ``last`` (None: no row was returned) is not the last row, or after a disk error."""
        snapshot, found = self._snapshot, self._snapshot.iter()
        del self._snapshot, self.rows  # a traceback would keep them alive, and so the folder locked
        seek, step = found.seek, found.next
        if self._backwards:
            seek, step = found.seek_for_prev, found.prev
        try:
            seek(self._first if last is None else last)
            while found.valid():
                # rocksdict's iterators of a snapshot also see later writes; its look-ups do not.
                if found.key() != last and _has(snapshot, found.key()):
                    lost = OSError(_MISSING_ROWS)
                    raise table_error(lost, self._folder, "read")
                step()
            found.status()
        except Exception as error:
            if not of_disk(error):
                raise
            raise table_error(error, self._folder, "read") from error
        finally:
            del snapshot, found, seek, step


def _has(snapshot: Snapshot, key: bytes) -> bool:
    try:
        snapshot[key]
    except Exception as error:
        if not of_disk(error) or str(error) != "key not found":
            raise
        return False
    return True


def of_disk(error: Exception) -> bool:
    """Whether rocksdict or the system raised the error. A signal handler may raise others, which stay unchanged."""
    by_system = isinstance(error, OSError) and error.errno is not None
    return by_system or type(error) in (Exception, DbClosedError)


def raw_key(found: RdictIter) -> bytes:
    """The key at an iterator's position; empty at its end. Raises: TableError."""
    if found.valid():
        key: bytes = found.key()
        return key
    with named(None, "read"):
        found.status()
    return b""


def release_frames(error: BaseException | None) -> None:
    """Free the objects in the frames of a caught error: an iterator there would keep the folder locked."""
    for each in chain_of(error):
        for frame, _ in walk_tb(each.__traceback__):
            if frame.f_globals["__name__"].startswith(__package__):
                with suppress(RuntimeError):  # the frame is running
                    frame.clear()


@contextmanager
def named(folder: Path | None, what: str) -> Iterator[None]:
    """Convert errors of RocksDB to `TableError`. ``folder``: None if RocksDB's message names it."""
    try:
        yield
    except Exception as error:
        if not of_disk(error):
            raise
        raise table_error(error, folder, what) from error


def is_full(error: Exception) -> bool:
    """Whether the disk is full."""
    return any(sign in str(error) for sign in _FULL_SIGNS)


def table_error(error: Exception, folder: Path | None, what: str) -> TableError:
    """The `TableError` that says what to do. ``what``: what can't be done with the folder, such as "read"."""
    where = folder or "its folder"
    if any(sign in str(error) for sign in _LOCK_SIGNS):
        return TableError(
            f"the table in {where} is open in another process: "
            "stop that one, or give this one a folder of its own"
        )
    if is_full(error):
        return TableError(f"the disk of {where} is full: make room, then open it again. {error}")
    kind = TableDamaged if any(sign in str(error) for sign in _DAMAGE_SIGNS) else TableError
    return kind(
        f"the table in {where} can't be {what}: {error}. Close it and open it again. It holds nothing that the "
        "log lacks: if that does not help, delete the folder, and it is built again"
    )
