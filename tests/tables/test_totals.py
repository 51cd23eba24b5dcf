"""Totals by group, over a real controller and the log in memory: a fold of their source at every timestamp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from contextvars import Context
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from anabranch import Total
from anabranch.client.calls import derivations
from anabranch.client.calls.derivations import _Piece
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.derived_rows import (
    BUILDING,
    PROGRESS_KEY,
    READY,
    STATE_KEY,
    Totals,
    of_value,
    total_of,
)
from anabranch.errors import (
    AnabranchError,
    DerivationFailed,
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    NotReady,
    NumberOverflow,
    StreamExists,
    TooManyLocks,
    TransactionAborted,
)
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.tables.test_derivations import ORDERS, Shop, city, do_and_end, rows_of

BY_BRANCH = "shop/orders-by-branch-v1"
OF = r.Derivation(ORDERS, "by-branch", 1)


def numbers(_: bytes, row: bytes) -> list[tuple[bytes, int]]:
    """Pairs of a row such as ``oslo 5 rome 7``."""
    words = row.split()
    return list(zip(words[::2], map(int, words[1::2]), strict=True))


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.close()


def with_totals(shop: Shop) -> Replica:
    shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
    return shop.replica(shop.client)


def knowing(shop: Shop, *versions: int) -> Client:
    """Another client, which has the function, and has not called `derive`."""
    made = shop.other()
    for version in versions or (1,):
        made._shared.derivations.add(Totals(OF._replace(version=version), numbers))
    return made


def totals_of(replica: Replica, table: str = BY_BRANCH, at: int | None = None) -> dict[str, Total]:
    rows = rows_of(replica, table, at)
    return {key.removesuffix(b"\0\0").decode(): total_of(row) for key, row in rows.items()}


def total(replica: Replica, group: str) -> Total:
    with replica.begin() as txn:
        return txn.total("by-branch", group.encode())


# -- totals that follow -------------------------------------------------------------------------------------


def test_totals_are_part_of_the_commit(shop: Shop) -> None:
    rows = with_totals(shop)
    first = shop.put(rows, a="oslo 5", b="oslo 7 rome 1", c="")
    assert totals_of(rows) == {"oslo": Total(12, 2), "rome": Total(1, 1)}
    assert total(rows, "oslo") == (12, 2)
    assert [c.timestamp for c in shop.commits(BY_BRANCH)][-1] == first
    then = shop.put(rows, a="rome -9", b=None)
    assert totals_of(rows) == {"rome": Total(-9, 1)}, "a group without rows has no total"
    assert total(rows, "oslo") == Total(0, 0)
    assert totals_of(rows, at=then - 1) == {"oslo": Total(12, 2), "rome": Total(1, 1)}
    assert shop.client.check_derivation(ORDERS, "by-branch") == []


def test_only_totals_that_change_are_written(shop: Shop) -> None:
    rows = with_totals(shop)
    shop.put(rows, a="oslo 5 rome 1")
    before = len(shop.events(BY_BRANCH))
    shop.put(rows, a="oslo 4 oslo 1 rome 2")
    assert len(shop.events(BY_BRANCH)) == before + 1


def several_writes(txn: TableTransaction) -> None:
    txn.put(ORDERS, b"a", b"oslo 1")
    txn.put(ORDERS, b"a", b"rome 2")
    txn.insert(ORDERS, b"d", b"oslo 3")
    txn.delete(ORDERS, b"d")
    txn.replace(ORDERS, b"a", b"bonn 4")
    txn.put(ORDERS, b"e", b"oslo 5 bonn 6")
    assert txn.total("by-branch", b"bonn").sum >= 10, "own writes are seen"


def delete_some(txn: TableTransaction) -> None:
    txn.put(ORDERS, b"c", b"rome 7")
    assert txn.delete_range(ORDERS, b"a", b"c") == 2


def delete_all(txn: TableTransaction) -> None:
    assert txn.truncate(ORDERS) == 3
    txn.put(ORDERS, b"z", b"oslo 8")


@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
@pytest.mark.parametrize("ends", ["commit", "prepare", "abort"])
def test_each_kind_of_write_is_followed(shop: Shop, ends: str, keepalive: float | None) -> None:
    rows = with_totals(shop)
    for work in (several_writes, delete_some, delete_all):
        shop.put(rows, a="oslo 1", b="rome 2", c="oslo 3 rome 4", e=None)
        before = totals_of(rows)
        do_and_end(rows, work, ends, keepalive)
        assert shop.client.check_derivation(ORDERS, "by-branch") == []
        assert (totals_of(rows) == before) == (ends == "abort")


def test_the_check_finds_differences(shop: Shop) -> None:
    rows = with_totals(shop)
    shop.put(rows, a="oslo 5", b="rome 1")
    assert shop.client.check_derivation(
        ORDERS, "by-branch", lambda key, row: [(b"oslo", 6), (key, 1)] if key == b"a" else None
    ) == [
        f"{BY_BRANCH} has 5 of 1 row for b'oslo', and the rows have 6 of 1",
        f"{BY_BRANCH} has 1 of 1 row for b'rome', and the rows have 0 of 0",
        f"{BY_BRANCH} has 0 of 0 rows for b'a', and the rows have 1 of 1",
    ]


BAD: dict[bytes, tuple[Any, type[Exception]]] = {
    b"raises": (None, ZeroDivisionError),
    b"no number": ((b"oslo", 1.5), InvalidArgument),
    b"a bool": ((b"oslo", True), InvalidArgument),
    b"a word": (("oslo", 1), InvalidArgument),
    b"bytes": (b"ab", InvalidArgument),
    b"a number": (5, InvalidArgument),
    b"three": ((b"oslo", 1, 2), InvalidArgument),
    b"long": ((b"x" * 9_000, 1), InvalidArgument),
    b"too much": ((b"oslo", (1 << 63) - 1), NumberOverflow),
    b"too little": ([(b"oslo", -(1 << 63)), (b"oslo", -3)], NumberOverflow),
}


def odd(_: bytes, row: bytes) -> Any:
    if row == b"raises":
        raise ZeroDivisionError
    return BAD[row][0] if row in BAD else (b"oslo", 2)


def test_an_error_of_the_function_leaves_the_transaction_as_it_was(
    shop: Shop, subtests: pytest.Subtests
) -> None:
    shop.client.derive(ORDERS, "by-branch", odd, totals=True)
    rows = shop.replica(shop.client)
    with rows.begin() as txn:
        txn.put(ORDERS, b"a", b"fine")
        for row in BAD:
            with subtests.test(row.decode()), pytest.raises(BAD[row][1]):
                txn.put(ORDERS, b"b", row)
        txn.put(ORDERS, b"c", b"too")
        txn.commit()
    assert rows_of(rows, ORDERS) == {b"a": b"fine", b"c": b"too"}
    assert totals_of(rows) == {"oslo": Total(4, 2)}


def test_results_may_be_one_pair_several_or_none(shop: Shop) -> None:
    made: dict[bytes, Any] = {
        b"none": None,
        b"pair": (b"\0", 1),
        b"tuple": ((b"\0", 2), (b"", 3)),
        b"pairs": ((b"\0\xff", n) for n in (4, 5)),
    }
    shop.client.derive(ORDERS, "by-branch", lambda _, row: made[row], totals=True)
    rows = shop.replica(shop.client)
    for row in made:
        with rows.begin() as txn:
            txn.put(ORDERS, row, row)
            txn.commit()
    with rows.begin() as txn:
        assert [txn.total("by-branch", group) for group in (b"\0", b"", b"\0\xff")] == [
            (3, 2), (3, 1), (9, 1),
        ]  # fmt: skip


def test_an_empty_tuple_is_no_pairs() -> None:
    made = Totals(r.Derivation(ORDERS, "by-branch", 1), lambda *_: ())
    assert made.numbers(b"k", b"row") == {}


def test_a_row_that_is_no_total(shop: Shop) -> None:
    rows = with_totals(shop)
    with rows.begin() as txn:
        txn.write_entries(OF, [(of_value(b"oslo"), b"many")])
        txn.commit()
    with pytest.raises(MalformedRecord, match="no total"):
        total(rows, "oslo")
    with pytest.raises(MalformedRecord, match="no total"):
        shop.put(rows, a="oslo 5")


# -- locks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
def test_of_two_writers_of_a_group_one_commits(
    shop: Shop, isolation: Any, keepalive: float | None
) -> None:
    rows = with_totals(shop)
    with (
        rows.begin(isolation=isolation, keepalive=keepalive) as one,
        rows.begin(isolation=isolation, keepalive=keepalive) as other,
    ):
        one.put(ORDERS, b"a", b"oslo 1")
        other.put(ORDERS, b"b", b"oslo 2")
        with shop.client.outside():
            one.commit()
            with pytest.raises((LocksBroken, TransactionAborted)):
                other.commit()
    assert totals_of(rows) == {"oslo": Total(1, 1)}


@pytest.mark.parametrize(
    ("change", "breaks"),
    [("oslo 6", True), (None, True), ("oslo 5 rome 1", False), ("rome 5", True)],
)
def test_a_total_is_locked(shop: Shop, change: str | None, breaks: bool) -> None:
    rows = with_totals(shop)
    shop.put(rows, a="oslo 5")
    with rows.begin() as txn:
        assert txn.total("by-branch", b"oslo") == (5, 1)
        txn.put(ORDERS, b"z", b"bonn 1")
        with shop.client.outside():
            shop.put(rows, a=change)
        if breaks:
            with pytest.raises(LocksBroken, match="by-branch"):
                txn.commit()
        else:
            txn.commit()
    assert shop.client.check_derivation(ORDERS, "by-branch") == []


def test_a_loader_locks_whole_tables(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it reaches the limit before anything is written."""
    monkeypatch.setattr(limits, "LOCKS", limits.LOCKS._replace(value=200))
    shop.client.derive(ORDERS, "by-name", lambda key, _: key, unique=True)
    rows, count = with_totals(shop), 101

    def load(txn: TableTransaction) -> None:
        for n in range(count):
            txn.put(ORDERS, b"k%d" % n, b"b%d 1" % (n % 100))

    with rows.begin() as txn, pytest.raises(TooManyLocks):
        load(txn)
    assert not rows_of(rows, ORDERS)
    assert not totals_of(rows)
    with rows.begin() as txn:
        for table in rows.tables:
            txn.lock(table)
        load(txn)
        txn.commit()
    assert sum(each.rows for each in totals_of(rows).values()) == count
    assert shop.client.check_derivation(ORDERS, "by-name") == []


