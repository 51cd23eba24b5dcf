"""A ledger whose transaction reads rows with locks, or moves positions: over a controller in memory."""

# ruff: noqa: PT012 (what a `with` of ours does at its end is what is tested)

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    LedgerDiffers,
    LocksBroken,
    OwnershipLost,
)
from anabranch.ledger import Ledger
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.cluster import CLIENT
from tests.client.doubles import counted
from tests.ledger.places import Place
from tests.tables.test_consuming import ROWS, Teller, add

LONG_AGO = -86_400 * 1000.0  # all that is prepared is older


@pytest.fixture
def world() -> Iterator[Teller]:
    made = Teller()
    made.put(b"total", b"10")
    made.rows.snapshot().close()
    yield made
    made.rows.close()


@pytest.fixture
def ledger(world: Teller, place: Place) -> Ledger:
    made = Ledger(place.connect)
    made.create(world.client)
    return made


def withdraw(world: Teller, ledger: Ledger, place: Place, name: str, *, big: bool = False) -> Any:
    """The row of the database depends on a locked row of a table."""
    with world.rows.begin() as txn, ledger.commit(txn) as cursor:
        held = add(txn, b"-3")
        for n in range(100 if big else 0):
            txn.put(ROWS, b"%d" % n, b"x" * 60)
        place.order(cursor, name, held)
        yield txn
    yield txn.result


def done(steps: Iterator[Any]) -> Any:
    """The result, without a step in between."""
    next(steps)
    return next(steps)


@pytest.mark.parametrize("big", [False, True])
def test_a_locked_row_and_the_database_are_one_commit(
    world: Teller, ledger: Ledger, place: Place, big: bool
) -> None:
    """By one command, and by journals."""
    result = done(withdraw(world, ledger, place, "a", big=big))
    assert result.counts.committed == (101 if big else 1)
    assert (world.total(), place.all("select id, amount from orders")) == (7, [("a", 7)])
    done(withdraw(world, ledger, place, "b"))
    assert (world.total(), place.orders()) == (4, ["a", "b"])
    assert world.client.prepared("bank") == []


@pytest.mark.parametrize("known", [False, True])
def test_a_broken_lock_rolls_both_back(
    world: Teller, ledger: Ledger, place: Place, known: bool
) -> None:
    steps = withdraw(world, ledger, place, "a")
    next(steps)
    world.put(b"total", b"100")
    if known:
        world.rows.snapshot().close()
    with pytest.raises(LocksBroken):
        next(steps)
    assert (world.total(), place.orders(), ledger.rows()) == (100, [], [])
    done(withdraw(world, ledger, place, "a"))
    assert (world.total(), place.orders()) == (97, ["a"])


def test_rows_that_count_are_refused(world: Teller, ledger: Ledger, place: Place) -> None:
    """A prepared transaction has its values; the value of a changed row is known at the commit."""
    with (
        pytest.raises(InvalidArgument, match="`prepare` takes none"),
        world.rows.begin() as txn,
        ledger.commit(txn) as cursor,
    ):
        txn.add(ROWS, b"total", 1)
        place.order(cursor, "a")
    assert (world.total(), place.orders(), ledger.rows()) == (10, [], [])
    done(withdraw(world, ledger, place, "b"))
    assert (world.total(), place.orders()) == (7, ["b"])


def test_an_exception_frees_the_locks(world: Teller, ledger: Ledger, place: Place) -> None:
    steps = withdraw(world, ledger, place, "a")
    next(steps)
    with pytest.raises(ZeroDivisionError):
        steps.throw(ZeroDivisionError())
    world.put(b"total", b"20")
    assert (world.total(), place.orders()) == (20, [])


class Dead(BaseException):
    """The process dies."""


@pytest.mark.parametrize("at", ["commit", "commit.after"])
@pytest.mark.parametrize("big", [False, True])
def test_recovery_ends_what_a_dead_process_left(
    world: Teller, place: Place, at: str, big: bool
) -> None:
    """The database decides; the locks are held until recovery."""
    dies: list[str] = []

    def hook(step: str) -> None:
        if dies and step == dies[0]:
            raise Dead

    ledger = Ledger(lambda: place.connect(hook))
    ledger.create(world.client)
    txn: TableTransaction = world.rows.begin()
    with pytest.raises(Dead), ledger.commit(txn) as cursor:
        add(txn, b"-3")
        for n in range(100 if big else 0):
            txn.put(ROWS, b"%d" % n, b"x" * 60)
        place.order(cursor, "a")
        dies.append(at)
    dies.clear()
    committed = at == "commit.after"
    assert world.total() == 10
    found = ledger.recover(world.client, older_than=LONG_AGO)
    assert (len(found.committed), len(found.aborted)) == ((1, 0) if committed else (0, 1))
    assert world.total() == (7 if committed else 10)
    assert place.orders() == (["a"] if committed else [])
    world.put(b"total", b"20")


def test_an_operator_who_was_wrong_is_named(world: Teller, place: Place) -> None:
    """Locks don't hide that database and log differ."""
    operator = memory_client(
        world.cluster.log(CLIENT), world.clock, counted(), lane=ADMIN_LANE, one_shot_bytes=4096
    )
    forced: list[bytes] = []

    def hook(step: str) -> None:
        if step == "commit.after" and forced:
            operator.force(forced.pop(), outcome=False)

    ledger = Ledger(lambda: place.connect(hook))
    ledger.create(world.client)
    txn = world.rows.begin()
    with pytest.raises(LedgerDiffers), ledger.commit(txn) as cursor:
        add(txn, b"-3")
        place.order(cursor, "a")
        forced.append(txn.txn_id or b"")
    assert (world.total(), place.orders()) == (10, ["a"])


@pytest.mark.parametrize("rows", [False, True])
def test_positions_move_with_the_database(
    world: Teller, ledger: Ledger, place: Place, rows: bool
) -> None:
    """With locked rows, and without."""
    with world.reader() as reader:
        for event in reader:
            txn: Any
            own = reader.ownership
            txn = (
                world.rows.begin(ownership=own)
                if rows
                else world.client.begin("bank", ownership=own)
            )
            with txn, ledger.commit(txn, consumed=reader.consumed()) as cursor:
                if rows:
                    add(txn, event.value)
                place.order(cursor, (event.key or b"").decode())
    assert place.orders() == ["k0", "k1", "k2"]
    assert (world.total(), world.rest()) == (16 if rows else 10, 0)


def test_a_fenced_worker_changes_no_database(world: Teller, ledger: Ledger, place: Place) -> None:
    with world.reader() as reader:
        list(reader)
        txn = world.rows.begin(ownership=reader.ownership)
        with (
            pytest.raises(OwnershipLost),
            ledger.commit(txn, consumed=reader.consumed()) as cursor,
        ):
            add(txn, b"5")
            place.order(cursor, "a")
            world.client.take_tasks("bank/p")
    assert (place.orders(), world.total(), world.rest()) == ([], 10, 3)


def test_a_transaction_is_in_one_ledger_once(world: Teller, ledger: Ledger, place: Place) -> None:
    with world.rows.begin() as txn, ledger.commit(txn) as cursor:
        place.order(cursor, "a")
        began = time.monotonic()
        with pytest.raises(IllegalState, match="already"), ledger.commit(txn):
            pass
        assert time.monotonic() - began < 20
    assert place.orders() == ["a"]
