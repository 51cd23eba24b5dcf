"""Reading a stream's history: the one place that decodes its records.

A *history* is a topic with one record for each commit and stream epoch of a stream. A *vector*, in such a record,
has the end offset of each partition of the stream.

`HistoryCursor` reads all records in order. `HistorySearch` finds records without that: by bisection, by time, and
from the history's end. A record may lack the vector; searches complete it where it is needed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import takewhile
from typing import NamedTuple

from anabranch.batches.records import Record, decode_records
from anabranch.core.history_records import (
    DIRECTLY_BEFORE,
    NO_PREVIOUS,
    completed,
    has_vector,
    vector_place,
)
from anabranch.errors import (
    FixCallError,
    InvalidArgument,
    MalformedRecord,
    NotReady,
    SnapshotExpired,
    UnsupportedVersion,
)
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol.hybrid_time import MAX, from_datetime, from_us, to_ms
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord
from anabranch.reading.committed_log import CommittedLog, client_errors
from anabranch.topics.names import history_topic

log = logging.getLogger("anabranch.client")

_FEW_BYTES = 1 << 10  # a fetch where few records are needed; it brings at least one batch
_MANY_BYTES = 1 << 20
_FEW = 16
HistoryRecord = EpochRecord | CommitRecord


def decode_history(topic: str, offset: int, value: bytes | None, advice: str) -> HistoryRecord:
    """A history record from its value. ``advice``: the end of the error's text, what to do about a foreign record.

    Raises: MalformedRecord (no controller wrote it), UnsupportedVersion (a newer controller did).
    """
    kind: type[MalformedRecord | UnsupportedVersion] = MalformedRecord
    try:
        record = decode(value or b"")
        if isinstance(record, EpochRecord | CommitRecord):
            return record
        what = f"a {type(record).__name__}"
    except (MalformedRecord, UnsupportedVersion) as error:
        kind, what = type(error), str(error)
    who = "no" if kind is MalformedRecord else "a newer, or no,"
    raise kind(
        f"{topic} has a record at offset {offset} that {who} controller wrote: {what}. {advice}"
    )


class Found(NamedTuple):
    """A record of a history, and its offset."""

    offset: int
    record: HistoryRecord

    @property
    def before(self) -> int:
        """The offset of the record before this one; `NO_PREVIOUS` for the first."""
        previous = self.record.previous
        return self.offset - 1 if previous == DIRECTLY_BEFORE else previous

    def vector(self) -> dict[int, int]:
        """End offset of every partition of the stream as of this record, if it has its vector."""
        return {position.partition: position.offset for position in self.record.vector}


def history_record(topic: str, record: Record) -> HistoryRecord:
    """Decode a record of a history topic. Raises: as `decode_history`."""
    return decode_history(
        topic, record.offset, record.value, "Only controllers may write to that topic"
    )


class HistoryCursor:
    """Reads one history from an offset, which `seek` sets. For one thread."""

    def __init__(self, source: CommittedLog, stream: str, *, whole: bool = False) -> None:
        """``whole``: where retention has removed records, `next` raises `SnapshotExpired` instead of continuing."""
        self._source = source
        self._whole = whole
        self.place = TopicPartition(history_topic(stream), 0)
        self.seek(0)

    def seek(self, offset: int) -> None:
        """Continue reading at this offset."""
        self._position = self._first = offset
        self._high: int | None = None  # as last seen
        self._batches: deque[RawBatch] = deque()
        self._records: deque[Record] = deque()
        self._gap: tuple[int, SnapshotExpired] | None = None  # from here on offsets are deleted
        self.ended_at = -1  # the end that was found last; -1: none since `seek`

    @property
    def is_fetched(self) -> bool:
        """Whether `next` has records without a fetch."""
        return bool(self._records or self._batches)

    @property
    def behind(self) -> int:
        """The number of offsets up to the end that was seen last."""
        return max(0, (self._high or 0) - self.position)

    @property
    def position(self) -> int:
        """The offset up to which all records were returned."""
        if self._records:
            return self._records[0].offset
        return self._batches[0].base_offset if self._batches else self._position

    def next(self, deadline: float, limit: int = 2000) -> list[Found]:
        """The next records, at least one unless the deadline (monotonic seconds) passes or the end is reached."""
        clock = self._source.clock
        while not self._records:
            if self._batches:
                with client_errors():
                    records = decode_records(self._batches.popleft().data)
                self._records.extend(r for r in records if r.offset >= self._first)
                self._judge_gap()
                continue
            at_end = self._high is not None and self._position >= self._high
            if at_end:
                self._judge_gap()
            if at_end and self.ended_at != self._position:
                self.ended_at = self._position
                return []
            few = _FEW_BYTES if limit < _FEW else _MANY_BYTES
            late = clock.monotonic() >= deadline
            try:
                found = self._source.fetch(self.place, self._position, deadline, few)
            except SnapshotExpired as error:
                if self._whole:
                    self._gap, self._high = self._gap or (self._position, error), None
                self._position = self._source.start_offsets([self.place], deadline)[self.place]
                if not self._whole:
                    log.warning("%s; reading continues at offset %d", error, self._position)
                continue
            if found is not None:
                self._first = self._position
                self._batches.extend(found.batches)
                self._position, self._high = found.next_offset, found.high_watermark
            elif late:
                return []
        given: list[Found] = []
        while self._records and len(given) < limit:
            record = self._records[0]
            try:
                given.append(Found(record.offset, history_record(self.place.topic, record)))
            except FixCallError:
                if given:
                    break  # a foreign record fails at each call
                raise
            self._records.popleft()
        return given

    def _judge_gap(self) -> None:
        """Raise `SnapshotExpired` if the deleted offsets had records, and not only a marker."""
        if self._gap is None:
            return
        position, error = self._gap
        if self._records:
            left = self._records[0]
            if Found(left.offset, history_record(self.place.topic, left)).before < position:
                self._gap = None
                return
        self.seek(position)
        raise error


_NEAR = 16  # up to this many offsets are read instead of bisected; also the first step back from the end
_EARLIEST = from_us(10**15)  # in 2001: a lower number is a Unix time in some unit, given by mistake
_FARTHER = 8  # each step back is longer than the one before by this factor

Start = str | int | datetime
Predicate = Callable[[HistoryRecord], bool]


def check_start(start: Start) -> str | int:
    """'begin', 'end', or a hybrid time (a datetime is converted). Raises `InvalidArgument` for anything else."""
    if isinstance(start, str) and start in ("begin", "end"):
        return start
    if isinstance(start, int | datetime) and (checked := check_at(start, "start")) is not None:
        return checked
    raise InvalidArgument(
        f"start {start!r}: 'begin', 'end', a commit timestamp or a datetime with its time zone"
    )


def check_at(at: object, name: str = "at") -> int | None:
    """A hybrid time (a datetime is converted), or None. Raises `InvalidArgument` for anything else."""
    if isinstance(at, datetime):
        return from_datetime(at)
    if isinstance(at, int) and not isinstance(at, bool) and 0 < at < _EARLIEST:
        raise InvalidArgument(
            f"{name} {at} is no commit timestamp, which are above {_EARLIEST}: give a datetime with its time zone"
        )
    if at is None or (isinstance(at, int) and not isinstance(at, bool) and 0 <= at <= MAX):
        return at
    raise InvalidArgument(
        f"{name} {at!r}: a commit timestamp, a datetime with its time zone, or None"
    )


class SafeTimeOf(NamedTuple):
    """The safe time of some streams: up to it, none of them gets another commit.

    ``apart``: whether several control partitions serve the streams; then a record of one of them says nothing about
    another. ``ask``: a safe time at or above that of a record, or of now (None); takes a deadline in
    monotonic seconds, too. Raises: RetryError, UnknownScope, NotAuthorized.
    """

    apart: bool
    ask: Callable[[int | None, float], int]


def safe_time_in(record: HistoryRecord) -> int:
    """The time up to which no stream of the record's control partition got another commit after it."""
    return record.safe or record.timestamp


