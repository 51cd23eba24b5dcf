"""What has to hold on the log, whatever happened, and no client sees; it is read raw.

The history checker judges events, transactions and their order by what clients recorded. Here are the parts that
no history has: the chain of a stream's history, the ranges and vectors of its records, epochs and key ranges, terms
and rounds of the status log, and which producer appended a batch. `check_stream` counts events, too, for tests that
record no history.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from anabranch.batches.format import read_header
from anabranch.batches.records import Record, decode_records
from anabranch.core import rows as k
from anabranch.core.history_records import has_vector
from anabranch.core.rows import Entry
from anabranch.ports import Log, RawBatch, TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    RoundRow,
    TermRow,
)
from tests.crash.raw import position

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
    log: Log,
    partitions: Iterable[TopicPartition],
    *,
    committed: bool = True,
    idle: Callable[[], None] = lambda: None,
) -> dict[TopicPartition, list[RawBatch]]:
    """All batches of some partitions up to their high watermarks as of now.

    Committed ones are waited for: a native transaction becomes visible partition by partition. ``idle`` is
    called meanwhile: that of a dead leader ends when the next one leads, or else after a minute.
    """
    wanted = list(partitions)
    starts = log.start_offsets(wanted)
    ends = log.end_offsets(wanted, committed=False)
    out: dict[TopicPartition, list[RawBatch]] = {tp: [] for tp in wanted}
    at = {tp: starts[tp] for tp in wanted if starts[tp] < ends[tp]}
    while at:
        idle()
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


def partitions_of(log: Log, topics: Iterable[str]) -> list[TopicPartition]:
    """All partitions that some topics have now."""
    found = log.describe_topics(list(topics))
    return [TopicPartition(t, p) for t, info in found.items() for p in range(info.partitions)]


def read_stream(log: Log, stream: str, idle: Callable[[], None] = lambda: None) -> StreamLog:
    """A stream with its history, and what was appended since. ``idle``: of `read_all`."""
    topic = stream.replace("/", ".")
    history = TopicPartition(f"{topic}.history", 0)
    batches = read_all(log, [history], idle=idle)
    data = partitions_of(log, [topic])
    batches |= read_all(log, data, idle=idle)
    events = [
        Seen(tp.partition, r.offset, r.key, r.value or b"", txn_of(r))
        for tp in data
        for r in records_of(batches[tp])
    ]
    past = [(r.offset, decode(r.value or b"")) for r in records_of(batches[history])]
    return StreamLog(stream, events, past)


def check_stream(stream: StreamLog, under_way: Collection[bytes] = ()) -> None:
    """History and data agree: each commit's ranges hold exactly its events, once, in order.

    ``under_way``: transactions that may be staged just now.
    """
    name = stream.name
    by_partition: dict[int, list[Seen]] = defaultdict(list)
    for event in stream.events:
        by_partition[event.partition].append(event)
    counted: Counter[bytes | None] = Counter()
    ends: dict[int, int] = {}
    before: tuple[int, int] = (-1, -1)  # offset, timestamp
    committed: set[bytes | None] = set()  # None: plain writes
    for at, (offset, record) in enumerate(stream.history):
        assert at or isinstance(record, EpochRecord), (
            f"{name}: history has to begin with its epoch, and is {stream.history}"
        )
        previous = before[0] if record.previous == -1 else record.previous
        previous = offset - 1 if record.previous == -2 else previous
        assert previous == before[0], f"{name}: history {offset} says {previous}, not {before[0]}"
        # The epoch to which a commit rolls may have that commit's time (`docs/inside/across.md`, H6).
        after_epoch = at and isinstance(stream.history[at - 1][1], EpochRecord)
        least = before[1] if after_epoch else before[1] + 1
        assert record.timestamp >= least, f"{name}: history {offset} goes back in time"
        before = (offset, record.timestamp)
        if isinstance(record, CommitRecord):
            plain = record.txn_id == NO_TXN
            assert plain or record.txn_id not in committed, (
                f"{name}: {record.txn_id.hex()} committed twice"
            )
            txn_id = None if plain else record.txn_id
            committed.add(txn_id)
            for part in record.segments:
                inside = [
                    e for e in by_partition[part.partition] if part.first <= e.offset < part.end
                ]
                assert [e.txn_id for e in inside] == [txn_id] * part.count, (
                    f"{name}[{part.partition}] {part.first}..{part.end}: {len(inside)} events, "
                    f"the history says {part.count} of {record.txn_id.hex()}"
                )
                assert part.first >= ends.get(part.partition, 0), f"{name}: ranges overlap"
                counted[txn_id] += part.count
                ends[part.partition] = part.end
        vector = {p.partition: p.offset for p in record.vector}
        for partition, end in ends.items() if has_vector(record) else ():
            assert vector[partition] == end, f"{name}: the vector at {offset} misses {partition}"
    check_epochs(stream)
    seen = Counter(
        e.txn_id for e in stream.events if e.txn_id in committed or e.txn_id not in under_way
    )
    assert seen == counted, (
        f"{name}: {sum(seen.values())} events, the history says {sum(counted.values())}"
    )


def check_epochs(stream: StreamLog) -> dict[bytes, list[bytes]]:
    """The epochs are as docs/inside/epochs.md says, and each event lies in the segment of its key.

    Returns the values of each key in stream order: as epochs and offsets order them, which has to be the order
    in which they were committed.
    """
    name = stream.name
    at = {(e.partition, e.offset): e for e in stream.events}
    layouts: dict[int, EpochRecord] = {}
    open_: dict[int, EpochSegment] = {}
    born: dict[int, int] = {}  # segment id -> the first epoch that has it
    ends: dict[int, int] = {}  # partition -> end of its data
    numbers: set[int] = set()
    by_commit: dict[bytes, list[bytes]] = defaultdict(list)
    by_epoch: dict[bytes, list[tuple[int, int, bytes]]] = defaultdict(list)
    epoch = -1
    for offset, record in stream.history:
        here = f"{name}: history {offset}"
        if isinstance(record, EpochRecord) and record.stream_epoch == epoch:
            said = {s.segment_id: s for s in record.segments}
            assert (said, record.sealed) == (open_, ()), f"{here}: said again otherwise"
            continue
        if isinstance(record, EpochRecord):
            assert not layouts or record.stream_epoch == epoch + 1, f"{here}: after epoch {epoch}"
            epoch = record.stream_epoch
            layouts[epoch] = record
            segments = {s.segment_id: s for s in record.segments}
            _check_layout(here, record, layouts[record.reference_epoch])
            sealed = {s.segment_id: s.end_offset for s in record.sealed}
            assert sealed.keys() == open_.keys() - segments.keys(), f"{here}: seals {sealed}"
            for id_, end in sealed.items():
                was = open_[id_]
                last = max(ends.get(was.partition, 0), was.start_offset)
                assert end == last, f"{here}: segment {id_:x} ends at {last}, not {end}"
            for id_, segment in segments.items():
                if id_ in open_:
                    assert segment == open_[id_], f"{here}: segment {id_:x} has changed"
                else:
                    begins = segment.start_offset
                    assert id_ >> 32 == epoch, f"{here}: segment {id_:x} is not of this epoch"
                    assert begins >= ends.get(segment.partition, 0), f"{here}: {id_:x} overlaps"
                    if record.reference_epoch == epoch:
                        assert id_ & 0xFFFFFFFF not in numbers, (
                            f"{here}: number used again: {id_:x}"
                        )
                    numbers.add(id_ & 0xFFFFFFFF)
                    born[id_] = epoch
            open_ = segments
            continue
        assert record.stream_epoch == epoch, f"{here}: {record.stream_epoch} is not active"
        for part in record.segments:
            segment = open_[part.segment_id]
            assert part.partition == segment.partition, f"{here}: {part} is elsewhere"
            assert part.first >= max(segment.start_offset, ends.get(part.partition, 0)), (
                f"{here}: {part} begins before its segment, or where others are"
            )
            ends[part.partition] = part.end
            for n in range(part.first, part.end):
                event = at.get((part.partition, n))
                if event is None or event.key is None:
                    continue  # a marker; or an event that may be anywhere
                key = event.key
                assert segment.low <= position(key) < segment.high, f"{here}: misplaced {event}"
                by_commit[key].append(event.value)
                by_epoch[key].append((born[part.segment_id], n, event.value))
    for key, values in by_commit.items():
        ordered = [value for _, _, value in sorted(by_epoch[key])]
        assert ordered == values, f"{name}: epochs and offsets do not order {key!r} as committed"
    return by_commit


def _check_layout(here: str, record: EpochRecord, reference: EpochRecord) -> None:
    """Ranges tile all keys on partitions of their own; a duplicate has what its reference has."""
    ranges = sorted((s.low, s.high) for s in record.segments)
    assert ranges[0][0] == 0, f"{here}: {ranges}"
    assert ranges[-1][1] == 1 << 32, f"{here}: {ranges}"
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), f"{here}: {ranges}"
    places = [s.partition for s in record.segments]
    assert len(set(places)) == len(places), f"{here}: two segments on a partition"
    assert reference.reference_epoch == reference.stream_epoch, f"{here}: refers to a duplicate"
    if record is not reference:
        have = {(s.segment_id & 0xFFFFFFFF, s.low, s.high) for s in record.segments}
        want = {(s.segment_id & 0xFFFFFFFF, s.low, s.high) for s in reference.segments}
        assert have == want, f"{here}: not a duplicate of {reference.stream_epoch}"
        epochs = {s.segment_id >> 32 for s in record.segments}
        assert epochs == {record.stream_epoch}, f"{here}: segments of {epochs}"


def figures(stream: StreamLog) -> str:
    """A stream's commits, events and epochs in numbers."""
    epochs = [record for _, record in stream.history if isinstance(record, EpochRecord)]
    own = sum(e.reference_epoch == e.stream_epoch for e in epochs) - 1
    commits = sum(isinstance(record, CommitRecord) for _, record in stream.history)
    return (
        f"{commits} commits, {len(stream.events)} events, {own} scalings, "
        f"{len(epochs) - 1 - own} duplicate epochs"
    )


