"""Consume, transform and produce by tasks of a processor: on a real broker, with scalings and rolling commits."""

from __future__ import annotations

import itertools
import pickle
import threading
import uuid
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

import anabranch
from anabranch.errors import (
    AlreadyCommitted,
    IllegalState,
    InvalidArgument,
    OwnershipLost,
    SnapshotExpired,
    TransactionAborted,
    UnknownProcessor,
)
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.topics.names import history_topic, stream_topic
from tests.behaviour.steps import committed

pytestmark = pytest.mark.broker

QUIET_S = 0.6
KEYS = [b"key-%d" % i for i in range(12)]


class Place:
    """A scope with an input, an output and a processor of four tasks; a copy of all that is written."""

    def __init__(self, client: anabranch.Client, segments: int = 2, tasks: int = 4) -> None:
        self.client = client
        self.scope = f"t{uuid.uuid4().hex[:8]}"
        self.input, self.output = f"{self.scope}/in", f"{self.scope}/out"
        self.processor = f"{self.scope}/copy"
        client.create_stream(self.input, segments=segments)
        client.create_stream(self.output, segments=2)
        client.create_processor(self.processor, self.input, tasks)
        self.written: list[tuple[bytes | None, bytes]] = []
        self._number = itertools.count()

    def events(self, count: int, keys: list[bytes] = KEYS) -> list[tuple[bytes, bytes | None]]:
        made = [(b"%d" % next(self._number), keys[i % len(keys)]) for i in range(count)]
        self.written += [(key, value) for value, key in made]
        return list(made)

    def write(self, *counts: int) -> None:
        """A transaction for each count."""
        for count in counts:
            with self.client.begin(self.scope) as txn:
                txn.write_many(self.input, self.events(count))
                txn.commit()

    def copied(self) -> list[tuple[bytes | None, bytes | None]]:
        return [(event.key, event.value) for event in committed(self.client, self.output)]

    def check(self) -> None:
        """Each event once, those of each key in order."""
        copied = self.copied()
        assert Counter(copied) == Counter(self.written)
        assert by_key(copied) == by_key(self.written)


def by_key(pairs: Iterable[tuple[bytes | None, bytes | None]]) -> dict[bytes, list[bytes | None]]:
    """The values of each key, in order."""
    found: dict[bytes, list[bytes | None]] = {}
    for key, value in pairs:
        if key is not None:
            found.setdefault(key, []).append(value)
    return found


def copy(
    client: anabranch.Client,
    place: Place,
    ownership: anabranch.TaskOwnership,
    every: int,
    most: int = 1 << 30,
) -> int:
    """Copy events, a commit for so many; whether all or some of what is left. Returns how many."""
    done = 0
    with client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader:
        while batch := list(itertools.islice(reader, every)):
            with client.begin(place.scope, ownership=ownership) as txn:
                txn.write_many(place.output, [(e.value, e.key) for e in batch])
                txn.commit(consumed=reader.consumed())
            done += len(batch)
            if done >= most:
                break
    return done


@pytest.fixture
def place(client: anabranch.Client) -> Place:
    return Place(client)


def test_a_new_owner_continues_in_the_middle_of_a_transaction(
    client: anabranch.Client, other: anabranch.Client, place: Place
) -> None:
    place.write(1, 30, 7)
    first = client.take_tasks(place.processor)
    assert copy(client, place, first, every=4, most=12) == 12
    assert copy(other, place, other.take_tasks(place.processor), every=5) == 26
    place.check()
    place.write(3)
    assert copy(other, place, other.take_tasks(place.processor), every=1) == 3
    place.check()
    info = client.processor(place.processor)
    history = [task.positions[0].record for task in info.tasks if task.positions]
    assert all(task.sequence for task in info.tasks)
    assert max(history) > 0


def test_who_lost_its_tasks_leaves_nothing(
    client: anabranch.Client, other: anabranch.Client, place: Place
) -> None:
    """A zombie: by a one-shot, and by journals whose commit was under way."""
    place.write(6, 6)
    zombie = client.take_tasks(place.processor)
    with client.read(place.input, timeout=QUIET_S, ownership=zombie) as reader:
        some = list(itertools.islice(reader, 5))
        small = client.begin(place.scope, ownership=zombie)
        small.write(place.output, b"of a zombie", key=some[0].key)
        big = client.begin(place.scope, ownership=zombie)
        big.write(place.output, b"of a zombie", key=some[0].key)
        big.flush()
        consumed = reader.consumed()
        assert copy(other, place, other.take_tasks(place.processor), every=100) == 12
        for txn in (small, big):
            with pytest.raises(OwnershipLost, match="has another owner, "):
                txn.commit(consumed=consumed)
            with pytest.raises((OwnershipLost, TransactionAborted)):
                txn.commit(consumed=consumed)
    assert big.txn_id is not None
    assert client.state(big.txn_id).state == "ABORTED"
    place.check()