# -- builds -------------------------------------------------------------------------------------------------


def test_they_are_built_from_the_rows_that_are_there(shop: Shop) -> None:
    plain = shop.replica(shop.client)
    for first in range(0, 200, 50):
        shop.put(plain, **{f"k{n:03}": f"b{n % 3} {n}" for n in range(first, first + 50)})
    rows = with_totals(shop)
    assert totals_of(rows) == {
        f"b{rest}": Total(sum(range(rest, 200, 3)), len(range(rest, 200, 3))) for rest in range(3)
    }
    with rows.snapshot() as view:
        assert view.get(BY_BRANCH, STATE_KEY) == READY
        assert view.get(BY_BRANCH, PROGRESS_KEY) is None
    assert shop.client.describe(BY_BRANCH).settings["derived.built"] == "true"


class Meanwhile:
    """Runs something within each piece of a build: after its snapshot, and before its commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Callable[[int], None]) -> None:
        real, self.times = _Piece.__call__, 0

        def call(piece: _Piece, txn: TableTransaction) -> int:
            with txn._shared.outside():
                run(self._next())
            done = real(piece, txn)
            with txn._shared.outside():
                run(self._next())
            return done

        monkeypatch.setattr(derivations, "_PIECE", 2)
        monkeypatch.setattr(_Piece, "__call__", call)

    def _next(self) -> int:
        self.times += 1
        return self.times - 1


WHILE_BUILT: dict[str, dict[str, str | None]] = {
    "a row that is done changes": {"a": "oslo 100"},
    "a row of the piece changes": {"b": "rome 100"},
    "a row that comes later changes": {"e": "oslo 100"},
    "a row goes": {"d": None},
    "a row comes in between": {"cc": "oslo 100"},
    "a row comes at the end": {"z": "oslo 100"},
    "a row comes at the beginning": {"0": "oslo 100"},
}


def test_a_build_whose_locks_break_continues_in_small_pieces(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of the only group breaks each piece of more than one row."""
    plain = shop.replica(shop.client)
    shop.put(plain, **{f"k{n:02}": f"oslo {n}" for n in range(16)})
    real, sizes, writer = _Piece.__call__, list[int](), knowing(shop, 1)
    others: list[Any] = []

    def call(piece: _Piece, txn: TableTransaction) -> int:
        done = real(piece, txn)
        sizes.append(done)
        if done > 1:
            with txn._shared.outside():
                others.extend([] if others else [shop.replica(writer)])
                shop.put(others[0], z=f"oslo {len(sizes)}")
        return done

    monkeypatch.setattr(_Piece, "__call__", call)
    rows = with_totals(shop)
    assert sizes[:5] == [16, 8, 4, 2, 1]
    assert len(sizes) <= 2 * 16 + 4
    assert totals_of(rows)["oslo"].rows == 17
    assert not shop.client.check_derivation(ORDERS, "by-branch")


