"""Tiny histories of times and answers: each anomaly, and its legal look-alike."""

from __future__ import annotations

from tests.checker.table import (
    ONE,
    THREE,
    TWO,
    Table,
    begin_one,
    commit_in_doubt,
    commit_one,
    state,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


@wrong("non-monotone-timestamps")
def the_later_one_is_older(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 20, 0)
    tape.commit("u", TWO, 10, 0, file="q")


def over_two_control_partitions(tape: Tape, timestamp: int) -> None:
    """It comes after one that only the other scope has."""
    tape.do("q", "begin", {"txn_id": TWO}, txn="u", scope="z")
    tape.write("u", "b", stream="z/b", file="q")
    tape.commit("u", TWO, 20, 1, file="q")
    tape.begin("t", ONE)
    tape.write("t", "a", stream="s/a")
    tape.write("t", "c", stream="z/c")
    tape.commit("t", ONE, timestamp, 2)
    for stream, name, txn_id, at in (
        ("s/a", "a", ONE, timestamp), ("z/b", "b", TWO, 20), ("z/c", "c", ONE, timestamp)
    ):  # fmt: skip
        tape.log(0, [0, "k", name, txn_id], stream=stream)
        tape.commits([1, at, [txn_id], [[0, 0, 1]]], stream=stream)


@wrong("non-monotone-timestamps")
def earlier_than_what_another_scope_of_it_had(tape: Tape) -> None:
    over_two_control_partitions(tape, 10)


@right
def later_than_what_all_its_scopes_had(tape: Tape) -> None:
    over_two_control_partitions(tape, 30)


def of_a_scope_that_it_found_later(tape: Tape, timestamp: int) -> None:
    """One in memory begins without a scope, and writes to that of another control partition."""
    for name, scope in (("s", "s"), ("z", "z"), ("t", "s")):
        tape.do("p", "begin", {"txn_id": None}, txn=name, scope=scope)
    tape.commit("s", ONE, 20, 0)
    tape.commit("z", TWO, 10, 0)
    tape.commit("t", THREE, timestamp, 0, scope="z")


@wrong("non-monotone-timestamps")
def earlier_than_another_in_the_scope_of_its_commit(tape: Tape) -> None:
    of_a_scope_that_it_found_later(tape, 9)


@right
def earlier_than_another_in_a_scope_where_it_is_not(tape: Tape) -> None:
    of_a_scope_that_it_found_later(tape, 19)


def of_one_timestamp(tape: Tape, other: str) -> None:
    """Two transactions of two scopes; the first one also writes to a stream."""
    for name, txn_id, scope in (("t", ONE, "s"), ("u", TWO, "z")):
        tape.do(name, "begin", {"txn_id": txn_id}, txn=name, scope=scope)
    tape.write("t", "a", stream=other, file="t")
    tape.log(0, [0, "k", "a", ONE], stream=other)
    tape.commits([1, 20, [ONE], [[0, 0, 1]]], stream=other)
    tape.commit("t", ONE, 20, 1, file="t")
    tape.commit("u", TWO, 20, 0, file="u")


@wrong("non-monotone-timestamps")
def two_control_partitions_gave_one_timestamp(tape: Tape) -> None:
    of_one_timestamp(tape, "y/a")


@right
def two_that_share_nothing_gave_one_timestamp(tape: Tape) -> None:
    of_one_timestamp(tape, "s/a")


@wrong("non-monotone-timestamps")
def not_above_what_was_seen(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", ONE, 10, 0, seen=10)


@right
def above_what_the_first_of_two_had_seen(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.ask("q", "commit", txn="t", writers=["w"], seen=9)
    tape.commit("t", ONE, 10, 0, seen=20)


@wrong("non-monotone-timestamps")
def a_history_goes_back(tape: Tape) -> None:
    for name, txn_id in (("t", ONE), ("u", TWO)):
        tape.begin(name, txn_id, file=name)
        tape.write(name, name, file=name)
        tape.ask(name, "commit", txn=name, writers=["w"])
    tape.log(0, [0, "k", "t", ONE], [1, "k", "u", TWO])
    tape.commits([1, 20, [ONE], [[0, 0, 1]]], [2, 20, [TWO], [[0, 1, 2]]])


@wrong("non-monotone-timestamps")
def answered_at_the_same_moment_in_one_file(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 20, 0)
    tape.stands_still = True
    tape.commit("u", TWO, 10, 0)


@wrong("non-monotone-timestamps")
def a_plain_write_is_older(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 20)
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])
    tape.commits([1, 10, [], [[0, 0, 1]]])


@right
def of_two_scopes(tape: Tape) -> None:
    tape.do("p", "begin", {"txn_id": ONE}, txn="t", scope="one")
    tape.do("p", "begin", {"txn_id": TWO}, txn="u", scope="two")
    tape.commit("t", ONE, 20, 0)
    tape.commit("u", TWO, 10, 0)


@wrong("changed-answer")
def committed_and_aborted(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", ONE, 10, 0)
    tape.do("q", "abort", txn="t")


@wrong("changed-answer")
def two_counts(tape: Tape) -> None:
    begin_one(tape)
    tape.commit("t", ONE, 10, 1)
    tape.commit("t", ONE, 10, 2)


@wrong("changed-answer")
def forgotten(tape: Tape) -> None:
    tape.begin("t", ONE)
    state(tape, "open")
    state(tape, "unknown")


@wrong("changed-answer")
def a_number_of_two(tape: Tape) -> None:
    tape.begin("t", ONE, file="a")
    tape.begin("u", TWO, file="a")
    tape.commit("t", ONE, 10, 0, file="a", series="x", number=1)
    tape.commit("u", "3" * 32, 5, 0, file="a", series="x", number=1, replayed=True)


@wrong("changed-answer", "non-monotone-timestamps")
def a_number_of_one_whose_commit_was_not_answered(tape: Tape) -> None:
    begin_one(tape)
    tape.ask("q", "commit", txn="t", writers=["w"], series="x", number=1)
    tape.begin("u", TWO)
    tape.commit("u", TWO, 20, 0, series="x", number=1)
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


@wrong("changed-answer")
def a_name_of_one_whose_commit_was_not_answered(tape: Tape) -> None:
    tape.do("p", "begin", {"txn_id": ONE}, txn="t", scope="s", name="x")
    tape.write("t", "a")
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.begin("u", TWO)
    tape.commit("u", TWO, 20, 0, name="x")
    tape.log(0, [0, "k", "a", ONE])


@wrong("changed-answer")
def answered_with_another_id(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", TWO, 10, 0)


@right
def the_same_again(tape: Tape) -> None:
    begin_one(tape)
    state(tape, "unknown")
    state(tape, "open")
    tape.commit("t", ONE, 10, 1, series="x", number=1)
    tape.commit("t", ONE, 10, 1, file="q", series="x", number=1, replayed=True)
    tape.begin("u", TWO)
    tape.write("u", "b")
    tape.commit("u", ONE, 10, 1, series="x", number=1, replayed=True)
    tape.do("q", "state", {"state": "aborted", "timestamp": None}, txn_id=TWO)
    state(tape, "committed", 10)
    state(tape, "expired")
    tape.log(0, [0, "k", "a", ONE])


@right
def a_name_that_was_there(tape: Tape) -> None:
    tape.do("p", "begin", {"txn_id": ONE}, txn="t", scope="s", name="x")
    tape.commit("t", ONE, 10, 0)
    told = {"txn_id": ONE, "replayed": True}
    tape.do("q", "begin", told, txn="u", scope="s", name="x")
    tape.do("q", "begin", {"txn_id": TWO}, txn="v", scope="s")
    tape.commit("v", ONE, 10, 0, file="q", name="x", replayed=True)


@wrong("unexplained")
def committed_before_it_was_asked(tape: Tape) -> None:
    tape.begin("t", ONE)
    state(tape, "committed", 10)
    tape.told("p", tape.ask("p", "commit", txn="t", writers=[]), "unknown")


@wrong("unexplained")
def gave_way_to_a_stranger(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 10, 0)
    tape.commit("u", ONE, 10, 0, series="x", number=1, replayed=True)


@wrong("unexplained")
def no_writer_wrote_it(tape: Tape) -> None:
    tape.log(0, [0, "k", "a", None])


@wrong("unexplained")
def another_key(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "l", "a", None])


@wrong("unexplained")
def no_record_names_it(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])
    tape.commits()


@wrong("changed-answer")
def two_have_begun_with_one_id(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", ONE)


@wrong("changed-answer")
def gave_way_and_was_committed(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10)
    told = {"txn_id": ONE, "replayed": True}
    tape.do("p", "begin", told, txn="u", scope="s", name="x")
    tape.commit("u", TWO, 20, 0)


@wrong("changed-answer")
def another_one_gave_way_to_what_was_aborted(tape: Tape) -> None:
    tape.begin("t", ONE)
    commit_in_doubt(tape)
    tape.do("p", "abort", txn="t")
    told = {"txn_id": ONE, "replayed": True}
    tape.do("q", "begin", told, txn="u", scope="s", name="x")


@right
def an_abort_in_doubt(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.told("q", tape.ask("q", "abort", txn="t"), "unknown")
    tape.commit("t", ONE, 10, 0)


@wrong("unexplained")
def a_one_shot_that_is_repeated_has_another_count(tape: Tape) -> None:
    begin_one(tape, None)
    commit_in_doubt(tape)
    tape.commit("t", ONE, 10, 2, replayed=True)
    tape.log(0, [0, "k", "a", ONE])


@wrong("changed-answer")
def a_reader_was_given_another_time_than_was_answered(tape: Tape) -> None:
    begin_one(tape)
    commit_in_doubt(tape)
    state(tape, "committed")
    state(tape, "committed", 10)
    tape.open("r", "ordered")
    tape.poll("r", row("a", 0, ONE, 11))
    tape.log(0, [0, "k", "a", ONE])


@right
def which_of_two_names_it_has_is_not_known(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.told("p", tape.ask("p", "commit", txn="t", writers=[], name="x"), "unknown")
    tape.commit("t", ONE, 10, 0, name="y")
    tape.begin("u", TWO)
    tape.commit("u", TWO, 20, 0, name="x")


@wrong("changed-answer")
def its_record_has_another_time(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 11, [ONE], [[0, 0, 1]]])


@wrong("non-monotone-timestamps")
def the_later_one_has_the_same_time(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10)
    commit_one(tape, "u", TWO, 10)


@wrong("non-monotone-timestamps")
def below_the_highest_that_a_reader_was_given_at_once(tape: Tape) -> None:
    for txn, txn_id, name in (("t", ONE, "a"), ("v", "3" * 32, "b")):
        tape.begin(txn, txn_id)
        tape.write(txn, name, key=name)
        tape.ask(txn, "commit", txn=txn, writers=["w"])
    tape.open("r", "ordered")
    tape.poll("r", row("a", 0, ONE, 20, key="a"), row("b", 0, "3" * 32, 10, 1, key="b"))
    commit_one(tape, "u", TWO, 15)
    tape.log(0, [0, "a", "a", ONE])
    tape.log(1, [0, "b", "b", "3" * 32])
    tape.commits([1, 10, ["3" * 32], [[1, 0, 1]]], [2, 20, [ONE], [[0, 0, 1]]])


@right
def below_what_a_raw_reader_was_given(tape: Tape) -> None:
    begin_one(tape)
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    commit_one(tape, "u", TWO, 10)
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 20, [ONE], [[0, 0, 1]]])


@wrong("non-monotone-timestamps")
def below_the_higher_one_of_two_that_were_answered_before(tape: Tape) -> None:
    for txn, txn_id in (("t", ONE), ("v", "3" * 32)):
        tape.begin(txn, txn_id)
    asked = {txn: tape.ask(txn, "commit", txn=txn, writers=[]) for txn in "tv"}
    tape.told("t", asked["t"], txn_id=ONE, timestamp=20, committed=0)
    tape.told("v", asked["v"], txn_id="3" * 32, timestamp=10, committed=0)
    commit_one(tape, "u", TWO, 15)


@right
def a_series_continues(tape: Tape) -> None:
    for name, number in (("t", 1), ("u", 2)):
        tape.begin(name, name * 32)
        tape.commit(name, name * 32, 10 * number, 0, series="x", number=number)


@wrong("changed-answer")
def two_answers_about_a_transaction_of_another_recorder(tape: Tape) -> None:
    tape.do("p", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.do("p", "state", {"state": "committed", "timestamp": 11}, txn_id=ONE)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()
