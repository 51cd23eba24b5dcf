"""One writer's events in a transaction: their places, how they are written and counted, and the receipt.

The receipt has, for each journal partition, the count of events and the sum of their checksums. A key is hashed
once, for its place and its checksum. `StreamLane.write` is the hot path of bulk writes.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zlib import crc32

from anabranch.client.ports import JournalWriter
from anabranch.core.journal_runs import CRC_MODULUS, not_covered
from anabranch.errors import AlreadyCommitted, InvalidArgument, MalformedRecord
from anabranch.extras import has
from anabranch.ports import JournalRecord, RecordHeaders, TopicPartition
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header, segment_number
from anabranch.protocol.legal_names import is_state
from anabranch.protocol.limits import (
    HEADERS,
    check_bytes,
    check_event,
    check_headers,
    check_row_key,
    headers_size,
)
from anabranch.protocol.partitioner import mix, position_of, record_checksum
from anabranch.protocol.schemas.records import (
    Event,
    EventHeader,
    Extent,
    Outcome,
    Receipt,
    SegmentRange,
    Touched,
)
from anabranch.topics.names import journal_topic
from anabranch.tracing import TRACE_HEADER, TRACED_BYTES
from anabranch.types import Headers, V

if TYPE_CHECKING:
    from anabranch.batches.columns_write import EventColumns, Placing
    from anabranch.tracing import Trace

log = logging.getLogger("anabranch.client")

# Events without a key go to one segment up to this many bytes, then to the next.
STICKY_BYTES = 32 << 10
_ALWAYS = 1 << 62  # … in an exclusive stream: a writer's events without a key lock one segment
RECORD_OVERHEAD = 128  # upper bound of framing and the ab.txn header
_SECONDS_MS = 10**11  # March 1973 if it is in milliseconds, the year 5138 if in seconds
_MANY_ROWS = 300  # from this many on, rows of a state are written as columns
_KNOWN_KEYS = 20_000  # limit of each cache of the places of keys, one for each stream

WriteFunction: TypeAlias = (
    "Callable[[bytes | None, bytes | None, RecordHeaders | None, int | None], None]"
)
# Value, key, headers, timestamp, as `Transaction.write` takes them; trailing ones may be omitted.
EventFields: TypeAlias = (
    "tuple[bytes | None]"
    " | tuple[bytes | None, bytes | None]"
    " | tuple[bytes | None, bytes | None, Headers | None]"
    " | tuple[bytes | None, bytes | None, Headers | None, int | None]"
)

# The same for a stream's handle. Type checkers can't infer the types of keys and values from a union of tuples.
TypedFields: TypeAlias = "tuple[V | None, *tuple[Any, ...]]"


StateRow: TypeAlias = "tuple[bytes, bytes | None]"  # key and value of a row of a processor's state


class Account:
    """The writes to one journal partition."""

    __slots__ = ("count", "crc_sum", "end", "first", "partition")

    def __init__(self, partition: int, first: int) -> None:
        self.partition = partition
        self.first = first
        self.end = first
        self.count = 0
        self.crc_sum = 0


class _Places(NamedTuple):
    """Finds the place of an event: account, checksum of the key, and the bytes left for the rest of the event.

    ``known``: the places of keys that came before. ``place``: finds the place of another key. ``spread``: finds the
    place of an event without a key.
    """

    known: dict[bytes, tuple[Account, int, int]]
    place: Callable[[bytes], tuple[Account, int, int]]
    spread: Callable[[bytes | None], tuple[Account, int, int]]


class StreamLane:
    """Writes the events of one writer to one stream."""

    def __init__(self, touched: Touched, account: WriterAccount, deadline: float) -> None:
        journal, writer = account.journal, account.writer
        self.stream = touched.stream
        self.topic = journal_topic(touched.stream)
        self.is_table = touched.is_table
        self.exclusive = touched.exclusive
        partitions = sorted({segment.partition for segment in touched.segments})
        opened = journal.open(self.topic, partitions, deadline)
        self.accounts = {p: Account(p, opened.first[p]) for p in partitions}
        self._trace = account.trace
        self._room = opened.max_event_bytes - RECORD_OVERHEAD - len(self._trace) * TRACED_BYTES
        txn = pack_txn_header(account.txn_id, writer, touched.stream_epoch)
        self._header = (TXN_HEADER, txn)
        self.write, self._records = self._make_write(touched.segments, journal, writer)
        self._journal = journal
        self._segments = touched.segments
        self._writer = writer
        self.judge_time: Callable[[int], None] | None = None
        self.lock: Callable[[Sequence[int]], Touched] | None = (
            None  # locks the segments of these positions
        )
        if touched.exclusive:
            self._lows = sorted(segment.low for segment in touched.segments)
            self._note(touched)
            self._write_free = self.write
            self.write = self._write_locked

    # -- an exclusive stream: segments are locked before an event is written there --------------------------

    def reserve(self, keys: Iterable[bytes | None]) -> None:
        """Lock the segments of these keys; all other streams have no locks. Nothing is written if it fails.

        Raises: Locked, TransactionAborted (wait-die), as `Session.touch`.
        """
        if not self.exclusive or len(self._locked) == len(self._lows):
            return
        wanted = set()
        for key in keys:
            at = self._writer % len(self._lows)
            if key is not None:
                at = bisect_right(self._lows, position_of(key)) - 1
            wanted.add(self._lows[at])
            if len(wanted) == len(self._lows):
                break
        wanted -= self._locked
        if wanted and self.lock is not None:
            self._note(self.lock(sorted(wanted)))

    def _note(self, touched: Touched) -> None:
        numbers = set(touched.locked)
        self._locked = {s.low for s in touched.segments if segment_number(s.segment_id) in numbers}

    def _write_locked(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders | None,
        timestamp: int | None,
    ) -> None:
        self.reserve((key,))
        self._write_free(key, value, headers, timestamp)

    # -- any stream -------------------------------------------------------------------------------------------

    def write_many(self, events: Sequence[EventFields]) -> None:
        """Write events. If an event is refused, the earlier events are already written."""
        self.reserve(event[1] if len(event) > 1 else None for event in events)
        self._journal.write_many(self.topic, self._records(events))

    def write_rows(self, partition: int, rows: Sequence[StateRow]) -> None:
        """Write rows of a processor's state to the given partition. Errors: as `write_many`."""
        if len(rows) >= _MANY_ROWS and has("numba"):
            from anabranch.batches.columns_write import EventColumns, bytes_column

            keys, values = zip(*rows, strict=True)
            columns = EventColumns(bytes_column(values), bytes_column(keys))
            self._check_bytes(int(columns.sizes().max()))
            if self._write_columns(self._placed([0], [partition]), columns):
                return
        self._journal.write_many(self.topic, self._rows(self.accounts[partition], rows))

    def _rows(self, account: Account, rows: Iterable[StateRow]) -> Iterator[JournalRecord]:
        headers: RecordHeaders = [self._header]
        for key, value in rows:
            self._check_bytes(len(key) + len(value or b""))
            yield account.partition, key, value, headers, 0
            account.count += 1
            account.crc_sum += record_checksum(key, value)

    def check_columns(self, columns: EventColumns) -> None:
        """Raise `EventTooLarge`, or `InvalidArgument` (a table needs keys), for rows that can't be written."""
        self._check_bytes(int(columns.sizes().max(initial=0)))
        if self.is_table and columns.rows and not columns.has_row_keys:
            for _, key, *_ in columns.events():
                check_row_key(key)

    def write_columns(self, columns: EventColumns) -> None:
        """Write checked rows. After an error some of the rows may be written."""
        if self.exclusive:
            self.reserve(key for _, key, *_ in columns.events())
        traced = columns.with_header(*self._trace[0]) if self._trace else columns
        if not self._write_columns(self._placing, traced):
            self._journal.write_many(self.topic, self._records(columns.events()))

    def _write_columns(self, placing: Placing, columns: EventColumns) -> bool:
        """Returns False if the rows are to be written as events."""
        counted = self._journal.write_columns(self.topic, placing, columns)
        if counted is None:
            return False
        for partition, rows, crc_sum in counted:
            self.accounts[partition].count += rows
            self.accounts[partition].crc_sum += crc_sum
        return True

    @cached_property
    def _placing(self) -> Placing:
        """The placing rule of `_make_places`, for columns."""
        ordered = sorted(self._segments, key=lambda segment: segment.low)
        return self._placed(
            [segment.low for segment in ordered], [segment.partition for segment in ordered]
        )

    def _placed(self, lows: list[int], partitions: list[int]) -> Placing:
        from anabranch.batches.columns_write import Placing

        first = self._writer % len(lows)
        sticky = _ALWAYS if self.exclusive else STICKY_BYTES
        return Placing(lows, partitions, self._header[1], first, sticky, RECORD_OVERHEAD)

    def check(self, key: bytes | None, value: bytes | None, headers: RecordHeaders | None) -> None:
        """Raise for an event that the stream does not take, as `check_columns`."""
        if self.is_table:
            check_row_key(key)
        self._check_bytes(len(key or b"") + len(value or b"") + headers_size(headers))

    def _check_bytes(self, size: int) -> None:
        check_bytes(size, self._room, self.stream, self.topic)

    def _with_trace(self, headers: RecordHeaders) -> RecordHeaders:
        """The headers of a record: the event's own, the trace context if it has none, and ``ab.txn``."""
        if self._trace and all(name != TRACE_HEADER for name, _ in headers):
            return [*headers, *self._trace, self._header]
        return [*headers, self._header]

    def _make_places(self, segments: Sequence[SegmentRange], writer: int) -> _Places:
        ordered = sorted(segments, key=lambda segment: segment.low)
        lows = [segment.low for segment in ordered]
        by_range = [self.accounts[segment.partition] for segment in ordered]
        known: dict[bytes, tuple[Account, int, int]] = {}
        room, several = self._room, len(lows) > 1
        sticky, sticky_left = writer % len(by_range), _ALWAYS if self.exclusive else STICKY_BYTES

        def place(key: bytes) -> tuple[Account, int, int]:
            if self.is_table:
                check_row_key(key)
            crc = crc32(key)
            account = by_range[bisect_right(lows, mix(crc)) - 1 if several else 0]
            placed = (account, crc, room - len(key))
            if len(known) < _KNOWN_KEYS:
                known[key] = placed
            return placed

        def spread(value: bytes | None) -> tuple[Account, int, int]:
            nonlocal sticky, sticky_left
            if self.is_table:
                check_row_key(None)
            sticky_left -= len(value or b"") + RECORD_OVERHEAD
            if sticky_left < 0:
                sticky, sticky_left = (sticky + 1) % len(by_range), STICKY_BYTES
            return by_range[sticky], 0, room

        return _Places(known, place, spread)

    def _make_write(
        self, segments: Sequence[SegmentRange], journal: JournalWriter, writer: int
    ) -> tuple[WriteFunction, Callable[[Iterable[EventFields]], Iterator[JournalRecord]]]:
        """Make two functions: one writes an event (key, value, headers, timestamp); the other turns events into
        records, and counts each record when the next one is requested.
        """
        known, place, spread = self._make_places(segments, writer)
        write_record = journal.write
        topic, header, traced = self.topic, self._header, bool(self._trace)
        plain_headers: RecordHeaders = [*self._trace, header]

        def write(
            key: bytes | None,
            value: bytes | None,
            headers: RecordHeaders | None,
            timestamp: int | None,
        ) -> None:
            if key is not None:
                account, crc, left = known.get(key) or place(key)
            else:
                account, crc, left = spread(value)
            if value is not None:
                crc = crc32(value, crc)
                left -= len(value)
            record_headers = plain_headers
            if headers:
                left -= headers_size(headers)
                record_headers = self._with_trace(headers) if traced else [*headers, header]
            if left < 0:
                self.check(key, value, headers)
            write_record(topic, account.partition, key, value, record_headers, timestamp or 0)
            account.count += 1
            account.crc_sum += crc

        def records(events: Iterable[EventFields]) -> Iterator[JournalRecord]:
            # The same code as in `write`, because one call for each event would be slower.
            for event in events:
                timestamp, record_headers = 0, plain_headers
                if len(event) == 2:
                    value, key = event
                else:
                    value, key, headers, timestamp = _unpack(event)
                    if timestamp and self.judge_time is not None:
                        self.judge_time(timestamp)
                    if headers:
                        self.check(key, value, headers)
                        record_headers = self._with_trace(headers)
                if key is not None:
                    account, crc, left = known.get(key) or place(key)
                else:
                    account, crc, left = spread(value)
                if value is not None:
                    crc = crc32(value, crc)
                    left -= len(value)
                if left < 0:
                    self.check(key, value, None)
                yield account.partition, key, value, record_headers, timestamp
                account.count += 1
                account.crc_sum += crc

        return write, records


