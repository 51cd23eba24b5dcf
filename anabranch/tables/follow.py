"""Following histories: the rows that COMMIT records name are laid down in a store, in the order of each history."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from anabranch.core.hybrid_time import to_text
from anabranch.core.legal_names import base_stream
from anabranch.errors import AnabranchError, NotReady, RetryError, SnapshotExpired, UnknownStream
from anabranch.ports import LogError, TopicPartition
from anabranch.reading.committed_log import CommittedLog, ReaderPorts
from anabranch.reading.decoded import Run
from anabranch.reading.feed import FETCH_BYTES
from anabranch.reading.history import Found, HistoryCursor
from anabranch.reading.history_search import HistorySearch
from anabranch.reading.transaction_reader import StreamParts
from anabranch.schemas.records import BaseRow, CommitRecord, EpochRecord, SegmentCommit
from anabranch.tables.layout import Mark
from anabranch.tables.rows import Rows
from anabranch.tables.store import Store
from anabranch.topics.names import history_topic, stream_topic

BATCH_ROWS = 32_768  # a write has so many rows, or bytes, and a block more
BATCH_BYTES = 8 << 20
_AT_ONCE = 2000  # history records
_NO_PREVIOUS = -1
_STUCK_S = 1.0  # a table that does not get on for so long may be another one by now


class SafeTimes(Protocol):
    """The controller's word, as a client brings it."""

    @property
    def last_timestamp(self) -> int:
        """The highest hybrid time that this client was told of."""

    def safe(
        self, tables: Sequence[str], at: int, deadline: float
    ) -> tuple[int, Mapping[str, int]]:
        """A hybrid time at or above ``at``, 0 being now, and each table's newest commit up to it (0: none).

        Later commits exceed it. Raises: UnknownStream, NotReady (``at`` is still to come at the deadline).
        """

    def oldest_snapshot(self, table: str, deadline: float) -> int:
        """The least time as of which the table is promised to be readable, also for open transactions."""

    def base(self, table: str, deadline: float) -> BaseRow | None:
        """The base that a table begins at now."""


class _Table:
    """One table while it is followed."""

    def __init__(
        self,
        source: CommittedLog,
        stream: str,
        mark: Mark,
        timeout: float,
        base: BaseRow | None = None,
    ) -> None:
        self.stream = stream
        self.base = base  # until it is laid down
        self.begun = (
            base or mark.position
        )  # a base, 0 for the history's beginning, or where the folder was
        self.cursor = HistoryCursor(source, stream, whole=True)
        self.cursor.seek(mark.position if base is None else base.position)
        self.parts = StreamParts(source, stream, timeout)
        self.found: deque[Found] = deque()
        self.runs: Iterator[Run] | None = None  # of the first record, as far as it is not laid down

    @property
    def at_end(self) -> bool:
        """Whether all is laid down that brokers told of when they were asked last."""
        return self.base is None and not self.found and self.cursor.ended_at >= 0


