"""Tables of rows: tiny histories in which a read, a broken lock or a change is right, or is not.

Row k is made by t at 10 (id a), overwritten by u at 20 (id b), deleted by v at 30; x (id w) and y (id z) are of t.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from checker.reading import BrokenHistory
from tests.checker.table import ONE, THREE, TWO, Case, Table
from tests.checker.tape import Tape

TABLE = Table()
FOUR, ROWS = "4" * 32, "s/a"
_LOG: list[list[Any]] = [
    [0, "k", "a", ONE], [1, "x", "w", ONE], [2, "y", "z", ONE], [4, "k", "b", TWO], [6, "k", None, THREE],
]  # fmt: skip
_COMMITS: list[list[Any]] = [
    [1, 10, [ONE], [[0, 0, 3]]], [2, 20, [TWO], [[0, 4, 5]]], [3, 30, [THREE], [[0, 6, 7]]],
]  # fmt: skip


def put(tape: Tape, txn: str, *rows: tuple[str, str | None], file: str = "p") -> None:
    events = [[key, name] for key, name in rows]
    tape.do(file, "write", txn=txn, writer="w", stream=ROWS, events=events)


def laid(tape: Tape, *, answered: bool = True) -> None:
    """The three commits, each told before the next one began; or only asked for."""
    for txn, txn_id, at, rows in (
        ("t", ONE, 10, [("k", "a"), ("x", "w"), ("y", "z")]),
        ("u", TWO, 20, [("k", "b")]),
        ("v", THREE, 30, [("k", None)]),
    ):
        tape.begin(txn, None)
        put(tape, txn, *rows)
        if answered:
            tape.commit(txn, txn_id, at, len(rows))
        else:
            tape.ask("p", "commit", txn=txn, writers=["w"])


def begin(tape: Tape, txn: str, at: int, file: str = "q", **asked: Any) -> None:
    tape.do(file, "begin", {"txn_id": None, "snapshot": at}, txn=txn, scope="s", **asked)


def read(
    tape: Tape, low: str, high: str | None, *rows: tuple[str, str], of: str = "r", **more: Any
) -> None:
    told = {"low": low, "high": high, "rows": [list(row) for row in rows], **more.pop("told", {})}
    tape.do("q", "read", told, table=ROWS, txn=of, **more)


def point(tape: Tape, key: str, name: str | None = None, **more: Any) -> None:
    read(tape, key, key + "\0", *([(key, name)] if name else []), **more)


def end(tape: Tape, *written: tuple[int, str, str | None], at: int | None = None) -> None:
    """The log, with what transaction r wrote at the end: its offset, key and id."""
    rows = [[offset, key, name, FOUR] for offset, key, name in written]
    for partition, there in ((0, _LOG), (1, rows)):
        told = {"start": 0, "end": 99, "events": there}
        tape.do("end", "log", told, stream=ROWS, partition=partition, table=True)
    more = [] if at is None else [[9, at, [FOUR], [[1, written[0][0], written[-1][0] + 1]]]]
    records = sorted([*_COMMITS, *more], key=lambda record: int(record[1]))
    tape.commits(*[[n, *record[1:]] for n, record in enumerate(records)])


def commits(tape: Tape, at: int, *rows: tuple[str, str | None]) -> None:
    """Transaction r writes these, and is committed at that time."""
    put(tape, "r", *rows, file="q")
    tape.commit("r", FOUR, at, len(rows), file="q")


def racing(tape: Tape, at: int, **asked: Any) -> None:
    """Transaction r begins when all commits are asked for, so its place among them is open."""
    laid(tape, answered=False)
    begin(tape, "r", at, **asked)


@TABLE.right
def reads_that_stand_at_both_times(tape: Tape) -> None:
    racing(tape, 25)
    point(tape, "k", "b")
    point(tape, "absent")
    read(tape, "l", None, ("x", "w"), ("y", "z"))
    read(tape, "k", "y", ("x", "w"), ("k", "b"), reverse=True)
    commits(tape, 27, ("x", "new"))
    end(tape, (8, "x", "new"), at=27)


def race(name: str, kinds: str, *reads: Case, overwrites: str = "x", **asked: Any) -> None:
    """A case: r has the snapshot 15, reads, and commits a row at 25; row k was overwritten at 20."""

    def case(tape: Tape) -> None:
        racing(tape, 15, **asked)
        for one in reads:
            one(tape)
        commits(tape, 25, (overwrites, "new"))
        end(tape, (8, overwrites, "new"), at=25)

    TABLE.row(name, kinds, case)


def a_part(outcome: str) -> Case:
    """A part of r, without which r is committed, reads row k and finishes."""

    def case(tape: Tape) -> None:
        point(tape, "k", "a", writer="part")
        tape.told("q", tape.ask("q", "finish", txn="r", writer="part"), outcome)

    return case


reads_k = partial(point, key="k", name="a")
of_no_read = partial(read, low="k", high="l", told={"rows": None})
of_its_own = partial(read, low="", high="l", told={"own": ["k"]})
race("a row that is overwritten was written since", "lost-update", reads_k, overwrites="k")
race("a row that was read was written since", "write-skew", reads_k)
race("a row that it wrote itself is no read", "", of_its_own, overwrites="k")
race("a read without a lock may be old", "", partial(reads_k, unlocked=True))
race("a lock without a read is broken", "write-skew", of_no_read)
race("a finished part's read counts", "write-skew", a_part("ok"))
race("an unfinished part's read does not count", "", a_part("unknown"))
race("with snapshot isolation reads are free", "", reads_k, isolation="snapshot")
race("the first committer wins", "lost-update", overwrites="k", isolation="snapshot")


@TABLE.right
def two_parts_delete_a_row_and_the_later_one_is_taken(tape: Tape) -> None:
    racing(tape, 15)
    events = [["x", None]]
    tape.do("p", "write", txn="r", writer="left out", stream=ROWS, events=events)
    commits(tape, 25, ("x", None))
    end(tape, (8, "x", None), at=25)


@TABLE.right
def two_writers_delete_a_row_and_one_of_them_writes_it_again(tape: Tape) -> None:
    """The log does not say that the writer without another row deleted it last."""
    racing(tape, 15)
    tape.do("p", "write", txn="r", writer="other", stream=ROWS, events=[["x", None]])
    put(tape, "r", ("x", None), ("x", "new"), file="q")
    tape.commit("r", FOUR, 25, 3, file="q", writers=("other", "w"))
    end(tape, (8, "x", None), (9, "x", "new"), (10, "x", None), at=25)


@TABLE.wrong("snapshot-not-prefix")
def a_row_that_never_was(tape: Tape) -> None:
    racing(tape, 15)
    point(tape, "absent", "ghost")
    end(tape)


@TABLE.wrong("snapshot-not-prefix")
def rows_out_of_order(tape: Tape) -> None:
    racing(tape, 15)
    read(tape, "x", None, ("y", "z"), ("x", "w"))
    end(tape)


@TABLE.wrong("snapshot-not-prefix")
def a_transaction_does_not_see_what_its_client_had_seen(tape: Tape) -> None:
    laid(tape)
    begin(tape, "r", 25, seen=30)
    end(tape)


@TABLE.wrong("snapshot-not-prefix")
def a_commit_comes_below_a_snapshot_that_was_answered_before(tape: Tape) -> None:
    begin(tape, "r", 25, file="o")
    laid(tape)
    end(tape)


def of_a_snapshot(tape: Tape, at: int, *rows: tuple[str, str], **asked: Any) -> None:
    tape.do("q", "snapshot", {"timestamp": at}, snapshot="n", streams=[ROWS], asked_for=at)
    told = {"low": "", "high": None, "rows": [list(row) for row in rows]}
    tape.do("q", "read", told, table=ROWS, snapshot="n", **asked)


@TABLE.right
def snapshots_and_indexes_of_a_replica(tape: Tape) -> None:
    laid(tape)
    of_a_snapshot(tape, 29, ("k", "b"), ("x", "w"), ("y", "z"))
    told = {"low": "", "high": None, "rows": [["x", "w"]]}
    tape.do("q", "read", told, table=ROWS, snapshot="n", begins="w")
    end(tape)


@TABLE.wrong("snapshot-not-prefix")
def a_replica_shows_a_deleted_row(tape: Tape) -> None:
    laid(tape)
    of_a_snapshot(tape, 30, ("k", "b"), ("x", "w"), ("y", "z"))
    end(tape)


def is_refused(tape: Tape, *broken: Any, what: str = "read") -> None:
    """Its locks are broken."""
    more = {"table": ROWS} if what == "read" else {"writers": ["w"]}
    op = tape.ask("q", what, txn="r", **more)
    tape.told("q", op, "failed", broken=[ROWS, *broken])


@TABLE.right
def a_lock_that_was_broken(tape: Tape) -> None:
    racing(tape, 15)
    point(tape, "k", "a")
    is_refused(tape, "k", TWO, 20, what="commit")
    is_refused(tape, "k", THREE, 30)
    is_refused(tape, "k", "", 20)  # by whom, it is not told
    end(tape)


def falsely_refused(name: str, at: int, by: str, timestamp: int) -> None:
    """A case: r, of this snapshot, is refused as one wrote row k at that time."""

    def case(tape: Tape) -> None:
        racing(tape, at)
        is_refused(tape, "k", by, timestamp)
        end(tape)

    TABLE.row(name, "false-conflict", case)


falsely_refused("a lock that no transaction broke", 15, TWO, 21)
falsely_refused("a lock that another one broke", 15, THREE, 20)
falsely_refused("a lock that was broken before the snapshot", 25, TWO, 20)


def a_part_is_refused(tape: Tape, *, answered: bool) -> None:
    """The locks of r are broken by transaction u; another process commits r, before or after that."""
    racing(tape, 15)
    point(tape, "x", "w")
    put(tape, "r", ("y", "new"), file="q")
    if answered:
        tape.commit("r", FOUR, 25, 1, file="q")
    is_refused(tape, "k", TWO, 20)
    if not answered:
        tape.commit("r", FOUR, 25, 1, file="q")
    end(tape, (8, "y", "new"), at=25)


@TABLE.right
def a_part_whose_locks_broke_is_left_out_of_the_commit(tape: Tape) -> None:
    a_part_is_refused(tape, answered=False)


@TABLE.wrong("false-conflict")
def broken_locks_are_reported_after_the_commit_was_answered(tape: Tape) -> None:
    a_part_is_refused(tape, answered=True)


_CHANGES = [
    ["k", None, "a", 10, ONE], ["x", None, "w", 10, ONE], ["y", None, "z", 10, ONE],
    ["k", "a", "b", 20, TWO], ["k", "b", None, 30, THREE],
]  # fmt: skip


def changes(
    name: str, kinds: str, start: int | None, until: int, rows: list[Any], **asked: Any
) -> None:
    """A case: these were given as the changes after ``start`` up to ``until``."""

    def case(tape: Tape) -> None:
        laid(tape)
        tape.do("q", "changes", {"until": until, "rows": rows}, table=ROWS, start=start, **asked)
        end(tape)

    TABLE.row(name, kinds, case)


changes("all changes with the rows before", "", 0, 40, _CHANGES, before=True)
changes("changes between two times", "", 10, 29, [["k", None, "b", 20, TWO]])
changes("changes of a group begin somewhere", "", None, 30, _CHANGES[3:], before=True)
changes("a change is left out", "wrong-change", 0, 40, _CHANGES[1:], before=True)
changes("a change too many", "wrong-change", 0, 19, _CHANGES[:4], before=True)
changes("another row before", "wrong-change", 10, 29, [["k", None, "b", 20, TWO]], before=True)


@TABLE.wrong("lost-write", "torn-transaction")
def a_deletion_is_lost(tape: Tape) -> None:
    """It is one of a transaction's events, as any."""
    racing(tape, 25)
    commits(tape, 35, ("x", "new"), ("y", None))
    end(tape, (8, "x", "new"), at=35)


