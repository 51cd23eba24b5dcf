"""Tiny histories of groups of readers: each anomaly, and its legal look-alike."""

from __future__ import annotations

from tests.checker.table import (
    MOVED,
    ONE,
    TWO,
    A,
    B,
    C,
    Table,
    commit_moved,
    commit_two,
    log_two,
)
from tests.checker.tape import Tape

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


@right
def another_member_had_the_old_partition(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered", "g")
    tape.open("q", "ordered", "g", file="q")
    tape.poll("r", A, B)
    tape.poll("q", MOVED, file="q")


@wrong("ext-poll-order")
def another_member_has_the_old_partition_too_late(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered", "g")
    tape.open("q", "ordered", "g", file="q")
    tape.poll("q", MOVED, file="q")
    tape.poll("r", A, B)


def _members(tape: Tape, *, closed: bool = True) -> None:
    """The first one is given a and b, and has committed a."""
    commit_two(tape)
    tape.open("r", "ordered", "g")
    tape.poll("r", A)
    tape.do("r", "position", reader="r")
    tape.poll("r", B)
    if closed:
        tape.do("r", "close", reader="r")
    tape.open("q", "ordered", "g", starts="position", file="q")


@right
def again_behind_the_position(tape: Tape) -> None:
    _members(tape, closed=False)
    tape.poll("q", B, C, file="q")
    tape.do("q", "caught_up", reader="q")
    log_two(tape)


@wrong("duplicate")
def again_below_the_position(tape: Tape) -> None:
    _members(tape)
    tape.poll("q", A, B, C, file="q")
    log_two(tape)


@wrong("unseen-commit")
def the_group_has_caught_up_without(tape: Tape) -> None:
    _members(tape)
    tape.poll("q", B, file="q")
    tape.do("q", "caught_up", reader="q")
    log_two(tape)


@wrong("unseen-commit")
def a_new_group_begins_at_the_start(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw", "g", starts="position")
    tape.poll("r", MOVED)
    tape.do("r", "caught_up", reader="r")
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])
    tape.log(1, [0, "k", "c", TWO])


@right
def the_killed_member_may_have_been_given_it(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered", "g")
    tape.poll("r", A)
    tape.ask("r", "poll", reader="r")  # b, of which the position is committed on the way
    tape.open("q", "ordered", "g", starts="position", file="q")
    tape.poll("q", C, file="q")
    tape.do("q", "caught_up", reader="q")
    log_two(tape)


@right
def two_at_a_time_without_offsets(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered", "g")
    tape.open("q", "ordered", "g", file="q")
    tape.poll("r", A)
    tape.do("r", "position", reader="r")  # it may have lost the partition before
    tape.poll("q", A, B, file="q")


@wrong("duplicate")
def two_at_a_time_with_offsets(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered", "g")
    tape.open("q", "ordered", "g", file="q")
    tape.poll("r", A)
    tape.do("r", "position", reader="r", positions=[["s/a", 0, 1]])
    tape.poll("q", A, B, file="q")


@wrong("poll-skip")
def a_position_beyond_what_was_given(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered", "g")
    tape.poll("r", A)
    tape.do("r", "position", reader="r")
    tape.do("r", "close", reader="r")
    tape.open("q", "ordered", "g", starts="position", file="q")
    tape.poll("q", C, file="q")
    log_two(tape)


@wrong("ext-poll-order")
def a_group_goes_on_before_what_comes_first(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "ordered", "g")
    tape.poll("r", A, C)
    tape.poll("r", B)
    log_two(tape)


@wrong("int-poll-order")
def a_group_is_given_a_poll_out_of_order(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw", "g")
    tape.poll("r", B, A, C)
    log_two(tape)


@right
def a_member_goes_on_after_an_unfinished_poll_and_back(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw", "g")
    tape.poll("r", A)
    tape.told("r", tape.ask("r", "poll", reader="r"), "unknown")  # b
    tape.poll("r", C)
    tape.poll("r", B, C)  # it lost the partition, and has it again
    log_two(tape)


@right
def one_member_has_caught_up_and_another_reads_on(tape: Tape) -> None:
    _members(tape, closed=False)
    tape.do("q", "caught_up", reader="q")
    tape.poll("r")
    log_two(tape)


@wrong("duplicate")
def a_transaction_again_below_the_position(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "transactions", "g")
    tape.poll("r", A, B)
    tape.do("r", "position", reader="r")
    tape.do("r", "close", reader="r")
    tape.open("q", "transactions", "g", starts="position", file="q")
    tape.poll("q", A, B, file="q")
    log_two(tape)


def _takes_up(tape: Tape, reader: str, partition: int | None = 0) -> None:
    tape.do(reader, "resume", reader=reader, places=[["s/a", partition]])


def _position(tape: Tape, offset: int, partition: int | None = 0) -> None:
    """A reader that is given nothing asks for the group's positions."""
    tape.do("w", "position", reader="w", positions=[["s/a", partition, offset]])


def _two_members(tape: Tape, mode: str = "ordered") -> None:
    commit_two(tape)
    log_two(tape)
    for name in ("r", "q", "w"):
        tape.open(name, mode, "g", starts="position", file=name)


@right
def a_member_has_not_heard_that_another_one_goes_on(tape: Tape) -> None:
    _two_members(tape)
    _takes_up(tape, "r")
    tape.poll("r", A)
    _takes_up(tape, "q")
    tape.poll("q", A, B, file="q")
    _position(tape, 2)
    tape.poll("r", B)


@right
def a_member_takes_up_what_has_no_position_yet(tape: Tape) -> None:
    _two_members(tape)
    _takes_up(tape, "r")
    tape.poll("r", A, B)
    _position(tape, 1)
    _takes_up(tape, "r")
    tape.poll("r", B, C)


@wrong("duplicate")
def a_member_takes_up_below_a_position(tape: Tape) -> None:
    _two_members(tape)
    _takes_up(tape, "r")
    tape.poll("r", A, B)
    _position(tape, 1)
    _takes_up(tape, "q")
    tape.poll("q", A, B, file="q")


@wrong("duplicate")
def a_member_is_given_again_without_taking_up(tape: Tape) -> None:
    _two_members(tape)
    _takes_up(tape, "r")
    tape.poll("r", A)
    tape.poll("r", A)


@wrong("ext-poll-order")
def a_member_goes_back_without_taking_up(tape: Tape) -> None:
    _two_members(tape)
    tape.poll("q", A, B, file="q")
    _takes_up(tape, "r")
    tape.poll("r", B)
    tape.poll("r", A)


@wrong("duplicate")
def a_transaction_is_taken_up_below_the_position_in_the_history(tape: Tape) -> None:
    _two_members(tape, "transactions")
    _takes_up(tape, "r", None)
    tape.poll("r", A, B)
    _position(tape, 2, None)
    _takes_up(tape, "q", None)
    tape.poll("q", A, B, file="q")


@right
def a_transaction_is_taken_up_at_the_position_in_the_history(tape: Tape) -> None:
    _two_members(tape, "transactions")
    _takes_up(tape, "r", None)
    tape.poll("r", A, B)
    tape.poll("r", C)
    _position(tape, 2, None)
    _takes_up(tape, "q", None)
    tape.poll("q", C, file="q")


test_an_anomaly, test_no_anomaly = TABLE.tests()