@dataclass
class StatusLog:
    """The status log of a control partition: terms and rounds in the order in which they count."""

    terms: list[TermRow] = field(default_factory=list)
    rounds: list[RoundRow] = field(default_factory=list)
    rows: dict[bytes, bytes] = field(default_factory=dict)


def read_status(
    log: Log, prefix: str, control_partition: int = 0, idle: Callable[[], None] = lambda: None
) -> StatusLog:
    """Fold a status log by hand; every round is of the last term before it. ``idle``: of `read_all`."""
    status = TopicPartition(f"{prefix}.status", control_partition)
    out = StatusLog()
    for record in records_of(read_all(log, [status], idle=idle)[status]):
        key = record.key or b""
        if record.value is None:
            out.rows.pop(key, None)
            continue
        out.rows[key] = record.value
        if key == k.TERM_KEY:
            term: TermRow = decode(record.value)
            if term.resigned:
                assert replace(term, resigned=False) == out.terms[-1], "who leads resigns"
                continue
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


def check_answers(log: Log, prefix: str) -> None:
    """Each answer is of a round that has happened: it has that round's hybrid time, which each commit moves on."""
    replies = read_all(log, partitions_of(log, [f"{prefix}.replies"]), committed=False)
    happened = {row.hybrid_time for row in read_status(log, prefix).rounds}
    for record in records_of(itertools.chain.from_iterable(replies.values())):
        reply = decode(record.value or b"")
        assert reply.hybrid_time in happened, f"of a round that has not happened: {reply}"


def txn_rows(rows: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Transaction id -> its own row."""
    return {
        key[:16]: value for key, value in rows.items() if len(key) == 17 and key[16] == Entry.TXN
    }


class Stamp(NamedTuple):
    """The producer that appended a batch."""

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