@pytest.mark.parametrize(
    "at", [0, 2, 4, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 3, 5))]
)
@pytest.mark.parametrize("case", WHILE_BUILT)
def test_writes_while_they_are_built(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, case: str, at: int
) -> None:
    plain = shop.replica(shop.client)
    shop.put(plain, a="oslo 1", b="oslo 2", c="rome 3", d="oslo 4", e="rome 5")
    writers: list[Replica] = []

    def run(time: int) -> None:
        if time == at:
            writers.append(shop.replica(knowing(shop)))
            shop.put(writers[0], **WHILE_BUILT[case])

    Meanwhile(monkeypatch, run)
    rows = with_totals(shop)
    assert writers
    assert shop.client.check_derivation(ORDERS, "by-branch") == []
    assert sum(found.rows for found in totals_of(rows).values()) == len(rows_of(rows, ORDERS))


@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
@pytest.mark.parametrize(
    ("key", "commits"), [("a", True), ("c", False), ("z", True)], ids=["done", "due", "new"]
)
def test_a_writer_of_a_row_that_the_build_passes_begins_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, key: str, commits: bool, keepalive: float | None
) -> None:
    """It has not taken the row's number away, and the build adds it. Writers of other rows are not disturbed."""
    plain = shop.replica(shop.client)
    shop.put(plain, a="a 1", b="b 2", c="c 3", d="d 4", e="e 5", f="f 6")
    writer = knowing(shop)
    held: list[TableTransaction] = []

    def run(time: int) -> None:
        if time == 2:  # a and b are done
            held.append(shop.replica(writer).begin(keepalive=keepalive))
            held[0].put(ORDERS, key.encode(), b"oslo 100")
        if time == 4:  # c and d, too
            with nullcontext() if commits else pytest.raises((LocksBroken, TransactionAborted)):
                held[0].commit()

    Meanwhile(monkeypatch, run)
    with_totals(shop)
    assert held[0].is_over
    assert shop.client.check_derivation(ORDERS, "by-branch") == []


