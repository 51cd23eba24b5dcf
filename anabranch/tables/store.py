"""Rows and their versions in RocksDB: the folder of a replica.

Rows and the mark of their table (how far its history is stored) are one write batch in one column family, without
RocksDB's own log: after a crash the folder has the state after some batch, with its marks, and what is lost is
fetched again.

A version is stored under table number, escaped key, 00 00, inverted timestamp. So a key's versions are adjacent,
the newest first, and keys are in byte order. Its value is the transaction id, then 1 and the row, or 0 for a
deletion.

An entry of an index is stored under the index's number, an escaped value, 00 00, the escaped key of a row. Its
value is empty.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from rocksdict import (
    DBCompressionType,
    MemtableFactory,
    Options,
    Rdict,
    RdictIter,
    WriteBatch,
    WriteOptions,
)

from anabranch.core.derived_rows import is_entry, progress_of
from anabranch.errors import IllegalState, NotForkSafe, UnsupportedVersion
from anabranch.protocol.ids import NO_TXN, TXN_ID_SIZE, VERSION_HEADER, unpack_version
from anabranch.tables.indexes import Entry, Indexed, Indexes, entries_of
from anabranch.tables.rocks import (
    Walk,
    is_full,
    named,
    of_disk,
    raw_key,
    release_frames,
    table_error,
)

log = logging.getLogger("anabranch.client")

# The layout of keys and values: sizes in bytes, and fixed bytes.
TABLE = 2  # a table's number
STAMP = 8  # a timestamp
MARKS = b"\xff\xff"  # no table has this number
HIGHEST = (1 << 8 * TABLE) - 2  # the highest number of a table
IDENTITY = MARKS + b"/"
ROW = TXN_ID_SIZE + 1  # where the row begins in a value
DELETED = b"\0"
THERE = b"\1"
_KEY_END = b"\0\0"
END = len(_KEY_END)
_ALL = (1 << 64) - 1

_VERSION = "1"
_OPEN_FILES = 256
_MEMTABLE_BYTES = 64 << 20
_MEMTABLES = 4
_BY_STEPS = (
    8  # up to this many versions of a key are skipped one by one, then a seek skips the rest
)
_LAST = b"\xff" * STAMP
_TAIL = END + STAMP
# Parts of a row's key and value: slices made once save a fifth of a scan's time.
_KEY = slice(TABLE, -_TAIL)
_AT = slice(-STAMP, None)
_ROW = slice(ROW, None)
_IS_THERE = ROW - 1
PIECE = 4096  # versions that are read before their deletions are written
_AGAIN = 1000  # tries, a millisecond apart, to close an iterator that another thread is using
_open_folders: weakref.WeakSet[ForkSafe] = weakref.WeakSet()
_opener = [0]  # the process that opened the first database
_SPAWN = "open one in a new process (multiprocessing's 'spawn')"
BaseEvent = tuple[bytes | None, bytes | None, Iterable[tuple[str, bytes | None]]]  # with headers
T = TypeVar("T")
P = ParamSpec("P")


class Mark(NamedTuple):
    """How far a table is stored. ``position``: offset in the history from which to continue.

    Hybrid times: ``last``, of the newest stored COMMIT, or of the first EPOCH; ``complete``: all commits up to it
    are stored; ``floor``: no snapshot before it can be read, because versions are swept. ``ids``: topic ids.
    ``indexes``: the numbers of the table's indexes, by name. ``base``: the base that is being loaded; ``laid``: for
    each part of the base, the number of stored rows, and the offset of the next row. ``progress``: the progress
    rows of a derived table that a worker writes (`anabranch.core.derived_rows`).
    """

    number: int
    ids: str
    position: int = 0
    last: int = 0
    complete: int = 0
    floor: int = 0
    indexes: Mapping[str, int] = MappingProxyType({})
    base: str = ""
    laid: Mapping[str, tuple[int, int]] = MappingProxyType({})
    progress: Mapping[bytes, int] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        loading: list[object] = [self.base, dict(self.laid)] if self.base or self.progress else []
        derived = [{key.hex(): at for key, at in self.progress.items()}] if self.progress else []
        return json.dumps([*self[:6], dict(self.indexes), *loading, *derived]).encode()

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        found = cls(*json.loads(data))
        if not found.progress:
            return found
        of_json: Mapping[Any, int] = found.progress
        return found._replace(progress={bytes.fromhex(key): at for key, at in of_json.items()})


def mark_key(stream: str) -> bytes:
    return MARKS + b"." + stream.encode()


def table_prefix(number: int) -> bytes:
    """The first bytes of a table's rows."""
    return number.to_bytes(TABLE, "big")


