"""Snapshots of streams that scale, roll and carry, over the log in memory and without a controller."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from typing import Any

import pytest

import anabranch
from anabranch.client.client import Client
from anabranch.clock import SystemClock
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading import commit_index as history
from anabranch.reading import ordered_reader as ordered
from anabranch.reading.commit_index import CommitIndex
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import HistoryCursor
from anabranch.reading.iteration import Readers
from anabranch.reading.snapshot import take
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.log import MemoryBrokers
from tests.client.members import by_key
from tests.client.written import ONE, Keys, WrittenStream, scaled

LONG_S = 60.0


@pytest.fixture
def cluster() -> MemoryBrokers:
    return MemoryBrokers(SystemClock())


@pytest.fixture
def written(cluster: MemoryBrokers) -> WrittenStream:
    return WrittenStream(cluster.log("controller"), "s/t", 3)


@pytest.fixture
def client(cluster: MemoryBrokers) -> Client:
    clock = SystemClock()
    made = memory_client(cluster.log("client"), clock, os.urandom)
    ports: Any = ReaderPorts(lambda _: cluster.log("reader"), lambda _: None, clock)  # type: ignore[arg-type, return-value]
    made._shared.ports = replace(made._shared.ports, readers=Readers(ports, LONG_S))
    return made


@pytest.fixture
def slow_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is read ahead by a few commits only, and comes with pauses."""
    asked = itertools.count()
    read_on, one = CommitIndex.read_on, HistoryCursor.next

    def halting(index: CommitIndex, deadline: float = 0.0) -> bool:
        return next(asked) % 3 == 2 and read_on(index, deadline)

    monkeypatch.setattr(CommitIndex, "read_on", halting)
    monkeypatch.setattr(HistoryCursor, "next", lambda *given: one(given[0], given[1], 1))
    monkeypatch.setattr(history, "MOST_SPANS", 2)
    monkeypatch.setattr(ordered, "_STARTS_EVERY_S", 1e9)  # nor is it helped on by other means


def as_of(client: Client, written: WrittenStream, timestamp: int) -> anabranch.Snapshot:
    """A snapshot of a stream that has no controller: every time in its past is safe."""
    deadline = time.monotonic() + LONG_S
    with client._reading.readers().source() as source:
        return client.open_snapshot(take(source, [written.stream], timestamp, deadline))


@pytest.mark.usefixtures("slow_history")
def test_a_snapshot_of_every_record_of_a_history(client: Client, written: WrittenStream) -> None:
    """Scaled, rolled and merged back: each record's snapshot has the events until then, each key in order."""
    scaled(written, Keys())
    count = 0
    for i, (offset, record) in enumerate(written.records):
        snapshot = as_of(client, written, record.timestamp)
        assert snapshot.offsets(written.stream) == {p.partition: p.offset for p in record.vector}
        assert snapshot.history(written.stream) == offset + 1
        if isinstance(record, CommitRecord):
            count += sum(part.count for part in record.segments)
        if i % 4 == 3 or record is written.records[-1][1]:
            events = list(snapshot.read(written.stream))
            assert len(events) == count
            assert all(event.commit_timestamp <= record.timestamp for event in events)
            assert {e.value: e.segment_id for e in events}.items() <= written.where.items()
            assert all(numbers == list(range(len(numbers))) for numbers in by_key(events).values())


@pytest.mark.usefixtures("slow_history")
def test_a_partition_of_which_nothing_is_left_holds_up_no_reader(
    client: Client, written: WrittenStream
) -> None:
    """The torn commit holds up no reader, however long its history is."""
    written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    keys = Keys(12)
    for _ in range(8):
        written.commit(keys.events())
    gone = written.vector[1]
    written.log.delete_records({TopicPartition(written.topic, 1): gone})
    snapshot = as_of(client, written, written.timestamp)
    assert snapshot.start_offsets(written.stream) == {0: 0, 1: gone}
    found = by_key(snapshot.read(written.stream))
    assert set(map(len, found.values())) == {8}
    assert 0 < len(found) < 12


def test_staged_events_count_from_their_commit(client: Client, written: WrittenStream) -> None:
    reference = written.scale(ONE)
    first = written.commit([(b"k", b"k:0")])
    carried = written.carry(2, [(b"c", b"c:0")], [(b"c", b"c:1")])
    second = written.commit([(b"k", b"k:1")])
    written.roll(reference, carried)
    times = (first.timestamp, second.timestamp, written.timestamp)
    found = [by_key(as_of(client, written, at).read(written.stream)) for at in times]
    assert found == [{b"k": [0]}, {b"k": [0, 1]}, {b"k": [0, 1], b"c": [0, 1]}]


def test_the_first_epoch_begins_after_a_marker(client: Client, written: WrittenStream) -> None:
    """As in a topic that was used before."""
    written._append(0, [(b"k", b"k:0")], NO_TXN)
    written.producer.commit()
    written.vector[0] = 2
    written.scale(ONE)
    snapshot = as_of(client, written, written.timestamp)
    assert snapshot.offsets(written.stream) == {0: 2}
    with snapshot.read(written.stream) as reader:
        assert [event.value for event in reader] == [b"k:0"]
