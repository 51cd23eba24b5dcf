"""State of processors on a real broker: by one-shots, by journals, taken over, reset, deleted."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

import anabranch
from anabranch.errors import InvalidArgument, OwnershipLost, UnknownProcessor
from anabranch.protocol.legal_names import state_stream
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.records import Consumed, TaskStep
from tests.behaviour.steps import committed
from tests.behaviour.test_tasks import QUIET_S

pytestmark = pytest.mark.broker

HEAD = 0


def key_of(ownership: anabranch.TaskOwnership, store: int, key: bytes = b"") -> bytes:
    return ownership.incarnation.to_bytes(2, "big") + store.to_bytes(2, "big") + key


class Counting:
    """A processor that counts the events of each key: its state is the counts."""

    def __init__(self, client: anabranch.Client) -> None:
        self.client = client
        self.scope = f"t{uuid.uuid4().hex[:8]}"
        self.input, self.output = f"{self.scope}/in", f"{self.scope}/out"
        self.processor = f"{self.scope}/count"
        self.state = state_stream(self.processor)
        client.create_stream(self.input, segments=2)
        client.create_stream(self.output, segments=2)
        self.create()

    def create(self, *more: str) -> None:
        self.client.create_processor(self.processor, self.input, 4, stores=["counts", *more])

    def write(self, count: int) -> None:
        with self.client.begin(self.scope) as txn:
            txn.write_many(self.input, [(b"x", b"key-%d" % (i % 12)) for i in range(count)])
            txn.commit()

    def rows(self) -> dict[int, dict[bytes, bytes]]:
        """Task -> rows, as compaction would leave them."""
        found: dict[int, dict[bytes, bytes]] = {}
        for event in committed(self.client, self.state):
            rows = found.setdefault(event.partition, {})
            rows.pop(event.key or b"", None)
            if event.key is not None and event.value is not None:
                rows[event.key] = event.value
        return found

    def counts(self, ownership: anabranch.TaskOwnership) -> dict[int, dict[bytes, int]]:
        """What a worker restores: its incarnation's rows, once each head agrees with its task."""
        tasks = self.client.processor(self.processor).tasks
        found = self.rows()
        prefix = key_of(ownership, 2)
        for task in tasks:
            head = found.get(task.task, {}).get(key_of(ownership, HEAD), bytes(8))
            assert int.from_bytes(head, "big") == task.state_sequence
        return {
            task: {key[4:]: int(value) for key, value in rows.items() if key.startswith(prefix)}
            for task, rows in found.items()
        }

    def count(
        self, ownership: anabranch.TaskOwnership, every: int, *, flush: bool = False
    ) -> dict[bytes, int]:
        """Count all that is there, a commit for so many events; by journals, with ``flush``."""
        totals = {k: n for task in self.counts(ownership).values() for k, n in task.items()}
        with self.client.read(self.input, timeout=QUIET_S, ownership=ownership) as reader:
            while batch := list(itertools.islice(reader, every)):
                for event in batch:
                    totals[event.key or b""] = totals.get(event.key or b"", 0) + 1
                consumed = reader.consumed()
                with self.client.begin(self.scope, ownership=ownership) as txn:
                    for event in batch:
                        txn.write(self.output, b"", key=event.key)
                    if flush:
                        txn.flush()
                    for step in consumed.steps:
                        for task in step.tasks:
                            head = step.sequence.to_bytes(8, "big")
                            mine = {e.key or b"" for e in batch if task_of(e.key) == task}
                            rows = [
                                (key_of(ownership, 2, k), b"%d" % totals[k]) for k in sorted(mine)
                            ]
                            txn.write_state(task, [*rows, (key_of(ownership, HEAD), head)])
                    txn.commit(consumed=consumed)
        return {k: n for task in self.counts(ownership).values() for k, n in task.items()}


def task_of(key: bytes | None) -> int:
    return position_of(key or b"") * 4 >> 32


