"""`add`, `min` and `max` of a transaction, over a real controller and the log in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import (
    DeadlineExceeded,
    FeatureNotEnabled,
    InvalidArgument,
    LocksBroken,
    NotANumber,
    NumberOverflow,
    TransactionAborted,
)
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.tables.test_transactions import A, B, Bank

K = b"n"


@pytest.fixture
def bank() -> Iterator[Bank]:
    made = Bank()
    made.connect(lane=ADMIN_LANE).feature_level(raise_to=LEVEL)
    made.rows._shared.one_shot_bytes = 1 << 18
    made.rows.snapshot().close()  # it is loaded
    yield made
    made.rows.close()


def value(bank: Bank, key: bytes = K, table: str = A) -> bytes | None:
    with bank.rows.snapshot() as view:
        return view.get(table, key)


def change(bank: Bank, kind: str, *numbers: int, key: Any = K, table: Any = A) -> int:
    def function(txn: TableTransaction) -> None:
        for number in numbers:
            getattr(txn, kind)(table, key, number)

    return bank.rows.transact(function, fresh=False, timeout=2.0).counts.committed


def test_rows_are_numbers_for_any_reader(bank: Bank) -> None:
    assert change(bank, "add", 5) == 1
    assert value(bank) == b"5"
    assert change(bank, "add", -3, -4) == 1, "adds of a row are one"
    assert value(bank) == b"-2"
    assert change(bank, "max", 7, 3) == 1
    assert value(bank) == b"7"
    assert change(bank, "min", 4, 9, table=B) == 1
    assert value(bank, table=B) == b"4"
    typed: Any = bank.client.stream(A, key=str, value=json)
    assert change(bank, "add", 1, key="n", table=typed) == 1
    with bank.rows.snapshot() as view:
        assert view.get(typed, "n") == 8


def test_a_hot_row_makes_nobody_try_again(bank: Bank) -> None:
    """Transactions that began at one snapshot; only the first one's row has to be proven."""
    begun = [bank.rows.begin() for _ in range(20)]
    bank.put(bank.blind, B, x="1")
    bank.sent = 0
    for txn in begun:
        with txn:
            txn.add(A, K, 1)
            txn.put(B, b"%d" % txn.timestamp, b"v")
            txn.commit()
    assert bank.sent == 20
    assert value(bank) == b"20"


def test_it_begins_without_waiting_for_the_replica(bank: Bank) -> None:
    """And its reads are of an older time, with locks that break if that matters."""
    seen = bank.rows.timestamp
    bank.put(bank.client, n="1")
    with bank.rows.begin(fresh=False) as txn:
        assert txn.timestamp == seen
        txn.add(A, K, 1)
        txn.commit()
    assert value(bank) == b"2"
    seen = bank.rows.timestamp
    bank.put(bank.client, n="5")
    with bank.rows.begin(fresh=False) as txn:
        assert txn.get(A, K) == b"2"
        txn.put(A, K, b"3")
        with pytest.raises(LocksBroken):
            txn.commit()
    with bank.rows.begin(fresh=False) as txn:
        assert txn.get(A, K) == b"5", "a transaction that begins again sees what broke the locks"


def takeover(bank: Bank) -> None:
    bank.stop_controller()
    bank.start_controller()


def put(bank: Bank) -> None:
    bank.put(bank.blind, n="40")


def put_by_journal(bank: Bank) -> None:
    bank.put(bank.by_journal, n="40")


@pytest.mark.parametrize(
    ("meanwhile", "then"), [(takeover, b"11"), (put, b"50"), (put_by_journal, b"50")]
)
def test_a_number_that_is_not_certain_is_read_anew(
    bank: Bank, meanwhile: Callable[[Bank], None], then: bytes
) -> None:
    with bank.rows.begin() as txn:
        txn.add(A, K, 10)
        with bank.client.outside():
            assert change(bank, "add", 1) == 1
        meanwhile(bank)
        bank.sent = 0
        txn.commit()
    assert bank.sent == 2, "the answer asked to revalidate, once"
    assert value(bank) == then


