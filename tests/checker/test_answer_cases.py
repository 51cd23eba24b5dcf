"""Tiny histories of time, answers and snapshots: each anomaly, and its legal look-alike."""

from __future__ import annotations

from tests.checker.table import ONE, TWO, A, B, C, Table, commit_one, commit_two, log_two
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


# Time.


@wrong("non-monotone-timestamps")
def the_later_one_is_older(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 20, 0)
    tape.commit("u", TWO, 10, 0, file="q")


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
def a_series_goes_back(tape: Tape) -> None:
    for name, number, timestamp in (("t", 2, 10), ("u", 1, 20)):
        txn_id = name * 32
        tape.begin(name, txn_id, file=name)
        tape.commit(name, txn_id, timestamp, 0, file=name, series="x", number=number)


@wrong("non-monotone-timestamps")
def told_at_the_same_moment_in_one_file(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 20, 0)
    tape.stands_still = True
    tape.commit("u", TWO, 10, 0)


@wrong("non-monotone-timestamps")
def older_than_what_a_reader_was_given(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.open("r", "ordered")
    tape.poll("r", row("a", 0, ONE, 20))
    tape.begin("u", TWO)
    tape.commit("u", TWO, 10, 0)
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 20, [ONE], [[0, 0, 1]]])


@wrong("non-monotone-timestamps")
def a_plain_write_is_older(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 20)
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])
    tape.commits([1, 10, [], [[0, 0, 1]]])


@right
def told_at_the_same_moment(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 20, 0)
    tape.stands_still = True
    tape.commit("u", TWO, 10, 0, file="q")


@right
def of_two_scopes(tape: Tape) -> None:
    tape.do("p", "begin", {"txn_id": ONE}, txn="t", scope="one")
    tape.do("p", "begin", {"txn_id": TWO}, txn="u", scope="two")
    tape.commit("t", ONE, 20, 0)
    tape.commit("u", TWO, 10, 0)


