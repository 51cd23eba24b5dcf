"""Tiny histories of the log: each anomaly, and its legal look-alike."""

from __future__ import annotations

from typing import Any

from tests.checker.table import ONE, TWO, Table, commit_one, commit_two
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


@wrong("lost-write")
def told_and_nothing_is_there(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0)


@wrong("lost-write")
def acknowledged_plain_write_is_lost(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0)


@wrong("lost-write")
def only_the_state_was_told(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "unknown")
    tape.do("q", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.log(0)


@wrong("lost-write")
def a_record_without_its_event(tape: Tape) -> None:
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "a"]]), "unknown")
    tape.log(0)
    tape.commits([1, 10, [], [[0, 0, 1]]])


@wrong("lost-write")
def a_one_shot_that_was_told_by_its_id(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    op = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.told("p", op, "unknown", txn_id=ONE)
    tape.do("q", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.log(0)


@right
def unknown_and_nothing_is_there(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "unknown")
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "b"]]), "unknown")
    tape.log(0)
    tape.commits()


@right
def unknown_and_it_took_effect_later(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.do("q", "state", {"state": "open", "timestamp": None}, txn_id=ONE)
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])
    tape.log(0, [0, "k", "a", ONE])


@right
def retention_has_deleted_it(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [3, "k", "c", TWO], start=2)
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


@right
def the_log_was_not_read(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.told("p", tape.ask("p", "log", stream="s/a", partition=0), "unknown")
    tape.log(1)


@right
def the_history_was_cut(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    told = {"records": [[2, 20, [TWO], [[0, 3, 4]]]], "start": 2}
    tape.do("end", "commits", told, stream="s/a")


@right
def a_partition_could_not_be_read(tape: Tape) -> None:
    tape.begin("u", TWO)
    tape.write("u", "a")
    tape.commit("u", ONE, 10, 1, series="x", number=1, replayed=True)  # the transaction of that id
    tape.told("p", tape.ask("p", "log", stream="s/a", partition=1), "unknown")
    tape.log(0)
    tape.commits([1, 10, [ONE], [[1, 0, 1]]])


@wrong("aborted-read", "lost-write", "torn-transaction")
def a_commit_that_came_too_late(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="first")
    tape.write("t", "b", writer="second")
    tape.commit("t", ONE, 10, 1, writers=["first"])
    tape.commit("t", ONE, 10, 1, writers=["second"])
    tape.log(0, [0, "k", "b", ONE])


@wrong("aborted-read")
def aborted_and_in_the_log(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.do("p", "abort", txn="t")
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def nobody_asked_for_a_commit(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def the_only_commit_was_refused(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "failed")
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def a_writer_that_was_not_taken(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.write("t", "b", writer="other")
    tape.commit("t", ONE, 10, 2)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])


@wrong("aborted-read")
def written_after_the_commit_was_told(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", ONE, 10, 1)
    tape.write("t", "a", file="q")
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def gave_way_and_is_there(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10)
    tape.begin("u", TWO)
    tape.write("u", "b")
    tape.commit("u", ONE, 10, 0, replayed=True)
    tape.log(0, [0, "k", "b", TWO])


@wrong("aborted-read")
def seen_and_not_in_the_log(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    tape.log(0)


@right
def a_finished_writer_that_nobody_named(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="mine")
    tape.write("t", "b", writer="done", file="q")
    tape.do("q", "finish", txn="t", writer="done")
    tape.write("t", "c", writer="maybe", file="q")
    tape.ask("q", "finish", txn="t", writer="maybe")
    tape.write("t", "d", writer="undone", file="q")
    tape.commit("t", ONE, 10, 2, writers=None, own=["mine"])
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])


@wrong("aborted-read")
def an_unfinished_writer_that_nobody_named(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="undone", file="q")
    tape.commit("t", ONE, 10, 1, writers=None, own=["mine"])
    tape.log(0, [0, "k", "a", ONE])


@right
def one_of_two_commits_took_effect(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="first")
    tape.write("t", "b", writer="second")
    tape.ask("q", "commit", txn="t", writers=["first"])
    tape.commit("t", ONE, 10, 1, writers=["second"])  # the same answer, in either order
    tape.log(0, [0, "k", "a", ONE])


@right
def a_flush_that_was_killed(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    rows = [["k", "b"], ["k", "c"]]
    tape.ask("q", "write", txn="t", writer="w", stream="s/a", events=rows)
    tape.commit("t", ONE, 10, 2)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])


@wrong("lost-write")
def an_id_that_was_told_with_events(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "unknown")
    tape.begin("u", TWO)
    tape.commit("u", ONE, 10, 1, series="x", number=1, replayed=True)
    tape.log(0)


@wrong("lost-write")
def a_partition_without_a_log(tape: Tape) -> None:
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "a"]]), "unknown")
    tape.log(0)
    tape.commits([1, 10, [], [[1, 0, 1]]])


