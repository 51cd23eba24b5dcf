"""Tiny histories of the log: each anomaly, and its legal look-alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.checker.table import (
    ONE,
    TWO,
    Table,
    begin_one,
    commit_in_doubt,
    commit_one,
    commit_two,
    state,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


def _write_late(tape: Tape, *ids: str) -> None:
    """Written first, and its arrival is unknown."""
    tape.begin("t", ONE)
    events = [["k", one] for one in ids]
    tape.ask("p", "write", txn="t", writer="w", stream="s/a", events=events)


def commit_one_of(tape: Tape, file: str, txn: str, txn_id: str, timestamp: int) -> None:
    """A transaction of another process, with one event of its name."""
    tape.begin(txn, txn_id, file)
    tape.write(txn, txn, file=file)
    tape.commit(txn, txn_id, timestamp, 1, file)


def _two_commit(tape: Tape, *own: str) -> None:
    """The owner of w and a helper, of x, commit at once; both are told so. The helper's commit was the one."""
    begin_one(tape)
    tape.write("t", "b", writer="x")
    asked = tape.ask("p", "commit", txn="t", writers=["w"], own=list(own))
    tape.commit("t", ONE, 10, 1, file="q", writers=["x"], own=["x"])
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=1)
    tape.log(0, [0, "k", "b", ONE])
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


def history(name: str, kinds: str, *records: list[Any]) -> None:
    """A case: the history of what `commit_two` wrote has these records."""

    def case(tape: Tape) -> None:
        commit_two(tape)
        tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
        tape.commits(*records)

    TABLE.row(name, kinds, case)


history(
    "offsets do not rise", "unexplained", [2, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]]
)
history(
    "two records name one place",
    "unexplained",
    [1, 10, [ONE], [[0, 0, 2]]],
    [2, 20, [TWO], [[0, 1, 4]]],
)
history(
    "a record of another transaction",
    "unexplained",
    [1, 10, [ONE], [[0, 0, 4]]],
    [2, 20, [TWO], []],
)


def plain_writes(
    name: str, kinds: str, *parts: list[tuple[int, str]], records: Sequence[list[Any]] = ()
) -> None:
    """A case: one producer's plain writes a, b and so on; what each partition has, with its offsets."""

    def case(tape: Tape) -> None:
        for one in sorted({one for part in parts for _, one in part}):
            tape.do("p", "plain", stream="s/a", events=[["k", one]], producer="w")
        for number, part in enumerate(parts):
            tape.log(number, *([offset, "k", one, None] for offset, one in part))
        if records:
            tape.commits(*records)

    TABLE.row(name, kinds, case)


plain_writes("a log whose offsets do not rise", "unexplained", [(1, "a"), (1, "b")])
plain_writes("twice in the log", "duplicate", [(0, "a")], [(0, "a")])
plain_writes(
    "the key has moved and the commits are out of order", "int-send-order", [(0, "a")], [(0, "b")],
    records=[[1, 10, [], [[1, 0, 1]]], [2, 20, [], [[0, 0, 1]]]],
)  # fmt: skip
plain_writes("the key has moved and no history was read", "", [(0, "b")], [(0, "a")])
plain_writes(
    "out of order where no history was read", "int-send-order", [(0, "b"), (1, "a")], [(0, "c")]
)


@wrong("lost-write")
def committed_and_nothing_is_there(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0)


@wrong("lost-write")
def a_one_shot_whose_id_was_answered(tape: Tape) -> None:
    begin_one(tape, None)
    op = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.told("p", op, "unknown", txn_id=ONE)
    state(tape, "committed", 10)
    tape.log(0)


@right
def unknown_and_nothing_is_there(tape: Tape) -> None:
    begin_one(tape)
    commit_in_doubt(tape)
    tape.told("p", tape.ask("p", "plain", stream="s/a", events=[["k", "b"]]), "unknown")
    tape.log(0)
    tape.commits()


@right
def retention_has_deleted_it(tape: Tape) -> None:
    commit_two(tape)
    tape.log(0, [3, "k", "c", TWO], start=2)
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


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
    begin_one(tape)
    tape.do("p", "abort", txn="t")
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def no_commit_was_asked_for(tape: Tape) -> None:
    begin_one(tape)
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def the_only_commit_was_refused(tape: Tape) -> None:
    begin_one(tape)
    tape.told("p", tape.ask("p", "commit", txn="t", writers=["w"]), "failed")
    tape.log(0, [0, "k", "a", ONE])


@wrong("aborted-read")
def written_after_the_commit_was_answered(tape: Tape) -> None:
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
    begin_one(tape)
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.open("r", "raw")
    tape.poll("r", row("a", 0, ONE))
    tape.log(0)


@right
def a_finished_writer_that_no_commit_named(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="mine")
    tape.write("t", "b", writer="done", file="q")
    tape.do("q", "finish", txn="t", writer="done")
    tape.write("t", "c", writer="maybe", file="q")
    tape.ask("q", "finish", txn="t", writer="maybe")
    tape.write("t", "d", writer="undone", file="q")
    tape.commit("t", ONE, 10, 2, writers=None, own=["mine"])
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])


@right
def one_of_two_commits_took_effect(tape: Tape) -> None:
    tape.begin("t", ONE)
    tape.write("t", "a", writer="first")
    tape.write("t", "b", writer="second")
    tape.ask("q", "commit", txn="t", writers=["first"])
    tape.commit("t", ONE, 10, 1, writers=["second"])  # the same answer, in either order
    tape.log(0, [0, "k", "a", ONE])