class WriterAccount:
    """All that one writer has written, by stream. ``trace``: the header with its trace context, or empty."""

    def __init__(self, txn_id: bytes, writer: int, journal: JournalWriter) -> None:
        self.trace: RecordHeaders = []
        self.txn_id = txn_id
        self.writer = writer
        self.journal = journal
        self.lanes: dict[str, StreamLane] = {}
        self._sequence = 0

    def add(self, touched: Touched, deadline: float) -> StreamLane:
        """Open the lane into a stream."""
        lane = StreamLane(touched, self, deadline)
        self.lanes[touched.stream] = lane
        return lane

    def flush(self, deadline: float) -> None:
        """Wait until all writes are acknowledged. Raises `WriteFailed`, `DeadlineExceeded`."""
        used = {
            TopicPartition(lane.topic, account.partition): account
            for lane in self.lanes.values()
            for account in lane.accounts.values()
            if account.count
        }
        # A lagging broker may report a lower end.
        least = {place: max(it.end, it.first + it.count) for place, it in used.items()}
        for place, end in self.journal.flush(least, deadline).items():
            used[place].end = end

    def receipt(self, *, finished: bool, seen: int) -> Receipt:
        """The receipt of everything flushed so far. ``seen``: the highest hybrid time that the client has seen."""
        self._sequence += 1
        extents = [
            Extent(
                stream=lane.stream,
                partition=account.partition,
                first=account.first,
                end=account.end,
                count=account.count,
                crc_sum=account.crc_sum % CRC_MODULUS,
            )
            for lane in self.lanes.values()
            for account in lane.accounts.values()
            if account.count
        ]
        return Receipt(self.txn_id, self.writer, self._sequence, finished, tuple(extents), seen)


