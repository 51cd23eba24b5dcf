"""Prepared transactions with locks and positions, over a real controller and the log in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from anabranch.client.session import Session
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import (
    AlreadyCommitted,
    FeatureNotEnabled,
    IllegalState,
    LocksBroken,
    NonTransactional,
    OutcomeUnknown,
    OwnershipLost,
    ReservedByPrepared,
    RetryError,
)
from tests.tables.test_consuming import NAME, ROWS, Teller, add

FORMS = {"one command": None, "journals": 60.0}
Form = float | None


@pytest.fixture(params=list(FORMS.values()), ids=list(FORMS))
def form(request: pytest.FixtureRequest) -> Form:
    """The keepalive of a transaction, or None for a short one."""
    found: Form = request.param
    return found


@pytest.fixture
def world() -> Iterator[Teller]:
    made = Teller()
    made.put(b"total", b"10")
    made.rows.snapshot().close()
    yield made
    made.rows.close()


def blocked(world: Teller, key: bytes = b"total") -> None:
    """Another commit to a locked row waits; it has no effect before the end of its time."""
    with world.blind.begin("bank") as txn:
        txn.write(ROWS, b"999", key=key)
        with pytest.raises(RetryError):
            txn.commit(timeout=1.0)


@pytest.mark.parametrize("ends", ["commit", "abort"])
@pytest.mark.parametrize("left", [False, True])
def test_others_wait_until_it_ends(world: Teller, form: Form, ends: str, left: bool) -> None:
    """It may end after its `with` block."""
    with world.rows.begin(keepalive=form) as txn:
        assert add(txn, b"5") == 15
        info = txn.prepare()
        assert (info.state, info.txn_id, txn.prepared) == ("PREPARED", txn.txn_id, info)
        blocked(world)
        if not left:
            getattr(txn, ends)()
    if left:
        assert world.total() == 10
        getattr(txn, ends)()
    assert world.total() == (15 if ends == "commit" else 10)
    world.put(b"total", b"20")
    assert world.total() == 20
    if ends == "commit":
        assert txn.commit() == txn.result
    else:
        txn.abort()


def test_a_row_that_was_only_read_is_held_too(world: Teller, form: Form) -> None:
    """Without writes: what a database's row depends on."""
    with world.rows.begin(keepalive=form) as txn:
        assert txn.get(ROWS, b"total") == b"10"
        assert list(txn.scan(ROWS, prefix=b"x")) == []
        txn.prepare()
        blocked(world)
        blocked(world, b"x1")  # a phantom
        world.put(b"elsewhere", b"1")
        txn.commit()
    world.put(b"total", b"20")


def test_a_broken_lock_prepares_nothing(world: Teller, form: Form) -> None:
    for known in (False, True):
        before = world.total()
        with world.rows.begin(keepalive=form) as txn:
            add(txn, b"5")
            world.put(b"total", b"%d" % (before + 1))
            if known:
                world.rows.snapshot().close()
            with pytest.raises(LocksBroken):
                txn.prepare()
            with pytest.raises((LocksBroken, IllegalState)):
                txn.commit()
        assert world.total() == before + 1
    assert world.client.prepared("bank") == []
    world.put(b"total", b"20")


def test_a_lock_that_holds_is_revalidated(world: Teller, form: Form) -> None:
    """The leader has not seen the latest commits, so it asks."""
    with world.rows.begin(keepalive=form) as txn:
        add(txn, b"5")
        world.put(b"elsewhere", b"1")
        world.stop_controller()
        world.start_controller()
        assert txn.prepare(timeout=60).state == "PREPARED"
        txn.commit(timeout=60)
    assert world.total() == 15


def test_a_commit_is_refused_by_name_when_the_locks_are_held_for_long(
    world: Teller, form: Form
) -> None:
    with world.rows.begin(keepalive=form) as txn:
        add(txn, b"5")
        txn.prepare()
        world.clock.sleep(11)
        with pytest.raises(ReservedByPrepared, match=(txn.txn_id or b"").hex()):
            world.put(b"total", b"20")
        txn.commit()
    assert world.total() == 15