@wrong("aborted-read")
def aborted_and_in_the_history(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.do("p", "abort", txn="t")
    tape.commits([1, 10, [ONE], []])


@wrong("aborted-read")
def a_plain_write_that_failed(tape: Tape) -> None:
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "a"]]), "failed")
    tape.log(0, [0, "k", "a", None])


@wrong("unexplained")
def a_log_whose_offsets_do_not_rise(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"], ["k", "b"]])
    tape.log(0, [1, "k", "a", None], [1, "k", "b", None])


@wrong("unexplained")
def an_event_beyond_the_end(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [1, "k", "a", None], end=1)


@wrong("unexplained")
def a_history_whose_offsets_do_not_rise(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.commits([2, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


@wrong("unexplained")
def two_records_name_one_place(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 1, 4]]])


@wrong("unexplained")
def a_record_of_another_transaction(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 4]]], [2, 20, [TWO], []])


@wrong("duplicate")
def twice_in_the_log(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])
    tape.log(1, [0, "k", "a", None])


@wrong("torn-transaction")
def half_of_it_is_there(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.write("t", "b", stream="s/b")
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.log(0, [0, "k", "a", ONE])
    tape.log(0, stream="s/b")


@wrong("int-send-order")
def a_writer_out_of_order(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.write("t", "b")
    tape.commit("t", ONE, 10, 2)
    tape.log(0, [0, "k", "b", ONE], [1, "k", "a", ONE])


@wrong("int-send-order")
def one_write_out_of_order(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b")
    tape.commit("t", ONE, 10, 2)
    tape.log(0, [0, "k", "b", ONE], [1, "k", "a", ONE])


@wrong("int-send-order")
def a_producer_out_of_order(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"], ["k", "b"]], producer="w")
    tape.log(0, [0, "k", "b", None], [1, "k", "a", None])


@right
def without_a_key_or_of_two_writers(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", "b", key=None)
    tape.write("t", "c")
    tape.write("t", "d", writer="x")
    tape.commit("t", ONE, 10, 4, writers=["w", "x"])
    rows: list[list[Any]] = [
        [0, None, "b", ONE],
        [1, None, "a", ONE],
        [2, "k", "d", ONE],
        [3, "k", "c", ONE],
    ]
    tape.log(0, *rows)
    tape.do("p", "plain", stream="s/b", events=[["k", "e"], ["k", "f"]])
    tape.log(0, [0, "k", "f", None], [1, "k", "e", None], stream="s/b")


@wrong("ext-send-order")
def the_later_one_comes_first(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    commit_one(tape, "u", TWO, 20, "b")
    tape.log(0, [0, "k", "b", TWO], [1, "k", "a", ONE])


@right
def the_two_overlapped(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    op = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.begin("u", TWO, file="q")
    tape.write("u", "b", file="q")
    tape.commit("u", TWO, 10, 1, file="q")
    tape.told("p", op, txn_id=ONE, timestamp=20, committed=1)
    tape.log(0, [0, "k", "b", TWO], [1, "k", "a", ONE])


test_an_anomaly, test_no_anomaly = TABLE.tests()
