"""`Replica.transact(consume=…)`: locked rows and positions of tasks in one commit, over the log in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import (
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    OwnershipLost,
)
from anabranch.reading.task_reader import TaskReader
from tests.client.world import World
from tests.tables.worlds import let_read, operator, reader_ports

IN, ROWS, NAME = "bank/commands", "bank/rows", "bank/p"


class Teller(World):
    """Commands add to rows of a table, which blind writers change, too."""

    def __init__(self, level: int = 3) -> None:
        super().__init__()
        let_read(self.client, reader_ports(self))
        self.client.create_stream(IN)
        self.client.create_table(ROWS)
        self.client.create_processor(NAME, IN, tasks=2)
        if level > 1:
            operator(self).feature_level(raise_to=level)
        self.blind = self.new_client()
        self.rows: Replica = self.client.replica(ROWS, threads=False)
        with self.client.begin("bank") as txn:
            for n in range(3):
                txn.write(IN, b"%d" % (n + 1), key=b"k%d" % n)
            txn.commit()

    def reader(self) -> TaskReader:
        ownership = self.client.take_tasks(NAME)
        return self.client.read(IN, timeout=1.0, ownership=ownership)

    def put(self, key: bytes, value: bytes) -> None:
        with self.blind.begin("bank") as txn:
            txn.write(ROWS, value, key=key)
            txn.commit()

    def total(self) -> int:
        with self.rows.snapshot() as view:
            return int(view.get(ROWS, b"total") or b"0")

    def rest(self) -> int:
        with self.reader() as reader:
            return len(list(reader))


@pytest.fixture
def world() -> Iterator[Teller]:
    made = Teller()
    yield made
    made.rows.close()


def add(txn: TableTransaction, value: bytes | None) -> int:
    total = int(txn.get(ROWS, b"total") or b"0") + int(value or b"0")
    txn.put(ROWS, b"total", b"%d" % total)
    return total


@pytest.mark.parametrize("rows", [1, 200])
def test_locked_rows_and_positions_are_one_commit(world: Teller, rows: int) -> None:
    """By one command, and by journals."""

    def work(txn: TableTransaction) -> int:
        for n in range(rows - 1):
            txn.put(ROWS, b"%d" % n, b"x" * 50)
        return add(txn, event.value)

    with world.reader() as reader:
        for event in reader:  # noqa: B007 (`work` uses it)
            done = world.rows.transact(work, consume=reader)
            assert done.value == world.total()
    assert (world.total(), world.rest()) == (6, 0)


@pytest.mark.parametrize("known", [False, True])
def test_a_broken_lock_repeats_the_function_for_the_same_events(world: Teller, known: bool) -> None:
    """Also if the replica has seen the other commit."""
    seen: list[Any] = []

    def work(txn: TableTransaction) -> None:
        add(txn, event.value)
        seen.append(event.value)
        if len(seen) < 3:
            world.put(b"total", b"%d" % (100 * len(seen)))
            if known:
                world.rows.snapshot().close()

    with world.reader() as reader:
        event = next(reader)
        world.rows.transact(work, consume=reader)
    assert seen == [event.value] * 3
    assert (world.total(), world.rest()) == (200 + int(event.value or b""), 2)


def test_a_lock_that_stays_broken_moves_nothing(world: Teller) -> None:
    def work(txn: TableTransaction) -> None:
        add(txn, event.value)
        world.put(b"total", b"100")

    with world.reader() as reader:
        event = next(reader)
        with pytest.raises(LocksBroken):
            world.rows.transact(work, consume=reader, timeout=3)
        assert world.total() == 100
        world.rows.transact(lambda txn: add(txn, event.value), consume=reader)
    assert (world.total(), world.rest()) == (100 + int(event.value or b""), 2)


@pytest.mark.parametrize("opened", [False, True])
def test_a_worker_without_its_tasks_writes_nothing(world: Teller, opened: bool) -> None:
    def work(txn: TableTransaction) -> None:
        add(txn, b"1")
        if opened:
            txn.flush()
        world.client.take_tasks(NAME)

    with world.reader() as reader:
        list(reader)
        with pytest.raises(OwnershipLost):
            world.rows.transact(work, consume=reader)
        with pytest.raises(IllegalState, match="take the tasks again"):
            world.rows.transact(work, consume=reader)
    assert (world.total(), world.rest()) == (0, 3)


def test_a_function_that_only_reads_moves_positions_under_its_locks(world: Teller) -> None:
    tries = []

    def work(txn: TableTransaction) -> None:
        tries.append(txn.get(ROWS, b"total"))
        if len(tries) == 1:
            world.put(b"total", b"5")

    with world.reader() as reader:
        list(reader)
        world.rows.transact(work, consume=reader)
    assert tries == [None, b"5"]
    assert world.rest() == 0


def test_below_level_3_it_is_refused_and_nothing_is_changed() -> None:
    world = Teller(level=1)
    with world.reader() as reader:
        list(reader)
        with pytest.raises(FeatureNotEnabled):
            world.rows.transact(lambda txn: add(txn, b"1"), consume=reader)
        with pytest.raises(InvalidArgument, match="give a reader of tasks"):
            world.rows.transact(lambda txn: add(txn, b"1"), consume=world)  # type: ignore[arg-type]
        world.client.transact(lambda txn: txn.write(ROWS, b"7", key=b"total"), consume=reader)
    assert (world.total(), world.rest()) == (7, 0)
    world.rows.close()
