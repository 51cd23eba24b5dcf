"""Tiny histories of logs, answers and times at the edges of conditions; see `test_edge_cases`."""

from __future__ import annotations

from tests.checker.table import (
    ONE,
    TWO,
    Table,
    commit_one,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


# Ids and answers.


def _ask_commit(tape: Tape, txn: str = "t") -> None:
    """The recorder does not know whether it took effect."""
    tape.told("p", tape.ask("p", "commit", txn=txn, writers=["w"]), "unknown")


def _state(tape: Tape, state: str, timestamp: int | None = None) -> None:
    tape.do("q", "state", {"state": state, "timestamp": timestamp}, txn_id=ONE)


@wrong("changed-answer")
def two_have_begun_with_one_id(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", ONE)


@wrong("aborted-read")
def a_one_shot_is_in_the_log_and_its_id_was_told_aborted(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    _ask_commit(tape)
    _state(tape, "aborted")
    tape.log(0, [0, "k", "a", ONE])


@wrong("unexplained")
def a_one_shot_is_in_the_log_without_an_id(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    _ask_commit(tape)
    tape.log(0, [0, "k", "a", None])


@wrong("unexplained")
def it_is_in_the_log_without_its_id(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, [0, "k", "a", None])


@wrong("changed-answer")
def gave_way_and_was_committed(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10)
    told = {"txn_id": ONE, "replayed": True}
    tape.do("p", "begin", told, txn="u", scope="s", name="x")
    tape.commit("u", TWO, 20, 0)


@wrong("changed-answer")
def another_one_gave_way_to_what_was_aborted(tape: Tape) -> None:
    tape.begin("t", ONE)
    _ask_commit(tape)
    tape.do("p", "abort", txn="t")
    told = {"txn_id": ONE, "replayed": True}
    tape.do("q", "begin", told, txn="u", scope="s", name="x")


@right
def nobody_knows_whether_it_was_aborted(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.told("q", tape.ask("q", "abort", txn="t"), "unknown")
    tape.commit("t", ONE, 10, 0)


@wrong("unexplained")
def a_one_shot_that_is_repeated_has_another_count(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    _ask_commit(tape)
    tape.commit("t", ONE, 10, 2, replayed=True)
    tape.log(0, [0, "k", "a", ONE])


@wrong("changed-answer")
def a_time_that_was_told_later_is_not_the_one_that_was_given(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    _ask_commit(tape)
    _state(tape, "committed")
    _state(tape, "committed", 10)
    tape.open("r", "ordered")
    tape.poll("r", row("a", 0, ONE, 11))
    tape.log(0, [0, "k", "a", ONE])


@right
def a_record_names_nothing_of_a_partition(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, [0, "k", "a", ONE])
    tape.log(1)
    tape.commits([1, 10, [ONE], [[0, 0, 1], [1, 0, 0]]])


@wrong("changed-answer")
def open_again_while_it_is_committing(tape: Tape) -> None:
    tape.begin("t", ONE)
    _ask_commit(tape)
    _state(tape, "committing")
    _state(tape, "open")


@wrong("changed-answer")
def committing_after_it_was_aborting(tape: Tape) -> None:
    tape.begin("t", ONE)
    _state(tape, "aborting")
    _state(tape, "committing")


@wrong("changed-answer")
def aborting_after_it_was_aborted(tape: Tape) -> None:
    tape.begin("t", ONE)
    _state(tape, "aborted")
    _state(tape, "aborting")


@right
def gave_way_to_one_that_claimed_the_number_later(tape: Tape) -> None:
    tape.begin("t", ONE)
    _ask_commit(tape)
    tape.commit("t", ONE, 10, 0, series="x", number=1)
    tape.begin("u", TWO)
    tape.commit("u", ONE, 10, 0, series="x", number=1, replayed=True)


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
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    commit_one(tape, "u", TWO, 10)
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 20, [ONE], [[0, 0, 1]]])


@wrong("non-monotone-timestamps")
def below_the_higher_one_of_two_that_were_told_before(tape: Tape) -> None:
    for txn, txn_id in (("t", ONE), ("v", "3" * 32)):
        tape.begin(txn, txn_id)
    asked = {txn: tape.ask(txn, "commit", txn=txn, writers=[]) for txn in "tv"}
    tape.told("t", asked["t"], txn_id=ONE, timestamp=20, committed=0)
    tape.told("v", asked["v"], txn_id="3" * 32, timestamp=10, committed=0)
    commit_one(tape, "u", TWO, 15)


@right
def a_series_goes_on(tape: Tape) -> None:
    for name, number in (("t", 1), ("u", 2)):
        tape.begin(name, name * 32)
        tape.commit(name, name * 32, 10 * number, 0, series="x", number=number)


# The writers that a commit takes.


@right
def the_second_commit_took_effect(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="first")
    tape.write("t", "b", writer="second")
    tape.ask("q", "commit", txn="t", writers=["first"])
    tape.commit("t", ONE, 10, 1, writers=["second"])
    tape.log(0, [0, "k", "b", ONE])


@right
def the_commit_that_takes_more_took_effect(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="first")
    tape.write("t", "b", writer="second")
    tape.ask("q", "commit", txn="t", writers=["first"])
    tape.commit("t", ONE, 10, 2, writers=["first", "second"])
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])


@right
def written_between_two_commits_of_which_the_first_took_effect(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    _ask_commit(tape)
    tape.write("t", "b")
    tape.commit("t", ONE, 10, 1)
    tape.log(0, [0, "k", "a", ONE])


@wrong("lost-write")
def a_finished_writer_that_nobody_named_is_lost(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="done", file="q")
    tape.do("q", "finish", txn="t", writer="done")
    tape.commit("t", ONE, 10, 1, writers=None)
    tape.log(0)


@right
def a_plain_write_where_no_log_was_read(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, stream="s/b")


@right
def written_beside_the_commit_and_not_there(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    rows = [["k", "b"]]
    op = tape.ask("q", "write", txn="t", writer="w", stream="s/a", events=rows)
    asked = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.told("q", op)
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=1)
    tape.log(0, [0, "k", "a", ONE])


@right
def nobody_knows_whether_it_was_written(tape: Tape) -> None:
    tape.begin("t", ONE)
    rows = [["k", "a"]]
    op = tape.ask("p", "write", txn="t", writer="w", stream="s/a", events=rows)
    tape.told("p", op, "unknown")
    tape.commit("t", ONE, 10, 0)
    tape.log(0)


@right
def written_after_the_receipt_and_not_there(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.do("p", "finish", txn="t", writer="w")
    tape.write("t", "a")
    tape.commit("t", ONE, 10, 0)
    tape.log(0)


@wrong("lost-write")
def finished_after_the_commit_and_not_there(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.do("p", "finish", txn="t", writer="w")
    tape.log(0)


# Retention.


@wrong("lost-write")
def no_record_names_it_and_retention_has_deleted_others(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, start=5)
    tape.commits()


@right
def the_history_is_cut_where_it_may_have_named_it(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, start=5)
    tape.do("end", "commits", {"records": [], "start": 2}, stream="s/a")


@wrong("lost-write", "torn-transaction")
def lost_behind_what_retention_has_deleted(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.log(0, [5, "k", "a", ONE], start=5)
    tape.commits([1, 10, [ONE], [[0, 5, 7]]])


@right
def retention_has_deleted_what_only_its_id_was_told_of(tape: Tape) -> None:
    tape.begin("u", TWO)
    tape.write("u", "a")
    tape.commit("u", ONE, 10, 1, series="x", number=1, replayed=True)
    tape.do("p", "plain", stream="s/a", events=[["k", "b"]])
    tape.log(0, start=5)


# Orders of sending.


@wrong("int-send-order")
def a_producers_key_has_moved_and_its_commits_are_out_of_order(tape: Tape) -> None:
    for name in "ab":
        tape.do("p", "plain", stream="s/a", events=[["k", name]], producer="w")
    tape.log(0, [0, "k", "a", None])
    tape.log(1, [0, "k", "b", None])
    tape.commits([1, 10, [], [[1, 0, 1]]], [2, 20, [], [[0, 0, 1]]])


@right
def a_producers_key_has_moved_and_no_history_was_read(tape: Tape) -> None:
    for name in "ab":
        tape.do("p", "plain", stream="s/a", events=[["k", name]], producer="w")
    tape.log(0, [0, "k", "b", None])
    tape.log(1, [0, "k", "a", None])


@wrong("int-send-order")
def a_producers_key_is_out_of_order_where_no_history_was_read(tape: Tape) -> None:
    for name in "abc":
        tape.do("p", "plain", stream="s/a", events=[["k", name]], producer="w")
    tape.log(0, [0, "k", "b", None], [1, "k", "a", None])
    tape.log(1, [0, "k", "c", None])


@wrong("int-send-order")
def one_write_of_three_out_of_order(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b", "c")
    tape.log(0, [0, "k", "a", ONE], [1, "k", "c", ONE], [2, "k", "b", ONE])


def _write_late(tape: Tape, *ids: str) -> None:
    """Written first, and its arrival is unknown."""
    tape.begin("t", ONE)
    events = [["k", one] for one in ids]
    tape.ask("p", "write", txn="t", writer="w", stream="s/a", events=events)


@wrong("int-send-order")
def a_write_without_an_answer_comes_between(tape: Tape) -> None:
    _write_late(tape, "a")
    tape.write("t", "b")
    tape.write("t", "c")
    tape.commit("t", ONE, 10, 3)
    tape.log(0, [0, "k", "c", ONE], [1, "k", "a", ONE], [2, "k", "b", ONE])


@wrong("int-send-order")
def a_write_without_an_answer_is_out_of_order_itself(tape: Tape) -> None:
    _write_late(tape, "a", "b")
    tape.write("t", "c")
    tape.commit("t", ONE, 10, 3)
    tape.log(0, [0, "k", "c", ONE], [1, "k", "b", ONE], [2, "k", "a", ONE])


@wrong("ext-send-order")
def one_that_was_asked_before_comes_between(tape: Tape) -> None:
    tape.begin("v", "3" * 32)
    tape.write("v", "v")
    tape.ask("p", "commit", txn="v", writers=["w"])
    commit_one_of(tape, "q", "t", ONE, 10)
    commit_one(tape, "u", TWO, 20, "u")
    tape.log(0, [0, "k", "u", TWO], [1, "k", "v", "3" * 32], [2, "k", "t", ONE])


def commit_one_of(tape: Tape, file: str, txn: str, txn_id: str, timestamp: int) -> None:
    """A transaction of another process, with one event of its name."""
    tape.begin(txn, txn_id, file)
    tape.write(txn, txn, file=file)
    tape.commit(txn, txn_id, timestamp, 1, file)


test_an_anomaly, test_no_anomaly = TABLE.tests()
