"""Deleting ranges of rows, and all rows, in a transaction, over a real controller and the log in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import IllegalState, InvalidArgument, LocksBroken, WriteFailed
from tests.tables import test_isolation
from tests.tables.test_transactions import A, B, Bank
from tests.tables.test_transactions import bank as bank


def put(bank: Bank, **rows: int | None) -> None:
    """Blind writes to table A, which the replica has read."""
    test_isolation.put(bank, **rows)
    bank.rows.snapshot().close()


def rows(bank: Bank, table: str = A) -> list[str]:
    with bank.rows.snapshot() as view:
        return [key.decode() for key, _ in view.scan(table)]


RANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"low": b"b"}, ["a"]),
    ({"high": b"c"}, ["c", "k", "own", "x"]),
    ({"low": b"a", "high": b"c"}, ["c", "k", "own", "x"]),
    ({"prefix": b"o"}, ["a", "b", "c", "k", "x"]),
    ({"low": b"d", "high": b"e"}, ["a", "b", "c", "k", "own", "x"]),
    ({"low": b"y"}, ["a", "b", "c", "k", "own", "x"]),
]


@pytest.mark.parametrize(("chosen", "left"), RANGES, ids=[str(chosen) for chosen, _ in RANGES])
@pytest.mark.parametrize("keepalive", [None, 60.0])
def test_the_rows_of_a_range_are_deleted_and_no_others(
    bank: Bank, chosen: dict[str, Any], left: list[str], keepalive: float | None
) -> None:
    put(bank, a=1, b=2, c=3, gone=4)
    put(bank, gone=None)
    with bank.rows.begin(keepalive=keepalive) as txn:
        txn.put(A, b"own", b"5")
        txn.put(B, b"b", b"of another table")
        assert txn.delete_range(A, **chosen) == 6 - len(left)
        assert [key.decode() for key, _ in txn.scan(A)] == left
        assert txn.delete_range(A, **chosen) == 0
        result = txn.commit()
    assert rows(bank) == left
    assert rows(bank, B) == ["b"]
    assert result.counts.committed == 2 + 6 - len(left)


def test_a_table_is_truncated_and_written_anew_in_one_commit(bank: Bank) -> None:
    """Also above what one command takes: by journals, with more rows than the window names."""
    put(bank, **dict.fromkeys((f"r{n:04d}" for n in range(300)), 1))

    def renew(txn: TableTransaction) -> int:
        count = txn.truncate(A)
        txn.put(A, b"new", b"1")
        return count

    done = bank.rows.transact(renew)
    assert done.value == 302
    assert rows(bank) == ["new"]
    with bank.rows.snapshot(at=done.commit_timestamp - 1) as before:
        assert len(list(before.scan(A))) == 302
    assert {commit.txn_id for commit in bank.commits(A)[-1:]} == {done.txn_id}


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
@pytest.mark.parametrize("keepalive", [None, 60.0])
@pytest.mark.parametrize(("key", "breaks"), [("b", True), ("ba", True), ("c", False), ("d", False)])
def test_a_phantom_in_the_range_breaks_the_transaction(
    bank: Bank,
    isolation: Literal["serializable", "snapshot"],
    keepalive: float | None,
    key: str,
    breaks: bool,
) -> None:
    put(bank, a=1, b=2, c=3)
    with bank.rows.begin(isolation=isolation, keepalive=keepalive) as txn:
        assert txn.delete_range(A, b"a", b"c") == 2
        put(bank, **{key: 7})
        if breaks:
            with pytest.raises(LocksBroken):
                txn.commit(timeout=20.0)
        else:
            txn.commit(timeout=20.0)
    assert set("ab") & set(rows(bank)) == (set("ab") if breaks else set())


def test_a_joined_process_deletes_ranges_with_its_own_rows(bank: Bank) -> None:
    put(bank, a=1, b=2)
    with bank.rows.begin(keepalive=60.0) as txn:
        txn.put(A, b"aa", b"3")
        txn.flush()
        with bank.rows.join(txn.token()) as part:
            part.put(A, b"ab", b"4")
            assert part.delete_range(A, prefix=b"a") == 2
            assert part.get(A, b"ab") is None
            receipt = part.finish()
        txn.commit(receipts=[receipt])
    assert rows(bank) == ["aa", "b", "k", "x"]


def test_a_range_that_is_deleted_in_part_is_not_committed(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bank, a=1, b=2, c=3)
    for keepalive in (None, 60.0):
        with bank.rows.begin(keepalive=keepalive) as txn:
            write, left = txn._write, [1]

            def failing(
                event: Any, write: Callable[[Any], None] = write, left: list[int] = left
            ) -> None:
                if not left:
                    raise WriteFailed("not acknowledged")
                left.pop()
                write(event)

            monkeypatch.setattr(txn, "_write", failing)
            with pytest.raises(WriteFailed):
                txn.delete_range(A, b"a", b"d")
            for call in (txn.commit, lambda txn=txn: txn.put(A, b"n", b"")):
                with pytest.raises(IllegalState, match="because delete_range was left by WriteF"):
                    call()
    assert rows(bank) == ["a", "b", "c", "k", "x"]


@pytest.mark.parametrize(
    "call",
    [
        lambda txn: txn.delete_range(A),
        lambda txn: txn.delete_range(A, prefix=b""),
        lambda txn: txn.delete_range(A, b""),
        lambda txn: txn.delete_range(A, b"b", b"a"),
        lambda txn: txn.delete_range(A, b"a", prefix=b"b"),
        lambda txn: txn.delete_range(A, "a"),
        lambda txn: txn.delete_range("bank/none", b"a"),
        lambda txn: txn.truncate("bank/none"),
    ],
)
def test_a_wrong_range_is_refused_and_deletes_nothing(
    bank: Bank, call: Callable[[TableTransaction], int]
) -> None:
    with bank.rows.begin() as txn:
        with pytest.raises(InvalidArgument):
            call(txn)
        txn.put(A, b"own", b"1")
        txn.commit()
    assert rows(bank) == ["k", "own", "x"]
