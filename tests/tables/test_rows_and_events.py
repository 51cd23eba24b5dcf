"""Rows of tables and events of streams in one transaction; and `transact` of both kinds of handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from anabranch.client.table_transaction import TableTransaction
from anabranch.client.transaction import Transaction
from anabranch.errors import InvalidArgument, LocksBroken, TransactionAborted, WriteFailed
from anabranch.protocol.ids import NO_TXN
from anabranch.types import Event
from tests.tables.test_transactions import A, B, Bank

EVENTS = "bank/events"
SEEN = (b"paid", b"ann", (("by", b"x"),), 1_700_000_000_000)


@pytest.fixture
def bank() -> Iterator[Bank]:
    made = Bank()
    made.client.create_stream(EVENTS, 2)
    made.put(made.blind, k="1")
    made.rows.snapshot().close()
    yield made
    made.rows.close()


def events(bank: Bank, stream: str = EVENTS) -> list[Event]:
    return list(bank.client.snapshot(stream).read(stream))


def short(bank: Bank) -> TableTransaction:
    return bank.rows.begin()


def long(bank: Bank) -> TableTransaction:
    return bank.rows.begin(keepalive=30.0)


def write_both(txn: Any) -> None:
    txn.put(A, b"k", b"%d" % (int(txn.get(A, b"k")) + 1))
    txn.write(EVENTS, b"paid", key=b"ann", headers={"by": b"x"}, timestamp=1_700_000_000_000)
    txn.write(EVENTS, b"no key")


def assert_both(bank: Bank, commit_timestamp: int) -> None:
    found = {event.value: event for event in events(bank)}
    assert set(found) == {b"paid", b"no key"}
    paid = found[b"paid"]
    assert (paid.value, paid.key, tuple(paid.headers), paid.timestamp) == SEEN
    assert {event.commit_timestamp for event in found.values()} == {commit_timestamp}
    with bank.rows.snapshot() as now:
        row = now.get_version(A, b"k")
        assert (row.value, row.timestamp) == (b"2", commit_timestamp)


@pytest.mark.parametrize("begin", [short, long])
def test_rows_and_events_commit_together(
    bank: Bank, begin: Callable[[Bank], TableTransaction]
) -> None:
    with begin(bank) as txn:
        write_both(txn)
        assert events(bank) == []
        result = txn.commit()
    assert result.counts.committed == 3
    assert_both(bank, result.commit_timestamp)


def test_a_process_that_joins_writes_rows_and_events(bank: Bank) -> None:
    with bank.rows.begin(keepalive=30.0) as txn:
        with bank.rows.join(txn.token()) as part:
            write_both(part)
            receipt = part.finish()
        result = txn.commit(receipts=[receipt])
    assert_both(bank, result.commit_timestamp)


@pytest.mark.parametrize("begin", [short, long])
def test_events_are_dropped_with_rows_whose_locks_are_broken(
    bank: Bank, begin: Callable[[Bank], TableTransaction]
) -> None:
    txn = begin(bank)
    write_both(txn)
    bank.put(bank.blind, k="7")
    with pytest.raises(LocksBroken):
        txn.commit()
    assert events(bank) == []


def test_an_event_alone_is_held_back_by_a_broken_lock(bank: Bank) -> None:
    """The event was decided by what was read: it must not be committed once that has changed."""
    txn = bank.rows.begin()
    assert txn.get(A, b"k") == b"1"
    txn.write(EVENTS, b"it is 1")
    bank.put(bank.blind, k="7")
    with pytest.raises(LocksBroken):
        txn.commit()
    assert events(bank) == []


def test_a_flush_names_the_lock_that_was_broken_meanwhile(bank: Bank) -> None:
    """Another commit comes after the locks are registered, and before the writes are stored."""
    txn = bank.rows.begin()
    assert txn.get(A, b"k") == b"1"
    txn.put(A, b"other", b"2")
    flush = Transaction.flush

    def late(own: Transaction, timeout: float | None) -> None:
        bank.put(bank.blind, k="7")
        flush(own, timeout)

    with patch.object(Transaction, "flush", late), pytest.raises(LocksBroken) as raised:
        txn.flush()
    assert (raised.value.table, raised.value.key) == (A, b"k")


REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("a table of the replica", (A, b"1", b"k"), "`put` or `delete` its rows"),
    ("a text", (EVENTS, "text"), "bytes"),
    ("a header's text", (EVENTS, b"v", b"k", {"h": "text"}), "header 'h'"),
    ("seconds", (EVENTS, b"v", b"k", None, -5), "timestamp"),
]


@pytest.mark.parametrize("begin", [short, long])
@pytest.mark.parametrize(("_", "given", "why"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_refused_event_leaves_the_transaction_usable(
    bank: Bank, begin: Callable[[Bank], TableTransaction], _: str, given: tuple[Any, ...], why: str
) -> None:
    with begin(bank) as txn:
        with pytest.raises(InvalidArgument, match=why):
            txn.write(*given)
        write_both(txn)
        assert_both(bank, txn.commit().commit_timestamp)


def test_a_table_outside_of_the_replica_is_written_without_a_look(bank: Bank) -> None:
    bank.client.create_table("bank/other")
    with bank.rows.begin() as txn:
        txn.put(A, b"k", b"2")
        txn.write("bank/other", b"row", key=b"k")
        txn.commit()
    assert [event.value for event in events(bank, "bank/other")] == [b"row"]


def test_the_scope_of_a_name_does_not_depend_on_what_is_written_first(bank: Bank) -> None:
    bank.client.create_stream("shop/orders", near="bank")
    for first in ("shop/orders", EVENTS):

        def work(txn: TableTransaction, first: str = first) -> None:
            txn.write(first, b"e", key=b"k")
            txn.put(B, b"k", b"1")

        bank.rows.transact(work, name="once")
    assert [event.value for event in events(bank, "shop/orders")] == [b"e"]
    assert events(bank) == []


# -- transact ---------------------------------------------------------------------------------------------


def test_the_result_has_what_the_function_returned(bank: Bank) -> None:
    assert bank.rows.transact(lambda txn: txn.get(A, b"k")).value == b"1"

    def work(txn: Transaction) -> int:
        txn.write(EVENTS, b"v", key=b"k")
        return 7

    result = bank.client.transact(work)
    assert result.value == 7
    (event,) = events(bank)
    assert (event.txn_id, event.commit_timestamp) == (result.txn_id, result.commit_timestamp)


@pytest.mark.parametrize("error", [TransactionAborted, WriteFailed])
def test_a_transaction_that_is_aborted_is_made_again(bank: Bank, error: type[Exception]) -> None:
    calls = []

    def work(txn: Transaction) -> None:
        calls.append(txn)
        txn.write(EVENTS, b"%d" % len(calls), key=b"k")
        txn.flush()
        if len(calls) == 1:
            bank.client.abort(txn.token("all"))
            raise error("by another process")

    bank.client.transact(work)
    assert [event.value for event in events(bank)] == [b"2"]


@pytest.mark.parametrize("error", [ZeroDivisionError, TransactionAborted])
def test_an_exception_of_the_function_aborts_and_is_raised(
    bank: Bank, error: type[Exception]
) -> None:
    def work(txn: Transaction) -> None:
        txn.write(EVENTS, b"v", key=b"k")
        raise error("mine")

    with pytest.raises(error, match="mine"):
        bank.client.transact(work)
    assert events(bank) == []


def test_a_transaction_without_a_scope_gets_that_of_its_first_stream(bank: Bank) -> None:
    bank.client.create_stream("shop/orders", near="bank")

    def work(txn: Transaction) -> None:
        with pytest.raises(InvalidArgument, match="no scope yet"):
            txn.token()
        txn.write("shop/orders", b"o", key=b"k")
        txn.write(EVENTS, b"v", key=b"k")

    result = bank.client.transact(work)
    assert [row.scope for row in bank.client.transactions("shop", finished=True)] == ["shop"]
    assert bank.client.state(result.txn_id).state == "COMMITTED"


def test_a_function_that_writes_nothing_sends_nothing(bank: Bank) -> None:
    before = len(bank.client.transactions(finished=True))
    result = bank.client.transact(lambda _: "nothing to do")
    assert (result.txn_id, result.counts.committed, result.value) == (NO_TXN, 0, "nothing to do")
    assert len(bank.client.transactions(finished=True)) == before
    with pytest.raises(InvalidArgument, match="no scope yet"):
        bank.client.transact(lambda _: None, name="a name needs a scope")
