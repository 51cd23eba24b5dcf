"""Merging pieces into a partition, over the in-memory log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.batches.format import crc_of, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.journal_refetch import JournalReader, JournalReaders
from anabranch.batches.one_shots import EventCopies
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.batches.splice import Piece, Splice
from anabranch.core.command_events import CommandEvents, SomeEvents
from anabranch.core.journal_runs import StoredRun
from anabranch.core.round import Landed
from anabranch.errors import InvariantViolation
from anabranch.ports import (
    LogRefused,
    LogUnavailable,
    RawBatch,
    TopicPartition,
    TopicSpec,
)
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas.records import Event
from anabranch.testing.memory.cluster import SteppedClock
from anabranch.testing.memory.log import MemoryBrokers
from tests.batches.strategies import stored_run

JOURNAL = TopicPartition("s.journal", 0)
TARGET = TopicPartition("s", 0)
T = 1_690_000_000_000


def splice_stream(
    cluster: MemoryBrokers, pieces: Sequence[Piece], copies: EventCopies | None = None
) -> list[Landed]:
    """Append the pieces to the target; where each landed."""
    log = cluster.log("controller")
    producer = log.producer("a", timeout=60)
    splice = Splice(JournalReaders(log), TARGET, pieces, copies=copies)
    splice.note(producer.append_stream(splice.batches()))
    producer.commit()
    return splice.landed()


@pytest.fixture
def cluster() -> MemoryBrokers:
    made = MemoryBrokers(SteppedClock(1_700_000_000.0))
    made.create([TopicSpec(JOURNAL.topic, 1), TopicSpec(TARGET.topic, 1)])
    return made


def header(txn: int) -> tuple[tuple[str, bytes], ...]:
    return ((TXN_HEADER, pack_txn_header(bytes([txn]) * 16, 1, 0)),)


def write(cluster: MemoryBrokers, *txns: int, codec: str | None = "lz4") -> None:
    """A journal batch with a record for each of the transactions named."""
    start = cluster.partitions[JOURNAL].end_offset
    records = [
        Record(0, T + i, b"k", b"t%d-%d" % (txn, start + i), header(txn))
        for i, txn in enumerate(txns)
    ]
    cluster.produce_batch(JOURNAL, encode_batch(records, codec))


def runs_of(cluster: MemoryBrokers, txn: int) -> list[StoredRun]:
    """A transaction's entries in an index of the journal."""
    found = []
    for entry in cluster.partitions[JOURNAL].entries:
        raw = RawBatch(entry.base_offset, entry.next_offset, memoryview(entry.data))
        for run in scan_batch(raw):
            if run.kind is Kind.WRITE and run.txn[0] == txn:
                base = raw.base_offset
                found.append(
                    stored_run(
                        base,
                        base + run.first_delta,
                        base + run.last_delta + 1,
                        run.records,
                        run.pure,
                    )
                )
    return found


def merged(cluster: MemoryBrokers) -> list[Record]:
    return [
        record
        for entry in cluster.partitions[TARGET].entries
        if not entry.is_control
        for record in decode_records(entry.data)
    ]


def expected(cluster: MemoryBrokers, txn: int) -> list[bytes | None]:
    prefix = b"t%d-" % txn
    return [
        record.value
        for entry in cluster.partitions[JOURNAL].entries
        for record in decode_records(entry.data)
        if (record.value or b"").startswith(prefix)
    ]


