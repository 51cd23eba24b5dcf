"""Tiny histories of groups at the edges of the judge's conditions: a change of each was seen by no other test."""

from __future__ import annotations

from tests.checker.table import (
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
MOVED = row("c", 0, TWO, 20, partition=1)


def _alone(tape: Tape) -> None:
    """One member of a group, that reads from the start."""
    commit_two(tape)
    log_two(tape)
    tape.open("r", "ordered", "g")


def _notes(tape: Tape, *positions: list[object], outcome: str = "ok") -> None:
    """A position: with offsets, if any are given."""
    more = {"positions": list(positions)} if positions else {}
    tape.told("r", tape.ask("r", "position", reader="r", **more), outcome)


# Positions.


@wrong("duplicate")
def the_second_of_two_positions(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A)
    _notes(tape)
    tape.poll("r", B)
    _notes(tape)
    tape.poll("r", B, C)


@wrong("duplicate")
def the_second_of_two_positions_with_offsets(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A, B)
    _notes(tape, ["s/a", 0, 1])
    _notes(tape, ["s/a", 0, 2])
    tape.poll("r", B, C)


@wrong("duplicate")
def between_two_positions(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A)
    _notes(tape)
    tape.poll("r", A)
    _notes(tape)


@wrong("duplicate")
def between_the_positions_of_two_members(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A)
    _notes(tape)
    tape.open("q", "ordered", "g", starts="position", file="q")
    tape.poll("q", A, file="q")
    tape.do("q", "position", reader="q")


@right
def again_after_a_position_of_which_nobody_knows(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A)
    _notes(tape, outcome="unknown")
    tape.poll("r", A)


@right
def again_after_a_position_with_offsets_of_which_nobody_knows(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A)
    _notes(tape, ["s/a", 0, 1], outcome="unknown")
    tape.poll("r", A)


@right
def again_above_a_position_with_offsets(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A, B)
    _notes(tape, ["s/a", 0, 1])
    tape.poll("r", B, C)


@wrong("duplicate")
def behind_something_that_was_not_given_before(tape: Tape) -> None:
    _alone(tape)
    tape.poll("r", A, B)
    _notes(tape, ["s/a", 0, 2])
    tape.poll("r", C)
    tape.poll("r", B)


@wrong("duplicate")
def below_the_position_on_the_second_partition(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "raw", "g")
    tape.poll("r", A, B, MOVED)
    _notes(tape, ["s/a", 0, 1], ["s/a", 1, 1])
    tape.poll("r", B, MOVED)


# Places that are taken up.


def _takes_up(tape: Tape, reader: str, *partitions: int) -> None:
    tape.do(reader, "resume", reader=reader, places=[["s/a", one] for one in partitions])


@wrong("duplicate")
def again_on_the_second_place_that_was_taken_up(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "raw", "g")
    _takes_up(tape, "r", 0, 1)
    tape.poll("r", A, B, MOVED)
    tape.poll("r", MOVED)


@right
def on_a_place_that_was_never_taken_up(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "raw", "g")
    _takes_up(tape, "r", 1)
    tape.poll("r", A)
    tape.poll("r", A, B, MOVED)


@wrong("duplicate")
def again_after_a_place_that_was_never_taken_up(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "raw", "g")
    _takes_up(tape, "r", 1)
    tape.poll("r", A, B, MOVED)
    tape.poll("r", MOVED)


@wrong("duplicate")
def a_member_that_could_not_take_up(tape: Tape) -> None:
    commit_two(tape)
    log_two(tape)
    tape.open("r", "raw", "g")
    tape.open("q", "raw", "g", file="q")
    places = [["s/a", 0]]
    tape.told("r", tape.ask("r", "resume", reader="r", places=places), "unknown")
    tape.poll("q", A, file="q")
    tape.do("q", "position", reader="q", positions=[["s/a", 0, 1]])
    tape.poll("r", A, B)


@wrong("duplicate")
def the_other_member_is_closed_at_the_same_time(tape: Tape) -> None:
    commit_two(tape)
    log_two(tape)
    tape.open("r", "ordered", "g")
    start = len(tape.entries)
    tape.poll("r", A)
    tape.do("r", "close", reader="r")
    tape.open("q", "ordered", "g", starts="position")
    for _, _, entry in tape.entries[start:]:
        entry["at"] = tape.at
    tape.poll("q", A)
    tape.do("r", "position", reader="q")
    tape.poll("q", A, B)


def _dies_and_another_one_reads(tape: Tape, *, closed: bool) -> None:
    commit_two(tape)
    log_two(tape)
    tape.open("q", "raw", "g", file="q")
    if closed:
        tape.do("q", "close", reader="q")
    tape.open("r", "raw", "g")
    tape.poll("r", A)
    _notes(tape)  # of nothing, if the place is q's by now: it missed no heartbeat yet
    tape.poll("r", A, B)


@right
def a_dead_member_may_have_taken_it(tape: Tape) -> None:
    _dies_and_another_one_reads(tape, closed=False)


@wrong("duplicate")
def a_closed_member_takes_nothing(tape: Tape) -> None:
    _dies_and_another_one_reads(tape, closed=True)


# The event before it.


def _two_members(tape: Tape) -> None:
    commit_two(tape)
    log_two(tape)
    tape.open("r", "raw", "g")
    tape.open("q", "raw", "g", file="q")


def _breaks(tape: Tape, file: str) -> None:
    tape.told(file, tape.ask(file, "poll", reader=file), "unknown")


@right
def each_member_has_an_unfinished_poll(tape: Tape) -> None:
    _two_members(tape)
    _breaks(tape, "r")
    _breaks(tape, "q")  # a
    tape.poll("q", B, file="q")
    tape.poll("r", A, B)


@right
def the_first_of_two_unfinished_polls(tape: Tape) -> None:
    _two_members(tape)
    _breaks(tape, "r")  # a
    tape.poll("r", B)
    _breaks(tape, "r")
    tape.poll("q", A, B, file="q")


@right
def the_unfinished_poll_of_another_member(tape: Tape) -> None:
    _two_members(tape)
    tape.open("s", "raw", "g", file="s")
    _breaks(tape, "s")  # a
    tape.poll("q", B, file="q")
    tape.poll("r", A, B)


@right
def two_events_of_an_unfinished_poll_are_given_again(tape: Tape) -> None:
    _two_members(tape)
    _breaks(tape, "r")  # a and b
    tape.poll("r", C)
    tape.poll("r", A, B, C)


@wrong("ext-poll-order")
def the_unfinished_poll_ended_before_the_event_before(tape: Tape) -> None:
    _two_members(tape)
    _breaks(tape, "q")
    tape.poll("q", A, file="q")
    tape.poll("q", C, file="q")
    tape.poll("r", B, C)


@wrong("ext-poll-order")
def the_unfinished_poll_of_another_member_came_later(tape: Tape) -> None:
    _two_members(tape)
    tape.poll("q", B, file="q")
    _breaks(tape, "r")
    tape.poll("r", A, B)


@wrong("ext-poll-order")
def a_reader_without_a_group_gives_nothing_again(tape: Tape) -> None:
    commit_moved(tape)
    tape.open("r", "ordered")
    _breaks(tape, "r")
    tape.poll("r", MOVED)
    tape.poll("r", A, B)


def _five_events(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, *"abcde")
    tape.log(0, *([n, "k", name, ONE] for n, name in enumerate("abcde")))
    for name in "rq":
        tape.open(name, "raw", "g", file=name)


def _two_gaps(tape: Tape, *behind: str) -> None:
    _five_events(tape)
    tape.poll("r", row("a", 0, ONE))
    _breaks(tape, "r")  # b, c and d
    for name in behind:
        tape.poll(name, row("e", 4, ONE), file=name)
    tape.poll("q", row("c", 2, ONE), file="q")


@right
def what_lies_between_two_gaps_is_given_again(tape: Tape) -> None:
    _two_gaps(tape, "r")


@wrong("poll-skip")
def the_member_of_the_unfinished_poll_has_not_gone_on(tape: Tape) -> None:
    _two_gaps(tape, "q")


@wrong("poll-skip")
def the_member_of_the_unfinished_poll_repeats_it_too(tape: Tape) -> None:
    _five_events(tape)
    poll = tape.ask("r", "poll", reader="r")
    tape.poll("q", row("a", 0, ONE), row("c", 2, ONE), file="q")
    tape.told("r", poll, "unknown")
    tape.poll("r", row("c", 2, ONE), row("e", 4, ONE))


@wrong("ext-poll-order", "int-poll-order")
def two_partitions_out_of_order(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.do("p", "plain", stream="s/a", events=[["l", "d"], ["l", "e"]])
    tape.log(1, [0, "l", "d", None], [1, "l", "e", None])
    tape.open("r", "raw", "g")
    tape.poll("r", B)
    tape.poll("r", A)
    one, other = (row(name, at, None, partition=1, key="l") for at, name in enumerate("de"))
    tape.poll("r", other, one)


test_an_anomaly, test_no_anomaly = TABLE.tests()