def test_what_is_prepared_is_not_changed(world: Teller, form: Form) -> None:
    calls: list[Callable[[TableTransaction], object]] = [
        lambda txn: txn.put(ROWS, b"k", b"1"),
        lambda txn: txn.get(ROWS, b"k"),
        lambda txn: txn.truncate(ROWS),
        lambda txn: txn.token(),
        lambda txn: txn.flush(),
    ]
    with world.rows.begin(keepalive=form) as txn:
        add(txn, b"5")
        info = txn.prepare(attempt=b"1")
        for call in calls:
            with pytest.raises(IllegalState, match="prepared"):
                call(txn)
        assert txn.prepare(attempt=b"1") == info
        with pytest.raises(NonTransactional):
            world.client.create_stream("bank/late")
        txn.commit()
    with pytest.raises((IllegalState, AlreadyCommitted)):
        txn.put(ROWS, b"k", b"1")
    assert world.total() == 15


def test_another_attempt_is_refused(world: Teller) -> None:
    with world.rows.begin(keepalive=60.0) as txn:
        add(txn, b"5")
        token = txn.token("all")
        txn.prepare(attempt=b"1")
        with pytest.raises(IllegalState, match="another attempt"):
            world.client.prepare(token, attempt=b"2")
        assert world.client.commit(token).txn_id == txn.txn_id
        assert txn.commit().txn_id == txn.txn_id
    assert world.total() == 15


def test_many_rows_are_prepared_by_journals(world: Teller) -> None:
    with world.rows.begin() as txn:
        add(txn, b"5")
        txn_id = txn.assign_id()
        for n in range(60):
            txn.put(ROWS, b"%d" % n, b"x" * 60)
        assert txn.prepare().txn_id == txn_id
        blocked(world)
        assert txn.commit().counts.committed == 61
    assert world.total() == 15


def test_big_locks_are_prepared_by_journals(world: Teller) -> None:
    with world.rows.begin() as txn:
        for n in range(40):
            list(txn.scan(ROWS, low=b"%02d" % n + b"k" * 8_000, high=b"%02dz" % n))
        add(txn, b"5")
        assert txn.prepare().state == "PREPARED"
        blocked(world)
        assert txn.commit().counts.committed == 1
    assert world.total() == 15


def test_a_name_that_is_committed_has_its_outcome(world: Teller, form: Form) -> None:
    earlier = world.rows.transact(lambda txn: add(txn, b"1"), name="once")
    with world.rows.begin(keepalive=form) as txn:
        add(txn, b"5")
        info = txn.prepare(name="once")
        assert (info.state, info.txn_id) == ("COMMITTED", earlier.txn_id)
        assert txn.result is not None
        assert txn.result.txn_id == earlier.txn_id
    assert world.total() == 11
    world.put(b"total", b"20")


def test_a_secret_ends_it_from_anywhere(world: Teller, form: Form) -> None:
    from hashlib import sha256

    secret = b"s" * 32
    with world.rows.begin(keepalive=form) as txn:
        add(txn, b"5")
        info = txn.prepare(by=sha256(secret).digest())
    assert world.new_client().commit(info.txn_id, secret=secret).txn_id == info.txn_id
    assert world.total() == 15
    assert txn.commit(secret=secret).txn_id == info.txn_id


# -- positions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_prepared_positions_move_with_the_commit(world: Teller, form: Form, ends: str) -> None:
    with world.reader() as reader:
        events = list(reader)
        with world.rows.begin(keepalive=form, ownership=reader.ownership) as txn:
            add(txn, b"5")
            txn.prepare(consumed=reader.consumed())
            tasks = world.client.processor(NAME).tasks
            assert {task.in_progress for task in tasks} == {txn.txn_id}
            getattr(txn, ends)()
    assert len(events) == 3
    assert (world.total(), world.rest()) == ((15, 0) if ends == "commit" else (10, 3))