def test_pieces_land_in_their_order(cluster: MemoryBrokers) -> None:
    rng = random.Random(7)
    for _ in range(40):
        if rng.random() < 0.5:
            write(cluster, *[rng.choice((1, 2, 3))] * rng.choice((5, 99, 100, 150)))
        else:
            write(cluster, *rng.choices((1, 2, 3), k=rng.randrange(1, 60)), codec="zstd")
    events = [Event("s", -1, b"e", b"event %d" % i, (), T + i) for i in range(50)]
    encoded, copies, txn = CommandEvents.of(events), EventCopies(), header(4)[0][1]
    some = [copies.part(SomeEvents(encoded, range(n)), T, txn) for n in (50, 3)]
    pieces = [
        Piece(JOURNAL, runs_of(cluster, 2)),
        Piece(events=some[0]),
        Piece(),
        Piece(JOURNAL, runs_of(cluster, 1)),
        Piece(events=some[1]),
        Piece(JOURNAL, runs_of(cluster, 3)),
    ]
    landed = splice_stream(cluster, pieces, copies)
    records = merged(cluster)
    wanted: list[list[bytes | None]] = [
        expected(cluster, 2),
        [e.value for e in events],
        [],
        expected(cluster, 1),
        [e.value for e in events[:3]],
        expected(cluster, 3),
    ]
    assert [r.value for r in records] == [value for piece in wanted for value in piece]
    assert landed[2] == Landed(0, 0, 0)
    by_offset = {r.offset: r.value for r in records}
    for piece, place in zip(wanted, landed, strict=True):
        inside = [by_offset[o] for o in sorted(by_offset) if place.first <= o < place.end]
        assert inside == piece
        assert place.records == len(piece)
    originals = {
        r.value: (r.timestamp_ms, r.key, r.headers)
        for entry in cluster.partitions[JOURNAL].entries
        for r in decode_records(entry.data)
    }
    for record in records:
        if (record.value or b"").startswith(b"t"):
            assert originals[record.value] == (record.timestamp_ms, record.key, record.headers)


def test_big_pure_batches_are_copied_as_they_are(cluster: MemoryBrokers) -> None:
    write(cluster, *[1] * 100)
    write(cluster, *[1] * 99)
    splice_stream(cluster, [Piece(JOURNAL, runs_of(cluster, 1))])
    sources = cluster.partitions[JOURNAL].entries
    first, second, _ = cluster.partitions[TARGET].entries
    assert first.data[61:] == sources[0].data[61:]
    assert second.data[61:] != sources[1].data[61:]


def test_a_run_that_the_journal_does_not_have_stops_the_merge(cluster: MemoryBrokers) -> None:
    write(cluster, 1, 1, 1)
    readers = JournalReaders(cluster.log("controller"))
    with pytest.raises(InvariantViolation, match="has 3"):
        splice_stream(cluster, [Piece(JOURNAL, [stored_run(0, 0, 3, 4, False)])])
    with pytest.raises(LogRefused, match=r"records are gone: no batch .* begins at 1"):
        list(Splice(readers, TARGET, [Piece(JOURNAL, [stored_run(1, 1, 3, 2, False)])]).batches())
    with pytest.raises(LogUnavailable):
        list(Splice(readers, TARGET, [Piece(JOURNAL, [stored_run(3, 3, 4, 1, False)])]).batches())
    with pytest.raises(InvariantViolation, match="without the journal"):
        list(Splice(readers, TARGET, [Piece(None, [stored_run(0, 0, 3, 3, True)])]).batches())


@pytest.mark.parametrize("pure", [True, False])
def test_a_batch_that_is_not_the_one_that_was_indexed_is_not_merged(
    cluster: MemoryBrokers, pure: bool
) -> None:
    write(cluster, *[1] * 200)
    readers = JournalReaders(cluster.log("controller"))
    crc = crc_of(readers.of(JOURNAL).batch(0).data)
    assert crc == read_header(cluster.partitions[JOURNAL].entries[0].data).crc
    known = stored_run(0, 0, 200, 200, pure, crc)
    assert len(list(Splice(readers, TARGET, [Piece(JOURNAL, [known])]).batches())) == 1
    other = stored_run(0, 0, 200, 200, pure, crc ^ 1)
    with pytest.raises(LogRefused, match=r"records are gone: another batch .* is at 0"):
        list(Splice(readers, TARGET, [Piece(JOURNAL, [other])]).batches())