def _unpack(event: EventFields) -> tuple[bytes | None, bytes | None, RecordHeaders | None, int]:
    """Value, key, headers and timestamp (0 if it has no timestamp) of an event that is not a pair."""
    check_fields(event)
    value, key, headers, timestamp = (*event, None, None, None)[:4]
    warn_of_seconds(timestamp)
    return value, key, check_headers(headers), timestamp or 0


def check_fields(event: EventFields) -> None:
    """Raise `InvalidArgument` unless these are the fields of an event. Headers are not checked."""
    check_shape(event)
    value, key, _, timestamp = (*event, None, None, None)[:4]
    check_event(key, value, timestamp)


def check_shape(event: EventFields) -> None:
    """Raise `InvalidArgument` unless this is a tuple or list of one to four fields."""
    given: Any = event  # callers without a type checker pass anything
    if not isinstance(given, (tuple, list)) or not 1 <= len(given) <= 4:
        raise InvalidArgument(
            f"an event is (value, key, headers, timestamp), the last may be left out, not {given!r:.80}"
        )


def check_layout(stream: str, segments: Sequence[SegmentRange]) -> None:
    """Raise `MalformedRecord` if a controller sent no segments: then no key has a place."""
    if not segments:
        raise MalformedRecord(
            f"the controller's answer names no segments of {stream}; nothing was written to it"
        )