def heads(searches: Mapping[str, HistorySearch], start: str | int) -> dict[str, Found | None]:
    """`HistorySearch.as_of` of each stream, so that together they have all or nothing of every transaction.

    If several control partitions serve the streams, ``start`` has to be a safe time, or 'begin'.
    """
    found = {stream: search.as_of(start) for stream, search in searches.items()}
    newest = max((safe_time_in(at.record) for at in found.values() if at is not None), default=0)
    if not isinstance(start, str):
        newest = min(newest, start)  # a later time may be safe at one control partition only
    for stream, at in found.items():
        if newest and (at is None or at.record.timestamp != newest):
            # This history may have been read before a commit of the same round became visible in it.
            found[stream] = searches[stream].as_of(newest)
    return found


class HistorySearch:
    """Searches of one history. Each search has its own time limit, and raises `NotReady` when that is over."""

    def __init__(self, source: CommittedLog, stream: str, timeout: float) -> None:
        """``timeout``: seconds, of each search."""
        self._source = source
        self._cursor = HistoryCursor(source, stream)
        self._place = self._cursor.place
        self._timeout = timeout
        self._deadline = 0.0
        self._low = self._high = 0

    def as_of(self, start: str | int) -> Found | None:
        """The record after which a reader starts, with its vector; None for the stream's beginning.

        The history's last record ('end'), or the last at or below a hybrid time. All that was committed
        before this call is included. Raises `SnapshotExpired` if the vector is not known any more.
        """
        if start == "begin":
            return None
        return self._whole(self._as_of(start))

    def _as_of(self, start: str | int) -> Found | None:
        self._begin()
        if isinstance(start, str):
            return self._last()
        found = None
        for at in self._records(self._by_time(start), 1):
            if at.record.timestamp > start:
                return found or self._back_to(at, start)
            found = at
        return found or self._back_to(self._last(), start)

    def last(self) -> Found | None:
        """The last record, without completing its vector; None if the history is empty."""
        self._begin()
        return self._last()

    def before(self, offset: int) -> Found | None:
        """The last record below an offset, with its vector; None if no such record exists yet, or it is deleted."""
        self._begin()
        return self._whole(self._last(min(offset, self._high)))

    def since(self, offset: int) -> Iterator[Found]:
        """The records from an offset on, up to the history's present end."""
        self._begin()
        yield from self._records(offset)

    def between(self, above: int, until: int) -> Iterator[Found]:
        """The records above one hybrid time and up to another time. Begin no other search while iterating."""
        before = self._as_of(above)
        for at in self._records(before.offset + 1 if before is not None else 0):
            if at.record.timestamp > until:
                return
            yield at

    def commits(self, above: int, until: int, most: int) -> list[CommitRecord]:
        """The newest commits above one hybrid time and up to another time, rising; at most ``most``."""
        self._begin()
        high, window = self._by_time(until), _NEAR + 2 * most  # a marker follows a commit
        while True:
            low = max(self._low, high - window)
            first, found = MAX, deque[CommitRecord](maxlen=most)
            for _, record in self._records(low):
                # At or after `high`, which may be the offset of a marker with a broker's time.
                if record.timestamp > until:
                    break
                first = min(first, record.timestamp)
                if isinstance(record, CommitRecord) and above < record.timestamp <= until:
                    found.append(record)
            if len(found) == most or low <= self._low or first <= above:
                return list(found)
            window *= _FARTHER

    @property
    def end(self) -> int:
        """The history's end (the high watermark) when the last search began."""
        return self._high

    def since_vector(self, found: Found) -> list[Found]:
        """The records from the last record with a vector up to this record, which a search found.

        Raises `SnapshotExpired` if the vector is not known any more.
        """
        if has_vector(found.record):
            return [found]
        begin = vector_place(found.offset, found.record)
        since = list(takewhile(lambda at: at.offset <= found.offset, self._records(begin)))
        if not since or since[0].offset != begin or not has_vector(since[0].record):
            raise SnapshotExpired(
                f"{self._place.topic} is truncated past offset {begin}, so the partitions' ends as of its record "
                f"at {found.offset} are not known: start at a later one, or at 'begin'"
            )
        return since

    def is_cut(self) -> bool:
        """Whether the beginning of the history was deleted when the last search began."""
        oldest = self._first(self._low)
        return self._low > 0 if oldest is None else oldest.record.previous != NO_PREVIOUS

    def not_beyond(self, positions: Mapping[int, int]) -> Found | None:
        """A record with which a reader at these positions may begin: all earlier commits are below the positions.

        ``positions``: partition -> offset, 0 if not given. The record is the first with an end offset above a
        position, or one a little before that record. None if the history is empty.
        """
        self._begin()

        def goes_beyond(record: HistoryRecord) -> bool:
            return any(p.offset > positions.get(p.partition, 0) for p in record.vector)

        if not any(positions.values()):
            return self._first(self._low)
        return self._first(self._before(self._high, goes_beyond, has_vector))

    def oldest_whole(self) -> Found | None:
        """The first record with a vector: usually the very first record, from which all others can be completed."""
        self._begin()
        return self._first(self._low, has_vector)

    def passing(self, partition: int, offset: int) -> int:
        """A place in the history from which a reader finds the commits of this offset and of all later ones.

        The place is at, or a little before, the first record with an end above the offset. Without such a record
        it is the history's end.
        """
        self._begin()
        return self._before(
            self._high,
            lambda record: any(
                p.partition == partition and p.offset > offset for p in record.vector
            ),
            has_vector,
        )

    def epoch(self, commit: Found) -> EpochRecord | None:
        """The EPOCH record of a commit's stream epoch; None if retention has deleted the record.

        ``commit``: found by the latest search of this object, whose bounds are used again.
        """
        self._deadline = self._source.clock.monotonic() + self._timeout
        return self._epoch(commit.record.stream_epoch, commit.offset)

    def epoch_record(self, wanted: int) -> EpochRecord | None:
        """The EPOCH record of a stream epoch; None if it does not exist yet, or is deleted."""
        self._begin()
        return self._epoch(wanted, self._high)

    def _epoch(self, wanted: int, high: int) -> EpochRecord | None:
        """The record that begins an epoch, before ``high``; bisection finds it, as epochs rise with the history."""
        low = self._low
        if wanted > 0:
            low = self._before(high, lambda record: record.stream_epoch >= wanted)
        for _, record in self._records(low):
            if record.stream_epoch >= wanted:
                if isinstance(record, EpochRecord) and record.stream_epoch == wanted:
                    return record
                return None
        return None

    def newest_epochs(self, count: int) -> Iterator[HistoryRecord]:
        """The records of the last ``count`` stream epochs, up to the history's present end."""
        self._begin()
        last = self._last()
        first = max(0, last.record.stream_epoch - count + 1) if last is not None else 0
        low = self._low
        if first:
            low = self._before(self._high, lambda record: record.stream_epoch >= first)
        for found in self._records(low):
            if found.record.stream_epoch >= first:
                yield found.record

    # -- steps of a search ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Ask for the end of the history: all earlier commits are below it, even if they are not visible yet."""
        self._deadline = self._source.clock.monotonic() + self._timeout
        self._low = self._source.start_offsets([self._place], self._deadline)[self._place]
        self._high = self._source.end_offsets([self._place], self._deadline)[self._place]

    def _records(self, offset: int, limit: int = 2000) -> Iterator[Found]:
        """The records from an offset on, up to the end that was seen."""
        if offset >= self._high:
            return
        cursor = self._cursor
        cursor.seek(max(offset, self._low))
        while True:
            for found in cursor.next(self._deadline, limit):
                if found.offset < self._high:
                    yield found
                if found.offset + 1 >= self._high:
                    return
            if cursor.ended_at >= self._high:
                return
            if self._source.clock.monotonic() >= self._deadline:
                why = f": {self._source.trouble}" if self._source.trouble else ""
                raise NotReady(f"{self._place.topic} can't be read to its end, {self._high}{why}")

    def _first(self, offset: int, fits: Predicate | None = None) -> Found | None:
        """The first record from an offset on that fits."""
        found = self._records(offset, 1)
        return next((at for at in found if fits is None or fits(at.record)), None)

    def _whole(self, found: Found | None) -> Found | None:
        """The same record with its vector."""
        if found is None or has_vector(found.record):
            return found
        since = self.since_vector(found)
        return Found(found.offset, completed(found.record, (at.record for at in since)))

    def _before(self, high: int, holds: Predicate, fits: Predicate | None = None) -> int:
        """An offset at, or a little before, the first record for which ``holds`` is true.

        ``holds`` has to be true for all later records. ``fits`` takes the records for which ``holds`` is defined;
        between these are few other records. The search begins at the end, where readers usually are.
        """
        low = self._low
        step = _NEAR
        while high - step > low:
            found = self._first(high - step, fits)
            if found is None or holds(found.record):
                high, step = high - step, step * _FARTHER
            else:
                low = found.offset
        while high - low > _NEAR:
            middle = (low + high) // 2
            found = self._first(middle, fits)
            if found is None or holds(found.record):
                high = middle
            else:
                low = found.offset
        return low

    def _last(self, high: int | None = None) -> Found | None:
        """The last record below ``high`` (None: the end that was seen)."""
        high = self._high if high is None else high
        window = _NEAR
        while True:
            offset = max(self._low, high - window)
            found = takewhile(lambda at: at.offset < high, self._records(offset))
            newest = deque(found, maxlen=1)
            last = newest[0] if newest else None
            if last is not None or offset <= self._low:
                return last
            window *= _FARTHER

    def _by_time(self, timestamp: int) -> int:
        """The offset of the first record, committed or aborted, of a later millisecond; without one, the end."""
        found = self._source.offset_for_time(self._place, to_ms(timestamp) + 1, self._deadline)
        return self._high if found is None else found

    def _back_to(self, found: Found | None, timestamp: int) -> Found | None:
        """The last record at or below a hybrid time, searched backwards from a later record."""
        while found is not None and found.record.timestamp > timestamp:
            previous = found.before
            earlier = self._first(previous) if previous >= self._low else None
            # Retention may have deleted it meanwhile: then the next record is found instead.
            found = earlier if earlier is not None and earlier.offset == previous else None
        return found
