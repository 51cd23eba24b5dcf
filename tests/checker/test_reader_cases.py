"""Tiny histories of single readers: each anomaly, and its legal look-alike."""

from __future__ import annotations

from checker.report import KINDS
from tests.checker import (
    test_answer_cases,
    test_deleted_topics,
    test_derivation_cases,
    test_group_cases,
    test_log_cases,
    test_program_cases,
    test_snapshot_cases,
    test_table_cases,
    test_task_cases,
)
from tests.checker.table import (
    MOVED,
    ONE,
    TWO,
    A,
    B,
    C,
    R,
    Table,
    begin_one,
    commit_moved,
    commit_one,
    commit_two,
    log_two,
    state,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


TABLE.readings(
    "raw",
    ("all is read", "", R.gets(A), R.gets(B, C), R.caught_up()),
    ("swapped in a poll", "int-poll-order", R.gets(B, A, C)),
    ("back from poll to poll", "ext-poll-order", R.gets(A, C), R.gets(B)),
    ("the first is passed over", "poll-skip", R.gets(B, C)),
    ("a poll in doubt may have returned it", "", R.gets(A), R.in_doubt(), R.gets(C)),
    ("the poll in doubt came later", "poll-skip", R.gets(A), R.gets(C), R.in_doubt()),
    ("the poll in doubt came earlier", "poll-skip", R.in_doubt(), R.gets(A), R.gets(C)),
    ("events without transactions", "", R.gets(row("a", 0, None), row("b", 1, None))),
    ("an event of another transaction", "unexplained", R.gets(A, row("b", 1, TWO))),
)
TABLE.readings(
    "ordered",
    ("all is read, in order", "", R.gets(), R.gets(A, B, C), R.caught_up()),
    ("given twice", "duplicate", R.gets(A, B), R.gets(B, C)),
    ("one is passed over", "poll-skip", R.gets(A), R.gets(C)),
    ("caught up without the last", "unseen-commit", R.gets(A, B), R.caught_up()),
    ("not known whether it has caught up", "", R.gets(A, B), R.caught_up("unknown")),
    ("caught up between two polls that wait", "unseen-commit", R.gets(A, B), R.waits(), R.caught_up(), R.waits()),
    ("given with another timestamp", "changed-answer", R.gets(A, row("b", 1, ONE, 11))),
    ("given with another offset", "unexplained", R.gets(A, row("b", 2, ONE, 10))),
    ("given as of another transaction", "unexplained", R.gets(A, row("b", 1, TWO, 10))),
    ("given with another key", "unexplained", R.gets(A, row("b", 1, ONE, 10, key="l"))),
    ("given as of another stream", "unexplained", R.gets(A, row("b", 1, ONE, 10, stream="s/b"))),
)  # fmt: skip
TABLE.readings(
    "transactions",
    ("all is read, by transactions", "", R.gets(A, B), R.gets(C), R.gets(), R.caught_up()),
    ("half of a transaction", "torn-transaction", R.gets(A), R.gets(C)),
    ("a transaction is passed over", "poll-skip", R.gets(C)),
    ("transactions in another order", "ext-poll-order", R.gets(C), R.gets(A, B)),
    ("two transactions in one poll", "unexplained", R.gets(A, B, C)),
    ("a transaction with an event twice", "duplicate", R.gets(A, B, B)),
    ("a transaction out of order", "int-poll-order", R.gets(B, A)),
)
TABLE.readings("raw", ("from the end", "", R.gets(B, C)), starts="end")
TABLE.readings(
    "ordered",
    ("from a time", "", R.gets(C), R.caught_up()),
    ("committed after the start at a time", "unseen-commit", R.caught_up()),
    starts=10,
)

# A key moves from partition 0 to partition 1.
TABLE.readings(
    "ordered",
    ("the new partition first", "ext-poll-order", R.gets(MOVED), R.gets(A, B)),
    ("the new partition first in a poll", "int-poll-order", R.gets(A, MOVED, B)),
    ("never the old partition", "poll-skip", R.gets(MOVED)),
    ("a poll in doubt may have returned the old partition", "", R.in_doubt(), R.gets(MOVED)),
    ("the old one after a poll in doubt", "ext-poll-order", R.in_doubt(), R.gets(MOVED), R.gets(A, B)),
    written=commit_moved,
)  # fmt: skip
TABLE.readings(
    "raw",
    ("any partition first", "", R.gets(MOVED), R.gets(A, B)),
    written=commit_moved,
)
TABLE.readings(
    "ordered",
    ("from a time after the old partition", "", R.gets(MOVED)),
    written=commit_moved,
    starts=10,
)
TABLE.readings(
    "ordered",
    ("the old partition is left too early", "poll-skip", R.gets(A), R.gets(MOVED)),
    written=commit_moved,
    starts="end",
)


# What is seen before it is committed, or never was.


@wrong("dirty-read")
def seen_before_the_commit_was_asked(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    tape.open("r", "raw")
    tape.poll("r", A)
    tape.commit("t", ONE, 10, 2)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


@right
def seen_before_the_commit_was_answered(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    tape.open("r", "raw")
    asked = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.poll("r", A)
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=2)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


@wrong("unseen-commit")
def committed_after_its_start_at_the_end(tape: Tape) -> None:
    tape.open("r", "raw", starts="end")
    tape.poll("r")
    commit_two(tape)
    tape.poll("r")
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


@right
def committed_before_its_start_at_the_end(tape: Tape) -> None:
    tape.open("r", "raw", starts="end")
    commit_two(tape)
    tape.poll("r")
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


@right
def a_plain_write_has_no_id(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"], ["k", "b"]])
    tape.open("r", "ordered")
    tape.poll("r", row("a", 0, None), row("b", 1, "0" * 32))
    tape.log(0, [0, "k", "a", None], [1, "k", "b", "0" * 32])


@wrong("aborted-read")
def a_plain_write_that_failed_was_seen(tape: Tape) -> None:
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "a"]]), "failed")
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, None))