def test_a_build_that_was_left_is_continued_by_derive(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shop.replica(shop.client)
    shop.put(plain, **{f"k{n}": f"oslo {n}" for n in range(9)})
    writer = knowing(shop)
    monkeypatch.setattr(derivations, "_PIECE", 2)
    real, read = Replica.transact, []
    for steps in range(12):
        left = iter(range(min(steps, 2)))

        def stops(self: Replica, *given: Any, left: Any = left, **how: Any) -> Any:
            read.append(given[0])
            if next(left, None) is None:
                raise NotReady("killed")
            return real(self, *given, **how)

        with monkeypatch.context() as patch:
            patch.setattr(Replica, "transact", stops)
            try:
                shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
            except NotReady:
                pass
            else:
                break
        rows = shop.replica(writer)
        shop.put(rows, **{f"k{steps}": f"rome {steps}", f"m{steps}": "bonn 1"})
        with rows.begin() as txn, pytest.raises(DerivationMissing, match=r"client\.rebuild"):
            txn.total("by-branch", b"oslo")
    firsts = [each._keys[0] for each in read if isinstance(each, _Piece)]
    assert firsts == sorted(firsts), "each build begins where the last one ended"
    assert len(set(firsts)) > 4
    shop.client.rebuild(ORDERS, "by-branch")
    assert shop.client.check_derivation(ORDERS, "by-branch") == []


def test_a_build_that_is_complete_is_not_read_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_totals(shop)
    monkeypatch.setattr(derivations.Deriving, "_replica", None)
    knowing(shop).derive(ORDERS, "by-branch", numbers, totals=True)


def test_two_processes_build(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shop.replica(shop.client)
    shop.put(plain, a="oslo 1", b="oslo 2", c="rome 3", d="oslo 4", e="rome 5")
    other = knowing(shop)

    def run(time: int) -> None:
        if time == 3:
            monkeypatch.undo()
            other.derive(ORDERS, "by-branch", numbers, totals=True)

    Meanwhile(monkeypatch, run)
    rows = with_totals(shop)
    assert totals_of(rows) == {"oslo": Total(7, 3), "rome": Total(8, 2)}


def test_rows_of_an_earlier_time_are_not_added_to(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = with_totals(shop)
    shop.put(rows, a="oslo 1")
    shop.client.drop_derivation(ORDERS, "by-branch")
    with pytest.raises(IllegalState, match="earlier time"):
        shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
    shop.client.delete_stream(BY_BRANCH)
    shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
    assert totals_of(shop.replica(shop.client)) == {"oslo": Total(1, 1)}


def left_before_it_began(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is in force, and the table has no state."""

    def stops(*_: Any, **__: Any) -> Any:
        raise NotReady("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "transact", stops)
        with pytest.raises(NotReady):
            shop.client.derive(ORDERS, "by-branch", numbers, totals=True)


def test_a_build_begins_with_an_empty_table(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that slept may have written totals of a table that was lost, and made again since."""
    left_before_it_began(shop, monkeypatch)
    rows = shop.replica(shop.client)
    with rows.begin() as txn:
        txn.write_entries(OF, [(of_value(b"oslo"), b"5 1")])
        txn.commit()
    with pytest.raises(IllegalState, match="earlier time"):
        shop.client.derive(ORDERS, "by-branch", numbers, totals=True)


def test_writers_that_began_before_the_build_begin_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_before_it_began(shop, monkeypatch)
    rows = shop.replica(shop.client)
    with rows.begin() as txn:
        txn.put(ORDERS, b"a", b"oslo 1")
        with shop.client.outside():
            shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
        with pytest.raises(LocksBroken):
            txn.commit()
    shop.put(rows, a="oslo 1")
    assert totals_of(rows) == {"oslo": Total(1, 1)}


def test_a_row_of_a_commit_under_way_may_be_of_the_time_before(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls at a hot row read what the call before has sent, which may not be in the totals."""
    shop.put(shop.replica(shop.client), a="oslo 1")
    left_before_it_began(shop, monkeypatch)
    writer = knowing(shop)
    rows, builder = shop.replica(writer), shop.replica(shop.client)
    others = shop.replica(knowing(shop))
    rows._chain.note((ORDERS, b"a"))
    session, sent_by = writer._session, list[r.OneShot]()
    shot = session.locked_shot

    def put(row: bytes) -> None:
        rows.transact(lambda txn: txn.put(ORDERS, b"a", row), timeout=5.0)

    def noted(command: r.OneShot, deadline: float, posted: Any = None) -> Any:
        sent_by.append(command)
        answer = shot(command, deadline, posted)
        if len(sent_by) > 1:
            return answer
        function: Any = writer._shared.derivations.function(OF)
        with shop.client.outside():
            builder.transact(lambda txn: derivations._begin(txn, function))
            shop.put(others, b="oslo 10")
        rows.snapshot().close()
        Context().run(put, b"rome 3")  # as of another thread
        return answer

    monkeypatch.setattr(session, "locked_shot", noted)
    put(b"oslo 2")
    assert len(sent_by) > 1
    shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
    assert totals_of(builder) == {"rome": Total(3, 1), "oslo": Total(10, 1)}


def test_a_row_that_the_function_does_not_take(shop: Shop) -> None:
    plain = shop.replica(shop.client)
    shop.put(plain, a="oslo 1", b="oslo", c="rome 3")
    second: Any = lambda _, row: row.split()[1]  # noqa: E731
    for name, function in (("by-branch", numbers), ("by-number", second)):
        with pytest.raises(DerivationFailed, match=r"Error for row b'b'.*drop_derivation"):
            shop.client.derive(ORDERS, name, function, totals=name == "by-branch")
        shop.client.drop_derivation(ORDERS, name)
    shop.client.delete_stream(BY_BRANCH)
    with pytest.raises(DerivationFailed):
        shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
    right: Any = lambda _, row: (row.split(b" ")[0], 1)  # noqa: E731
    shop.client.derive(ORDERS, "by-branch", right, totals=True)
    assert totals_of(shop.replica(shop.client)) == {"oslo": Total(2, 2), "rome": Total(1, 1)}


def test_a_total_that_is_too_high_fails_the_build(shop: Shop) -> None:
    plain = shop.replica(shop.client)
    shop.put(plain, a=f"oslo {limits.MOST_NUMBER}", b="oslo 1")
    with pytest.raises(NumberOverflow, match="b'oslo' of derivation 'by-branch'"):
        with_totals(shop)


def test_a_higher_version(shop: Shop) -> None:
    rows = with_totals(shop)
    shop.put(rows, a="oslo 5", b="rome 7")
    new = knowing(shop, 1)
    twice: Any = lambda key, row: [(g, 2 * n) for g, n in numbers(key, row)]  # noqa: E731
    new.derive(ORDERS, "by-branch", twice, version=2, totals=True)
    fresh = shop.replica(new)
    with fresh.begin() as txn:
        assert txn.total("by-branch", b"oslo") == (5, 1)
        with new.outside():
            new.rebuild(ORDERS, "by-branch")
        txn.put(ORDERS, b"z", b"bonn 1")
        with pytest.raises(AnabranchError, match="by-branch"):
            txn.commit()
    assert total(fresh, "oslo") == (10, 1)
    with pytest.raises(DerivationMissing, match="version 2"):
        shop.put(rows, c="oslo 1")
    shop.put(fresh, c="oslo 1")
    assert total(fresh, "oslo") == (12, 2)
    assert new.check_derivation(ORDERS, "by-branch") == []


# -- refusals -----------------------------------------------------------------------------------------------


def look_up(shop: Shop) -> object:
    with shop.replica(shop.client).snapshot() as view:
        return view.lookup("by-branch", b"oslo")  # it is refused before the first row is asked for


REFUSED: dict[str, tuple[Callable[[Shop, TableTransaction], object], type[Exception], str]] = {
    "unique totals": (
        lambda s, _: s.client.derive(ORDERS, "x", numbers, unique=True, totals=True), InvalidArgument,
        "can't be unique and totals",
    ),
    "another kind": (lambda s, _: s.client.derive(ORDERS, "by-branch", city), StreamExists, "totals"),
    "a look-up": (lambda _, txn: txn.lookup("by-branch", b"oslo"), InvalidArgument, "`total`"),
    "a look-up in a snapshot": (lambda s, _: look_up(s), InvalidArgument, f"get the rows of {BY_BRANCH}"),
    "a total of rows": (lambda _, txn: txn.total("by-city", b"oslo"), InvalidArgument, "`lookup`"),
    "no bytes": (lambda _, txn: txn.total("by-branch", "oslo"), InvalidArgument, "bytes"),  # type: ignore[arg-type]
    "no such name": (lambda _, txn: txn.total("by-size", b"oslo"), DerivationMissing, "no version"),
    "by hand": (lambda _, txn: txn.put(BY_BRANCH, b"oslo\0\0", b"9 9"), InvalidArgument, "derived from"),
    "a setting that is none": (
        lambda s, _: s.client.alter_stream(ORDERS, {"derived.built": "true"}), InvalidArgument, "client.derive",
    ),
}  # fmt: skip


def test_refusals(shop: Shop, subtests: pytest.Subtests) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    rows = with_totals(shop)
    for case, (call, error, text) in REFUSED.items():
        with (
            subtests.test(case),
            rows.begin() as txn,
            pytest.raises(error, match=text),
            shop.client.outside(),
        ):
            call(shop, txn)


def test_a_replica_that_was_opened_before(shop: Shop) -> None:
    rows = shop.replica(shop.client)
    shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
    with pytest.raises(DerivationMissing, match="open it again"):
        shop.put(rows, a="oslo 1")
    batch = pa.table({"key": [b"oslo\0\0"], "value": [b"9 9"]})
    with rows.begin() as txn:
        for write in (
            lambda: txn.write(BY_BRANCH, b"9 9", key=b"oslo\0\0"),
            lambda: txn.write_many(BY_BRANCH, [(b"9 9", b"oslo\0\0")]),
            lambda: txn.write_batch(BY_BRANCH, batch),
        ):
            with pytest.raises(InvalidArgument, match="derived from shop/orders"):
                write()


# -- all together -------------------------------------------------------------------------------------------

KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])
ROWS = st.none() | st.sampled_from([b"oslo 1", b"oslo 2", b"rome 3", b"rome 4 oslo 5", b""])
WRITES = st.lists(st.tuples(KEYS, ROWS), min_size=1, max_size=3)
# Writes of one transaction: committed at once, or after so many other steps.
STEPS = st.lists(st.tuples(WRITES, st.integers(0, 4), st.booleans()), min_size=4, max_size=14)
REFUSED_COMMITS = (LocksBroken, TransactionAborted, DerivationMissing)


class Steps:
    """Transactions that are open while others commit, and while totals are built."""

    def __init__(self, shop: Shop, steps: list[Any]) -> None:
        self._rows, self._shop = shop.replica(knowing(shop, 1, 2), ORDERS), shop
        self._steps, self._open = iter(steps), list[list[Any]]()

    def step(self, _: int = 0) -> bool:
        for each in list(self._open):
            each[0] -= 1
            if each[0] < 0:
                self._open.remove(each)
                self._commit(each[1])
        found = next(self._steps, None)
        if found is None:
            return bool(self._open)
        writes, delay, is_long = found
        with suppress(*REFUSED_COMMITS):
            if not set(self._rows.tables) >= {BY_BRANCH}:
                self._rows = self._shop.replica(knowing(self._shop, 1, 2), ORDERS)
            txn = self._rows.begin(keepalive=60 if is_long and delay == 0 else None)
            self._open.append([delay - 1, txn])
            with self._shop.client.outside():
                for key, row in writes:
                    if row is None:
                        txn.delete(ORDERS, key)
                    else:
                        txn.put(ORDERS, key, row)
        return True

    def end(self) -> None:
        """Commit what is open: a version comes into force when no long transaction writes to the source."""
        while self._open:
            self._commit(self._open.pop(0)[1])

    def _commit(self, txn: TableTransaction) -> None:
        with suppress(*REFUSED_COMMITS, IllegalState):
            txn.commit()
        txn.__exit__(None, None, None)


@given(STEPS, st.integers(0, 3), st.booleans())
@settings(max_examples=some(15), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_totals_are_a_fold_of_the_source_at_every_timestamp(
    steps: list[Any], derived_at: int, rebuilds: bool
) -> None:
    shop = Shop()
    with pytest.MonkeyPatch.context() as patch:
        work = Steps(shop, steps)
        for _ in range(derived_at):
            work.step()
        work.end()
        Meanwhile(patch, work.step)  # type: ignore[arg-type]
        shop.client.derive(ORDERS, "by-branch", numbers, totals=True)
        if rebuilds:
            work.step()
            work.end()
            shop.client.derive(ORDERS, "by-branch", numbers, version=2, totals=True)
            shop.client.rebuild(ORDERS, "by-branch")
    while work.step():
        pass
    rows = shop.replica(knowing(shop, 1, 2), ORDERS)
    rows.snapshot().close()
    for at in sorted({c.timestamp for table in rows.tables for c in shop.commits(table)}):
        with rows.snapshot(at=at) as view:
            for table in rows.tables[1:]:
                _compare(view, table)
    shop.close()


def _compare(view: Any, table: str) -> None:
    """Each row of the source counts, or while totals are built those that are done, or were written since."""
    state = next(view.versions(table, STATE_KEY), None)
    if state is None or state.value is None or not state.value.startswith((BUILDING, READY)):
        return
    done = view.get(table, PROGRESS_KEY)
    expected: dict[bytes, list[int]] = {}
    for key, row in view.scan(ORDERS):
        at = next(view.versions(ORDERS, key)).timestamp
        if state.value == READY or at > state.timestamp or (done is not None and key <= done):
            for group in {group for group, _ in numbers(key, row)}:
                its = expected.setdefault(of_value(group), [0, 0])
                its[0] += sum(n for g, n in numbers(key, row) if g == group)
                its[1] += 1
    rows = {k: v for k, v in view.scan(table) if k not in (STATE_KEY, PROGRESS_KEY)}
    assert {k: list(total_of(v)) for k, v in rows.items()} == expected