def test_consumed_here_and_committed_there(
    client: anabranch.Client, other: anabranch.Client, place: Place
) -> None:
    """Consume in one process, transform in others, commit in a third."""
    place.write(20)
    ownership = client.take_tasks(place.processor)
    with client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader:
        events = list(reader)
        txn = client.begin(place.scope, ownership=pickle.loads(pickle.dumps(ownership)))
        writer = other.join(txn.token())
        for event in events:
            writer.write(place.output, event.value, key=event.key)
        receipts = [writer.finish()]
        consumed = decode(encode(pickle.loads(pickle.dumps(reader.consumed()))))
    token = txn.token(rights="commit")
    with pytest.raises(InvalidArgument):
        other.commit(token, receipts)
    result = other.commit(token, receipts, consumed=consumed)
    assert other.commit(token, receipts, consumed=consumed) == result
    with pytest.raises(AlreadyCommitted):
        other.commit(token, receipts)
    place.check()
    assert {task.txn_id for task in client.processor(place.processor).tasks} <= {
        result.txn_id,
        bytes(16),
    }


@pytest.mark.soak
def test_two_workers_while_the_input_is_scaled_and_rolled(
    client: anabranch.Client, other: anabranch.Client
) -> None:
    """Each has half of the tasks, whatever partitions their keys lie on."""
    place = Place(client, segments=2, tasks=8)
    stop = threading.Event()

    def write() -> None:
        for segments in (5, 1, 3, 7):
            with client.begin(place.scope) as rolling:
                rolling.write_many(
                    place.input, place.events(6, [b"rolling-%d" % i for i in range(6)])
                )
                rolling.flush()
                with client.outside():
                    place.write(5, 3)
                    client.scale(place.input, segments=segments)
                    place.write(4)
                rolling.commit()
        stop.set()

    def work(by: anabranch.Client, tasks: range) -> int:
        done = 0
        while not (
            stop.is_set()
            and (last := copy(by, place, by.take_tasks(place.processor, tasks), 3)) == 0
        ):
            done += copy(by, place, by.take_tasks(place.processor, tasks), every=3)
        return done + last

    with ThreadPoolExecutor(3) as pool:
        writing = pool.submit(write)
        halves = [pool.submit(work, client, range(4)), pool.submit(work, other, range(4, 8))]
        writing.result(120)
        assert all(half.result(120) >= 0 for half in halves)
    place.check()
    assert len(client.processor(place.processor).tasks) == 8


@pytest.mark.soak
def test_events_without_a_key_are_dealt_once(
    client: anabranch.Client, other: anabranch.Client
) -> None:
    place = Place(client, segments=3, tasks=8)
    values = [b"%d" % i for i in range(40)]
    place.written = [(None, value) for value in values]
    for first in range(0, 40, 2):  # each goes to one segment
        with client.begin(place.scope) as txn:
            txn.write_many(place.input, [(value, None) for value in values[first : first + 2]])
            txn.commit()
    with ThreadPoolExecutor(8) as pool:
        ownerships = [client.take_tasks(place.processor, [number]) for number in range(8)]
        counts = list(
            pool.map(lambda ownership: copy(client, place, ownership, every=7), ownerships)
        )
    place.check()
    assert sum(1 for count in counts if count) > 4, "over many tasks"


@pytest.mark.soak
def test_several_inputs_and_a_start_at_the_end(client: anabranch.Client, place: Place) -> None:
    place.write(5)
    more = f"{place.scope}/more"
    client.create_stream(more)
    both = f"{place.scope}/both"
    client.create_processor(both, [place.input, more], tasks=1, start="end")
    client.create_processor(both, [place.input, more], tasks=1, start="begin")  # logged once
    before = len(place.written)
    place.write(2)
    with client.begin(place.scope) as txn:
        txn.write(more, b"of more", key=b"k")
        txn.commit()
    ownership = client.take_tasks(both)
    with client.read([place.input, more], timeout=QUIET_S, ownership=ownership) as reader:
        found = Counter((event.key, event.value) for event in reader)
        assert found == Counter([*place.written[before:], (b"k", b"of more")])
        with client.begin(place.scope, ownership=ownership) as txn:
            txn.commit(consumed=reader.consumed())  # positions alone
    task = client.processor(both).tasks[0]
    assert [(p.input, p.segment) for p in task.positions] == [(0, -1), (1, -1)]
    with client.read(
        [place.input, more], timeout=QUIET_S, ownership=client.take_tasks(both)
    ) as reader:
        assert list(reader) == []
    assert [info.processor for info in client.processors(place.scope)] == [both, place.processor]