@right
def the_first_of_its_commits_may_have_been_it(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.ask("q", "commit", txn="u", writers=[])
    tape.commit("t", ONE, 20, 0)
    tape.commit("u", TWO, 10, 0)


# Answers.


@wrong("changed-answer")
def committed_and_aborted(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", ONE, 10, 0)
    tape.do("q", "abort", txn="t")


@wrong("changed-answer")
def two_timestamps(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", ONE, 10, 0)
    tape.do("q", "state", {"state": "committed", "timestamp": 11}, txn_id=ONE)


@wrong("changed-answer")
def two_counts(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.commit("t", ONE, 10, 1)
    tape.commit("t", ONE, 10, 2)


@wrong("changed-answer")
def open_after_the_end(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.do("p", "abort", txn="t")
    tape.do("q", "state", {"state": "open", "timestamp": None}, txn_id=ONE)


@wrong("changed-answer")
def forgotten(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.do("q", "state", {"state": "open", "timestamp": None}, txn_id=ONE)
    tape.do("q", "state", {"state": "unknown", "timestamp": None}, txn_id=ONE)


@wrong("changed-answer")
def a_number_of_two(tape: Tape) -> None:
    tape.begin("t", ONE, file="a")
    tape.begin("u", TWO, file="a")
    tape.commit("t", ONE, 10, 0, file="a", series="x", number=1)
    tape.commit("u", "3" * 32, 5, 0, file="a", series="x", number=1, replayed=True)


@wrong("changed-answer", "non-monotone-timestamps")
def a_number_of_one_that_nobody_was_told_of(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.ask("q", "commit", txn="t", writers=["w"], series="x", number=1)
    tape.begin("u", TWO)
    tape.commit("u", TWO, 20, 0, series="x", number=1)
    tape.log(0, [0, "k", "a", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


@wrong("changed-answer")
def a_name_of_one_that_nobody_was_told_of(tape: Tape) -> None:
    tape.do("p", "begin", {"txn_id": ONE}, txn="t", scope="s", name="x")
    tape.write("t", "a")
    tape.ask("q", "commit", txn="t", writers=["w"])
    tape.begin("u", TWO)
    tape.commit("u", TWO, 20, 0, name="x")
    tape.log(0, [0, "k", "a", ONE])


@wrong("changed-answer")
def a_name_of_two(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 10, 0, name="x")
    tape.commit("u", TWO, 20, 0, name="x")


@wrong("changed-answer")
def answered_with_another_id(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.commit("t", TWO, 10, 0)


@right
def the_same_again(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.do("q", "state", {"state": "unknown", "timestamp": None}, txn_id=ONE)
    tape.do("q", "state", {"state": "open", "timestamp": None}, txn_id=ONE)
    tape.commit("t", ONE, 10, 1, series="x", number=1)
    tape.commit("t", ONE, 10, 1, file="q", series="x", number=1, replayed=True)
    tape.begin("u", TWO)
    tape.write("u", "b")
    tape.commit("u", ONE, 10, 1, series="x", number=1, replayed=True)
    tape.do("q", "state", {"state": "aborted", "timestamp": None}, txn_id=TWO)
    tape.do("q", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.do("q", "state", {"state": "expired", "timestamp": None}, txn_id=ONE)
    tape.log(0, [0, "k", "a", ONE])


@right
def a_one_shot_that_is_repeated(tape: Tape) -> None:
    tape.begin("t", None)
    tape.write("t", "a")
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"], series="x", number=1), "unknown")
    tape.commit("t", ONE, 10, 1, series="x", number=1, replayed=True)
    tape.log(0, [0, "k", "a", ONE])


@right
def aborted_by_the_service(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.do("q", "state", {"state": "open", "timestamp": None}, txn_id=ONE)
    tape.do("q", "state", {"state": "aborted", "timestamp": None}, txn_id=ONE)
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "failed")
    tape.log(0)


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
    tape.do("q", "state", {"state": "committed", "timestamp": 10}, txn_id=ONE)
    tape.told("p", tape.ask("p", "commit", txn="t", writers=[]), "unknown")


@wrong("unexplained")
def gave_way_to_a_stranger(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.begin("u", TWO)
    tape.commit("t", ONE, 10, 0)
    tape.commit("u", ONE, 10, 0, series="x", number=1, replayed=True)


@wrong("unexplained")
def nobody_wrote_it(tape: Tape) -> None:
    tape.log(0, [0, "k", "a", None])


@wrong("unexplained")
def another_key(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "l", "a", None])


@wrong("unexplained")
def another_count(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a")
    tape.commit("t", ONE, 10, 2)
    tape.log(0, [0, "k", "a", ONE])


@wrong("unexplained")
def no_record_names_it(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [0, "k", "a", None])
    tape.commits()


# Snapshots.


def _snapshot(tape: Tape, timestamp: int, asked_for: int | None, *rows: list[object]) -> None:
    asked = {"snapshot": "n", "streams": ["s/a"], "asked_for": asked_for}
    tape.do("n", "snapshot", {"timestamp": timestamp}, **asked)
    tape.do("n", "snapshot_read", {"events": list(rows)}, snapshot="n", stream="s/a")


@wrong("snapshot-not-prefix")
def a_snapshot_lacks_a_commit(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 25, None, A, B)
    log_two(tape)


@wrong("snapshot-not-prefix")
def a_snapshot_shows_the_future(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 10, 10, A, B, C)
    log_two(tape)


@wrong("snapshot-not-prefix")
def a_snapshot_of_yesterday(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 15, None, A, B)
    log_two(tape)


@wrong("snapshot-not-prefix")
def committed_below_a_snapshot(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    tape.do("n", "snapshot", {"timestamp": 30}, snapshot="n", streams=["s/a"], asked_for=None)
    commit_one(tape, "u", TWO, 20, "c")
    log_two(tape)


@wrong("snapshot-not-prefix")
def of_another_time_than_asked(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 20, 10, A, B, C)
    log_two(tape)


@wrong("snapshot-not-prefix", "torn-transaction")
def a_snapshot_shows_half(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 10, 10, A)
    log_two(tape)


@wrong("duplicate")
def a_snapshot_shows_it_twice(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 10, 10, A, B, A)
    log_two(tape)


@wrong("int-poll-order")
def a_snapshot_out_of_order(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 10, 10, B, A)
    log_two(tape)


@wrong("int-poll-order")
def a_snapshot_of_a_scaled_stream_out_of_order(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 20, 20, row("c", 0, TWO, 20, partition=1), A, B)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])
    tape.log(1, [0, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[1, 0, 1]]])


@wrong("snapshot-not-prefix")
def a_snapshot_lacks_what_was_told_where_no_log_was_read(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 20, 20, A, B)


@right
def retention_has_deleted_what_a_snapshot_lacks(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 20, 20, C)
    tape.log(0, [3, "k", "c", TWO], start=2)
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


@right
def a_snapshot_of_the_past(tape: Tape) -> None:
    commit_two(tape)
    _snapshot(tape, 10, 10, A, B)
    log_two(tape)


@right
def committed_while_a_snapshot_was_taken(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b")
    asked = {"snapshot": "n", "streams": ["s/a"], "asked_for": None}
    op = tape.ask("n", "snapshot", **asked)
    commit_one(tape, "u", TWO, 20, "c")
    tape.told("n", op, timestamp=15)
    tape.do("n", "snapshot_read", {"events": [A, B]}, snapshot="n", stream="s/a")
    log_two(tape)


test_an_anomaly, test_no_anomaly = TABLE.tests()
