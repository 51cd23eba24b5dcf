"""Tiny histories of snapshots: each anomaly, and its legal look-alike."""

from __future__ import annotations

from tests.checker.table import (
    MOVED,
    ONE,
    TWO,
    A,
    B,
    C,
    Table,
    begin_one,
    commit_moved,
    commit_one,
    commit_two,
    commit_two_and_log,
    log_two,
    snapshot,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


TABLE.snapshots(
    ("a snapshot of the past", "", 10, 10, [A, B]),
    ("a snapshot lacks a commit", "snapshot-not-prefix", 25, None, [A, B]),
    ("a snapshot shows the future", "snapshot-not-prefix", 10, 10, [A, B, C]),
    ("a snapshot of yesterday", "snapshot-not-prefix", 15, None, [A, B]),
    ("of another time than asked", "snapshot-not-prefix", 20, 10, [A, B, C]),
    ("a snapshot shows half", "snapshot-not-prefix torn-transaction", 10, 10, [A]),
    ("a snapshot shows it twice", "duplicate", 10, 10, [A, B, A]),
    ("a snapshot out of order", "int-poll-order", 10, 10, [B, A]),
    ("a snapshot shows an event that no writer wrote", "unexplained", 20, 20, [A, B, C, row("d", 4, TWO, 20)]),
    ("a snapshot does not know a transaction", "unexplained", 20, 20, [A, row("b", 1, None, 10), C]),
)  # fmt: skip
TABLE.snapshots(
    (
        "no log was read, and a snapshot lacks what was committed",
        "snapshot-not-prefix",
        20,
        20,
        [A, B],
    ),
    written=commit_two,
)
TABLE.snapshots(
    ("a snapshot of a scaled stream out of order", "int-poll-order", 20, 20, [MOVED, A, B]),
    written=commit_moved,
)


def _take_again(tape: Tape, timestamp: int, *rows: list[object]) -> None:
    """Another one, which is not read, comes first."""
    for name in ("x", "y"):
        asked = {"snapshot": name, "streams": ["s/a"], "asked_for": None}
        tape.do("n", "snapshot", {"timestamp": timestamp}, **asked)
    tape.do("n", "snapshot_read", {"events": list(rows)}, snapshot="y", stream="s/a")


@right
def retention_has_deleted_what_a_snapshot_lacks(tape: Tape) -> None:
    commit_two(tape)
    snapshot(tape, 20, C, asked_for=20)
    tape.log(0, [3, "k", "c", TWO], start=2)
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


@wrong("snapshot-not-prefix")
def the_latest_without_what_was_committed(tape: Tape) -> None:
    commit_two_and_log(tape)
    snapshot(tape, 15, A, B, latest=True)


@right
def the_latest_while_other_streams_are_newer(tape: Tape) -> None:
    commit_two(tape)
    tape.begin("v", "3" * 32)
    tape.commit("v", "3" * 32, 30, 0)
    snapshot(tape, 20, A, B, C, latest=True)
    log_two(tape)


@right
def committed_above_a_snapshot(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    snapshot(tape, 15, A, B)
    tape.told("n", tape.ask("n", "snapshot", snapshot="m", streams=["s/a"], asked_for=1), "unknown")
    commit_one(tape, "u", TWO, 20, "c")
    tape.begin("v", "3" * 32)
    tape.write("v", "d")
    _take_again(tape, 20, A, B, C)
    log_two(tape)


@wrong("snapshot-not-prefix")
def committed_at_a_snapshot(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.do("n", "snapshot", {"timestamp": 20}, snapshot="n", streams=["s/a"], asked_for=None)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


@right
def a_snapshot_lacks_what_may_not_have_been_written(tape: Tape) -> None:
    begin_one(tape)
    rows = [["k", "b"]]
    tape.ask("q", "write", txn="t", writer="w", stream="s/a", events=rows)
    tape.commit("t", ONE, 10, 1)
    snapshot(tape, 10, row("a", 0, ONE, 10))


@wrong("snapshot-not-prefix")
def a_snapshot_lacks_one_of_two_plain_writes(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"], ["k", "b"]])
    snapshot(tape, 10, row("a", 0, None, 10), asked_for=10)
    tape.log(0, [0, "k", "a", None], [1, "k", "b", None])
    tape.commits([1, 10, [], [[0, 0, 2]]])


@right
def a_snapshot_shows_keyless_events_of_two_partitions(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[[None, "a"], [None, "b"]])
    shown = row("b", 0, None, 20, 1, key=None), row("a", 0, None, 10, key=None)
    snapshot(tape, 20, *shown, asked_for=20)
    tape.log(0, [0, None, "a", None])
    tape.log(1, [0, None, "b", None])
    tape.commits([1, 10, [], [[0, 0, 1]]], [2, 20, [], [[1, 0, 1]]])


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()