@TABLE.right
def a_deletion_by_one_of_two(tape: Tape) -> None:
    racing(tape, 25)
    for txn in ("r", "other"):
        if txn != "r":
            begin(tape, txn, 25)
        put(tape, txn, ("y", None), file="q")
        tape.ask("q", "commit", txn=txn, writers=["w"])
    end(tape, (8, "y", None), at=35)


@TABLE.wrong("unexplained", "lost-write")
def a_deletion_by_no_transaction(tape: Tape) -> None:
    racing(tape, 25)
    end(tape, (8, "y", None), at=35)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()


@pytest.mark.parametrize(
    ("what", "asked", "why"),
    [
        ("write", {"txn": "t", "writer": "w", "stream": "s/b", "events": [["k", None]]}, "deletes"),
        ("plain", {"stream": ROWS, "events": [["k", None]]}, "deletes"),
        ("read", {"table": ROWS}, "of a transaction, or of a snapshot"),
        ("read", {"table": ROWS, "txn": "t", "snapshot": "n"}, "of a transaction, or"),
        ("read", {"table": ROWS, "txn": "none"}, "nobody began"),
        ("read", {"table": ROWS, "snapshot": "none"}, "nobody took"),
    ],
)
def test_broken_histories(what: str, asked: dict[str, Any], why: str) -> None:
    tape = Tape()
    laid(tape)
    tape.ask("q", what, **asked)
    end(tape)
    with pytest.raises(BrokenHistory, match=why):
        tape.judge()


def test_what_is_judged_is_counted() -> None:
    """A check that judged nothing is seen; so is a table whose log was not read whole."""
    for whole in (True, False):
        tape = Tape()
        reads_that_stand_at_both_times(tape)
        if not whole:
            op = tape.ask("end", "log", stream=ROWS, partition=2, table=True)
            tape.told("end", op, "unknown")
        counts = tape.judge().counts
        assert counts["reads that hold at their commit"] == (4 if whole else 0)
        assert counts["reads of tables that are not judged"] == (0 if whole else 4)