def warn_of_seconds(timestamp: int | None) -> None:
    """Log, once in a process, that a timestamp is probably in seconds."""
    if timestamp is not None and timestamp < _SECONDS_MS:
        _warn(timestamp)


@lru_cache(1)
def _warn(timestamp: int) -> None:
    log.warning(
        "timestamp %d ms is before 1973: is it in seconds? Retention may delete such events at once",
        timestamp,
    )


def with_trace(events: Iterable[Event], trace: Trace | None) -> tuple[Event, ...]:
    """The events of a command, with the current trace context in a header, unless they have one.

    Rows of processors' state get none.
    """
    header = None if trace is None else trace.header()
    if header is None:
        return tuple(events)
    added = (EventHeader(TRACE_HEADER, header),)
    out, former, takes = [], None, False
    for each in events:
        stream, segment, key, value, headers, timestamp = each
        if stream is not former:
            former, takes = stream, not is_state(stream)
        if not takes or (headers and not _takes_trace(each)):
            out.append(each)
        else:  # without headers of its own it shares the tuple, which is encoded once
            fields = (stream, segment, key, value, headers + added, timestamp)
            out.append(tuple.__new__(Event, fields))  # without its checks, in half the time
    return tuple(out)


def _takes_trace(event: Event) -> bool:
    if len(event.headers) >= HEADERS.value:
        return False
    return all(header.key != TRACE_HEADER for header in event.headers)


def check_taken(outcome: Outcome, own: Iterable[Receipt], txn_id: bytes | None) -> None:
    """Raise if another holder of the token has committed the transaction without the writes of this handle."""
    taken = {receipt.writer: receipt for receipt in outcome.writers}
    if outcome.txn_id == txn_id and not_covered(own, taken):
        raise AlreadyCommitted(
            "the transaction was committed elsewhere, without what this handle wrote"
        )
