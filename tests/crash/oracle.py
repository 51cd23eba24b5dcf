"""What has to hold on the log, whatever happened: read raw, and held against what clients were told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.core import rows as k
from anabranch.core.rows import Entry
from anabranch.ports import Log, RawBatch, TopicPartition
from anabranch.schemas.codec import decode
from anabranch.schemas.records import CommitRecord, EpochRecord, RoundRow, TermRow
from anabranch.topics.batch import read_header
from anabranch.topics.records import Record, decode_records

_FETCH_BYTES = 8 << 20


class Seen(NamedTuple):
    """An event in a stream's partition."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes
    txn_id: bytes | None


@dataclass
class StreamLog:
    """A stream and its history, read committed to their ends."""

    name: str
    events: list[Seen]
    history: list[tuple[int, EpochRecord | CommitRecord]]

    def values(self, txn_id: bytes) -> list[bytes]:
        """A transaction's payloads, sorted."""
        return sorted(e.value for e in self.events if e.txn_id == txn_id)


def read_all(
    log: Log, partitions: Iterable[TopicPartition], *, committed: bool = True
) -> dict[TopicPartition, list[RawBatch]]:
    """All batches of some partitions up to their high watermarks as of now.

    Committed ones are waited for: a native transaction becomes visible partition by partition.
    """
    wanted = list(partitions)
    starts = log.start_offsets(wanted)
    ends = log.end_offsets(wanted, committed=False)
    out: dict[TopicPartition, list[RawBatch]] = {tp: [] for tp in wanted}
    at = {tp: starts[tp] for tp in wanted if starts[tp] < ends[tp]}
    while at:
        for tp, got in log.fetch(
            at, max_wait=0.5, max_bytes=_FETCH_BYTES, committed=committed
        ).items():
            out[tp] += [b for b in got.batches if b.base_offset < ends[tp]]
            at[tp] = got.next_offset
        at = {tp: n for tp, n in at.items() if n < ends[tp]}
    return out


def records_of(batches: Iterable[RawBatch]) -> list[Record]:
    """All records of some batches."""
    return [record for batch in batches for record in decode_records(batch.data)]


def txn_of(record: Record) -> bytes | None:
    """The transaction in a record's ab.txn header."""
    value = dict(record.headers).get("ab.txn")
    return value[:16] if value else None


def read_stream(log: Log, stream: str, partitions: int) -> StreamLog:
    """A stream with its history."""
    topic = stream.replace("/", ".")
    data = [TopicPartition(topic, p) for p in range(partitions)]
    history = TopicPartition(f"{topic}.history", 0)
    batches = read_all(log, [*data, history])
    events = [
        Seen(tp.partition, r.offset, r.key, r.value or b"", txn_of(r))
        for tp in data
        for r in records_of(batches[tp])
    ]
    past = [(r.offset, decode(r.value or b"")) for r in records_of(batches[history])]
    return StreamLog(stream, events, past)


def check_stream(stream: StreamLog) -> None:
    """History and data agree: each commit's ranges hold exactly its events, once, in order."""
    name = stream.name
    by_partition: dict[int, list[Seen]] = defaultdict(list)
    for event in stream.events:
        by_partition[event.partition].append(event)
    told: Counter[bytes] = Counter()
    ends: dict[int, int] = {}
    before: tuple[int, int] = (-1, -1)  # offset, timestamp
    committed: set[bytes] = set()
    for at, (offset, record) in enumerate(stream.history):
        assert (at == 0) == isinstance(record, EpochRecord), (
            f"{name}: history has to begin with its epoch, and is {stream.history}"
        )
        previous = before[0] if record.previous == -1 else record.previous
        previous = offset - 1 if record.previous == -2 else previous
        assert previous == before[0], f"{name}: history {offset} says {previous}, not {before[0]}"
        assert record.timestamp > before[1], f"{name}: history {offset} goes back in time"
        before = (offset, record.timestamp)
        if isinstance(record, CommitRecord):
            assert record.txn_id not in committed, f"{name}: {record.txn_id.hex()} committed twice"
            committed.add(record.txn_id)
            for part in record.segments:
                inside = [
                    e for e in by_partition[part.partition] if part.first <= e.offset < part.end
                ]
                assert [e.txn_id for e in inside] == [record.txn_id] * part.count, (
                    f"{name}[{part.partition}] {part.first}..{part.end}: {len(inside)} events, "
                    f"the history says {part.count} of {record.txn_id.hex()}"
                )
                assert part.first >= ends.get(part.partition, 0), f"{name}: ranges overlap"
                told[record.txn_id] += part.count
                ends[part.partition] = part.end
        vector = {p.partition: p.offset for p in record.vector}
        for partition, end in ends.items():
            assert vector[partition] == end, f"{name}: the vector at {offset} misses {partition}"
    seen = Counter(e.txn_id for e in stream.events)
    assert seen == told, (
        f"{name}: {sum(seen.values())} events, the history tells {sum(told.values())}"
    )


@dataclass
class StatusLog:
    """The status log of control partition 0: terms and rounds in the order in which they count."""

    terms: list[TermRow] = field(default_factory=list)
    rounds: list[RoundRow] = field(default_factory=list)
    rows: dict[bytes, bytes] = field(default_factory=dict)


def read_status(log: Log, prefix: str) -> StatusLog:
    """Fold the status log by hand, and see that every round is of the last term before it."""
    status = TopicPartition(f"{prefix}.status", 0)
    out = StatusLog()
    for record in records_of(read_all(log, [status])[status]):
        key = record.key or b""
        if record.value is None:
            out.rows.pop(key, None)
            continue
        out.rows[key] = record.value
        if key == k.TERM_KEY:
            term: TermRow = decode(record.value)
            assert not out.terms or term.term == out.terms[-1].term + 1, "terms rise by one"
            out.terms.append(term)
        elif key == k.ROUND_KEY:
            row: RoundRow = decode(record.value)
            assert out.terms, "a round before any term"
            assert row.term == out.terms[-1].term, (
                f"a round of term {row.term} after term {out.terms[-1].term} began"
            )
            if out.rounds:
                last = out.rounds[-1]
                assert row.hybrid_time >= last.hybrid_time, "hybrid time went back"
                assert row.commands_offset >= last.commands_offset, "commands were decided twice"
                assert row.expired_ms >= last.expired_ms, "the horizon went back"
            out.rounds.append(row)
    return out


def txn_rows(rows: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Transaction id -> its own row."""
    return {
        key[:16]: value for key, value in rows.items() if len(key) == 17 and key[16] == Entry.TXN
    }


class Stamp(NamedTuple):
    """Who appended a batch."""

    partition: TopicPartition
    base_offset: int
    producer_id: int
    producer_epoch: int


def stamps(log: Log, partitions: Iterable[TopicPartition]) -> list[Stamp]:
    """All data batches, committed or not, of native transactions."""
    out = []
    for tp, batches in read_all(log, partitions, committed=False).items():
        for batch in batches:
            header = read_header(batch.data)
            if header.is_transactional:
                out.append(Stamp(tp, batch.base_offset, header.producer_id, header.producer_epoch))
    return out
