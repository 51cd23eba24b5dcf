"""Tiny histories of readers: each anomaly, and its legal look-alike."""

from __future__ import annotations

from checker.report import KINDS
from tests.checker import (
    test_answer_cases,
    test_deleted_topics,
    test_group_cases,
    test_log_cases,
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
    Table,
    commit_moved,
    commit_one,
    commit_two,
    log_two,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


@wrong("dirty-read")
def seen_before_the_commit_was_asked(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    tape.open("r", "raw")
    tape.poll("r", A)
    tape.commit("t", ONE, 10, 2)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


@wrong("dirty-read")
def a_plain_write_seen_before_it_was_written(tape: Tape) -> None:
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, None))
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])


@right
def seen_before_the_commit_was_told(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    tape.open("r", "raw")
    asked = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.poll("r", A)
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=2)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


def _poll_all(
    tape: Tape, mode: str, *polls: list[list[object]], starts: str | int = "start"
) -> None:
    """A reader that is alone."""
    commit_two(tape)
    tape.open("r", mode, starts=starts)
    for rows in polls:
        tape.poll("r", *rows)
    log_two(tape)


@wrong("duplicate")
def given_twice(tape: Tape) -> None:
    _poll_all(tape, "ordered", [A, B], [B, C])


@wrong("int-poll-order")
def swapped_in_a_poll(tape: Tape) -> None:
    _poll_all(tape, "raw", [B, A, C])


@wrong("ext-poll-order")
def back_from_poll_to_poll(tape: Tape) -> None:
    _poll_all(tape, "raw", [A, C], [B])


@wrong("poll-skip")
def one_is_passed_over(tape: Tape) -> None:
    _poll_all(tape, "ordered", [A], [C])


@wrong("poll-skip")
def the_first_is_passed_over(tape: Tape) -> None:
    _poll_all(tape, "raw", [B, C])


@right
def an_unfinished_poll_may_have_given_it(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw")
    tape.poll("r", A)
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")
    tape.poll("r", C)
    log_two(tape)


@right
def from_the_end_or_the_middle(tape: Tape) -> None:
    _poll_all(tape, "raw", [B, C], starts="end")
    tape.open("q", "ordered", starts=10)
    tape.poll("q", C)
    tape.do("r", "caught_up", reader="q")


@wrong("torn-transaction")
def half_of_a_transaction(tape: Tape) -> None:
    _poll_all(tape, "transactions", [A], [C])


@wrong("poll-skip")
def a_transaction_is_passed_over(tape: Tape) -> None:
    _poll_all(tape, "transactions", [C])


@wrong("ext-poll-order")
def transactions_in_another_order(tape: Tape) -> None:
    _poll_all(tape, "transactions", [C], [A, B])


@wrong("unexplained")
def two_transactions_in_one_poll(tape: Tape) -> None:
    _poll_all(tape, "transactions", [A, B, C])


@right
def each_mode_reads_all(tape: Tape) -> None:
    commit_two(tape)
    polls = {"raw": [[A], [B, C]], "ordered": [[], [A, B, C]], "transactions": [[A, B], [C], []]}
    for mode, rows in polls.items():
        tape.open(mode, mode)
        for of_poll in rows:
            tape.poll(mode, *of_poll)
        tape.do("r", "caught_up", reader=mode)
    log_two(tape)


@wrong("unseen-commit")
def caught_up_without_the_last(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, B)
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


@wrong("unseen-commit")
def caught_up_while_a_poll_waits(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, B)
    tape.ask("r", "poll", reader="r")
    tape.do("r", "caught_up", reader="r")
    tape.ask("r", "poll", reader="r")
    log_two(tape)


@wrong("poll-skip")
def the_unfinished_poll_came_later(tape: Tape) -> None:
    _poll_all(tape, "raw", [A], [C])
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")


@wrong("poll-skip")
def the_unfinished_poll_came_earlier(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw")
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")
    tape.poll("r", A)
    tape.poll("r", C)
    log_two(tape)


@wrong("poll-skip")
def one_unfinished_poll_for_two_gaps(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, *"abcdef")
    tape.log(0, *([n, "k", name, ONE] for n, name in enumerate("abcdef")))
    tape.open("r", "raw")
    tape.poll("r", A)
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")
    tape.poll("r", row("c", 2, ONE), row("d", 3, ONE))
    tape.poll("r", row("f", 5, ONE))


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


@wrong("changed-answer")
def given_with_another_timestamp(tape: Tape) -> None:
    _poll_all(tape, "ordered", [A, row("b", 1, ONE, 11)])


@wrong("unexplained")
def given_with_another_offset(tape: Tape) -> None:
    _poll_all(tape, "ordered", [A, row("b", 2, ONE, 10)])


@wrong("unexplained")
def given_as_of_another_transaction(tape: Tape) -> None:
    _poll_all(tape, "ordered", [A, row("b", 1, TWO, 10)])


@wrong("unexplained")
def given_with_another_key(tape: Tape) -> None:
    _poll_all(tape, "ordered", [A, row("b", 1, ONE, 10, key="l")])


@right
def a_plain_write_has_no_id(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"], ["k", "b"]])
    tape.open("r", "ordered")
    tape.poll("r", row("a", 0, None), row("b", 1, "0" * 32))
    tape.log(0, [0, "k", "a", None], [1, "k", "b", "0" * 32])


@right
def a_raw_reader_does_not_know_transactions(tape: Tape) -> None:
    _poll_all(tape, "raw", [row("a", 0, None), row("b", 1, None)])


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
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.do("p", "abort", txn="t")
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))


# Keys that move from partition 0 to partition 1.


@wrong("ext-poll-order")
def an_ordered_reader_takes_the_new_partition_first(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered")
    tape.poll("r", MOVED)
    tape.poll("r", A, B)


@wrong("int-poll-order")
def an_ordered_reader_takes_the_new_partition_first_in_a_poll(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered")
    tape.poll("r", A, MOVED, B)


@wrong("poll-skip")
def an_ordered_reader_never_takes_the_old_partition(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered")
    tape.poll("r", MOVED)


@right
def a_raw_reader_takes_any_partition_first(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "raw")
    tape.poll("r", MOVED)
    tape.poll("r", A, B)


test_an_anomaly, test_no_anomaly = TABLE.tests()


def test_every_kind_has_a_case() -> None:
    """No kind is in the list for show."""
    others = (
        test_answer_cases,
        test_deleted_topics,
        test_group_cases,
        test_log_cases,
        test_table_cases,
        test_task_cases,
    )
    tables = (TABLE, *(module.TABLE for module in others))
    shown = {kind for table in tables for kinds, _ in table.wrongs for kind in kinds}
    assert shown == set(KINDS)
