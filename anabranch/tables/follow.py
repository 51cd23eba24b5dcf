"""Following tables: the rows that COMMIT records name are stored in the order of each table's history.

A *base* is a table's rows at one moment, in a stream of their own. A replica of a table with a base loads the base
first, then what the history has from there on.

A derived table that a worker writes is followed by the time of its source. Its entries name the source's commits,
and its progress rows say up to which of them all is derived
(docs/inside/decisions/0063-asynchronous-derivations.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from anabranch.core.derived_rows import derived_through, progress_of, with_progress
from anabranch.core.stream_settings import Derived
from anabranch.errors import AnabranchError, NotReady, RetryError, SnapshotExpired, UnknownStream
from anabranch.ports import LogError, TopicPartition
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.legal_names import base_stream
from anabranch.protocol.schemas.records import BaseRow, CommitRecord, EpochRecord, SegmentCommit
from anabranch.reading.commit_feed import CommitFeed, StreamParts
from anabranch.reading.committed_log import CommittedLog, ReaderPorts
from anabranch.reading.decoded import Run
from anabranch.reading.feed import FETCH_BYTES
from anabranch.reading.history import HistorySearch
from anabranch.tables.store import Mark, Rows, Store
from anabranch.topics.names import history_topic, stream_topic

BATCH_ROWS = 32_768  # a write is full at this many rows or bytes; its last block may go beyond this
BATCH_BYTES = 8 << 20
_NO_PREVIOUS = -1
_STUCK_S = 1.0  # a table without progress for this long may have been replaced


class SafeTimes(Protocol):
    """Safe times from the controller, as a client asks for them."""

    @property
    def last_timestamp(self) -> int:
        """The highest hybrid time that this client has received."""

    def safe(
        self, tables: Sequence[str], at: int, deadline: float
    ) -> tuple[int, Mapping[str, int]]:
        """A safe time at or above ``at`` (0: now), and the time of each table's newest commit up to it (0: none).

        Raises: UnknownStream, NotReady (``at`` is still in the future at the deadline).
        """

    def oldest_snapshot(self, table: str, deadline: float) -> int:
        """The hybrid time from which the table is sure to be readable, also for open transactions."""

    def base(self, table: str, deadline: float) -> BaseRow | None:
        """The base at which a table begins now."""


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
        self.base = base  # until it is loaded
        # The base, 0 for the history's beginning, or the stored position.
        self.begun = base or mark.position
        self.feed = CommitFeed(source, stream, timeout, whole=True)
        self.feed.seek(mark.position if base is None else base.position)
        self.base_runs: Iterator[Run] | None = None  # the rest of the base
        self.progress: dict[bytes, int] = {}  # progress rows of the commit that is read

    @property
    def at_end(self) -> bool:
        """Whether everything is stored up to the ends that brokers reported last."""
        return self.base is None and not self.feed.records and self.feed.history.ended_at >= 0


class Follower:
    """Follows tables, step by step, without a thread or clock of its own. One thread at a time calls `step`."""

    def __init__(
        self,
        store: Store,
        ports: ReaderPorts,
        streams: Sequence[str],
        timeout: float,
        base_of: Callable[[str, float], BaseRow | None],
        derived: Mapping[str, Derived] = MappingProxyType({}),
    ) -> None:
        """``timeout``: seconds of a question. ``base_of``: asks for a table's present base, with a deadline.

        ``derived``: the derived tables that workers write.
        """
        self._store = store
        self._ports = ports
        self.streams = tuple(dict.fromkeys(streams))
        self._sources = sources = {table: each.of.source for table, each in derived.items()}
        self._floors = {table: each.since for table, each in derived.items()}
        # Tables of which the controller's reports are needed.
        self.reported_of = tuple(dict.fromkeys([*self.streams, *sources.values()]))
        self._timeout = timeout
        self._base_of = base_of
        self._source: CommittedLog | None = None
        self._tables: list[_Table] = []
        self._lock = threading.Lock()
        self._check_at = 0.0  # the next check for stuck tables, monotonic seconds
        self._seen: dict[str, int] = {}  # the last commit of each table at the check before
        # Table -> its newest commit in a report, and its source's (0 without one) -> the report's later time.
        self._reported: dict[str, dict[tuple[int, int], int]] = {s: {} for s in self.streams}
        # Table -> its newest commit in all reports, or its source's.
        self._newest: dict[str, int] = dict.fromkeys(self.streams, 0)
        # Derived table -> commit of its source up to which all is derived, and stored here.
        self._through: dict[str, int] = dict.fromkeys(sources, 0)
        # The folder may have rows of other topics: its marks count only when topic ids are compared.
        self.last: dict[str, int] = dict.fromkeys(self.streams, 0)
        self.complete: dict[str, int] = dict.fromkeys(self.streams, 0)

    def close(self) -> None:
        """Close all connections. Another thread may call it."""
        if self._source is not None:
            self._source.close()

    @property
    def timestamp(self) -> int:
        """The hybrid time up to which all tables are complete and readable; 0 while one begins at a later base."""
        least, marks = min(self.complete.values()), self._store.marks
        for stream in self.streams:  # as in `floor`, without the cost of a call
            if stream in marks and marks[stream].floor > least:
                return 0
        return least

    @property
    def floor(self) -> int:
        """The least time at which all tables can be read here."""
        marks = self._store.marks
        return max([marks[stream].floor for stream in self.streams if stream in marks], default=0)

    @property
    def at_end(self) -> bool:
        """Whether everything is stored up to the ends that brokers reported."""
        return bool(self._tables) and all(table.at_end for table in self._tables)

    def behind(self) -> dict[str, int]:
        """Table -> its history records that are not stored yet, counted by offsets up to the reported end."""
        return {t.stream: len(t.feed.records) + t.feed.history.behind for t in self._tables}

    def observe(self, timestamp: int, last: Mapping[str, int]) -> bool:
        """Note a report of the controller: ``last`` has each table's newest commit up to ``timestamp``.

        Returns whether a table is complete up to a later time than before.
        """
        rose = False
        with self._lock:
            for stream in self.streams:
                source = self._sources.get(stream, stream)
                if stream not in last or source not in last:
                    continue
                newest = last[source]
                self._newest[stream] = max(newest, self._newest[stream])
                # Otherwise the commit itself will show as much.
                if timestamp > newest:
                    known = self._reported[stream]
                    both = last[stream], newest if source != stream else 0
                    known[both] = max(timestamp, known.get(both, 0))
                    before = self.complete[stream]
                    self._raise(stream)
                    rose = rose or self.complete[stream] > before
        return rose

    def marks(self) -> dict[str, tuple[int, int]]:
        """Table -> (time up to which it is complete, timestamp of its newest stored commit), at one moment."""
        with self._lock:
            return {s: (self.complete[s], self.last[s]) for s in self.streams}

    def will_reach(self, timestamp: int) -> bool:
        """Whether all tables will be complete up to ``timestamp`` once they have stored what is reported."""
        with self._lock:
            return all(
                max(self.complete[s], self._newest[s], *self._reported[s].values()) >= timestamp
                for s in self.streams
            )

    def _raise(self, stream: str) -> None:
        known, last = self._reported[stream], self.last[stream]
        # Records of a history are in the order of their timestamps.
        through = self._through.get(stream, last)
        reached = []
        if through:
            reached = [
                known.pop(both) for both in list(known) if both[0] <= last and both[1] <= through
            ]
        self.complete[stream] = max(self.complete[stream], through, *reached)

    def save(self) -> None:
        """Store the complete times, which reports may have raised. The thread of `step` calls this."""
        rows = Rows()
        for stream, complete in self.complete.items():
            mark = self._store.marks.get(stream)
            if mark is not None and mark.complete < complete:
                rows.marks[stream] = mark._replace(complete=complete)
        if rows.marks:
            self._store.write(rows)

    # -- steps ----------------------------------------------------------------------------------------

    def step(self, deadline: float) -> bool:
        """Do one piece of work, or wait for work until ``deadline`` (monotonic). Returns whether work came.

        Raises: UnknownStream, SnapshotExpired (the table's beginning is deleted, and it has no base),
        MalformedRecord, NotAuthorized, RetryError. After any error the next step continues from what is stored.
        """
        try:
            tables = self._tables or self._begin(deadline)
            self._check_same()
            was_at_end = self.at_end
            if self._advance(tables):
                return True
            if self.at_end and not was_at_end:
                return False  # the first load is over: readers need not wait
            return self._wait(tables, deadline) and self._advance(tables)
        except BaseException as error:
            self._tables = []  # what was read and not stored is read again
            source, self._source = self._source, None
            if source is not None:
                source.close()
                if source.is_gone and isinstance(error, AnabranchError | LogError):
                    raise NotReady("a table was deleted and made again: it is loaded") from error
            raise

    def _advance(self, tables: list[_Table]) -> bool:
        """Store what can be read without waiting. Returns whether there was something."""
        now = self._source.clock.monotonic() if self._source is not None else 0.0
        for table in tables:
            if not table.feed.records and table.base is None:
                self._read_history(table, now)
        rows = Rows()
        for table in tables:
            if not (self._load_base(table, table.base, rows) and self._load(table, rows)):
                break
        if not (rows.rows or rows.marks):
            return False
        self._write(rows)
        return True

    def _wait(self, tables: list[_Table], deadline: float) -> bool:
        """Wait for a commit in any table. A small commit's events usually come with the same request."""
        places: dict[TopicPartition, int] = {}
        for table in tables:
            places |= table.feed.positions()
        return self._source is not None and self._source.wait_for(places, deadline, FETCH_BYTES)

    def _begin(self, deadline: float) -> list[_Table]:
        """Continue from what is stored. A table with other topics than before is loaded from its beginning."""
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
                mark = self._begin_again(stream, own)
            base = None if mark.last else self._base_of(stream, deadline)
            if mark.base != ("" if base is None else _base_id(base)):
                mark = self._begin_again(stream, own)  # the folder's rows come from another base
            if (floor := self._floors.get(stream, 0)) > mark.floor:
                mark = self._store.marks[stream] = mark._replace(floor=floor)
            with self._lock:
                self._note(stream, mark)
            tables.append(_Table(source, stream, mark, self._timeout, base))
        self._tables = tables
        return tables

    def _ids(self, source: CommittedLog, deadline: float) -> dict[str, str]:
        """The topic ids of the tables that exist."""
        topics = {s: (history_topic(s), stream_topic(s)) for s in self.streams}
        ids = source.topic_ids([topic for both in topics.values() for topic in both], deadline)
        there = {s: both for s, both in topics.items() if all(topic in ids for topic in both)}
        return {s: "/".join(ids[topic] for topic in both) for s, both in there.items()}

    def _check_same(self) -> None:
        """Raise `UnknownStream` if a table without progress was deleted and created again; then it is loaded again.

        While the new log is not longer than the old log, reading does not show the difference.
        """
        source = self._source
        if source is None or (now := source.clock.monotonic()) < self._check_at:
            return
        with self._lock:
            stuck = any(
                (self._reported[s] or self._newest[s] > self.last[s])
                and self._seen.get(s) == self.last[s]
                for s in self.streams
            )
            self._check_at, self._seen = now + _STUCK_S, dict(self.last)
        if not (stuck or source.trouble):
            return
        ids: dict[str, str] = {}
        with suppress(RetryError):
            ids = self._ids(source, now + _STUCK_S)
        for stream, own in ids.items():
            if self._store.marks[stream].ids != own:
                raise source.gone(f"{stream} was deleted, and is another one now")

    def _begin_again(self, stream: str, ids: str) -> Mark:
        with self._lock:
            self.last[stream] = self.complete[stream] = 0  # the controller's reports still count
            self._newest[stream] = 0
            if stream in self._through:
                self._through[stream] = 0
        return self._store.begin(stream, ids)

    def _read_history(self, table: _Table, deadline: float) -> None:
        try:
            found = table.feed.read_on(deadline)
        except SnapshotExpired as error:
            raise self._start_over(table) from error
        if found and not self._store.marks[table.stream].last:
            first = found[0].record
            if not isinstance(first, EpochRecord) or first.previous != _NO_PREVIOUS:
                raise _incomplete(table.stream)

    def _start_over(self, table: _Table) -> AnabranchError:
        """Drop a table's rows, because the next needed record is deleted; returns the error to raise."""
        stream, mark = table.stream, self._store.marks[table.stream]
        self._begin_again(stream, mark.ids)
        deadline = self._ports.clock.monotonic() + self._timeout
        # The table would begin at the same place again.
        if table.begun == (self._base_of(stream, deadline) or 0):
            return _incomplete(stream)
        return NotReady(
            f"the log of {stream} begins after the folder's position: it is loaded again"
        )

    def _load_base(self, table: _Table, base: BaseRow | None, rows: Rows) -> bool:
        """Add rows of the base at which a table begins; False if ``rows`` is full.

        The table can't be read before all of them are stored.
        """
        if base is None or self._source is None:
            return True
        mark, indexes = self._store.marks[table.stream], self._store.indexes(table.stream)
        laid = dict(mark.laid)
        try:
            table.base_runs = table.base_runs or base_runs(
                self._source, table.stream, base, self._timeout, laid
            )
            while rows.rows < BATCH_ROWS and rows.size < BATCH_BYTES:
                run = next(table.base_runs, None)
                if run is None:
                    table.base = table.base_runs = None
                    at = base.timestamp
                    mark = mark._replace(
                        position=base.position, last=base.last, floor=at, base="", laid={}
                    )
                    complete = self._through_of(table.stream, mark, at)
                    rows.marks[table.stream] = mark._replace(complete=complete)
                    return True
                there = run.block.rows(run.low, run.low + run.stretch.length)
                if table.stream in self._sources:
                    for key, value in zip(there.keys, there.values, strict=False):
                        if key is not None and (at := progress_of(key, value)):
                            mark = mark._replace(progress=with_progress(mark.progress, key, at))
                some = zip(there.keys, there.values, there.headers, strict=False)
                rows.add_base(mark.number, some, indexes)
                part = _part_id(run.partition, run.stretch.segment_id)
                count = run.stretch.length + laid.get(part, (0, 0))[0]
                laid[part] = count, run.offsets[-1] + 1
        except SnapshotExpired as error:  # the base is deleted, so there should be a later one
            raise self._start_over(table) from error
        rows.marks[table.stream] = mark._replace(base=_base_id(base), laid=laid)
        return False

    def _load(self, table: _Table, rows: Rows) -> bool:
        """Add records to ``rows``; False if it is full."""
        mark = self._store.marks[table.stream]
        while table.feed.records:
            offset, record = table.feed.first
            last = mark.last
            if isinstance(record, CommitRecord):
                if not self._commit(table, record, mark.number, rows):
                    return False
                last = max(last, record.timestamp)
            elif not last:
                last = record.timestamp
            table.feed.advance()
            for key, through in table.progress.items():
                mark = mark._replace(progress=with_progress(mark.progress, key, through))
            table.progress = {}
            complete = max(self.complete[table.stream], self._through_of(table.stream, mark, last))
            mark = mark._replace(position=offset + 1, last=last, complete=complete)
            rows.marks[table.stream] = mark
        return True

    def _commit(self, table: _Table, record: CommitRecord, number: int, rows: Rows) -> bool:
        """Add a commit to ``rows``; False if only a part of it has room."""
        indexes = self._store.indexes(table.stream)
        while rows.rows < BATCH_ROWS and rows.size < BATCH_BYTES:
            try:
                runs = table.feed.runs()
                if runs is None:
                    raise self._start_over(table)
                run = next(runs, None)
            except SnapshotExpired as error:
                raise self._start_over(table) from error
            if run is None:
                return True
            there = run.block.rows(run.low, run.low + run.stretch.length)
            txn_id, at = record.txn_id, record.timestamp
            if table.stream in self._sources:
                some = zip(there.keys, there.values, there.headers, strict=False)
                table.progress |= rows.add_derived(number, txn_id, at, some, indexes)
            else:
                rows.add(number, txn_id, at, there.keys, there.values, indexes)
        return False

    def _write(self, rows: Rows) -> None:
        self._store.write(rows)
        with self._lock:
            for stream, mark in rows.marks.items():
                self._note(stream, mark)

    def _note(self, stream: str, mark: Mark) -> None:
        """Note what is stored of a table. The caller has the lock."""
        self.last[stream] = mark.last
        self.complete[stream] = max(self.complete[stream], mark.complete)
        if stream in self._through:
            self._through[stream] = self._through_of(stream, mark, 0)
        self._raise(stream)

    def _through_of(self, stream: str, mark: Mark, own: int) -> int:
        """The time up to which a table is complete by its own log: of a derived one, by its progress rows.

        ``own``: the answer for other tables.
        """
        if stream not in self._sources:
            return own
        return 0 if mark.base else derived_through(mark.progress)


def base_runs(
    source: CommittedLog,
    table: str,
    base: BaseRow,
    timeout: float,
    laid: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Iterator[Run]:
    """The rows of a table's base that are not ``laid`` (`Mark`) yet. Raises: SnapshotExpired (it is deleted)."""
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
    """The parts of a commit, each without its stored rows."""
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
