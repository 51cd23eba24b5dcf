"""Writes by hand what only a controller should write, honestly or not, onto the logs of a stream.

No controller may lead meanwhile. Every method leaves a log that an audit finds sound, but for what is spoiled.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from confluent_kafka import Message, Producer

from anabranch.core import rows as k
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import make_txn_id, pack_txn_header
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    Extent,
    ParticipantRow,
    Position,
    Receipt,
    RoundRow,
    SegmentCommit,
    SegmentEnd,
    TxnRow,
    WriterRow,
)
from tests.crash.oracle import read_stream

WRITER = 0x1122334455667788
STAMP = 1_700_000_000_000


class Rec(NamedTuple):
    """A record to write. ``txn``: value of its ab.txn header; None: no such header."""

    key: bytes | None
    value: bytes | None
    txn: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp: int = STAMP


def same(thing: Any) -> Any:
    """Nothing is spoiled."""
    return thing


@dataclass
class Clock:
    """Rising commit timestamps for all that is forged on one status log."""

    last: int = field(default_factory=lambda: hybrid_time.from_us(int(time.time() * 1000) * 1000))

    def tick(self) -> int:
        self.last += 1
        return self.last


class Forge:
    """Appends to one stream of one scope."""

    def __init__(
        self, log: KafkaLog, producer: Producer, prefix: str, stream: str, clock: Clock
    ) -> None:
        self.stream = stream
        self.scope = stream.partition("/")[0]
        self.topic = stream.replace("/", ".")
        self.status = f"{prefix}.status"
        self._producer = producer
        self._clock = clock
        history = read_stream(log, stream).history
        self.last, tail = history[-1]
        self.epoch = next(r for _, r in reversed(history) if isinstance(r, EpochRecord))
        self.vector = {p.partition: p.offset for p in tail.vector}
        self._log = log

    # -- raw ------------------------------------------------------------------------------------------

    def put(
        self, topic: str, records: Sequence[tuple[bytes | None, bytes | None]], partition: int = 0
    ) -> list[int]:
        """Append keys and values."""
        return self._send(topic, partition, [(key, value, [], 0) for key, value in records])

    def put_records(self, topic: str, records: Iterable[Rec], partition: int = 0) -> list[int]:
        """Append events or journal records."""
        rows = []
        for r in records:
            headers = [*r.headers, *([] if r.txn is None else [("ab.txn", r.txn)])]
            rows.append((r.key, r.value, headers, r.timestamp))
        return self._send(topic, partition, rows)

    def _send(
        self, topic: str, partition: int, rows: Sequence[tuple[Any, Any, Any, int]]
    ) -> list[int]:
        offsets: dict[int, int] = {}

        def note(at: int) -> Callable[[Any, Message], None]:
            def delivered(error: Any, message: Message) -> None:
                assert error is None, error
                offsets[at] = message.offset() or 0

            return delivered

        for at, (key, value, headers, stamp) in enumerate(rows):
            self._producer.produce(
                topic, value, key, partition, on_delivery=note(at), timestamp=stamp, headers=headers
            )
        assert self._producer.flush(30) == 0
        return [offsets[at] for at in range(len(rows))]

    # -- whole things ---------------------------------------------------------------------------------

    def new_id(self, made_ms: int | None = None) -> bytes:
        """A transaction id of control partition 0."""
        now_ms = int(time.time() * 1000)
        return make_txn_id(
            0, now_ms if made_ms is None else made_ms, int.from_bytes(os.urandom(7), "big")
        )

    def records(self, txn_id: bytes, pairs: Iterable[tuple[bytes, bytes]]) -> list[Rec]:
        """A writer's records."""
        header = pack_txn_header(txn_id, WRITER, self.epoch.reference_epoch)
        return [Rec(key, value, header, (("n", b"1"),)) for key, value in pairs]

    def row(self, row: TxnRow | None, txn_id: bytes) -> None:
        """Put a transaction's row; None: delete it."""
        self.put(self.status, [(k.txn_key(txn_id), None if row is None else encode(row))])

    def commit(
        self,
        pairs: Sequence[tuple[bytes, bytes]] = ((b"k", b"a"), (b"k", b"b"), (b"k", b"c")),
        *,
        made_ms: int | None = None,
        journal: Callable[[list[Rec]], list[Rec]] = same,
        events: Callable[[list[Rec]], list[Rec]] = same,
        record: Callable[[CommitRecord], CommitRecord] = same,
        row: Callable[[TxnRow], TxnRow] = same,
        receipt: Callable[[Receipt], Receipt] = same,
        key: Callable[[bytes], bytes] = same,
    ) -> bytes:
        """A transaction of one writer, from its journal to its rows, on partition 0. Returns its id.

        ``journal`` … ``key``: how the records, the events and so on are spoiled before they are written.
        """
        txn_id = self.new_id(made_ms)
        written = self.records(txn_id, pairs)
        offsets = self.put_records(f"{self.topic}.journal", journal(list(written)))
        its_events = events(list(written))
        timestamp = self.append_commit(txn_id, its_events, record=record, key=key)
        self.row(row(self.row_of(txn_id, timestamp, committed=len(written))), txn_id)
        crcs = sum(zlib.crc32((r.key or b"") + (r.value or b"")) for r in written)
        extent = Extent(self.stream, 0, offsets[0], offsets[-1] + 1, len(written), crcs)
        account = receipt(Receipt(txn_id, WRITER, 1, True, (extent,)))
        self.put(
            self.status,
            [
                (k.participant_key(txn_id, self.stream), encode(ParticipantRow(self.stream, 0))),
                (k.writer_key(txn_id, WRITER), encode(WriterRow(account, "open"))),
            ],
        )
        return txn_id

    def append_commit(
        self,
        txn_id: bytes,
        events: Sequence[Rec],
        *,
        record: Callable[[CommitRecord], CommitRecord] = same,
        key: Callable[[bytes], bytes] = same,
    ) -> int:
        """Append events and the COMMIT record that names them. Returns its timestamp."""
        offsets = self.put_records(self.topic, events)
        timestamp = self._clock.tick()
        segment = next(s for s in self.epoch.segments if s.partition == 0)
        part = SegmentCommit(segment.segment_id, 0, offsets[0], offsets[-1] + 1, len(offsets))
        self.vector[0] = part.end
        honest = CommitRecord(
            txn_id, self.epoch.stream_epoch, timestamp, (part,), self.positions(), self.last
        )
        spoiled = record(honest)
        (self.last,) = self.put(f"{self.topic}.history", [(key(txn_id), encode(spoiled))])
        return spoiled.timestamp

    def positions(self) -> tuple[Position, ...]:
        """The vector as of now."""
        return tuple(Position(p, self.vector[p]) for p in sorted(self.vector))

    def new_epoch(self, spoil: Callable[[EpochRecord], EpochRecord] = same) -> None:
        """A scaling that replaces all segments by one over all keys, on partition 0."""
        sealed = self.epoch.segments
        epoch = self.epoch.stream_epoch + 1
        numbers = 1 + max(s.segment_id & 0xFFFFFFFF for s in sealed)
        honest = EpochRecord(
            epoch, epoch, self._clock.tick(),
            (replace(sealed[0], segment_id=epoch << 32 | numbers, low=0, high=1 << 32, partition=0,
                     start_offset=self.vector[0]),),
            tuple(SegmentEnd(s.segment_id, self.vector[s.partition]) for s in sealed),
            self.positions(),
            self.last,
        )  # fmt: skip
        (self.last,) = self.put(f"{self.topic}.history", [(None, encode(spoil(honest)))])
        self.epoch = honest

    def repeat_epoch(self) -> None:
        """As a controller does it after many commits."""
        record = replace(
            self.epoch, timestamp=self._clock.tick(), sealed=(), vector=self.positions(), previous=self.last
        )  # fmt: skip
        (self.last,) = self.put(f"{self.topic}.history", [(None, encode(record))])

    def forget(self, txn_id: bytes) -> None:
        """Delete all of a transaction's rows."""
        keys = (
            k.txn_key(txn_id),
            k.participant_key(txn_id, self.stream),
            k.writer_key(txn_id, WRITER),
        )
        self.put(self.status, [(key, None) for key in keys])

    def cut(self, topic: str, offset: int) -> None:
        """Delete what lies before an offset of partition 0, as retention does, or a controller in a journal."""
        self._log.delete_records({TopicPartition(topic, 0): offset})

    def row_of(self, txn_id: bytes, timestamp: int | None = None, **changes: Any) -> TxnRow:
        """A row of a transaction that committed one event, by default just now."""
        at = self._clock.tick() if timestamp is None else timestamp
        row = TxnRow(
            txn_id, self.scope, None, "COMMITTED", 60_000, STAMP, STAMP, at, 1, 0, 0, "", None, "open"
        )  # fmt: skip
        return row._replace(**changes)

    def take_part(self, txn_id: bytes) -> None:
        """Say that a transaction touched the stream."""
        key = k.participant_key(txn_id, self.stream)
        self.put(self.status, [(key, encode(ParticipantRow(self.stream, 0)))])

    def round(self, expired_ms: int = 0) -> None:
        """Say that everything so far is on the log."""
        row = RoundRow(1 << 20, self._clock.last, 1 << 40, 1 << 40, expired_ms)
        self.put(self.status, [(k.ROUND_KEY, encode(row))])