def place(prefix: bytes, key: bytes) -> bytes:
    """The stored key from which a seek finds the first key at or above this one."""
    return prefix + (key.replace(b"\0", b"\0\xff") if 0 in key else key)


def versions(prefix: bytes, key: bytes) -> bytes:
    """The common prefix of all versions of a key, or of all entries of an index for one value."""
    return place(prefix, key) + _KEY_END


def stamp(timestamp: int) -> bytes:
    """The end of a stored key: the timestamp, inverted so that later times sort first."""
    return (_ALL - timestamp).to_bytes(STAMP, "big")


def suffix(timestamp: int) -> bytes:
    """The end of a version's key, after the escaped key."""
    return _KEY_END + stamp(timestamp)


def timestamp_of(raw: bytes) -> int:
    return _ALL - int.from_bytes(raw[-STAMP:], "big")


def entry(prefix: bytes, value: bytes, key: bytes) -> bytes:
    """The entry of an index for a value of a row."""
    return place(versions(prefix, value), key)


def unescaped(key: bytes) -> bytes:
    return key.replace(b"\0\xff", b"\0") if 0 in key else key


def key_of(versions: bytes) -> bytes:
    """The key of a prefix that `versions` made."""
    return unescaped(versions[TABLE:-END])


class Rows:
    """Rows and marks for one `Store.write`."""

    def __init__(self) -> None:
        self.batch = WriteBatch(raw_mode=True)
        self.marks: dict[str, Mark] = {}
        self.rows = 0

    def add(
        self,
        number: int,
        txn_id: bytes,
        timestamp: int,
        keys: Iterable[bytes | None],
        values: Iterable[bytes | None],
        indexes: Indexes = (),
    ) -> None:
        """Add versions of a commit. Events without a key are skipped."""
        put, before, after = self.batch.put, table_prefix(number), suffix(timestamp)
        there, deleted = txn_id + THERE, txn_id + DELETED
        for key, value in zip(keys, values, strict=True):
            if key is not None:
                if indexes and value is not None:
                    self._index(key, value, indexes)
                if 0 in key:  # a tenth of the time of `b"\0" in key`
                    key = key.replace(b"\0", b"\0\xff")
                put(before + key + after, deleted if value is None else there + value)
        self.rows = self.batch.len()

    def add_derived(
        self,
        number: int,
        txn_id: bytes,
        timestamp: int,
        events: Iterable[BaseEvent],
        indexes: Indexes = (),
    ) -> dict[bytes, int]:
        """Add versions of a commit of a worker that derives a table; returns its progress rows.

        An entry is a version as of the source's commit, which the event names. Raises: MalformedRecord.
        """
        put, before, found = self.batch.put, table_prefix(number), dict[bytes, int]()
        for key, value, headers in events:
            if key is None:
                continue
            own, at = txn_id, timestamp
            if is_entry(key):
                at, own = unpack_version(dict(headers).get(VERSION_HEADER))
            elif through := progress_of(key, value):
                found[key] = through
            if indexes and value is not None:
                self._index(key, value, indexes)
            put(
                place(before, key) + suffix(at), own + (DELETED if value is None else THERE + value)
            )
        self.rows = self.batch.len()
        return found

    def add_base(self, number: int, events: Iterable[BaseEvent], indexes: Indexes = ()) -> None:
        """Add rows of a base, each with its own commit. Raises `MalformedRecord` for an event without a commit."""
        put, before = self.batch.put, table_prefix(number)
        for key, value, headers in events:
            if key is not None and value is not None:
                timestamp, txn_id = unpack_version(dict(headers).get(VERSION_HEADER))
                if indexes:
                    self._index(key, value, indexes)
                put(place(before, key) + suffix(timestamp), txn_id + THERE + value)
        self.rows = self.batch.len()

    def _index(self, key: bytes, row: bytes, indexes: Indexes) -> None:
        for prefix, value in entries_of(indexes, key, row):
            self.batch.put(entry(prefix, value, key), b"")

    @property
    def size(self) -> int:
        """The bytes of all rows and marks."""
        return self.batch.size_in_bytes()