@pytest.mark.parametrize("locks", [False, True])
def test_a_fenced_worker_prepares_nothing(world: Teller, form: Form, locks: bool) -> None:
    with world.reader() as reader:
        list(reader)
        consumed = reader.consumed()
        txn: Any
        if locks:
            txn = world.rows.begin(keepalive=form, ownership=reader.ownership)
            add(txn, b"5")
        else:
            txn = world.client.begin("bank", ownership=reader.ownership)
            txn.write(ROWS, b"15", key=b"total")
            if form:
                txn.flush()
        world.client.take_tasks(NAME)
        with pytest.raises(OwnershipLost):
            txn.prepare(consumed=consumed)
        txn.abort()
    assert (world.total(), world.rest()) == (10, 3)
    assert world.client.prepared("bank") == []


def test_a_plain_transaction_prepares_positions(world: Teller) -> None:
    with world.reader() as reader:
        list(reader)
        with world.client.begin("bank", ownership=reader.ownership) as txn:
            txn.write(ROWS, b"15", key=b"total")
            txn.prepare(consumed=reader.consumed())
            txn.commit()
    assert (world.total(), world.rest()) == (15, 0)


@pytest.mark.parametrize("locks", [False, True])
@pytest.mark.parametrize("why", [KeyboardInterrupt(), OutcomeUnknown("late", txn_id=b"")], ids=repr)
def test_a_prepare_that_an_error_ended_holds_nothing(
    world: Teller, form: Form, locks: bool, why: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = "prepare_events" if form is None else "try_commit"
    real = getattr(Session, call)

    def ended(*given: Any, **named: Any) -> None:
        real(*given, **named)
        raise why

    with world.reader() as reader:
        list(reader)
        begin: Any = world.rows.begin if locks else partial(world.client.begin, "bank")
        more = {} if form is None else {"keepalive": form}

        def prepare() -> None:
            with begin(ownership=reader.ownership, **more) as txn:
                if form is not None:
                    txn.flush()
                if locks:
                    txn.put(ROWS, b"total", b"15")
                else:
                    txn.write(ROWS, b"15", key=b"total")
                monkeypatch.setattr(Session, call, ended)
                txn.prepare(consumed=reader.consumed())

        with pytest.raises(type(why)):
            prepare()
    assert world.client.prepared("bank") == []
    assert (world.total(), world.rest()) == (10, 3)


def test_positions_of_a_named_commit_that_gives_way_move_alone(world: Teller, form: Form) -> None:
    def work(txn: TableTransaction) -> int:
        if form:
            txn.flush()
        return add(txn, b"5")

    earlier = world.rows.transact(lambda txn: add(txn, b"1"), name="once")
    with world.reader() as reader:
        list(reader)
        done = world.rows.transact(work, name="once", consume=reader)
    assert (done.txn_id, done.value) == (earlier.txn_id, 16)
    assert (world.total(), world.rest()) == (11, 0)
    with world.reader() as reader:
        plain = world.client.transact(
            lambda txn: txn.write(ROWS, b"7", key=b"total"), name="once", consume=reader
        )
    assert (plain.txn_id, world.total()) == (earlier.txn_id, 11)


def test_a_named_commit_moves_positions(world: Teller) -> None:
    with world.reader() as reader:
        next(reader)
        done = world.rows.transact(lambda txn: add(txn, b"5"), name="one", consume=reader)
        assert done.name == "one"
        next(reader)
        with world.rows.begin(ownership=reader.ownership) as txn:
            add(txn, b"5")
            result = txn.commit(name="series", number=7, consumed=reader.consumed())
        assert result.counts.committed == 1
    assert (world.total(), world.rest()) == (20, 1)
    assert world.client.series("bank", "series")[0].number == 7


def test_below_level_3_locks_are_not_prepared(form: Form) -> None:
    world = Teller(level=1)
    with world.rows.begin(keepalive=form) as txn:
        add(txn, b"5")
        with pytest.raises(FeatureNotEnabled):
            txn.prepare()
        txn.commit()
    assert world.total() == 5
    with world.reader() as reader:
        list(reader)
        plain = world.client.begin("bank", ownership=reader.ownership)
        with pytest.raises(FeatureNotEnabled):
            plain.prepare(consumed=reader.consumed())
        plain.abort()
    world.rows.close()
