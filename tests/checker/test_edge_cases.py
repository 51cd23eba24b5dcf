"""Tiny histories at the edges of the judges' conditions: a change of each of these was seen by no other test."""

from __future__ import annotations

from typing import Any

from tests.checker.table import (
    MOVED,
    ONE,
    TWO,
    A,
    B,
    C,
    Table,
    commit_moved,
    commit_one,
    commit_two,
    log_two,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


# Groups and the ends that they have met.


def _pair(tape: Tape) -> None:
    """Two members; of a, b and c the first one is given a and b."""
    commit_two(tape)
    tape.open("r", "raw", "g")
    tape.open("q", "raw", "g", file="q")
    tape.poll("r", A, B)
    log_two(tape)


@wrong("unseen-commit")
def each_member_has_caught_up_one_after_the_other(tape: Tape) -> None:
    _pair(tape)
    tape.do("q", "caught_up", reader="q")
    tape.poll("r")
    tape.do("r", "caught_up", reader="r")


@right
def a_member_reads_on_after_the_first_has_caught_up(tape: Tape) -> None:
    _pair(tape)
    tape.open("x", "raw", "g", file="x")
    tape.do("q", "caught_up", reader="q")
    tape.poll("x", file="x")
    tape.do("r", "caught_up", reader="r")


@right
def a_poll_between_two_ends_may_have_given_it(tape: Tape) -> None:
    _pair(tape)
    tape.do("q", "caught_up", reader="q")
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")
    tape.do("r", "caught_up", reader="r")


@wrong("unseen-commit")
def a_poll_waits_between_two_ends_of_one_reader(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, B)
    tape.do("r", "caught_up", reader="r")
    tape.ask("r", "poll", reader="r")
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


@right
def nobody_knows_whether_it_has_caught_up(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, B)
    tape.told("r", tape.ask("r", "caught_up", reader="r"), "unknown")
    log_two(tape)


@right
def an_end_that_nobody_knows_of_ends_no_poll(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw", "g")
    tape.poll("r", A)
    tape.ask("r", "poll", reader="r")
    tape.ask("r", "caught_up", reader="r")
    tape.open("q", "raw", "g", starts="position", file="q")
    tape.poll("q", C, file="q")
    log_two(tape)


# Polls without a recorded end.


@wrong("poll-skip")
def one_unfinished_poll_beside_two_gaps(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, *"abcde")
    tape.log(0, *([n, "k", name, ONE] for n, name in enumerate("abcde")))
    tape.open("r", "raw", "g")
    tape.open("q", "raw", "g", file="q")
    tape.poll("r", row("a", 0, ONE))
    poll = tape.ask("r", "poll", reader="r")  # b or d, not both
    tape.poll("q", row("c", 2, ONE), file="q")
    tape.told("r", poll, "unknown")
    tape.poll("q", row("e", 4, ONE), file="q")


@right
def what_stands_before_the_gap_is_given_again_after_it(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw", "g")
    tape.poll("r", A)
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")  # b
    tape.open("q", "raw", "g", starts="position", file="q")
    tape.poll("q", A, file="q")
    tape.poll("q", C, file="q")
    log_two(tape)


@wrong("poll-skip")
def what_stands_behind_the_gap_was_given_before_the_poll(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw", "g")
    tape.poll("r", A, C)
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")
    tape.open("q", "raw", "g", starts="position", file="q")
    tape.poll("q", C, file="q")
    log_two(tape)


# Within a poll, and along a key.


@wrong("duplicate")
def a_transaction_with_an_event_twice(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "transactions")
    tape.poll("r", A, B, B)
    log_two(tape)


@wrong("int-poll-order")
def a_transaction_out_of_order(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "transactions")
    tape.poll("r", B, A)
    log_two(tape)


@right
def an_unfinished_poll_may_have_given_the_old_partition(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered")
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")
    tape.poll("r", MOVED)


@wrong("poll-skip")
def an_ordered_reader_leaves_the_old_partition_too_early(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered", starts="end")
    tape.poll("r", A)
    tape.poll("r", MOVED)


@right
def an_ordered_reader_begins_behind_the_old_partition(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered", starts=10)
    tape.poll("r", MOVED)


# Starts.


@wrong("unseen-commit")
def committed_after_its_start_at_a_time(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered", starts=10)
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


@right
def committed_at_its_start_at_a_time(tape: Tape) -> None:
    commit_two(tape)
    tape.do("p", "plain", stream="s/b", events=[["k", "d"]])
    tape.open("r", "ordered", starts=20, streams=("s/a", "s/b"))
    tape.do("r", "caught_up", reader="r")
    log_two(tape)
    tape.log(0, [0, "k", "d", None], stream="s/b")  # of which no time is known


@right
def a_groups_end_is_fixed_when_it_is_given_something(tape: Tape) -> None:
    tape.open("r", "raw", "g", starts="end")
    tape.poll("r")
    commit_two(tape)
    tape.poll("r", C)
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


# Retention.


@right
def retention_has_torn_what_a_reader_passes_over(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "transactions")
    tape.poll("r", C)
    tape.do("r", "caught_up", reader="r")
    tape.log(0, [1, "k", "b", ONE], [3, "k", "c", TWO], start=1)
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


@right
def retention_has_torn_it_on_one_of_two_partitions(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.open("r", "transactions")
    tape.do("r", "caught_up", reader="r")
    tape.log(0, start=1)
    tape.log(1, [0, "k", "b", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1], [1, 0, 1]]])


@wrong("unseen-commit")
def retention_has_torn_another_one(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "transactions")
    tape.do("r", "caught_up", reader="r")
    tape.log(0, [1, "k", "b", ONE], [3, "k", "c", TWO], start=1)
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


# The seen event.


def _show(tape: Tape, *rows: list[Any]) -> None:
    """In a snapshot of everything."""
    asked = {"snapshot": "n", "streams": ["s/a"], "asked_for": 20}
    tape.do("n", "snapshot", {"timestamp": 20}, **asked)
    tape.do("n", "snapshot_read", {"events": list(rows)}, snapshot="n", stream="s/a")


@wrong("unexplained")
def a_snapshot_shows_what_nobody_wrote(tape: Tape) -> None:
    commit_two(tape)
    _show(tape, A, B, C, row("d", 4, TWO, 20))
    log_two(tape)


@wrong("unexplained")
def a_snapshot_does_not_know_a_transaction(tape: Tape) -> None:
    commit_two(tape)
    _show(tape, A, row("b", 1, None, 10), C)
    log_two(tape)


@wrong("unexplained")
def an_ordered_reader_does_not_know_a_transaction(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, row("b", 1, None, 10))
    log_two(tape)


@wrong("unexplained")
def a_raw_reader_knows_another_transaction(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw")
    tape.poll("r", A, row("b", 1, TWO))
    log_two(tape)


@wrong("unexplained")
def given_as_of_another_stream(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, row("b", 1, ONE, 10, stream="s/b"))
    log_two(tape)


@wrong("dirty-read")
def seen_before_it_was_written_beside_the_commit(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    tape.write("t", "a")
    tape.log(0, [0, "k", "a", ONE])


@wrong("dirty-read")
def seen_by_the_process_before_it_asks_at_that_moment(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.open("r", "raw", file="p")
    tape.poll("r", row("a", 0, ONE), file="p")
    tape.stands_still = True
    tape.commit("t", ONE, 10, 1)
    tape.log(0, [0, "k", "a", ONE])


@wrong("dirty-read")
def seen_by_the_process_before_it_writes_at_that_moment(tape: Tape) -> None:
    tape.open("r", "raw", file="p")
    tape.poll("r", row("a", 0, None), file="p")
    tape.stands_still = True
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])


@wrong("dirty-read")
def seen_by_the_process_before_it_writes_beside_the_commit_at_that_moment(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.open("r", "raw", file="p")
    tape.poll("r", row("a", 0, ONE), file="p")
    tape.stands_still = True
    tape.write("t", "a")
    tape.log(0, [0, "k", "a", ONE])


@right
def seen_at_the_moment_at_which_it_was_asked(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    tape.stands_still = True
    tape.commit("t", ONE, 10, 1)
    tape.log(0, [0, "k", "a", ONE], [2, "k", "b", None])
    tape.poll("r", row("b", 2, None))
    tape.stands_still = True
    tape.do("p", "plain", stream="s/a", events=[["k", "b"]])


@wrong("aborted-read")
def seen_and_aborted_in_the_end(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    tape.do("q", "state", {"state": "aborted", "timestamp": None}, txn_id=ONE)


@wrong("aborted-read")
def seen_of_a_writer_that_was_not_taken(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="other")
    tape.commit("t", ONE, 10, 0)
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))


@wrong("lost-write")
def committed_and_seen_and_gone(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    tape.log(0)


test_an_anomaly, test_no_anomaly = TABLE.tests()