@pytest.mark.long
def test_stretches_are_committed_in_order(client: anabranch.Client, place: Place) -> None:
    place.write(9)
    ownership = client.take_tasks(place.processor)
    with client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader:
        next(reader)
        reader.consumed()  # never committed
        list(itertools.islice(reader, 8))
        with (
            client.begin(place.scope, ownership=ownership) as txn,
            pytest.raises(InvalidArgument, match="sequence 2 of task"),
        ):
            txn.commit(consumed=reader.consumed())
    client.release_tasks(ownership)
    with client.begin(place.scope, ownership=ownership) as txn, pytest.raises(OwnershipLost):
        txn.commit(consumed=consumed_by_hand(ownership))
    assert place.copied() == []


def consumed_by_hand(ownership: anabranch.TaskOwnership) -> r.Consumed:
    step = r.TaskStep((0,), 1, (r.TaskPosition(0, 1, 0),))
    return r.Consumed(ownership.processor, ownership.fencing_token, (step,))


@pytest.mark.soak
def test_a_reader_raises_what_retention_deleted_before_it(
    client: anabranch.Client, place: Place, log: KafkaLog
) -> None:
    """Events that are gone, and a history that is cut above a position."""
    place.write(4, 4, 4)
    ownership = client.take_tasks(place.processor)
    ends = [TopicPartition(stream_topic(place.input), p) for p in range(2)]
    log.delete_records({p: end for p, end in log.end_offsets(ends, committed=False).items() if end})
    with (
        client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader,
        pytest.raises(SnapshotExpired, match="has not consumed"),
    ):
        list(reader)
    # A new one begins with the first commit that is there whole; one partition of this one is cut within it.
    place.written.clear()
    place.write(8, 8, 8)
    gone = TopicPartition(stream_topic(place.input), 1)
    cut = log.end_offsets([gone], committed=False)[gone]
    place.written = place.written[8:]
    first = next(e for e in committed(client, place.input) if e.partition == 1)
    assert first.offset < cut
    log.delete_records({gone: first.offset + 1})
    client.create_processor(f"{place.scope}/late", place.input, tasks=1)
    late = client.take_tasks(f"{place.scope}/late")
    with client.read(place.input, timeout=QUIET_S, ownership=late) as reader:
        assert Counter((e.key, e.value) for e in reader) == Counter(place.written)
    history = TopicPartition(history_topic(place.input), 0)
    log.delete_records({history: log.end_offsets([history], committed=False)[history] - 2})
    with (
        client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader,
        pytest.raises(SnapshotExpired, match="is truncated past record 0"),
    ):
        list(reader)


@pytest.mark.long
def test_bad_input(client: anabranch.Client, place: Place) -> None:
    with pytest.raises(UnknownProcessor):
        client.take_tasks(f"{place.scope}/none")
    for tasks in ([4], [-1], []):
        with pytest.raises(InvalidArgument):
            client.take_tasks(place.processor, tasks)
    with pytest.raises(IllegalState, match="exists with 4 tasks"):
        client.create_processor(place.processor, place.input, 8)
    for count in (0, 3, 2048):
        with pytest.raises(InvalidArgument):
            client.create_processor(f"{place.scope}/new", place.input, count)
    ownership = client.take_tasks(place.processor)
    with pytest.raises(InvalidArgument, match="is no input"):
        client.read(place.output, ownership=ownership)
    with pytest.raises(InvalidArgument):
        client.begin(place.scope, "a name", ownership=ownership)
    with pytest.raises(InvalidArgument):
        client.begin("elsewhere", ownership=ownership)
    with client.begin(place.scope) as txn, pytest.raises(InvalidArgument):
        txn.commit(consumed=consumed_by_hand(ownership))
    with client.begin(place.scope, ownership=ownership) as txn, pytest.raises(InvalidArgument):
        txn.commit()
    assert repr(ownership.fencing_token)[2:-1] not in repr(ownership) + repr(
        consumed_by_hand(ownership)
    )
