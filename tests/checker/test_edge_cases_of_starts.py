"""Tiny histories of what a reader must be given: from which start, and before what else of a key.

A change of the condition behind each of these was seen by no other test.
"""

from __future__ import annotations

from tests.checker.table import (
    FOUR,
    ONE,
    THREE,
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

# The end, which is fixed when the first poll is told.


def _reads_from_the_end(tape: Tape, mode: str) -> None:
    tape.open("r", mode, starts="end")
    tape.poll("r")


def _has_caught_up(tape: Tape) -> None:
    tape.do("r", "caught_up", reader="r")


@wrong("unseen-commit")
def a_transaction_behind_the_end(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    _reads_from_the_end(tape, "transactions")
    commit_one(tape, "u", TWO, 20, "c")
    _has_caught_up(tape)
    log_two(tape)


@right
def a_transaction_before_the_end(tape: Tape) -> None:
    commit_two(tape)
    _reads_from_the_end(tape, "transactions")
    _has_caught_up(tape)
    log_two(tape)


def _plain(tape: Tape, name: str) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", name]])


@right
def plain_writes_of_one_commit_on_both_sides_of_the_end(tape: Tape) -> None:
    _plain(tape, "a")
    _reads_from_the_end(tape, "transactions")
    _plain(tape, "b")
    _has_caught_up(tape)
    tape.log(0, [0, "k", "a", None], [1, "k", "b", None])
    tape.commits([1, 10, ["0" * 32], [[0, 0, 2]]])


@right
def a_plain_write_before_the_end(tape: Tape) -> None:
    _plain(tape, "a")
    _reads_from_the_end(tape, "raw")
    _has_caught_up(tape)
    tape.log(0, [0, "k", "a", None])


@wrong("unseen-commit")
def a_plain_write_behind_the_end(tape: Tape) -> None:
    _reads_from_the_end(tape, "raw")
    _plain(tape, "a")
    _has_caught_up(tape)
    tape.log(0, [0, "k", "a", None])


def _asks_again(tape: Tape) -> None:
    """A commit without an answer, and its effect."""
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "unknown")


@right
def a_commit_is_asked_before_the_end_and_again(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    _asks_again(tape)
    _reads_from_the_end(tape, "raw")
    tape.commit("t", ONE, 10, 2)
    commit_one(tape, "u", TWO, 20, "c")
    tape.poll("r", C)
    _has_caught_up(tape)
    log_two(tape)


@right
def a_commit_is_asked_before_another_one_and_again(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    _asks_again(tape)
    commit_one(tape, "u", TWO, 20, "c")
    tape.commit("t", ONE, 10, 2)
    log_two(tape)


@wrong("non-monotone-timestamps")
def a_commit_is_asked_after_another_one_and_again_after_a_third(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    commit_one(tape, "u", TWO, 15, "b")
    _asks_again(tape)
    commit_one(tape, "v", THREE, 20, "c")
    tape.commit("t", ONE, 10, 1)


@right
def closed_is_not_caught_up(tape: Tape) -> None:
    commit_two(tape)
    tape.open("r", "raw")
    tape.poll("r", A)
    tape.do("r", "close", reader="r")
    log_two(tape)


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


@right
def a_key_moves_to_a_partition_that_is_read_first(tape: Tape) -> None:
    _moves_back(tape)
    tape.poll("r", _A1, _B1, _C0)


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


def _two_keys(tape: Tape) -> None:
    """Keys k and l move from partition 0 to partition 1, each with a commit of its own on both."""
    for number, (key, name) in enumerate([("k", "a"), ("l", "b"), ("k", "c"), ("l", "d")]):
        txn, txn_id = f"t{number}", str(number + 1) * 32
        tape.begin(txn, txn_id)
        tape.write(txn, name, key=key)
        tape.commit(txn, txn_id, 10 * number + 10, 1)
    tape.log(0, [0, "k", "a", ONE], [1, "l", "b", TWO])
    tape.log(1, [0, "k", "c", THREE], [1, "l", "d", FOUR])


_K, _L = row("a", 0, ONE, 10), row("b", 1, TWO, 20, key="l")
_K1 = row("c", 0, THREE, 30, partition=1)
_L1 = row("d", 1, FOUR, 40, partition=1, key="l")


@wrong("int-poll-order")
def the_second_key_comes_too_soon(tape: Tape) -> None:
    _two_keys(tape)
    tape.open("r", "ordered")
    tape.poll("r", _K, _K1, _L1, _L)


@wrong("poll-skip")
def the_second_key_is_due(tape: Tape) -> None:
    _two_keys(tape)
    tape.open("r", "ordered", starts=10)
    tape.poll("r", _K1, _L1)


test_an_anomaly, test_no_anomaly = TABLE.tests()
