"""Single readers of streams that scale, roll and carry."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import pytest

import anabranch
from anabranch.batches.records import Record, encode_batch
from anabranch.ports import TopicPartition
from anabranch.ports import TopicPartition as Partition
from anabranch.protocol.hybrid_time import to_datetime
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading import ordered_reader as ordered
from anabranch.reading.commit_index import NO_SEGMENT
from anabranch.reading.ranges import RangeReader
from anabranch.reading.snapshot import take
from tests.client.members import LONG_S, by_key
from tests.client.written import ONE, Keys, WrittenStream, scaled

pytestmark = pytest.mark.broker

QUIET_S = 1.0


def test_alone_every_key_comes_in_order(client: anabranch.Client, written: WrittenStream) -> None:
    keys = Keys()
    scaled(written, keys)
    events = list(client.read(written.stream, timeout=QUIET_S))
    assert by_key(events) == keys.expected
    assert {event.value: event.segment_id for event in events} == written.where


@pytest.mark.soak
def test_a_member_alone_too(client: anabranch.Client, written: WrittenStream, group: str) -> None:
    keys = Keys()
    scaled(written, keys)
    assert by_key(client.read(written.stream, group=group, timeout=QUIET_S)) == keys.expected
    assert list(client.read(written.stream, group=group, timeout=QUIET_S)) == []


@pytest.mark.parametrize("in_group", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_new_partitions_are_read_while_reading(
    client: anabranch.Client, written: WrittenStream, group: str, in_group: bool
) -> None:
    keys = Keys()
    written.scale(ONE)
    written.commit(keys.events())
    chosen = group if in_group else None
    with client.read(written.stream, group=chosen, timeout=LONG_S) as reader:
        seen = list(itertools.islice(reader, 24))
        written.add_partitions(6)
        written.scale((1, 0, 4, 5), (2, 4, 8, 4))
        written.commit(keys.events())
        started = time.monotonic()
        seen += itertools.islice(reader, 24)
        assert time.monotonic() - started < 20
    assert by_key(seen) == keys.expected
    assert {event.partition for event in seen[24:]} == {4, 5}


@pytest.mark.soak
def test_what_is_carried_aside_waits_for_its_commit(
    client: anabranch.Client, written: WrittenStream, group: str
) -> None:
    keys = Keys()
    reference = written.scale(ONE)
    written.commit(keys.events())
    carried_events = [(key, key + b":0") for key in (b"c1", b"c2")]
    carried = written.carry(2, carried_events[:1], carried_events[1:])
    with (
        client.read(written.stream, timeout=LONG_S) as alone,
        client.read(written.stream, group=group, timeout=LONG_S) as member,
    ):
        for reader in (alone, member):
            assert by_key(itertools.islice(reader, 24)) == keys.expected
        written.commit(keys.events())
        for reader in (alone, member):
            assert by_key(itertools.islice(reader, 24)) == {key: [1] for key in keys.expected}
        written.roll(reference, carried)
        written.commit([(b"c1", b"c1:1"), (b"c2", b"c2:1")])
        for reader in (alone, member):
            events = list(itertools.islice(reader, 4))
            assert by_key(events) == {b"c1": [0, 1], b"c2": [0, 1]}
            assert {e.txn_id for e in events[:2]} == {carried.txn_id}
            assert [e.segment_id >> 32 for e in events] == [1, 1, 2, 2]


def test_plain_writes_have_no_transaction(client: anabranch.Client, written: WrittenStream) -> None:
    written.scale(ONE)
    record = written.commit([(b"p", b"p:0")], plain=True)
    (event,) = client.read(written.stream, timeout=QUIET_S)
    assert (event.txn_id, event.commit_timestamp) == (None, record.timestamp)
    (transaction,) = client.read_transactions(written.stream, timeout=QUIET_S)
    assert transaction.txn_id is None
    assert [event.txn_id for event in transaction.events] == [None]


@pytest.mark.soak
def test_whole_transactions_over_epochs(client: anabranch.Client, written: WrittenStream) -> None:
    keys = Keys()
    with client.read_transactions(written.stream, timeout=LONG_S) as reader:
        reference = written.scale(ONE)
        record = written.commit(keys.events())
        assert next(reader).commit_timestamp == record.timestamp
        carried = written.carry(1, [(b"c", b"c:0")], [(b"c", b"c:1")])
        written.add_partitions(5)
        written.scale((1, 0, 4, 3), (2, 4, 8, 4))
        written.commit(keys.events())
        written.roll(reference, carried)
        written.commit(keys.events())
        found = list(itertools.islice(reader, 3))
    assert [t.commit_timestamp for t in found] == sorted(t.commit_timestamp for t in found)
    assert [len(t.events) for t in found] == [24, 2, 24]
    events = [event for transaction in found for event in transaction.events]
    assert by_key(events)[b"c"] == [0, 1]
    for event in events:
        if event.key != b"c":
            assert event.segment_id == written.where[event.value or b""]


# -- where to start -------------------------------------------------------------------------------------


@pytest.mark.soak
def test_start_at_a_timestamp(client: anabranch.Client, written: WrittenStream, group: str) -> None:
    keys = Keys(8)
    before = written.timestamp
    first = written.scale(ONE)
    for i in range(10):
        written.commit(keys.events())
        written.roll(first, keys.events())
        written.scale((10 + i, 0, 4, i % 3), (30 + i, 4, 8, (i + 1) % 3))
    written.carry(2, [(b"never", b"never:0")])
    for i, (_, record) in enumerate(written.records):
        if i % 13 and i < len(written.records) - 2:
            continue
        below = {p.partition: p.offset for p in record.vector}
        # Just before the next record, and exactly at this one.
        for start in (record.timestamp, record.timestamp + 999_999):
            with client.read(written.stream, timeout=0, start=start) as reader:
                at = reader._streams[written.topic]._begun
                assert at is not None
                assert {p: at[p] for p in below} == below
    middle = written.records[30][1]
    expected = sum(isinstance(r, CommitRecord) for _, r in written.records[:31])
    numbers = {key: list(range(expected, 20)) for key in keys.expected}
    moment = to_datetime(middle.timestamp) + timedelta(microseconds=1)
    for exact in (middle.timestamp, moment):
        assert by_key(client.read(written.stream, timeout=QUIET_S, start=exact)) == numbers
    with client.read(
        written.stream, group=group, timeout=QUIET_S, start=middle.timestamp
    ) as member:
        assert by_key(member) == numbers
    transactions = list(
        client.read_transactions(written.stream, timeout=QUIET_S, start=middle.timestamp)
    )
    assert [t.commit_timestamp > middle.timestamp for t in transactions] == [True] * (20 - expected)
    assert by_key(client.read(written.stream, timeout=QUIET_S, start=before)) == keys.expected
    assert list(client.read(written.stream, timeout=QUIET_S, start="end")) == []


# -- retention ------------------------------------------------------------------------------------------


def test_what_retention_deleted_is_not_waited_for(
    client: anabranch.Client, written: WrittenStream, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "_STARTS_EVERY_S", 0.3)
    keys = Keys(8)
    written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    written.commit(keys.events())
    with client.read(written.stream, group=group, timeout=LONG_S) as reader:
        list(itertools.islice(reader, 8))
        next_events = keys.events()
        fetch = reader._feed.next
        stopped = {TopicPartition(written.topic, partition) for partition in (0, 1)}
        monkeypatch.setattr(reader._feed, "next", lambda d, waiting: fetch(d, waiting | stopped))
        written.commit(next_events)
        written.scale((2, 0, 8, 2))
        written.commit(keys.events())
        written.log.delete_records({Partition(written.topic, p): written.vector[p] for p in (0, 1)})
        left = list(itertools.islice(reader, 8))
        assert by_key(left) == {key: [2] for key in keys.expected}
    # The same for who comes later.
    assert by_key(client.read(written.stream, timeout=QUIET_S)) == by_key(left)


# -- records of others ----------------------------------------------------------------------------------


def test_no_reader_passes_off_records_of_others_as_committed(
    client: anabranch.Client, written: WrittenStream, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """But for what was there when the stream was created over it: that is adopted, and given without a commit."""
    keys = Keys()
    adopted = keys.events()
    written.producer.append(
        [
            (
                Partition(written.topic, 0),
                encode_batch([Record(i, 0, k, v) for i, (k, v) in enumerate(adopted)]),
            )
        ]
    )
    written.producer.commit()
    written.vector[0] = len(adopted)
    first = written.scale(ONE)
    committed = []
    for plain in (False, True):
        written.stray(0)
        committed += (events := keys.events())
        written.commit(events, plain=plain)
        written.stray(0)
        written.stray(0, make_txn_id(0, 1, 1))
    events = keys.events(2)
    committed += events
    written.roll(first, written.carry(2, events[:5], events[5:9], events[9:], strays=True))
    written.stray(1)
    written.scale((1, 0, 4, 1), (2, 4, 8, 2))
    committed += (events := keys.events())
    written.commit(events)

    values = sorted(value for _, value in committed)
    told = sorted([*values, *(value for _, value in adopted)])
    for chosen in (None, group):
        found = list(client.read(written.stream, chosen, QUIET_S))
        assert sorted(event.value or b"" for event in found) == told
        assert by_key(found) == keys.expected
        unknown = [event for event in found if event.segment_id == NO_SEGMENT]
        assert [(e.key, e.value, e.txn_id) for e in unknown] == [(k, v, None) for k, v in adopted]
    with client._reading.readers().source() as source:
        plan = take(source, [written.stream], written.timestamp, time.monotonic() + LONG_S)
    snapshot = client.open_snapshot(plan)
    assert by_key(snapshot.read(written.stream)) == keys.expected
    transactions = client.read_transactions(written.stream, timeout=QUIET_S)
    assert sorted(event.value or b"" for t in transactions for event in t.events) == values
    rows = []
    with RangeReader(client._reading.readers().ports) as ranges:
        for partition, end in snapshot.offsets(written.stream).items():
            for batch in ranges.read(written.stream, partition, 0, end):
                rows += batch.select(["value", "commit_timestamp"]).to_pylist()
    assert sorted(row["value"] for row in rows) == told
    assert sorted(row["value"] for row in rows if row["commit_timestamp"] is not None) == values
    warnings = [r for r in caplog.records if "records of others" in r.getMessage()]
    assert len(warnings) == 5  # one a reader and minute