def test_a_row_that_others_write_all_the_time_is_given_up_in_time(bank: Bank) -> None:
    session = bank.rows._shared.session
    real, sent = session.locked_shot, []

    def beaten(*given: Any) -> Any:
        sent.append(bank.clock.now)
        bank.put(bank.blind, n=str(len(sent)))
        return real(*given)

    session.locked_shot = beaten  # type: ignore[assignment,method-assign]
    began = bank.clock.now
    with bank.rows.begin() as txn:
        txn.add(A, K, 1)
        with pytest.raises(DeadlineExceeded, match="keep writing"):
            txn.commit(timeout=2.0)
    session.locked_shot = real  # type: ignore[method-assign]
    assert bank.clock.now - began < 3.0
    assert 10 < len(sent) < 100, "not as fast as it can"
    assert value(bank) == b"%d" % len(sent)


@pytest.mark.parametrize(
    ("row", "number", "error"),
    [
        ("five", 1, NotANumber),
        ("1.5", 1, NotANumber),
        ("9" * 50, 1, NotANumber),
        (str(limits.MOST_NUMBER), 1, NumberOverflow),
    ],
)
def test_a_row_that_is_no_number_is_left_as_it_is(
    bank: Bank, row: str, number: int, error: type[Exception]
) -> None:
    bank.put(bank.blind, n=row)
    with bank.rows.begin() as txn:
        txn.add(A, K, number)
        txn.put(A, b"other", b"v")
        with pytest.raises(error, match="bank/a b'n'"):
            txn.commit()
    assert (value(bank), value(bank, b"other")) == (row.encode(), None)


def test_its_locks_break_as_any(bank: Bank) -> None:
    with bank.rows.begin() as txn:
        txn.get(A, b"read")
        txn.add(A, K, 1)
        bank.put(bank.blind, read="1")
        with pytest.raises(LocksBroken):
            txn.commit()
    assert value(bank) is None


def test_a_late_copy_of_the_commit_counts_once(bank: Bank) -> None:
    """It is carried out after the answer to revalidate, as another commit left the number; then the lock breaks."""
    session = bank.rows._shared.session
    real = session.locked_shot

    def late(command: r.OneShot, deadline: float, *_: Any) -> Any:
        session.locked_shot = real  # type: ignore[method-assign]
        bank.put(bank.blind, n="40")
        answer = real(command, deadline)
        assert isinstance(answer, r.Revalidate)
        with bank.client.outside():
            assert change(bank, "add", 1) == 1
            assert isinstance(real(command, deadline), r.Outcome)
            bank.put(bank.client, read="1")
        bank.rows.snapshot().close()  # the replica sees it
        return answer

    with bank.rows.begin() as txn:
        txn.get(A, b"read")
        txn.add(A, K, 1)
        session.locked_shot = late  # type: ignore[assignment,method-assign]
        assert txn.commit().counts.committed == 1
    assert value(bank) == b"42"


def test_a_late_copy_of_a_commit_that_was_given_up_does_nothing(bank: Bank) -> None:
    session = bank.rows._shared.session
    real, sent = session.locked_shot, list[r.OneShot]()

    def beaten(command: r.OneShot, deadline: float, *more: Any) -> Any:
        sent.append(command)
        bank.put(bank.blind, n=str(len(sent)))
        return real(command, deadline, *more)

    session.locked_shot = beaten  # type: ignore[assignment,method-assign]
    with bank.rows.begin() as txn:
        txn.add(A, K, 1)
        with pytest.raises(DeadlineExceeded):
            txn.commit(timeout=1.0)
    session.locked_shot = real  # type: ignore[method-assign]
    assert change(bank, "add", 1) == 1  # from now on the controller knows the number
    then = value(bank)
    with pytest.raises(TransactionAborted):
        real(sent[0], bank.clock.now + 5)
    assert value(bank) == then


def test_below_its_level_nothing_is_written() -> None:
    bank = Bank()
    with bank.rows.begin() as txn:
        txn.add(A, K, 1)
        with pytest.raises(FeatureNotEnabled, match="--raise 3"):
            txn.commit()
    assert value(bank) is None
    bank.rows.close()