@wrong("lost-write")
def a_plain_write_was_seen_and_is_gone(tape: Tape) -> None:
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "a"]]), "unknown")
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, None))
    tape.log(0)


@wrong("aborted-read")
def aborted_and_seen_where_no_log_was_read(tape: Tape) -> None:
    begin_one(tape)
    tape.do("p", "abort", txn="t")
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))


@wrong("dirty-read")
def seen_by_the_process_before_it_asks_at_that_moment(tape: Tape) -> None:
    begin_one(tape)
    tape.open("r", "raw", file="p")
    tape.poll("r", row("a", 0, ONE), file="p")
    tape.stands_still = True
    tape.commit("t", ONE, 10, 1)
    tape.log(0, [0, "k", "a", ONE])


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
    begin_one(tape)
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
    begin_one(tape)
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    state(tape, "aborted")


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


@right
def retention_has_torn_it_on_one_of_two_partitions(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.open("r", "transactions")
    tape.do("r", "caught_up", reader="r")
    tape.log(0, start=1)
    tape.log(1, [0, "k", "b", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1], [1, 0, 1]]])


@right
def committed_at_its_start_at_a_time(tape: Tape) -> None:
    commit_two(tape)
    tape.do("p", "plain", stream="s/b", events=[["k", "d"]])
    tape.open("r", "ordered", starts=20, streams=("s/a", "s/b"))
    tape.do("r", "caught_up", reader="r")
    log_two(tape)
    tape.log(0, [0, "k", "d", None], stream="s/b")  # of which no time is known


@right
def plain_writes_of_one_commit_on_both_sides_of_the_end(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.open("r", "transactions", starts="end")
    tape.poll("r")
    tape.do("p", "plain", stream="s/a", events=[["k", "b"]])
    tape.do("r", "caught_up", reader="r")
    tape.log(0, [0, "k", "a", None], [1, "k", "b", None])
    tape.commits([1, 10, ["0" * 32], [[0, 0, 2]]])


# Keys that are followed across partitions.


def _moves_back(tape: Tape) -> None:
    """The key moves from partition 1 to partition 0."""
    commit_two(tape)
    tape.log(0, [0, "k", "c", TWO])
    tape.log(1, [0, "k", "a", ONE], [1, "k", "b", ONE])
    tape.commits([1, 10, [ONE], [[1, 0, 2]]], [2, 20, [TWO], [[0, 0, 1]]])
    tape.open("r", "ordered")


_A1, _B1 = row("a", 0, ONE, 10, partition=1), row("b", 1, ONE, 10, partition=1)
_C0 = row("c", 0, TWO, 20)


@wrong("int-poll-order")
def a_key_moves_to_a_partition_that_is_read_too_soon(tape: Tape) -> None:
    _moves_back(tape)
    tape.poll("r", _C0, _A1, _B1)


@right
def another_stream_has_the_key_too(tape: Tape) -> None:
    tape.begin("u", TWO)
    tape.write("u", "c", stream="s/b")
    tape.commit("u", TWO, 5, 1)
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])
    tape.log(0, [0, "k", "c", TWO], stream="s/b")
    tape.open("r", "ordered")
    tape.poll("r", A, B)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()


def test_every_kind_has_a_case() -> None:
    """No kind is in the list for show."""
    others = (
        test_answer_cases,
        test_deleted_topics,
        test_derivation_cases,
        test_group_cases,
        test_log_cases,
        test_program_cases,
        test_snapshot_cases,
        test_table_cases,
        test_task_cases,
    )
    tables = (TABLE, *(module.TABLE for module in others))
    shown = {kind for table in tables for kinds, _ in table.wrongs for kind in kinds}
    assert shown == set(KINDS)
