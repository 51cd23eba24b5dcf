"""The commit of an event's offset, for ordered readers: from the stream's history, read as far as needed.

A *history* has a COMMIT record for each commit to a stream, with the offsets of its events. These records are in
commit order, and so are the offsets on every partition, so history and events are read in parallel. A COMMIT record
is in the same native transaction as its data, so both arrive together. Only the data of a staged merge arrives long
before its record, and waits for it. For offset ranges, `anabranch.reading.commit_columns` has the same commits as
arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Set
from typing import NamedTuple

from anabranch.core.history_records import NO_PREVIOUS, ends_in
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.epoch_order import StreamOrder
from anabranch.reading.history import Found, HistoryCursor, HistorySearch

MOST_SPANS = 100_000  # commits known ahead of the events; the history is not read further than that
NO_SEGMENT = -1  # the segment of events that were in the topic before the stream was created
FOREIGN = -2  # the segment of records that no controller wrote
DELETED = -3  # the segment of events that retention has deleted, with the history records of them


class Span(NamedTuple):
    """The offsets [first, end) of one commit on a partition."""

    first: int
    end: int
    txn_id: bytes | None
    commit_timestamp: int
    segment_id: int


class CommitIndex:
    """The commits and epochs of one stream, from given positions on. Used by one thread."""

    def __init__(self, source: CommittedLog, stream: str, timeout: float) -> None:
        """``timeout``: seconds until a search in the history gives up (`NotReady`)."""
        self._clock = source.clock
        self._cursor = HistoryCursor(source, stream)
        self.search = HistorySearch(source, stream, timeout)
        self._own: Container[int] = ()
        self._read: Mapping[int, int] = {}  # partition -> offset below which all is consumed
        self._spans: dict[int, deque[Span]] = {}
        self._ahead = 0
        self._vector: dict[int, int] = {}
        self._last: int | None = None  # offset of the record that was read last
        # Partition -> end of the events that no record names, and the timestamp that they do not exceed.
        self._adopted: dict[int, tuple[int, int]] = {}  # in the topic when the stream was created
        self._cut: dict[int, tuple[int, int]] = {}  # the history records of them are deleted
        self.order = StreamOrder(())

    def cover(self, positions: Mapping[int, int], own: Container[int]) -> None:
        """Prepare to find every offset on the own partitions from these positions (of all partitions) on.

        Offsets before the positions count as read.
        """
        order = StreamOrder(own)
        order.moved(positions)
        begin = self.search.not_beyond(positions)
        if begin is not None and isinstance(begin.record, CommitRecord):
            epoch = self.search.epoch(begin)
            if epoch is not None:
                order.add(epoch)
        self._spans = {}
        self._own = own
        self._read = positions
        self._ahead = 0
        self._vector = {}
        self._last = None
        self._adopted = {}
        self._cut = {}
        self.order = order
        self._cursor.seek(begin.offset if begin else 0)

    @property
    def partitions(self) -> Set[int]:
        """The partitions that the history has named since `cover`, also before they have events."""
        return self._vector.keys()

    def find(self, partition: int, offset: int, wait: float) -> Span | None:
        """The commit of an offset. Offsets have to rise from call to call on each partition.

        None: the history does not show it yet; the same offset may be asked for again. ``wait``: seconds to wait
        for the history.
        """
        spans = self._spans.setdefault(partition, deque())
        deadline = self._clock.monotonic() + wait
        while True:
            self.drop(partition, offset)
            if spans and spans[0].first <= offset:
                return spans[0]
            end = spans[0].first if spans else self._vector.get(partition, 0)
            if end > offset:
                return self._unnamed(partition, offset, end)
            if not self.read_on(deadline):
                return None

    def _unnamed(self, partition: int, offset: int, end: int) -> Span:
        """The span of offsets from this one to ``end`` at most that the history has passed without naming them."""
        for known, segment in ((self._adopted, NO_SEGMENT), (self._cut, DELETED)):
            until, timestamp = known.get(partition, (0, 0))
            if offset < until:
                return Span(offset, min(end, until), None, timestamp, segment)
        return Span(offset, end, None, 0, FOREIGN)

    def keep(self, partition: int) -> None:
        """Let readers get events whose history records are deleted, as if the stream had adopted them."""
        self._adopted[partition] = self._cut.pop(partition)

    def drop(self, partition: int, offset: int) -> None:
        """Forget offsets below this one, which are not needed any more."""
        spans = self._spans.setdefault(partition, deque())
        while spans and spans[0].end <= offset:
            spans.popleft()
            self._ahead -= 1

    def read_on(self, deadline: float = 0.0) -> bool:
        """Read the history further, up to `MOST_SPANS`. False if nothing came until the deadline (monotonic)."""
        if self._ahead > MOST_SPANS:
            return False
        found = self._cursor.next(deadline)
        for at in found:
            record = at.record
            if at.before == NO_PREVIOUS:  # the stream's very first
                self._adopted = _ends(at)
            elif at.before != self._last:  # the history may be truncated up to here
                self._cut |= _ends(at)
            self._last = at.offset
            if isinstance(record, EpochRecord):
                self.order.add(record)
            else:
                self._note(record)
            self._vector.update(ends_in(record))
        return bool(found)

    def _note(self, record: CommitRecord) -> None:
        txn_id = None if record.txn_id == NO_TXN else record.txn_id
        for part in record.segments:
            if part.partition in self._own and part.end > self._read.get(part.partition, 0):
                spans = self._spans.setdefault(part.partition, deque())
                spans.append(Span(part.first, part.end, txn_id, record.timestamp, part.segment_id))
                self._ahead += 1


def _ends(at: Found) -> dict[int, tuple[int, int]]:
    """Partition -> its end as of a record, and the record's timestamp."""
    return {partition: (end, at.record.timestamp) for partition, end in at.vector().items()}