class ForkSafe:
    """A database that is safe under fork, and the readers' open iterators, which end when the database closes."""

    _db: Any = None

    def __init__(self) -> None:
        """Raise `NotForkSafe` after a fork: RocksDB would wait for threads that don't exist in this process."""
        _opener[0] = _opener[0] or os.getpid()
        if _opener[0] != os.getpid():
            raise NotForkSafe(f"a replica was opened before a fork: {_SPAWN}")
        self.forked = False
        self._closed = False
        self._half_read: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        _open_folders.add(self)

    def check_fork(self) -> None:
        """Raise `NotForkSafe` in a forked child."""
        if self.forked:
            raise NotForkSafe(f"these tables were opened before a fork: {_SPAWN}")

    def after_fork(self) -> None:
        """In a forked child: never free anything: freeing would wait for threads that do not exist here."""
        self.forked = True
        for thing in (self._db, *self._half_read):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def give(self, rows: Generator[T, None, None]) -> Iterator[T]:
        """Register an iterator of rows for a reader, which may stop before the last row."""
        self._half_read.add(rows)
        return chain(rows, self._end())

    def _end(self) -> Iterator[Any]:
        self.check_open()
        yield from ()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed, or this is a forked child."""
        return self._closed or self.forked

    def check_open(self) -> None:
        """Raise `IllegalState` once it is closed, and `NotForkSafe` in a forked child."""
        if self.forked or self._closed:
            self.check_fork()
            raise IllegalState("the replica is closed: open another one")

    def end_half_read(self) -> None:
        """Close all open iterators, which would keep the folder locked; their next step raises an error."""
        self._closed = True
        for rows in list(self._half_read):
            for _ in range(_AGAIN):
                try:
                    rows.close()
                except ValueError:  # another thread is iterating
                    time.sleep(0.001)
                else:
                    break


H = TypeVar("H", bound=ForkSafe)


def given(
    read: Callable[Concatenate[H, P], Iterator[T]],
) -> Callable[Concatenate[H, P], Iterator[T]]:
    """Close the generator that a method returns when its database closes."""

    @wraps(read)
    def method(self: H, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        return self.give(cast("Generator[T, None, None]", read(self, *args, **named)))

    return method


def _after_fork_in_child() -> None:
    for each in list(_open_folders):
        each.after_fork()
    # RocksDB's exit handler would wait for threads that do not exist here: the child ends before it runs.
    if _opener[0] and hasattr(libc := ctypes.CDLL(None), "on_exit"):  # glibc
        libc.on_exit(libc["_exit"], None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Seen(NamedTuple):
    """A key as of a time. ``value``: its row then, or None.

    ``timestamp``, ``txn_id``: of its newest version, which may be later than that time; 0 without a version.
    """

    key: bytes
    value: bytes | None
    timestamp: int
    txn_id: bytes


class Cursor:
    """An iterator for several reads, as making one takes longer than a read. A context manager.

    The first read makes the iterator, and all reads see the rows of that moment. An iterator keeps the folder open,
    and an error's traceback would keep the iterator. So the end of the block drops it, and no read comes after it.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], RdictIter]) -> None:
        self._make: Callable[[], RdictIter] | None = make
        self._made: Any = None

    @property
    def found(self) -> Any:
        """The iterator."""
        found = self._made
        if found is None:
            if self._make is None:
                raise RuntimeError("a read after the end of the cursor's block")
            found = self._made = self._make()
        return found

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._made = self._make = None