class Follower:
    """Lays tables down, step by step. No thread and no clock of its own; `step` by one thread at a time."""

    def __init__(
        self,
        store: Store,
        ports: ReaderPorts,
        streams: Sequence[str],
        timeout: float,
        base_of: Callable[[str, float], BaseRow | None],
    ) -> None:
        """``timeout``: seconds that a question may take. ``base_of``: a table's base now, asked by a deadline."""
        self._store = store
        self._ports = ports
        self.streams = tuple(dict.fromkeys(streams))
        self._timeout = timeout
        self._base_of = base_of
        self._source: CommittedLog | None = None
        self._tables: list[_Table] = []
        self._lock = threading.Lock()
        self._look_at = 0.0  # whether tables are stuck: monotonic seconds
        self._seen: dict[str, int] = {}  # what was the last commit of each then
        self._told: dict[str, dict[int, int]] = {s: {} for s in self.streams}  # last -> its time
        # A folder may be of other topics: it counts once their ids are known.
        self.last: dict[str, int] = dict.fromkeys(self.streams, 0)
        self.complete: dict[str, int] = dict.fromkeys(self.streams, 0)

    def close(self) -> None:
        """Close all connections, perhaps from another thread."""
        if self._source is not None:
            self._source.close()

    @property
    def timestamp(self) -> int:
        """All tables are complete up to here, and can be read, hybrid time; 0: one begins at a later base."""
        least, marks = min(self.complete.values()), self._store.marks
        for stream in self.streams:  # as `floor`, without the cost of a call
            if stream in marks and marks[stream].floor > least:
                return 0
        return least

    @property
    def floor(self) -> int:
        """The least time at which all tables can be read, as far as they are here."""
        marks = self._store.marks
        return max([marks[stream].floor for stream in self.streams if stream in marks], default=0)

    @property
    def at_end(self) -> bool:
        """Whether all is laid down that brokers told of."""
        return bool(self._tables) and all(table.at_end for table in self._tables)

    def behind(self) -> dict[str, int]:
        """Records of each history that are not laid down, as far as brokers told of them; markers count."""
        return {t.stream: len(t.found) + t.cursor.behind for t in self._tables}

    def told(self, timestamp: int, last: Mapping[str, int]) -> None:
        """Take the controller's word: ``last`` are the newest commits of these tables up to ``timestamp``."""
        with self._lock:
            for stream, newest in last.items():
                if stream in self._told:
                    known = self._told[stream]
                    known[newest] = max(timestamp, known.get(newest, 0))
                    self._raise(stream)

    def marks(self) -> dict[str, tuple[int, int]]:
        """Table -> (complete through, its newest commit), of one moment."""
        with self._lock:
            return {s: (self.complete[s], self.last[s]) for s in self.streams}

    def is_told(self, timestamp: int) -> bool:
        """Whether the controller's word is here by which all tables will be complete up to ``timestamp``."""
        with self._lock:
            return all(
                max(self.complete[s], *self._told[s].values(), 0) >= timestamp for s in self.streams
            )

    def _raise(self, stream: str) -> None:
        known, last = self._told[stream], self.last[stream]
        reached = [known.pop(newest) for newest in list(known) if newest <= last] if last else []
        # Records of a history stand in the order of their timestamps.
        self.complete[stream] = max(self.complete[stream], last, *reached)

    def save(self) -> None:
        """Store what the controller's word made complete since the last commits. By the thread of `step`."""
        rows = Rows()
        for stream, complete in self.complete.items():
            mark = self._store.marks.get(stream)
            if mark is not None and mark.complete < complete:
                rows.marks[stream] = mark._replace(complete=complete)
        if rows.marks:
            self._store.write(rows)

    # -- steps ----------------------------------------------------------------------------------------

    def step(self, deadline: float) -> bool:
        """Do one piece of work, or wait for some until ``deadline`` (monotonic seconds). Whether something came.

        Raises: UnknownStream, SnapshotExpired (the table's beginning is gone, and it has no base), MalformedRecord,
        NotAuthorized, RetryError. After any error the next step goes on from what is stored.
        """
        try:
            tables = self._tables or self._begin(deadline)
            self._check_same()
            was_at_end = self.at_end
            if self._advance(tables):
                return True
            if self.at_end and not was_at_end:
                return False  # a first load is over: it can be read at once
            return self._wait(tables, deadline) and self._advance(tables)
        except BaseException as error:
            self._tables = []  # what was read, and is not stored, is read again
            source, self._source = self._source, None
            if source is not None:
                source.close()
                if source.is_gone and isinstance(error, AnabranchError | LogError):
                    raise NotReady("a table was deleted and made again: it is loaded") from error
            raise

    def _advance(self, tables: list[_Table]) -> bool:
        """Lay down what is there. Whether there was something."""
        now = self._source.clock.monotonic() if self._source is not None else 0.0
        for table in tables:
            if not table.found and table.base is None:
                self._look(table, now)
        rows = Rows()
        for table in tables:
            if not (self._lay_base(table, table.base, rows) and self._lay(table, rows)):
                break
        if not (rows.rows or rows.marks):
            return False
        self._write(rows)
        return True

    def _wait(self, tables: list[_Table], deadline: float) -> bool:
        """Wait for news of any table. Its events mostly come along: a small commit takes one question."""
        places: dict[TopicPartition, int] = {}
        for table in tables:
            places |= {table.cursor.place: table.cursor.position} | table.parts.places()
        return self._source is not None and self._source.wait_for(places, deadline, FETCH_BYTES)

    def _begin(self, deadline: float) -> list[_Table]:
        """Go on where the store stands. A table whose topics are others begins from nothing."""
        source = self._source = self._ports.committed_log(self._timeout)
        deadline = max(deadline, source.clock.monotonic() + self._timeout)
        ids = self._ids(source, deadline)
        tables = []
        for stream in self.streams:
            own = ids.get(stream)
            if own is None:
                raise UnknownStream(f"there is no stream {stream!r}: create it first")
            mark = self._store.marks.get(stream)
            if mark is None or mark.ids != own or not self._store.is_indexed(stream):
                mark = self._anew(stream, own)
            base = None if mark.last else self._base_of(stream, deadline)
            if mark.base != ("" if base is None else _base_id(base)):
                mark = self._anew(stream, own)  # the folder has rows of another base
            with self._lock:
                self.last[stream] = mark.last
                self.complete[stream] = max(self.complete[stream], mark.complete)
                self._raise(stream)
            tables.append(_Table(source, stream, mark, self._timeout, base))
        self._tables = tables
        return tables

    def _ids(self, source: CommittedLog, deadline: float) -> dict[str, str]:
        """The ids of the topics of those tables that are there."""
        topics = {s: (history_topic(s), stream_topic(s)) for s in self.streams}
        ids = source.topic_ids([topic for both in topics.values() for topic in both], deadline)
        there = {s: both for s, both in topics.items() if all(topic in ids for topic in both)}
        return {s: "/".join(ids[topic] for topic in both) for s, both in there.items()}

    def _check_same(self) -> None:
        """`UnknownStream` if a table that does not get on was deleted, and made again, so that it is loaded again.

        Its log may be shorter than the old one, or as long: then nothing that is read tells.
        """
        source = self._source
        if source is None or (now := source.clock.monotonic()) < self._look_at:
            return
        with self._lock:
            stuck = any(self._told[s] and self._seen.get(s) == self.last[s] for s in self.streams)
            self._look_at, self._seen = now + _STUCK_S, dict(self.last)
        if not (stuck or source.trouble):
            return
        ids: dict[str, str] = {}
        with suppress(RetryError):
            ids = self._ids(source, now + _STUCK_S)
        for stream, own in ids.items():
            if self._store.marks[stream].ids != own:
                raise source.gone(f"{stream} was deleted, and is another one now")

    def _anew(self, stream: str, ids: str) -> Mark:
        with self._lock:
            self.last[stream] = self.complete[stream] = 0  # the controller's word still counts
        return self._store.begin(stream, ids)

    def _look(self, table: _Table, deadline: float) -> None:
        """Read on in a history."""
        try:
            found = table.cursor.next(deadline, _AT_ONCE)
        except SnapshotExpired as error:
            raise self._cut(table) from error
        if found and not self._store.marks[table.stream].last:
            first = found[0].record
            if not isinstance(first, EpochRecord) or first.previous != _NO_PREVIOUS:
                raise _incomplete(table.stream)
        table.found.extend(found)

    def _cut(self, table: _Table) -> AnabranchError:
        """The log begins behind what a table needs next, so what it has is dropped: a base is laid over no rows."""
        stream, mark = table.stream, self._store.marks[table.stream]
        self._anew(stream, mark.ids)
        deadline = self._ports.clock.monotonic() + self._timeout
        if table.begun == (self._base_of(stream, deadline) or 0):  # it would begin there again
            return _incomplete(stream)
        return NotReady(
            f"the log of {stream} begins after the folder's position: it is loaded again"
        )

    def _lay_base(self, table: _Table, base: BaseRow | None, rows: Rows) -> bool:
        """Lay the base down that a table begins at; False: ``rows`` is full. Till the end it shows nothing."""
        if base is None or self._source is None:
            return True
        mark, indexes = self._store.marks[table.stream], self._store.indexes(table.stream)
        laid = dict(mark.laid)
        try:
            table.runs = table.runs or base_runs(
                self._source, table.stream, base, self._timeout, laid
            )
            while rows.rows < BATCH_ROWS and rows.size < BATCH_BYTES:
                run = next(table.runs, None)
                if run is None:
                    table.base = table.runs = None
                    at = base.timestamp
                    rows.marks[table.stream] = mark._replace(
                        position=base.position,
                        last=base.last,
                        complete=at,
                        floor=at,
                        base="",
                        laid={},
                    )
                    return True
                there = run.block.rows(run.low, run.low + run.stretch.length)
                some = zip(there.keys, there.values, there.headers, strict=False)
                rows.add_base(mark.number, some, indexes)
                part = _part_id(run.partition, run.stretch.segment_id)
                count = run.stretch.length + laid.get(part, (0, 0))[0]
                laid[part] = count, run.offsets[-1] + 1
        except SnapshotExpired as error:  # there is a later base, or should be
            raise self._cut(table) from error
        rows.marks[table.stream] = mark._replace(base=_base_id(base), laid=laid)
        return False

    def _lay(self, table: _Table, rows: Rows) -> bool:
        """Lay records down until ``rows`` is full: False."""
        mark = self._store.marks[table.stream]
        while table.found:
            offset, record = table.found[0]
            last = mark.last
            if isinstance(record, CommitRecord):
                if not self._commit(table, record, mark.number, rows):
                    return False
                last = max(last, record.timestamp)
            elif not last:
                last = record.timestamp
            table.found.popleft()
            complete = max(self.complete[table.stream], last)
            mark = mark._replace(position=offset + 1, last=last, complete=complete)
            rows.marks[table.stream] = mark
        return True

    def _commit(self, table: _Table, record: CommitRecord, number: int, rows: Rows) -> bool:
        """Lay a commit down, or as much of it as ``rows`` has room for: False."""
        indexes = self._store.indexes(table.stream)
        table.runs = table.runs or table.parts.runs(record)
        while rows.rows < BATCH_ROWS and rows.size < BATCH_BYTES:
            try:
                if table.runs is None:
                    raise self._cut(table)
                run = next(table.runs, None)
            except SnapshotExpired as error:
                raise self._cut(table) from error
            if run is None:
                table.runs = None
                return True
            there = run.block.rows(run.low, run.low + run.stretch.length)
            rows.add(number, record.txn_id, record.timestamp, there.keys, there.values, indexes)
        return False

    def _write(self, rows: Rows) -> None:
        self._store.write(rows)
        with self._lock:
            for stream, mark in rows.marks.items():
                self.last[stream] = mark.last
                self.complete[stream] = max(self.complete[stream], mark.complete)
                self._raise(stream)