def test_offsets_must_be_noted_before_they_are_asked_for(cluster: MemoryBrokers) -> None:
    copies = EventCopies()
    one = SomeEvents(CommandEvents.of([Event("s", -1, b"k", b"v", (), T)]), [0])
    piece = Piece(events=copies.part(one, T, header(4)[0][1]))
    splice = Splice(JournalReaders(cluster.log("c")), TARGET, [piece], copies=copies)
    list(splice.batches())
    with pytest.raises(InvariantViolation, match="not known yet"):
        splice.landed()
    splice.note([17])
    assert splice.landed() == [Landed(17, 18, 1)]


@pytest.mark.parametrize("fetch_bytes", [400, 1 << 20], ids=["few batches", "all at once"])
@pytest.mark.parametrize("ahead", [False, True])
def test_reading_ahead_gives_the_same_batches(
    cluster: MemoryBrokers, monkeypatch: pytest.MonkeyPatch, ahead: bool, fetch_bytes: int
) -> None:
    """In leaps, too: also beyond what was read ahead, and back to the start."""
    monkeypatch.setattr("anabranch.batches.journal_refetch.FETCH_BYTES", fetch_bytes)
    for number in range(200):
        write(cluster, *[number % 5] * (number % 7 + 1))
    entries = cluster.partitions[JOURNAL].entries
    readers = JournalReaders(cluster.log("reader"), ahead=ahead)
    reader = readers.of(JOURNAL)
    assert readers.of(JOURNAL) is reader
    for step in (1, 2, 3, 9, 40, 50):
        for entry in entries[::step]:
            for _ in range(2):
                assert bytes(reader.batch(entry.base_offset).data) == entry.data
    readers.close()


def test_an_empty_read_ahead_does_no_harm(cluster: MemoryBrokers) -> None:
    write(cluster, 1)
    write(cluster, 2)
    log = cluster.log("reader")
    readers = JournalReaders(log, ahead=True)
    reader = readers.of(JOURNAL)
    assert reader.batch(0).next_offset == 1
    assert reader.batch(1).next_offset == 2
    write(cluster, 3)
    # Read ahead when it was not there yet.
    assert reader.batch(2).next_offset == 3
    readers.close()
    assert isinstance(reader, JournalReader)


def test_a_long_run_of_a_mixed_batch_is_taken_apart(cluster: MemoryBrokers) -> None:
    write(cluster, *[1] * 150, 2, *[1] * 200)
    runs = runs_of(cluster, 1)
    assert [(run.records, run.pure) for run in runs] == [(150, False), (200, False)]
    (landed,) = splice_stream(cluster, [Piece(JOURNAL, runs)])
    assert [r.value for r in merged(cluster)] == expected(cluster, 1)
    assert landed.records == 350


def test_an_error_while_reading_ahead_is_ignored(
    cluster: MemoryBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.batches.journal_refetch.FETCH_BYTES", 1)
    for number in range(6):
        write(cluster, number)
    calls = [0]

    def on_call(_: str, name: str) -> None:
        if name == "fetch":
            calls[0] += 1
            if calls[0] % 2 == 0:
                raise LogUnavailable("no leader, just now")

    cluster.on_call = on_call
    readers = JournalReaders(cluster.log("reader"), ahead=True)
    for number in range(6):
        assert readers.of(JOURNAL).batch(number).base_offset == number
    readers.close()
    assert calls[0] >= 11


def test_more_is_read_ahead_while_it_is_of_use(
    cluster: MemoryBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fetch ahead at first, `MAX_AHEAD` in a long merge, one again after a leap."""
    monkeypatch.setattr("anabranch.batches.journal_refetch.FETCH_BYTES", 1)
    for number in range(40):
        write(cluster, number % 5)
    fetches = [0]

    def on_call(_: str, name: str) -> None:
        fetches[0] += name == "fetch"

    cluster.on_call = on_call
    reader = JournalReader(cluster.log("reader"), JOURNAL, pool := ThreadPoolExecutor(1))

    def fetched_for(base: int) -> int:
        """How many fetches were begun until this batch was had, and what it started ended."""
        reader.batch(base)
        pool.submit(int).result()
        return fetches[0]

    assert [fetched_for(base) - base - 1 for base in range(7)] == [1, 2, 3, 4, 4, 4, 4]
    assert fetched_for(30) == 11 + 2
    pool.shutdown()