@wrong("lost-write")
def an_id_that_was_answered_with_events(tape: Tape) -> None:
    begin_one(tape, None)
    commit_in_doubt(tape)
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
def an_event_beyond_the_end(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    tape.log(0, [1, "k", "a", None], end=1)


@wrong("torn-transaction")
def half_of_it_is_there(tape: Tape) -> None:
    begin_one(tape)
    tape.write("t", "b", stream="s/b")
    tape.ask("p", "commit", txn="t", writers=["w"])
    tape.log(0, [0, "k", "a", ONE])
    tape.log(0, stream="s/b")


@wrong("int-send-order")
def a_writer_out_of_order(tape: Tape) -> None:
    begin_one(tape)
    tape.write("t", "b")
    tape.commit("t", ONE, 10, 2)
    tape.log(0, [0, "k", "b", ONE], [1, "k", "a", ONE])


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


@right
def the_two_overlapped(tape: Tape) -> None:
    begin_one(tape)
    op = tape.ask("p", "commit", txn="t", writers=["w"])
    tape.begin("u", TWO, file="q")
    tape.write("u", "b", file="q")
    tape.commit("u", TWO, 10, 1, file="q")
    tape.told("p", op, txn_id=ONE, timestamp=20, committed=1)
    tape.log(0, [0, "k", "b", TWO], [1, "k", "a", ONE])


@wrong("aborted-read")
def a_one_shot_is_in_the_log_and_its_state_was_aborted(tape: Tape) -> None:
    begin_one(tape, None)
    commit_in_doubt(tape)
    state(tape, "aborted")
    tape.log(0, [0, "k", "a", ONE])


@wrong("unexplained")
def a_one_shot_is_in_the_log_without_an_id(tape: Tape) -> None:
    begin_one(tape, None)
    commit_in_doubt(tape)
    tape.log(0, [0, "k", "a", None])


@right
def a_record_names_nothing_of_a_partition(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, [0, "k", "a", ONE])
    tape.log(1)
    tape.commits([1, 10, [ONE], [[0, 0, 1], [1, 0, 0]]])


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
    begin_one(tape)
    commit_in_doubt(tape)
    tape.write("t", "b")
    tape.commit("t", ONE, 10, 1)
    tape.log(0, [0, "k", "a", ONE])


@wrong("lost-write")
def a_finished_writer_that_no_commit_named_is_lost(tape: Tape) -> None:
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
def a_write_in_doubt(tape: Tape) -> None:
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


@right
def the_history_is_cut_where_it_may_have_named_it(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.log(0, start=5)
    tape.do("end", "commits", {"records": [], "start": 2}, stream="s/a")


@right
def retention_has_deleted_what_only_an_answer_names(tape: Tape) -> None:
    tape.begin("u", TWO)
    tape.write("u", "a")
    tape.commit("u", ONE, 10, 1, series="x", number=1, replayed=True)
    tape.do("p", "plain", stream="s/a", events=[["k", "b"]])
    tape.log(0, start=5)


@wrong("int-send-order")
def one_write_of_three_out_of_order(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a", "b", "c")
    tape.log(0, [0, "k", "a", ONE], [1, "k", "c", ONE], [2, "k", "b", ONE])


@wrong("int-send-order")
def a_write_without_an_answer_comes_between(tape: Tape) -> None:
    _write_late(tape, "a")
    tape.write("t", "b")
    tape.write("t", "c")
    tape.commit("t", ONE, 10, 3)
    tape.log(0, [0, "k", "c", ONE], [1, "k", "a", ONE], [2, "k", "b", ONE])


@wrong("ext-send-order")
def one_that_was_asked_before_comes_between(tape: Tape) -> None:
    tape.begin("v", "3" * 32)
    tape.write("v", "v")
    tape.ask("p", "commit", txn="v", writers=["w"])
    commit_one_of(tape, "q", "t", ONE, 10)
    commit_one(tape, "u", TWO, 20, "u")
    tape.log(0, [0, "k", "u", TWO], [1, "k", "v", "3" * 32], [2, "k", "t", ONE])


@wrong("aborted-read")
def a_writer_that_could_not_finish_is_taken(tape: Tape) -> None:
    begin_one(tape)
    tape.told("p", tape.ask("p", "finish", txn="t", writer="w"), "failed")
    tape.commit("t", ONE, 10, 1, writers=None)
    tape.log(0, [0, "k", "a", ONE])


@right
def answers_without_results(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.do("p", "scale", stream="s/a")
    tape.do("r", "snapshot", {"timestamp": 10}, snapshot="n", streams=["s/a"], asked_for=None)
    for file, what, more in (
        ("p", "state", {"txn_id": ONE}),
        ("r", "snapshot_read", {"snapshot": "n", "stream": "s/a"}),
        ("end", "commits", {"stream": "s/a"}),
    ):
        tape.told(file, tape.ask(file, what, **more), "unknown")
    tape.log(0, [0, "k", "a", ONE])


@wrong("lost-write")
def the_owner_is_answered_and_its_own_is_not_there(tape: Tape) -> None:
    _two_commit(tape, "w")


@right
def of_its_own_what_was_written_too_late(tape: Tape) -> None:
    begin_one(tape)
    asked = tape.ask("p", "commit", txn="t", writers=["w"], own=["w"])
    tape.write("t", "b", file="q")
    tape.told("p", asked, txn_id=ONE, timestamp=10, committed=1)
    tape.log(0, [0, "k", "a", ONE])


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()
