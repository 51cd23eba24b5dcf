"""Tiny histories of transactions and logs: no other test saw a change of these conditions."""

from __future__ import annotations

from tests.checker.table import ONE, Table, commit_one
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


@wrong("changed-answer")
def two_answers_about_a_transaction_of_another_recorder(tape: Tape) -> None:
    tape.do("p", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.do("p", "state", {"state": "committed", "timestamp": 11}, txn_id=ONE)


@right
def only_the_second_partition_has_lost_its_beginning(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0)
    tape.log(1, start=5)


@wrong("lost-write")
def a_log_is_read_at_the_second_attempt(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.told("end", tape.ask("end", "log", stream="s/a", partition=0), "unknown")
    tape.log(0)


@wrong("unseen-commit")
def a_partition_that_nobody_could_read(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.open("r", "transactions")
    tape.do("r", "caught_up", reader="r")
    tape.log(0, [0, "k", "a", ONE])
    tape.told("end", tape.ask("end", "log", stream="s/a", partition=1), "unknown")
    tape.commits([1, 10, [ONE], [[0, 0, 1], [1, 0, 1]]])


# The events that a writer has finished.


def _begins(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")


def _finishes(tape: Tape, outcome: str = "ok") -> None:
    tape.told("p", tape.ask("p", "finish", txn="t", writer="w"), outcome)


@right
def a_writer_that_could_not_finish(tape: Tape) -> None:
    _begins(tape)
    _finishes(tape, "failed")
    tape.commit("t", ONE, 10, 0, writers=None)
    tape.log(0)


@wrong("aborted-read")
def a_writer_that_could_not_finish_is_taken(tape: Tape) -> None:
    _begins(tape)
    _finishes(tape, "failed")
    tape.commit("t", ONE, 10, 1, writers=None)
    tape.log(0, [0, "k", "a", ONE])


@right
def a_writer_that_finishes_twice(tape: Tape) -> None:
    _begins(tape)
    _finishes(tape)
    tape.write("t", "b")
    _finishes(tape)
    tape.commit("t", ONE, 10, 1, writers=None)
    tape.log(0, [0, "k", "a", ONE])


# Operations that tell nothing, or are told in another order than they came about.


@right
def nothing_is_told(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.do("p", "scale", stream="s/a")
    tape.do("r", "snapshot", {"timestamp": 10}, snapshot="n", streams=["s/a"], asked_for=None)
    for file, what, more in (
        ("p", "state", {"txn_id": ONE}),
        ("r", "snapshot_read", {"snapshot": "n", "stream": "s/a"}),
        ("end", "commits", {"stream": "s/a"}),
    ):
        tape.told(file, tape.ask(file, what, **more), "unknown")
    tape.log(0, [0, "k", "a", ONE])


@right
def a_file_comes_before_the_one_that_it_goes_by(tape: Tape) -> None:
    tape.begin("t", ONE, file="z")
    tape.write("t", "a", file="a")
    tape.commit("t", ONE, 10, 1, file="z")
    tape.do("z", "snapshot", {"timestamp": 10}, snapshot="n", streams=["s/a"], asked_for=None)
    rows = [row("a", 0, ONE, 10)]
    tape.do("a", "snapshot_read", {"events": rows}, snapshot="n", stream="s/a")
    tape.log(0, [0, "k", "a", ONE])
    tape.entries.sort(key=lambda entry: entry[0])


# Outcomes that a caller goes by.


def _two_commit(tape: Tape, *own: str) -> None:
    """The owner of w and a helper, of x, commit at once; both are told so. The helper's commit was the one."""
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.write("t", "b", writer="x")
    asked = tape.ask("p", "commit", txn="t", writers=["w"], own=list(own))
    tape.commit("t", ONE, 10, 1, file="q", writers=["x"], own=["x"])
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=1)
    tape.log(0, [0, "k", "b", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


@wrong("lost-write")
def told_to_the_owner_and_its_own_is_not_there(tape: Tape) -> None:
    _two_commit(tape, "w")


@right
def told_to_who_wrote_nothing(tape: Tape) -> None:
    _two_commit(tape)


@right
def of_its_own_what_was_written_too_late(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    asked = tape.ask("p", "commit", txn="t", writers=["w"], own=["w"])
    tape.write("t", "b", file="q")
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=1)
    tape.log(0, [0, "k", "a", ONE])


@right
def told_with_what_another_one_did(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.begin("u", None)
    tape.write("u", "b", writer="x")
    tape.commit("u", ONE, 10, 1, writers=["x"], own=["x"], replayed=True)
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def interrupted_then_aborted_and_there(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "unknown")
    tape.do("p", "abort", txn="t")
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


@wrong("aborted-read")
def refused_and_let_be_and_there(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "failed")
    tape.log(0, [0, "k", "a", ONE])


@right
def refused_once_and_taken_the_next_time(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "failed")
    tape.commit("t", ONE, 10, 1)
    tape.log(0, [0, "k", "a", ONE])


test_an_anomaly, test_no_anomaly = TABLE.tests()