class Store(ForkSafe):
    """The tables of one folder. One process opens it. Any thread may read; one thread at a time writes.

    Disk errors are raised as `TableError`.
    """

    def __init__(
        self, folder: Path, cluster_id: str, indexes: Mapping[str, Sequence[Indexed]] | None = None
    ) -> None:
        """Open or create it. ``indexes``: by table.

        Raises: IllegalState (in use, of another cluster, or not a replica's folder), TableError (the disk is full).
        """
        super().__init__()
        self.folder = folder
        self._indexes = indexes or {}
        self.marks: dict[str, Mark] = {}
        self.loading = not folder.exists()  # no reads until `end_loading`
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[assignment, method-assign]
        try:
            if self.loading and folder.parent.exists() and any(folder.parent.iterdir()):
                raise FileExistsError(f"{folder.parent} has files that are no replica's")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private data
            self._db = self._opened(loading=self.loading)
        except Exception as error:
            if not (isinstance(error, FileExistsError) or of_disk(error)):
                raise
            if is_full(error):
                raise table_error(error, folder, "opened") from error
            own = ". One that no replica has open may be deleted: its rows are in the log, too"
            raise IllegalState(
                f"the folder {folder} can't be opened: {error}. Give each replica a folder of its own, new or "
                f"empty at first{'' if self.loading else own}"
            ) from error
        try:
            self._check_identity(cluster_id)
            for key, value in Walk(self._db, folder, mark_key("")):
                if key.startswith(mark_key("")):
                    self.marks[key[len(mark_key("")) :].decode()] = Mark.parse(value)
            self._given = max(self._used(), default=0)
        except BaseException:
            self._db.close()
            raise

    def _opened(self, *, loading: bool) -> Rdict:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(_OPEN_FILES)
        options.set_compression_type(DBCompressionType.lz4())
        options.set_write_buffer_size(_MEMTABLE_BYTES)
        options.set_max_write_buffer_number(_MEMTABLES)
        if loading:
            # Rows are sorted when they are flushed, in parallel to writes: four times as fast.
            options.set_allow_concurrent_memtable_write(False)
            options.set_memtable_factory(MemtableFactory.vector())
            options.set_disable_auto_compactions(True)
        # Without options of its own the column family keeps the options of the last opening.
        return Rdict(str(self.folder), options, {"default": options})

    def _check_identity(self, cluster_id: str) -> None:
        known, own = self._db.get(IDENTITY), f"{_VERSION}/{cluster_id}".encode()
        if known is None:
            self._db.put(IDENTITY, own)
            return
        version, _, cluster = known.decode(errors="replace").partition("/")
        other = "give another folder, or delete it"
        if version != _VERSION:
            raise UnsupportedVersion(
                f"the folder {self.folder} has form {version!r:.20}, and this release knows form {_VERSION}: "
                f"upgrade it, or {other}"
            )
        if cluster != cluster_id:
            raise IllegalState(
                f"the folder {self.folder} is a replica of cluster {cluster}, not of {cluster_id}: {other}"
            )

    def end_loading(self) -> None:
        """End the first load: from now on rows can be read quickly."""
        if self.loading:
            with named(self.folder, "written"):
                self._db.flush()
                self._db.close()
                self._db = self._opened(loading=False)
            self.loading = False  # readers begin when they see this

    def close(self, failure: BaseException | None = None) -> None:
        """Close the folder. Rows that can't be stored now are fetched again later.

        ``failure``: an error whose traceback may keep an iterator open.
        """
        if self.forked:
            return
        self.end_half_read()
        for error in (failure, sys.exc_info()[1]):
            release_frames(error)
        try:
            self._db.close()  # flushes, and closes even if that fails
        except Exception as error:
            if not of_disk(error):
                raise
            log.warning("%s", table_error(error, self.folder, "written"))

    # -- writing --------------------------------------------------------------------------------------

    def write(self, rows: Rows) -> None:
        """Write rows and marks in one step."""
        for stream, mark in rows.marks.items():
            rows.batch.put(mark_key(stream), mark.to_bytes())
        with named(self.folder, "written"):
            self._db.write(rows.batch, self._unlogged)
        self.marks |= rows.marks

    def begin(self, stream: str, ids: str) -> Mark:
        """Drop what is stored of a table, and begin it without rows.

        The table gets a new number, so that readers of the old rows fail. A table that had no rows keeps its
        number.
        """
        before = self.marks.get(stream)
        if before is not None and self.is_indexed(stream) and not self._has_rows(before):
            number, numbers = before.number, before.indexes
        else:
            names = [index.name for index in self._indexes.get(stream, ())]
            number, *others = self._free(1 + len(names))
            numbers = dict(zip(names, others, strict=True))
        rows = Rows()
        self.marks[stream] = Mark(number, ids, indexes=numbers)
        rows.marks[stream] = self.marks[stream]
        if before is not None:
            for old in (before.number, *before.indexes.values()):
                rows.batch.delete_range(table_prefix(old), table_prefix(old + 1))
        self.write(rows)
        return self.marks[stream]

    def _used(self) -> set[int]:
        return {n for mark in self.marks.values() for n in (mark.number, *mark.indexes.values())}

    def _free(self, count: int) -> list[int]:
        """Numbers without a table or index; a number is reused as late as possible."""
        used, found = self._used(), list[int]()
        while len(found) < count:
            self._given = self._given % HIGHEST + 1
            if self._given not in used:
                found.append(self._given)
        return found

    def _has_rows(self, mark: Mark) -> bool:
        found = self._db.iter()
        for prefix in map(table_prefix, (mark.number, *mark.indexes.values())):
            found.seek(prefix)
            if raw_key(found).startswith(prefix):
                return True
        return False

    def is_indexed(self, stream: str) -> bool:
        """Whether the folder has exactly the requested indexes of a table."""
        names = {index.name for index in self._indexes.get(stream, ())}
        return set(self.marks[stream].indexes) == names

    def indexes(self, stream: str) -> Indexes:
        """The prefixes and functions of a table's indexes."""
        numbers = self.marks[stream].indexes
        return [(table_prefix(numbers[i.name]), i) for i in self._indexes.get(stream, ())]

    # -- reading --------------------------------------------------------------------------------------

    def cursor(self) -> Cursor:
        """A cursor for several reads."""
        return Cursor(self._db.iter)

    def get(self, number: int, key: bytes, at: int, cursor: Cursor | None = None) -> Seen:
        """A key as of ``at``. ``cursor``: saves half of the time, which it takes to make one."""
        own = versions(table_prefix(number), key)
        found = self._db.iter() if cursor is None else cursor.found
        found.seek(own)
        raw = found.key() if found.valid() else raw_key(found)
        if raw[:-STAMP] != own:
            return Seen(key, None, 0, NO_TXN)
        data: bytes = found.value()
        newest, txn_id = timestamp_of(raw), data[:TXN_ID_SIZE]
        if newest > at:
            found.seek(own + stamp(at))
            data = found.value() if raw_key(found)[:-STAMP] == own else b""
        return Seen(key, _row(data), newest, txn_id)

    def row(self, number: int, key: bytes, at: int) -> bytes | None:
        """The row of `get` alone, which is faster."""
        return _row_at(self._db.iter(), place(table_prefix(number), key) + suffix(at))

    def get_many(self, number: int, keys: Iterable[bytes], at: int) -> dict[bytes, bytes]:
        """The rows of these keys as of ``at``, without missing ones. Sorted keys are fastest."""
        prefix, end, found = table_prefix(number), suffix(at), self._db.iter()
        rows = ((key, _row_at(found, place(prefix, key) + end)) for key in keys)
        return {key: row for key, row in rows if row is not None}

    @given
    def rows(
        self, number: int, low: bytes, high: bytes | None, at: int
    ) -> Iterator[tuple[bytes, bytes]]:
        """The keys and rows of `scan` alone, which is faster if keys have few versions."""
        begin, end = _range(number, low, high)
        return _visible(Walk(self._db, self.folder, begin), end, stamp(at))

    @given
    def stamped(self, number: int, at: int) -> Iterator[tuple[bytes, bytes, int, bytes]]:
        """All rows as of ``at``, in the order of their keys: key, row, commit timestamp and transaction id."""
        end, bound, done = table_prefix(number + 1), stamp(at), b""
        walk, raw = Walk(self._db, self.folder, table_prefix(number)), None
        for raw, data in walk.rows:
            if raw >= end:
                return
            own = raw[:-STAMP]
            if own != done and raw[-STAMP:] >= bound:
                done = own
                row = _row(data)
                if row is not None:
                    yield key_of(own), row, timestamp_of(raw), data[:TXN_ID_SIZE]
        walk.check(raw)

    @given
    def scan(
        self, number: int, low: bytes, high: bytes | None, at: int, *, reverse: bool = False
    ) -> Iterator[Seen]:
        """The keys of [low, high) that have a row as of ``at``, or a later version; ``high`` None: to the end."""
        begin, end = _range(number, low, high)
        found = self._db.iter()
        return (
            self._backwards(found, begin, end, at) if reverse else _forwards(found, begin, end, at)
        )

    def scan_some(
        self, number: int, low: bytes, high: bytes | None, at: int, most: int, cursor: Cursor
    ) -> list[Seen]:
        """The first keys of `scan`, at most ``most``: for a few it is several times as fast."""
        begin, end = _range(number, low, high)
        return list(islice(_forwards(cursor.found, begin, end, at), most))

    def _backwards(self, found: RdictIter, begin: bytes, end: bytes, at: int) -> Iterator[Seen]:
        found.seek_for_prev(end)
        while begin <= (raw := raw_key(found)) < end:
            own = raw[:-STAMP]
            found.seek(own)  # the newest version is first
            yield from _forwards(found, own, own + _LAST, at)
            found.seek_for_prev(own)

    @given
    def versions(self, number: int, key: bytes, at: int) -> Iterator[Seen]:
        """The kept versions of a key at or below ``at``, with deletions, the newest first."""
        own = versions(table_prefix(number), key)
        found = self._db.iter()
        found.seek(own + stamp(at))
        while (raw := raw_key(found))[:-STAMP] == own:
            data: bytes = found.value()
            yield Seen(key, _row(data), timestamp_of(raw), data[:TXN_ID_SIZE])
            found.next()

    @given
    def lookup(self, prefix: bytes, value: bytes) -> Iterator[bytes]:
        """The keys of which some version has this value, in their order. ``prefix``: the index's."""
        own = versions(prefix, value)
        found = self._db.iter()
        found.seek(own)
        while (raw := raw_key(found)).startswith(own):
            yield unescaped(raw[len(own) :])
            found.next()

    # -- sweeping -------------------------------------------------------------------------------------

    def sweep(self, stream: str, floor: int) -> Iterator[int]:
        """Delete what no snapshot at or after ``floor`` needs. Yields the number of deletions after each piece.

        A version is deleted if a newer version replaces it at the floor. If the newest version at the floor is a
        deletion, that version is deleted, too, after all versions that it replaces.
        """
        mark = self.marks[stream]
        rows = Rows()
        rows.marks[stream] = mark._replace(floor=max(floor, mark.floor))
        self.write(rows)
        return self._sweep(stream, mark, floor)

    def _sweep(self, stream: str, mark: Mark, floor: int) -> Iterator[int]:
        prefix, end, bound = table_prefix(mark.number), table_prefix(mark.number + 1), stamp(floor)
        at, own, is_covered = prefix, b"", False
        last: bytes | None = None  # the deletion that replaces the swept versions
        gone: set[Entry] = set()  # index entries of this key's swept versions
        indexes = self.indexes(stream)
        is_over = False
        while not is_over and self.marks[stream].number == mark.number:
            batch, found = WriteBatch(raw_mode=True), self._db.iter()
            found.seek(at)
            for _ in range(PIECE):
                raw = raw_key(found)
                if raw[:-STAMP] != own:
                    if last is not None:
                        batch.delete(last)
                    self._sweep_entries(batch, own, gone, bound, indexes)
                    own, is_covered, last, gone = raw[:-STAMP], False, None, set()
                if not raw or raw >= end:
                    is_over = True
                    break
                if raw[-STAMP:] < bound:
                    pass  # later than the floor
                elif is_covered:
                    batch.delete(raw)
                    if indexes:
                        gone |= entries_of(indexes, key_of(own), _row(found.value()))
                else:
                    is_covered = True
                    if found.value()[ROW - 1 :] == DELETED:
                        last = raw
                found.next()
            at = raw_key(found)
            del found  # an iterator would keep the folder open between the pieces
            deleted = batch.len()
            if deleted:
                with named(self.folder, "written"):
                    self._db.write(batch, self._unlogged)
            yield deleted

    def _sweep_entries(
        self, batch: WriteBatch, own: bytes, gone: set[Entry], bound: bytes, indexes: Indexes
    ) -> None:
        """Delete entries of swept versions, unless a kept version, or one written meanwhile, has the same entry."""
        if not gone:
            return
        key, found = key_of(own), self._db.iter()
        found.seek(own)
        while (raw := raw_key(found))[:-STAMP] == own:
            gone -= entries_of(indexes, key, _row(found.value()))
            if raw[-STAMP:] >= bound:
                break  # the newest version at the floor: older ones are swept
            found.next()
        for prefix, value in gone:
            batch.delete(entry(prefix, value, key))