def many(txn: TableTransaction) -> None:
    for number in range(65):
        txn.add(A, b"%d" % number, 1)


def big(txn: TableTransaction) -> None:
    txn.put(B, b"big", b"v" * (1 << 20))


MANY: dict[str, tuple[Callable[[TableTransaction], Any], str]] = {
    "get": (lambda txn: txn.get(A, K), "can't read or write it"),
    "scan": (lambda txn: list(txn.scan(A)), "can't read or write it"),
    "put": (lambda txn: txn.put(A, K, b"1"), "can't read or write it"),
    "delete": (lambda txn: txn.delete(A, K), "can't read or write it"),
    "insert": (lambda txn: txn.insert(A, K, b"1"), "can't read or write it"),
    "otherwise": (lambda txn: txn.max(A, K, 1), "changed otherwise"),
    "written": (lambda txn: txn.add(A, b"written", 1), "`put` the number"),
    "no integer": (lambda txn: txn.add(A, b"m", 1.5), "no integer of 64 bits"),  # type: ignore[call-overload]
    "no bool": (lambda txn: txn.add(A, b"m", True), "no integer of 64 bits"),
    "too big": (lambda txn: txn.add(A, b"m", 1 << 63), "no integer of 64 bits"),
    "no table": (lambda txn: txn.add("bank/none", K, 1), "not in this replica"),
    "no key": (lambda txn: txn.add(A, b"", 1), "not 0 bytes"),
    "65 rows": (many, "64 are allowed"),
    "token": (lambda txn: txn.token(), "one command"),
    "flush": (lambda txn: txn.flush(), "one command"),
    "a big write": (big, "one command"),
    "prepare": (lambda txn: txn.prepare(), "`prepare` takes none"),
    "a number": (lambda txn: txn.commit(name="n", number=1), "one command"),
    "delete_range": (lambda txn: txn.delete_range(A, prefix=K), "can't read or write it"),
    "truncate": (lambda txn: txn.truncate(A), "can't read or write it"),
}


@pytest.mark.parametrize("case", MANY.values(), ids=MANY.keys())
def test_what_is_refused_leaves_the_transaction_as_it_was(
    bank: Bank, case: tuple[Callable[[TableTransaction], Any], str]
) -> None:
    call, text = case
    with bank.rows.begin() as txn:
        txn.put(A, b"written", b"v")
        txn.add(A, K, 1)
        with pytest.raises(InvalidArgument, match=text):
            call(txn)
        assert list(txn.scan(A, b"written")) == [(b"written", b"v")]
        txn.commit()
    assert value(bank) == b"1"


def test_a_write_that_was_refused_takes_no_room(bank: Bank) -> None:
    with bank.rows.begin() as txn:
        txn.add(A, K, 1)
        with pytest.raises(InvalidArgument, match="one command"):
            big(txn)
        txn.add(B, K, 1)
        txn.put(B, b"other", b"v")
        txn.commit()
    assert (value(bank), value(bank, table=B)) == (b"1", b"1")


def test_other_rows_are_deleted(bank: Bank) -> None:
    bank.put(bank.client, a="1", z="2")
    with bank.rows.begin() as txn:
        txn.add(A, K, 1)
        txn.add(B, b"a", 1)
        assert txn.delete_range(A, high=K) == 1
        txn.commit()
    assert (value(bank, b"a"), value(bank), value(bank, b"z")) == (None, b"1", b"2")


def test_other_transactions_are_refused(bank: Bank) -> None:
    with bank.rows.begin(keepalive=60) as txn:
        with pytest.raises(InvalidArgument, match="open at the controller"):
            txn.add(A, K, 1)
        with (
            bank.rows.join(txn.token()) as part,
            pytest.raises(InvalidArgument, match="other processes join"),
        ):
            part.add(A, K, 1)
        txn.abort()
    with bank.rows.begin() as txn:
        txn.flush()
        with pytest.raises(InvalidArgument, match="open at the controller"):
            txn.min(A, K, 1)
        txn.abort()
