"""The records of a stream's history, in order: the one place that decodes them."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from anabranch.batches.records import Record, decode_records
from anabranch.core.history_records import DIRECTLY_BEFORE
from anabranch.errors import FixCallError, MalformedRecord, SnapshotExpired, UnsupportedVersion
from anabranch.ports import RawBatch, TopicPartition
from anabranch.reading.committed_log import CommittedLog, client_errors
from anabranch.schemas.codec import decode
from anabranch.schemas.records import CommitRecord, EpochRecord
from anabranch.topics.names import history_topic

log = logging.getLogger("anabranch.client")

_FEW_BYTES = 1 << 10  # fetched where few records are needed; at least one batch comes
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
    """Decode a record of a history topic. `MalformedRecord`, `UnsupportedVersion` for a foreign one."""
    return decode_history(
        topic, record.offset, record.value, "Only controllers may write to that topic"
    )


class HistoryCursor:
    """Reads one history from an offset, which `seek` sets. For one thread."""

    def __init__(self, source: CommittedLog, stream: str, *, whole: bool = False) -> None:
        """``whole``: `next` raises SnapshotExpired where retention has removed records; else it continues after
        them.
        """
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
        self._gap: tuple[int, SnapshotExpired] | None = None  # from where records are deleted
        self.ended_at = -1  # the end, if all records before it were returned

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
        """`SnapshotExpired` if records were deleted, and not only a marker."""
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
