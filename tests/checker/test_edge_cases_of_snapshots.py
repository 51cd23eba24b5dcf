"""Tiny histories of snapshots at the edges of conditions; see `test_edge_cases`."""

from __future__ import annotations

from tests.checker.table import (
    ONE,
    TWO,
    A,
    B,
    C,
    Table,
    commit_one,
    commit_two,
    log_two,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


def _take(
    tape: Tape,
    timestamp: int,
    *rows: list[object],
    asked_for: int | None = None,
    latest: bool = False,
) -> None:
    asked = {"snapshot": "n", "streams": ["s/a"], "asked_for": asked_for, "latest": latest}
    tape.do("n", "snapshot", {"timestamp": timestamp}, **asked)
    tape.do("n", "snapshot_read", {"events": list(rows)}, snapshot="n", stream="s/a")


@right
def a_snapshot_at_the_last_commit_of_its_scope(tape: Tape) -> None:
    commit_two(tape)
    tape.do("p", "begin", {"txn_id": "3" * 32}, txn="v", scope="other")
    tape.commit("v", "3" * 32, 90, 0)
    _take(tape, 20, A, B, C)
    log_two(tape)


@right
def the_latest_while_other_streams_are_newer(tape: Tape) -> None:
    commit_two(tape)
    tape.begin("v", "3" * 32)
    tape.commit("v", "3" * 32, 30, 0)
    _take(tape, 20, A, B, C, latest=True)
    log_two(tape)


@wrong("snapshot-not-prefix")
def the_latest_without_what_was_told(tape: Tape) -> None:
    commit_two(tape)
    _take(tape, 15, A, B, latest=True)
    log_two(tape)


@right
def committed_above_a_snapshot(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    _take(tape, 15, A, B)
    tape.told("n", tape.ask("n", "snapshot", snapshot="m", streams=["s/a"], asked_for=1), "unknown")
    commit_one(tape, "u", TWO, 20, "c")
    tape.begin("v", "3" * 32)
    tape.write("v", "d")
    _take_again(tape, 20, A, B, C)
    log_two(tape)


def _take_again(tape: Tape, timestamp: int, *rows: list[object]) -> None:
    """Another one, which is not read, comes first."""
    for name in ("x", "y"):
        asked = {"snapshot": name, "streams": ["s/a"], "asked_for": None}
        tape.do("n", "snapshot", {"timestamp": timestamp}, **asked)
    tape.do("n", "snapshot_read", {"events": list(rows)}, snapshot="y", stream="s/a")


@wrong("snapshot-not-prefix")
def one_of_two_snapshots_is_read_and_lacks_a_commit(tape: Tape) -> None:
    commit_two(tape)
    _take_again(tape, 20, A, B)
    log_two(tape)


@wrong("snapshot-not-prefix")
def a_snapshot_lacks_what_was_written_last(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.write("t", "a", key="a")
    tape.write("u", "c", key="c")
    asked = {txn: tape.ask(txn, "commit", txn=txn, writers=["w"]) for txn in "tu"}
    tape.told("t", asked["t"], txn_id=ONE, timestamp=20, committed=1)
    tape.told("u", asked["u"], txn_id=TWO, timestamp=10, committed=1)
    _take(tape, 10, asked_for=10)
    tape.log(0, [0, "c", "c", TWO], [2, "a", "a", ONE])
    tape.commits([1, 10, [TWO], [[0, 0, 1]]], [2, 20, [ONE], [[0, 2, 3]]])


@wrong("snapshot-not-prefix")
def committed_at_a_snapshot(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.do("n", "snapshot", {"timestamp": 20}, snapshot="n", streams=["s/a"], asked_for=None)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


@right
def a_snapshot_lacks_what_may_not_have_been_written(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    rows = [["k", "b"]]
    tape.ask("q", "write", txn="t", writer="w", stream="s/a", events=rows)
    tape.commit("t", ONE, 10, 1)
    _take(tape, 10, row("a", 0, ONE, 10))


@wrong("snapshot-not-prefix")
def a_snapshot_lacks_one_of_two_plain_writes(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"], ["k", "b"]])
    _take(tape, 10, row("a", 0, None, 10), asked_for=10)
    tape.log(0, [0, "k", "a", None], [1, "k", "b", None])
    tape.commits([1, 10, [], [[0, 0, 2]]])


@right
def a_snapshot_shows_keyless_events_of_two_partitions(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[[None, "a"], [None, "b"]])
    shown = row("b", 0, None, 20, 1, key=None), row("a", 0, None, 10, key=None)
    _take(tape, 20, *shown, asked_for=20)
    tape.log(0, [0, None, "a", None])
    tape.log(1, [0, None, "b", None])
    tape.commits([1, 10, [], [[0, 0, 1]]], [2, 20, [], [[1, 0, 1]]])


test_an_anomaly, test_no_anomaly = TABLE.tests()
