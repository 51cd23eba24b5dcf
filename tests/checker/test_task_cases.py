"""Tiny histories of processors: each anomaly, and its legal look-alike."""

from __future__ import annotations

from typing import Any

from tests.checker.table import FOUR, ONE, THREE, TWO, Table, begin_one, commit_two
from tests.checker.tape import Tape

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


def take(tape: Tape, ownership: str, *tasks: int, file: str = "w") -> None:
    tape.do(file, "take", processor="s/p", ownership=ownership, tasks=list(tasks or (0,)))


def moves(ownership: str, *ids: str, tasks: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """What a commit consumes."""
    consumes = {"tasks": list(tasks), "consumes": list(ids)}
    return {"processor": "s/p", "ownership": ownership, **consumes}


def consume(
    tape: Tape, txn: str, txn_id: str, at: int, ownership: str, *ids: str, **more: Any
) -> None:
    """A transaction without outputs."""
    tape.begin(txn, txn_id)
    tape.commit(txn, txn_id, at, 0, writers=(), **moves(ownership, *ids, **more))


def ends(tape: Tape) -> None:
    """Events a and b of one commit, then c, all of one key."""
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


def drained(tape: Tape) -> None:
    tape.do("end", "drained", processor="s/p", streams=["s/a"])


@right
def each_event_once(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "a")
    take(tape, "B")
    consume(tape, "y", FOUR, 40, "B", "b", "c")
    ends(tape)
    drained(tape)


@wrong("consumed-twice")
def an_event_by_two_commits(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "a")
    consume(tape, "y", FOUR, 40, "A", "a", "b", "c")
    ends(tape)


@wrong("consumed-twice")
def an_event_twice_in_one(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "a", "a")
    ends(tape)


@right
def two_attempts_and_one_of_them_is_committed(tape: Tape) -> None:
    """The outcome of the other one is never told."""
    commit_two(tape)
    take(tape, "A")
    tape.begin("x", None)
    asked = tape.ask("p", "commit", txn="x", writers=[], **moves("A", "a"))
    tape.told("p", asked, "unknown")
    consume(tape, "y", FOUR, 40, "A", "a", "b")
    ends(tape)


@wrong("unconsumed")
def an_event_is_left(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "a", "c")
    ends(tape)
    drained(tape)


@wrong("consume-order")
def a_key_backwards(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "a", "c")
    consume(tape, "y", FOUR, 40, "A", "b")
    ends(tape)


@wrong("aborted-read")
def an_aborted_event_is_consumed(tape: Tape) -> None:
    begin_one(tape)
    tape.do("p", "abort", txn="t")
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "a")
    tape.log(0)


@wrong("unexplained")
def an_event_that_no_writer_wrote(tape: Tape) -> None:
    take(tape, "A")
    consume(tape, "x", THREE, 30, "A", "z")


@wrong("fenced-commit")
def asked_after_the_tasks_were_taken(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A", 0, 1)
    take(tape, "B", 1)
    consume(tape, "x", THREE, 30, "A", "a", tasks=(0, 1))
    ends(tape)


@right
def asked_before_the_take_was_answered(tape: Tape) -> None:
    commit_two(tape)
    take(tape, "A", 0, 1)
    asked = tape.ask("w", "take", processor="s/p", ownership="B", tasks=[0])
    tape.begin("x", THREE)
    commit = tape.ask("p", "commit", txn="x", writers=[], **moves("A", "a"))
    tape.told("w", asked)
    tape.told("p", commit, txn_id=THREE, timestamp=30, committed=0)
    consume(tape, "y", FOUR, 40, "A", "b", tasks=(1,))
    ends(tape)


@right
def the_later_take_was_another_ones_before(tape: Tape) -> None:
    """Nobody knows which of two takes at one time was first."""
    commit_two(tape)
    mine = tape.ask("p", "take", processor="s/p", ownership="A", tasks=[0])
    take(tape, "B")
    tape.told("p", mine)
    consume(tape, "x", THREE, 30, "A", "a")
    ends(tape)


@wrong("fenced-commit")
def owners_take_turns(tape: Tape) -> None:
    commit_two(tape)
    mine = tape.ask("p", "take", processor="s/p", ownership="A", tasks=[0])
    other = tape.ask("w", "take", processor="s/p", ownership="B", tasks=[0])
    tape.told("p", mine)
    for at, ownership, one in ((30, "A", "a"), (40, "B", "b"), (50, "A", "c")):
        consume(tape, one * 2, f"{at}".zfill(32), at, ownership, one)
    tape.told("w", other)
    ends(tape)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()
