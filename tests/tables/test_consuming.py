"""`Replica.transact(consume=…)`: locked rows and positions of tasks in one commit, over the log in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import (
    DeadlineExceeded,
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    OutcomeUnknown,
    OwnershipLost,
)
from anabranch.ledger import Ledger
from anabranch.protocol.ids import is_marked
from anabranch.protocol.schemas import records as r
from anabranch.reading.task_reader import TaskReader
from tests.client.world import World
from tests.tables.test_row_chain import OtherThread
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


@pytest.mark.parametrize(("name", "writes"), [(None, True), ("n", True), (None, False)])
def test_after_its_locks_broke_it_commits_in_a_turn(
    world: Teller, name: str | None, writes: bool
) -> None:
    """The turn ends with the commit, also if that leaves neither events nor a row of its own."""
    asked, tries = [], []
    session = world.client._shared.session
    take, give_up = session.take_turn, session.give_up_turn

    def taking(command: r.TakeTurn, deadline: float) -> r.Revalidate:
        asked.append(command)
        return take(command, deadline)

    def giving_up(command: r.TakeTurn) -> None:
        asked.append(command)
        give_up(command)

    session.take_turn, session.give_up_turn = taking, giving_up  # type: ignore[method-assign]

    def work(txn: TableTransaction) -> None:
        tries.append(txn.get(ROWS, b"total"))
        if writes:
            add(txn, b"1")
        if len(tries) == 1:
            world.put(b"total", b"5")

    with world.reader() as reader:
        list(reader)
        result = world.rows.transact(work, name=name, consume=reader)
    assert tries == [None, b"5"]
    assert asked[0].txn_id == result.txn_id
    assert is_marked(result.txn_id) == (name is None)
    assert [command.wait_ms > 0 for command in asked] == [True] if writes else [True, False]
    assert (world.total(), world.rest()) == (5 + writes, 0)
    assert world.controller is not None
    assert not world.controller._memory.row_turns.queues.as_dict()


def test_a_name_that_was_committed_gives_its_turn_up(world: Teller) -> None:
    world.client.transact(lambda txn: txn.write(ROWS, b"9", key=b"other"), name="n", scope="bank")
    tries = []

    def work(txn: TableTransaction) -> None:
        tries.append(txn.get(ROWS, b"total"))
        add(txn, b"1")
        if len(tries) == 1:
            world.put(b"total", b"5")

    with world.reader() as reader:
        list(reader)
        world.rows.transact(work, name="n", consume=reader)
    assert (world.total(), world.rest()) == (5, 0)
    assert world.controller is not None
    assert not world.controller._memory.row_turns.queues.as_dict()


@pytest.mark.parametrize("again", [False, True])
def test_an_advised_commit_that_ends_in_between_is_in_doubt(
    world: Teller, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A copy of it may be carried out later. ``again``: it is, before the question."""
    other = world.new_client()
    session = other._shared.session
    txn_id = session.new_txn_id("bank", session.now() + 5)
    point = fingerprint(b"total")
    own = world.client._shared.session
    shot, calls = own.locked_shot, []

    def asked(command: r.OneShot, *more: Any) -> r.Outcome | r.Revalidate:
        calls.append(command)
        monkeypatch.setattr(world.rows, "wait", late)
        if len(calls) == 1 or again:
            return shot(command, *more)
        # Another turn is in the way of the second copy.
        return r.Revalidate(0, (), (point, 0))

    monkeypatch.setattr(own, "locked_shot", asked)
    with world.reader() as reader:
        list(reader)
        session.take_turn(r.TakeTurn(txn_id, None, ROWS, point, (ROWS,), 5_000), session.now() + 5)
        if again:
            world.rows.transact(lambda txn: add(txn, b"1"), consume=reader)
        else:
            with pytest.raises(OutcomeUnknown):
                world.rows.transact(lambda txn: add(txn, b"1"), consume=reader)
            with pytest.raises(IllegalState, match="take the tasks again"):
                world.rows.transact(lambda txn: add(txn, b"1"), consume=reader)
    assert calls[0] == calls[1]
    monkeypatch.undo()
    assert world.total() == again


def late(*_: Any) -> None:
    raise DeadlineExceeded("the replica is late")


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


def test_positions_in_a_ledger_are_put_back_after_a_conflict(world: Teller, tmp_path: Path) -> None:
    """As docs/ledger.md says."""
    database = tmp_path / "cash.db"
    with closing(sqlite3.connect(database)) as made:
        made.execute("create table cash (n)")
        made.commit()
    ledger = Ledger(lambda: sqlite3.connect(database))
    ledger.create(world.client)
    tries = 0
    with world.reader() as reader:
        list(reader)
        while True:
            consumed = reader.consumed()
            try:
                with (
                    world.rows.begin(ownership=reader.ownership) as txn,
                    ledger.commit(txn, consumed=consumed) as cursor,
                ):
                    add(txn, b"5")
                    cursor.execute("insert into cash values (5)")
                    tries += 1
                    if tries == 1:
                        world.put(b"total", b"100")
                break
            except LocksBroken:
                reader.put_back(consumed)
    assert (tries, world.total(), world.rest()) == (2, 105, 0)
    with closing(sqlite3.connect(database)) as now:
        assert now.execute("select n from cash").fetchall() == [(5,)]


def test_a_turn_that_passed_from_a_commit_without_rows_is_given_up(world: Teller) -> None:
    """Another call waited when the commit was sent, and does not come."""
    chain = world.rows._chain
    chain.note((ROWS, b"total"), taken=True)

    def looks(txn: TableTransaction) -> None:
        txn.get(ROWS, b"total")
        chain._waiting.append(cast("Any", OtherThread(chain)))

    with world.reader() as reader:
        next(reader)
        world.rows.transact(looks, consume=reader)
    assert world.total() == 0
    assert world.controller is not None
    assert not world.controller._memory.row_turns.queues.as_dict()
