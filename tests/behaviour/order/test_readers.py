"""Single readers of streams that scale, roll and carry."""

from __future__ import annotations

import itertools
import time

import pytest

import anabranch
from anabranch.batches.records import Record, encode_batch
from anabranch.ports import TopicPartition as Partition
from anabranch.protocol.ids import make_txn_id
from anabranch.reading.commit_index import NO_SEGMENT
from anabranch.reading.ranges import RangeReader
from anabranch.reading.snapshot import take
from tests.client.members import LONG_S, by_key
from tests.client.written import ONE, Keys, WrittenStream

pytestmark = pytest.mark.broker

QUIET_S = 1.0


@pytest.mark.long
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


def test_plain_writes_have_no_transaction(client: anabranch.Client, written: WrittenStream) -> None:
    written.scale(ONE)
    record = written.commit([(b"p", b"p:0")], plain=True)
    (event,) = client.read(written.stream, timeout=QUIET_S)
    assert (event.txn_id, event.commit_timestamp) == (None, record.timestamp)
    (transaction,) = client.read_transactions(written.stream, timeout=QUIET_S)
    assert transaction.txn_id is None
    assert [event.txn_id for event in transaction.events] == [None]


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
