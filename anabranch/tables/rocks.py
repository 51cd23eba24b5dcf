"""Reads of RocksDB that all its tables share: they are whole, or `TableError` says why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

from rocksdict import DbClosedError, Rdict, RdictIter, Snapshot

from anabranch.errors import chain_of
from anabranch.ports import TableError

# Words of RocksDB's error when another process, or this one, has the folder open.
_LOCK_SIGNS = ("LOCK", "lock hold")
_FULL_SIGNS = ("No space left", "Disk quota exceeded")


class Walk:
    """Rows from a key on, or from it ``backwards``, as they are when it is made.

    rocksdict's ``rows`` end at an error of the disk as they do behind the last row. So a loop over them that comes
    to their end calls `check`; an iteration over the walk itself does it.
    """

    def __init__(self, db: Rdict, folder: Path, first: bytes, *, backwards: bool = False) -> None:
        self._folder, self._first, self._backwards = folder, first, backwards
        try:
            self._snapshot = db.snapshot()  # else rows of meanwhile look like missing ones
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
        """`TableError` if there are rows behind the ``last`` that was given (None: none was), or an error."""
        snapshot, found = self._snapshot, self._snapshot.iter()
        del self._snapshot, self.rows  # a traceback would keep them, and so the folder locked
        seek, step = found.seek, found.next
        if self._backwards:
            seek, step = found.seek_for_prev, found.prev
        try:
            seek(self._first if last is None else last)
            while found.valid():
                # rocksdict's iterators of a snapshot have what was written since; its look-ups do not.
                if found.key() != last and _has(snapshot, found.key()):
                    lost = OSError("rows are missing, and the disk reported no error")
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
    """Whether rocksdict or the system raised it. Otherwise a signal handler may have, and it is not changed."""
    by_system = isinstance(error, OSError) and error.errno is not None
    return by_system or type(error) in (Exception, DbClosedError)


def raw_key(found: RdictIter) -> bytes:
    """The key that an iterator stands at; empty: at none. Raises: TableError."""
    if found.valid():
        key: bytes = found.key()
        return key
    with named(None, "read"):
        found.status()
    return b""


def let_go(error: BaseException | None) -> None:
    """Free what the frames of a caught error hold: an iterator there would keep the folder locked."""
    for each in chain_of(error):
        for frame, _ in walk_tb(each.__traceback__):
            if frame.f_globals["__name__"].startswith(__package__):
                with suppress(RuntimeError):  # it is under way
                    frame.clear()


@contextmanager
def named(folder: Path | None, what: str) -> Iterator[None]:
    """Errors of RocksDB become `TableError`. ``folder``: None: RocksDB's own words name it."""
    try:
        yield
    except Exception as error:
        if not of_disk(error):
            raise
        raise table_error(error, folder, what) from error


def is_full(error: Exception) -> bool:
    """Whether it is an error of a full disk."""
    return any(sign in str(error) for sign in _FULL_SIGNS)


def table_error(error: Exception, folder: Path | None, what: str) -> TableError:
    """A table's error, as people are told it. ``what``: its folder can't be this."""
    where = folder or "its folder"
    if any(sign in str(error) for sign in _LOCK_SIGNS):
        return TableError(
            f"the table in {where} is open in another process: "
            "stop that one, or give this one a folder of its own"
        )
    if is_full(error):
        return TableError(f"the disk of {where} is full: make room, then open it again. {error}")
    return TableError(
        f"the table in {where} can't be {what}: {error}. Close it and open it again. It holds nothing that the "
        "log lacks: if that does not help, delete the folder, and it is built again"
    )