def _row(data: bytes) -> bytes | None:
    return data[ROW:] if data[TXN_ID_SIZE:ROW] == THERE else None


def _range(number: int, low: bytes, high: bytes | None) -> tuple[bytes, bytes]:
    """The first stored key of [low, high), and the first one after it; ``high`` None: to the end of the table."""
    prefix = table_prefix(number)
    return place(prefix, low), table_prefix(number + 1) if high is None else place(prefix, high)


def _row_at(found: RdictIter, wanted: bytes) -> bytes | None:
    """The row of the first version from ``wanted`` on; None if that version belongs to another key."""
    found.seek(wanted)
    return _row(found.value()) if raw_key(found)[:-STAMP] == wanted[:-STAMP] else None


def _visible(walk: Walk, end: bytes, bound: bytes) -> Iterator[tuple[bytes, bytes]]:
    done, raw = b"", None
    for raw, data in walk.rows:
        if raw >= end:
            return
        own = raw[_KEY]
        if own != done and raw[_AT] >= bound:
            done = own
            if data[_IS_THERE]:
                yield own.replace(b"\0\xff", b"\0") if 0 in own else own, data[_ROW]
    walk.check(raw)


def _forwards(found: RdictIter, begin: bytes, end: bytes, at: int) -> Iterator[Seen]:
    bound = stamp(at)
    found.seek(begin)
    raw = found.key() if found.valid() else raw_key(found)
    while raw and raw < end:
        own, data = raw[:-STAMP], found.value()
        newest, txn_id = timestamp_of(raw), data[:TXN_ID_SIZE]
        is_newer = raw[-STAMP:] < bound
        if is_newer:
            found.seek(own + bound)
            raw = raw_key(found)
            data = found.value() if raw[:-STAMP] == own else b""
        value = data[ROW:] if data[TXN_ID_SIZE:ROW] == THERE else None
        if is_newer or value is not None:
            yield Seen(unescaped(own[TABLE:-END]), value, newest, txn_id)
        steps = 0
        while raw[:-STAMP] == own:
            steps += 1
            if steps > _BY_STEPS:
                found.seek(own + _LAST + b"\0")
            else:
                found.next()
            raw = found.key() if found.valid() else raw_key(found)
