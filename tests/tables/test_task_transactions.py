"""Transactions on tables that move the positions of a processor's tasks, over a real controller in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import (
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    NotReady,
    OutcomeUnknown,
    OwnershipLost,
)
from anabranch.protocol.legal_names import ADMIN_LANE, state_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.types import TaskOwnership
from tests.tables.test_transactions import A, Bank

NAME, IN, OUT = "bank/p", "bank/in", "bank/out"


class Tasks(Bank):
    """A bank with a processor of two tasks, which this client owns."""

    def __init__(self, level: int = LEVEL) -> None:
        super().__init__()
        if level > 1:
            self.connect(lane=ADMIN_LANE).feature_level(raise_to=level)
        for stream in (IN, OUT):
            self.client.create_stream(stream)
        self.client.create_processor(NAME, [IN], tasks=2, stores=("totals",))
        self.put(self.blind, x="1")
        self.take()

    def take(self) -> TaskOwnership:
        self.owned = self.client.take_tasks(NAME)
        return self.owned

    def consumed(self, sequence: int = 1, tasks: Sequence[int] = (0, 1)) -> r.Consumed:
        step = r.TaskStep(tuple(tasks), sequence, (r.TaskPosition(0, sequence, 0),))
        return r.Consumed(NAME, self.owned.fencing_token, (step,))

    def begin(self) -> TableTransaction:
        return self.rows.begin(ownership=self.owned)

    def sequences(self) -> list[int]:
        return [task.sequence for task in self.client.processor(NAME).tasks]

    def row(self, key: bytes) -> bytes | None:
        with self.rows.snapshot() as now:
            return now.get(A, key)


@pytest.fixture
def bank() -> Iterator[Tasks]:
    made = Tasks()
    yield made
    made.rows.close()


def write_all(txn: TableTransaction) -> None:
    """Everything that a processor's commit may have."""
    txn.put(A, b"x", (txn.get(A, b"x") or b"") + b"2")
    txn.write_state(0, [(b"\0\0\0\2k", b"v"), (b"\0\0\0\2gone", None)])
    txn.write_many(OUT, [(b"one", b"k"), (b"two", b"k", [("h", b"1")])])
    txn.write_batch(OUT, pa.record_batch({"value": pa.array([b"three"]), "key": pa.array([b"k"])}))


@pytest.mark.parametrize("long", [False, True], ids=["one-shot", "by journals"])
def test_it_commits_rows_state_events_and_positions(bank: Tasks, long: bool) -> None:
    with bank.begin() as txn:
        if long:
            txn.flush()
        write_all(txn)
        result = txn.commit(consumed=bank.consumed(), timeout=20.0)
        assert txn.commit(consumed=bank.consumed()) is result, "repeated"
    assert bank.row(b"x") == b"12"
    assert bank.sequences() == [1, 1]
    assert [e.value for e in bank.events(OUT)] == [b"one", b"two", b"three"]
    assert len(bank.events(state_stream(NAME))) == 2
    assert {c.timestamp for s in (A, OUT, state_stream(NAME)) for c in bank.commits(s)[-1:]} == {
        result.commit_timestamp
    }


def test_rows_that_count_and_positions_are_one_commit(bank: Tasks) -> None:
    """Also if the row's number is not certain at first, and if the commit is repeated by another transaction."""
    for sequence, total in ((1, b"10"), (2, b"20")):
        with bank.begin() as txn:
            txn.add(A, b"n", 10)
            write_all(txn)
            bank.sent = 0
            result = txn.commit(consumed=bank.consumed(sequence), timeout=20.0)
        assert result.counts.committed == 7
        assert (bank.row(b"n"), bank.sequences()) == (total, [sequence, sequence])
    with bank.begin() as txn:
        txn.add(A, b"n", 10)
        with pytest.raises(InvalidArgument, match="which is at 2"):
            txn.commit(consumed=bank.consumed(2), timeout=20.0)
    assert bank.row(b"n") == b"20"


def test_a_row_of_another_writer_is_added_to_once(bank: Tasks) -> None:
    with bank.begin() as txn:
        txn.add(A, b"n", 10)
        bank.put(bank.blind, n="5")
        bank.sent = 0
        txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sent == 2, "the answer asked to revalidate, once"
    assert (bank.row(b"n"), bank.sequences()) == (b"15", [1, 1])


def test_what_is_too_big_for_a_command_goes_by_journals(bank: Tasks) -> None:
    with bank.begin() as txn:
        txn.get(A, b"x")
        txn.write_state(0, [(b"\0\0\0\2%d" % n, bytes(100)) for n in range(100)])
        write_all(txn)
        many = pa.record_batch({"value": pa.array([bytes(100)] * 100)})
        txn.write_batch(OUT, many)
        assert not bank.sent
        txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sequences() == [1, 1]
    assert len(bank.events(OUT)) == 103


@pytest.mark.parametrize("long", [False, True], ids=["one-shot", "by journals"])
def test_broken_locks_move_nothing(bank: Tasks, long: bool) -> None:
    for seen in (False, True):
        txn = bank.begin()
        txn.put(A, b"y", txn.get(A, b"x") or b"")
        if long:
            txn.flush()
        bank.put(bank.blind, x="3")
        if seen:
            bank.rows.snapshot().close()
        with pytest.raises(LocksBroken):
            txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.row(b"y") is None
    assert bank.sequences() == [0, 0]
    with bank.begin() as txn:
        txn.put(A, b"y", txn.get(A, b"x") or b"")
        txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.row(b"y") == b"3"
    assert bank.sequences() == [1, 1]