def even(count: int) -> Mapping[bytes, int]:
    return {b"key-%d" % i: count // 12 for i in range(12)}


@pytest.fixture
def counting(client: anabranch.Client) -> Counting:
    return Counting(client)


def test_state_moves_with_positions(counting: Counting) -> None:
    """By one-shots, then by journals, and by another worker who restores what is there."""
    counting.write(24)
    assert counting.count(counting.client.take_tasks(counting.processor), 5) == even(24)
    counting.write(24)
    assert counting.count(counting.client.take_tasks(counting.processor), 7, flush=True) == even(48)
    for task, rows in counting.counts(counting.client.take_tasks(counting.processor)).items():
        assert {task_of(key) for key in rows} == {task}
    described = counting.client.describe(counting.state)
    assert len(described.segments) == 4


@pytest.mark.long
def test_what_is_refused_changes_nothing(counting: Counting) -> None:
    counting.write(24)
    client, scope = counting.client, counting.scope
    ownership = client.take_tasks(counting.processor)
    with client.read(counting.input, timeout=QUIET_S, ownership=ownership) as reader:
        mine = next(iter(reader))
        consumed = reader.consumed()
    task = task_of(mine.key)
    row = (key_of(ownership, 2, b"k"), b"1")
    with client.begin(scope, ownership=ownership) as txn:
        txn.write_state(1 ^ task, [row])
        txn.flush()
        with pytest.raises(InvalidArgument, match="only commits that move"):
            txn.commit(consumed=consumed)
    with client.begin(scope) as txn, pytest.raises(InvalidArgument, match="use `write_state`"):
        txn.write(counting.state, b"v", key=row[0])
    with client.begin(scope) as txn, pytest.raises(InvalidArgument, match="with a task ownership"):
        txn.write_state(0, [row])
    with client.begin(scope, ownership=ownership) as txn:
        for bad in ((None, b"v"), (b"k", 1)):
            with pytest.raises(InvalidArgument, match="a row of state"):
                txn.write_state(task, [bad])  # type: ignore[list-item]
    with client.begin(scope, ownership=ownership) as late:
        late.write_state(task, [row])
        client.take_tasks(counting.processor)
        with pytest.raises(OwnershipLost):
            late.commit(consumed=consumed)
    assert counting.rows() == {}


@pytest.mark.soak
def test_reset_and_delete_begin_without_the_old_rows(counting: Counting) -> None:
    client, processor = counting.client, counting.processor
    counting.write(24)
    first = client.take_tasks(processor)
    assert counting.count(first, 24) == even(24)
    with pytest.raises(InvalidArgument, match="keep its state"):
        client.reset_processor(processor)
    with pytest.raises(InvalidArgument, match="still to come"):
        client.reset_processor(processor, datetime.now(UTC) + timedelta(minutes=1))
    client.reset_processor(processor, keep_state=True)
    with client.begin(counting.scope, ownership=first) as late, pytest.raises(OwnershipLost):
        late.commit(consumed=Consumed(processor, first.fencing_token, (TaskStep((0,), 2, ()),)))
    assert counting.count(client.take_tasks(processor), 24) == even(24), "it went on where it stood"
    client.reset_processor(processor, "begin", keep_state=True)
    assert counting.count(client.take_tasks(processor), 24) == even(48), "all is counted again"
    client.reset_processor(processor, "begin")
    second = client.take_tasks(processor)
    assert second.incarnation == first.incarnation + 1
    assert counting.counts(second)[task_of(b"key-0")] == {}
    assert counting.count(second, 24) == even(24)
    client.delete_processor(processor)
    with pytest.raises(UnknownProcessor):
        client.take_tasks(processor)
    counting.create("more")
    third = client.take_tasks(processor)
    assert third.incarnation > second.incarnation
    assert (third.stores, counting.rows()) == (("counts", "more"), {})
    assert counting.count(third, 24) == even(24)
