"""Topics of streams that outside hands deleted: what that excuses, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from checker import BrokenHistory
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


def delete(tape: Tape, topic: str = "stream", stream: str = "s/a") -> None:
    tape.do("o", "delete", stream=stream, topic=topic)


def commit_in_two(tape: Tape) -> None:
    """A transaction with an event in s/a and one in s/b."""
    begin_one(tape)
    tape.write("t", "b", stream="s/b")
    tape.commit("t", ONE, 10, 2)


@right
def what_was_committed_went_with_its_topic(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.do("p", "plain", stream="s/a", events=[["k", "b"]])
    delete(tape)
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


@right
def a_part_in_another_stream_stays(tape: Tape) -> None:
    commit_in_two(tape)
    delete(tape)
    tape.log(0)  # made again
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])
    tape.log(0, [0, "k", "b", ONE], stream="s/b")
    tape.commits([1, 10, [ONE], [[0, 0, 1]]], stream="s/b")


@wrong("lost-write", "torn-transaction")
def it_was_never_committed_in_the_stream_that_was_deleted(tape: Tape) -> None:
    """Its history is there, and does not name it."""
    commit_in_two(tape)
    delete(tape)
    tape.commits()
    tape.log(0, [0, "k", "b", ONE], stream="s/b")
    tape.commits([1, 10, [ONE], [[0, 0, 1]]], stream="s/b")


@wrong("lost-write")
def the_other_stream_lost_its_part(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    delete(tape, stream="s/b")
    tape.log(0)


def lose_one_of_two(
    tape: Tape, left_out: int | None, other: str = "s/b", *, prepares: bool = True
) -> None:
    """A transaction with one event in s/a, whose journal is deleted, and one in another stream; and its log."""
    begin_one(tape)
    tape.write("t", "b", stream=other)
    delete(tape, "journal")
    told: dict[str, Any] = {} if left_out is None else {"left_out": left_out}
    told |= {"prepares": True} if prepares else {}
    tape.commit("t", ONE, 10, 2 if left_out == 0 else 1, **told)
    tape.log(0, [0, "k", "b", ONE], stream=other)
    tape.commits([1, 10, [ONE], [[0, 0, 1]]], stream=other)


def read_both(tape: Tape) -> None:
    """A later snapshot, which shows nothing of s/a."""
    asked = {"snapshot": "x", "streams": ["s/a", "s/b"], "asked_for": 20}
    tape.do("r", "snapshot", {"timestamp": 20}, **asked)
    tape.do("r", "snapshot_read", {"events": []}, snapshot="x", stream="s/a")


@right
def of_a_prepared_one_some_was_carried_before(tape: Tape) -> None:
    lose_one_of_two(tape, 1)
    read_both(tape)
    tape.log(0, [0, "k", "a", ONE])
    tape.commits()


@right
def no_answer_says_whether_a_prepared_one_left_something_out(tape: Tape) -> None:
    lose_one_of_two(tape, None)
    read_both(tape)
    tape.log(0)
    tape.commits()


@wrong("lost-write", "torn-transaction", "snapshot-not-prefix")
def a_prepared_one_was_answered_to_be_whole(tape: Tape) -> None:
    lose_one_of_two(tape, 0)
    read_both(tape)
    tape.log(0)
    tape.commits()


@right
def one_over_two_control_partitions_was_decided_before_the_loss(tape: Tape) -> None:
    lose_one_of_two(tape, 1, "t/b", prepares=False)
    tape.log(0)
    tape.commits()


@wrong("lost-write", "torn-transaction")
def one_within_a_control_partition_left_out_what_was_lost(tape: Tape) -> None:
    tape.do("final", "near", scopes=["s", "t"])
    lose_one_of_two(tape, 1, "t/b", prepares=False)
    tape.log(0)
    tape.commits()


@right
def plain_writes_that_were_not_committed_went_with_the_journal(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/a", events=[["k", "a"]])
    delete(tape, "journal")
    tape.do("p", "plain", stream="s/a", events=[["k", "b"]])
    tape.log(0)
    tape.commits()


@wrong("lost-write")
def plain_writes_of_another_stream_did_not(tape: Tape) -> None:
    tape.do("p", "plain", stream="s/b", events=[["k", "a"]])
    delete(tape, "journal")
    tape.log(0, stream="s/b")
    tape.commits(stream="s/b")


@right
def a_history_made_anew_names_nothing_of_before(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    delete(tape, "history")
    tape.log(0, [0, "k", "a", ONE])
    tape.commits()


@wrong("changed-answer")
def it_was_aborted_for_the_loss_after_it_was_answered_committed(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    delete(tape)
    state(tape, "aborted")


def carried(tape: Tape) -> None:
    """Decided, with parts in two streams; that in s/b was staged."""
    begin_one(tape)
    tape.write("t", "b", stream="s/b")
    commit_in_doubt(tape)


@right
def a_merge_that_can_not_continue_may_be_there(tape: Tape) -> None:
    carried(tape)
    delete(tape)
    state(tape, "committing")
    tape.open("x", "ordered", streams=("s/b",))
    tape.do("r", "caught_up", reader="x")
    tape.log(3, [0, "k", "b", ONE], stream="s/b")
    tape.commits(stream="s/b")


@right
def a_merge_is_there_and_its_history_is_gone(tape: Tape) -> None:
    carried(tape)
    delete(tape, "history", "s/b")
    state(tape, "committing")
    tape.log(3, [0, "k", "b", ONE], stream="s/b")
    tape.log(0)


@wrong("unexplained")
def a_merge_is_there_without_any_loss(tape: Tape) -> None:
    carried(tape)
    state(tape, "committing")
    tape.log(0, [0, "k", "a", ONE])
    tape.log(3, [0, "k", "b", ONE], stream="s/b")
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])
    tape.commits(stream="s/b")


@wrong("torn-transaction")
def it_was_committed_in_the_other_stream_alone(tape: Tape) -> None:
    """The loss of a journal takes nothing of a stream."""
    carried(tape)
    delete(tape, "journal")
    tape.log(0)
    tape.commits()
    tape.log(0, [0, "k", "b", ONE], stream="s/b")
    state(tape, "committing")


def snapshot(tape: Tape) -> None:
    tape.do("r", "snapshot", {"timestamp": 15}, snapshot="n", streams=["s/a"], asked_for=None)
    tape.do("r", "snapshot_read", {"events": []}, snapshot="n", stream="s/a")


@right
def a_snapshot_of_what_is_left(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    delete(tape, "history")
    snapshot(tape)
    tape.log(0, [0, "k", "a", ONE])


@wrong("snapshot-not-prefix")
def a_snapshot_before_the_loss(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    snapshot(tape)
    delete(tape, "history")
    tape.log(0, [0, "k", "a", ONE])


@right
def what_was_seen_went_with_its_topic(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, "a")
    tape.open("x", "ordered")
    tape.poll("x", row("a", 0, ONE, 10))
    delete(tape)
    tape.log(0)
    tape.commits([1, 10, [ONE], [[0, 0, 1]]])


def truncate(tape: Tape, until: int) -> int:
    """Asked, and not told."""
    return tape.ask("o", "truncate", stream="s/a", until=until)


def commit_three(tape: Tape) -> None:
    """At 10, 20 and 30, at offsets 0, 2 and 4 of partition 0."""
    for name, txn_id, at in (("t", ONE, 10), ("u", TWO, 20), ("v", THREE, 30)):
        commit_one(tape, name, txn_id, at, f"{name}1")


def left(tape: Tape, start: int) -> None:
    """What of them is left from an offset on."""
    rows = [[0, "k", "t1", ONE], [2, "k", "u1", TWO], [4, "k", "v1", THREE]]
    tape.log(0, *(one for n, one in enumerate(rows) if 2 * n >= start), start=start)
    ids = enumerate((ONE, TWO, THREE))
    tape.commits(*([n + 1, 10 * n + 10, [one], [[0, 2 * n, 2 * n + 1]]] for n, one in ids))


@right
def it_was_truncated_between_two_commits(tape: Tape) -> None:
    commit_three(tape)
    tape.told("o", truncate(tape, 10))
    tape.told("o", truncate(tape, 20))
    left(tape, 3)


@right
def a_truncation_in_doubt_may_be_done_or_not(tape: Tape) -> None:
    commit_three(tape)
    tape.told("o", truncate(tape, 10))
    tape.told("o", truncate(tape, 20), "unknown")
    truncate(tape, 15)
    left(tape, 1)


@wrong("undeleted")
def a_truncation_was_answered_and_left_a_commit(tape: Tape) -> None:
    commit_three(tape)
    tape.told("o", truncate(tape, 20))
    left(tape, 1)


@wrong("lost-write")
def a_truncation_took_more_than_was_asked(tape: Tape) -> None:
    commit_three(tape)
    tape.told("o", truncate(tape, 20))
    left(tape, 5)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()


@pytest.mark.parametrize(
    ("topics", "why"), [(("logs",), "unknown topic"), (("stream", "stream"), "deleted before")]
)
def test_a_deletion_names_a_topic_once(topics: tuple[str, ...], why: str) -> None:
    tape = Tape()
    for topic in topics:
        delete(tape, topic)
    with pytest.raises(BrokenHistory, match=why):
        tape.judge()


def test_a_deletion_that_failed_excuses_nothing() -> None:
    tape = Tape()
    commit_one(tape, "t", ONE, 10, "a")
    tape.told("o", tape.ask("o", "delete", stream="s/a", topic="stream"), "failed")
    tape.log(0)
    assert tape.judge().kinds == {"lost-write"}