def test_reads_alone_move_positions_only_if_their_locks_hold(bank: Tasks) -> None:
    txn = bank.begin()
    txn.get(A, b"x")
    bank.put(bank.blind, x="3")
    bank.rows.snapshot().close()
    with pytest.raises(LocksBroken):
        txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sequences() == [0, 0]
    with bank.begin() as txn:
        txn.get(A, b"x")
        txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sequences() == [1, 1]


@pytest.mark.parametrize("long", [False, True], ids=["one-shot", "by journals"])
def test_it_is_fenced_with_its_tasks(bank: Tasks, long: bool) -> None:
    txn = bank.begin()
    txn.put(A, b"y", txn.get(A, b"x") or b"")
    if long:
        txn.flush()
    late = bank.consumed()
    bank.take()
    with pytest.raises(OwnershipLost):
        txn.commit(consumed=late, timeout=20.0)
    assert txn.is_over
    with pytest.raises(IllegalState, match="another worker has its tasks"):
        txn.get(A, b"x")
    assert bank.row(b"y") is None
    assert bank.sequences() == [0, 0]


@pytest.mark.parametrize("broken", [False, True])
def test_an_unanswered_commit_is_asked_for_again(
    bank: Tasks, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``broken``: its locks were broken since, by others or, as the client may see it, by itself."""
    session = bank.rows._shared.session
    ask = session.try_ask

    def unanswered(*given: Any, **how: Any) -> Any:
        ask(*given, **how)

    txn = bank.begin()
    txn.put(A, b"x", (txn.get(A, b"x") or b"") + b"2")
    monkeypatch.setattr(session, "try_ask", unanswered)
    with pytest.raises(OutcomeUnknown):
        txn.commit(consumed=bank.consumed(), timeout=5.0)
    monkeypatch.undo()
    if broken:
        bank.put(bank.blind, x="9")
        bank.rows.snapshot().close()
    assert txn.commit(consumed=bank.consumed(), timeout=20.0).counts.committed == 1
    assert bank.sequences() == [1, 1]
    assert bank.row(b"x") == (b"9" if broken else b"12")


def test_a_commit_that_never_arrived_is_broken_for_good(
    bank: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = bank.rows._shared.session
    txn = bank.begin()
    txn.put(A, b"x", (txn.get(A, b"x") or b"") + b"2")
    monkeypatch.setattr(session, "try_ask", lambda *_, **__: None)
    with pytest.raises(OutcomeUnknown), txn:
        txn.commit(consumed=bank.consumed(), timeout=5.0)
    with pytest.raises(OutcomeUnknown):
        txn.commit(consumed=bank.consumed(), timeout=5.0)
    monkeypatch.undo()
    bank.put(bank.blind, x="9")
    with pytest.raises(OutcomeUnknown):  # the block was left: only the tasks' positions show it now
        txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sequences() == [0, 0]


def test_a_replica_that_lags_changes_nothing(bank: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    txn = bank.begin()
    txn.put(A, b"y", txn.get(A, b"x") or b"")
    bank.put(bank.blind, z="3")
    bank.stop_controller()
    bank.start_controller()  # it does not know which rows were written

    def lags(_: float) -> bool:
        bank.clock.sleep(0.1)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(bank.rows._follower, "step", lags)
        with pytest.raises(NotReady):
            txn.commit(consumed=bank.consumed(), timeout=2.0)
    assert bank.sequences() == [0, 0]
    txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sequences() == [1, 1]


def test_arguments_are_checked(bank: Tasks) -> None:
    with bank.rows.begin() as txn:
        with pytest.raises(InvalidArgument, match="begin with a task ownership"):
            txn.commit(consumed=bank.consumed())
        with pytest.raises(InvalidArgument, match="begin the transaction with a task ownership"):
            txn.write_state(0, [])
    with bank.begin() as txn:
        with pytest.raises(InvalidArgument, match="both, or neither"):
            txn.commit()
        with pytest.raises(InvalidArgument, match="task 7"):
            txn.write_state(7, [])
        with pytest.raises(InvalidArgument, match="a row of state"):
            txn.write_state(0, [("k", b"v")])  # type: ignore[list-item]
        with pytest.raises(InvalidArgument, match="`put` or `delete`"):
            txn.write_batch(A, pa.record_batch({"value": pa.array([b"1"])}))
        txn.write_many(OUT, [(b"good",)])
        txn.commit(consumed=bank.consumed())
    assert bank.sequences() == [1, 1]


def test_half_of_many_events_is_never_committed(bank: Tasks) -> None:
    with bank.begin() as txn:
        with pytest.raises(InvalidArgument):
            txn.write_many(OUT, [(b"good",), ("bad",)])  # type: ignore[list-item]
        with pytest.raises(IllegalState, match="write_many was left"):
            txn.commit(consumed=bank.consumed())
    assert bank.sequences() == [0, 0]


def test_older_controllers_take_no_locks_with_positions() -> None:
    bank = Tasks(level=1)
    with bank.begin() as txn:
        txn.get(A, b"x")
        with pytest.raises(FeatureNotEnabled):
            txn.commit(consumed=bank.consumed(), timeout=20.0)
    assert bank.sequences() == [0, 0]
    bank.rows.close()


def test_an_assigned_id_is_not_replaced(bank: Tasks) -> None:
    with bank.begin() as txn:
        txn_id = txn.assign_id()
        txn.put(A, b"q", b"1")
        with pytest.raises(InvalidArgument, match="`assign_id`"):
            txn.commit(consumed=bank.consumed())
        result = txn.commit(name="once", consumed=bank.consumed(), timeout=20.0)
        assert result.txn_id == txn_id