def base_runs(
    source: CommittedLog,
    table: str,
    base: BaseRow,
    timeout: float,
    laid: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Iterator[Run]:
    """The rows of a table's base that are not yet ``laid`` down. Raises: SnapshotExpired (the base is deleted)."""
    stream = base_stream(table)
    search = HistorySearch(source, stream, timeout)
    before = search.as_of(base.commit_timestamp - 1)
    for _, record in search.since(0 if before is None else before.offset + 1):
        if isinstance(record, CommitRecord) and record.txn_id == base.txn_id:
            rest = record._replace(segments=tuple(_rest_of(record.segments, laid)))
            runs = StreamParts(source, stream, timeout).runs(rest)
            if runs is not None:
                return runs
    raise SnapshotExpired(f"the base of {table} as of {to_text(base.timestamp)} is deleted")


def _rest_of(
    parts: Iterable[SegmentCommit], laid: Mapping[str, tuple[int, int]]
) -> Iterator[SegmentCommit]:
    """The parts of a commit without the first rows of each."""
    for part in parts:
        count, at = laid.get(_part_id(part.partition, part.segment_id), (0, part.first))
        if count < part.count:
            yield replace(part, first=at, count=part.count - count)


def _part_id(partition: int, segment: int) -> str:
    return f"{partition}/{segment}"


def _base_id(base: BaseRow) -> str:
    return f"{base.timestamp}/{base.txn_id.hex()}"


def _incomplete(stream: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"events of {stream} are deleted that its rows are made of, so no table can be made of it: "
        "keep them without end (`retention.ms` and `retention.bytes` of -1), and don't truncate"
    )
