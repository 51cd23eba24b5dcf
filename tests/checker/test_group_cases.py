"""Tiny histories of groups of readers: each anomaly, and its legal look-alike."""

from __future__ import annotations

from tests.checker.table import (
    MOVED,
    ONE,
    A,
    B,
    C,
    Q,
    R,
    Table,
    W,
    commit_moved,
    commit_one,
    commit_two,
    log_two,
)
from tests.checker.tape import Tape, row

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


TABLE.readings(
    "ordered",
    ("again above the position", "", R.gets(A), R.position(), R.gets(B), Q.gets(B, C), Q.caught_up()),
    ("again below the position", "duplicate", R.gets(A), R.position(), R.gets(B), R.closes(), Q.gets(A, B, C)),
    ("the group has caught up without the last", "unseen-commit",
     R.gets(A), R.position(), R.gets(B), R.closes(), Q.gets(B), Q.caught_up()),
    ("one member has caught up and another polls", "",
     R.gets(A), R.position(), R.gets(B), Q.caught_up(), R.gets()),
    ("a killed member may have been given it", "", R.gets(A), R.waits(), Q.gets(C), Q.caught_up()),
    ("a position beyond what was given", "poll-skip", R.gets(A), R.position(), R.closes(), Q.gets(C)),
    ("a later one before an earlier one", "ext-poll-order", R.gets(A, C), R.gets(B)),
    ("between two positions", "duplicate", R.gets(A), R.position(), R.gets(A), R.position()),
    ("again above a position", "", R.gets(A, B), R.position(1), R.gets(B, C)),
    ("again after a position with an offset in doubt", "",
     R.gets(A), R.position(1, outcome="unknown"), R.gets(A)),
    ("again after a position in doubt", "", R.gets(A), R.position(outcome="unknown"), R.gets(A)),
    group="g",
)  # fmt: skip
TABLE.readings(
    "raw",
    ("out of order in a poll", "int-poll-order", R.gets(B, A, C)),
    ("on after a poll in doubt, and back", "", R.gets(A), R.in_doubt(), R.gets(C), R.gets(B, C)),
    ("a closed member takes nothing", "duplicate", Q.closes(), R.gets(A), R.position(), R.gets(A, B)),
    ("a member in doubt whether it has caught up", "",
     R.gets(A), R.waits(), R.caught_up(""), Q.gets(C)),
    group="g",
)  # fmt: skip
TABLE.readings(
    "raw",
    ("each member has caught up, one after the other", "unseen-commit",
     R.gets(A, B), Q.caught_up(), R.gets(), R.caught_up()),
    ("a poll between two ends may have returned it", "",
     R.gets(A, B), Q.caught_up(), R.in_doubt(), R.caught_up()),
    ("two events of a poll in doubt are given again", "", R.in_doubt(), R.gets(C), R.gets(A, B, C)),
    ("a member in doubt whether it has resumed", "duplicate",
     R.resumes(outcome="unknown"), Q.gets(A), Q.position(1), R.gets(A, B)),
    ("the poll in doubt ended before the event before", "ext-poll-order",
     Q.in_doubt(), Q.gets(A), Q.gets(C), R.gets(B, C)),
    ("the poll in doubt of another member came later", "ext-poll-order",
     Q.gets(B), R.in_doubt(), R.gets(A, B)),
    group="g",
    opened=(R, Q),
)  # fmt: skip
TABLE.readings(
    "transactions",
    ("a transaction again below the position", "duplicate",
     R.gets(A, B), R.position(), R.closes(), Q.gets(A, B)),
    group="g",
)  # fmt: skip

# A key moves from partition 0 to partition 1.
TABLE.readings(
    "ordered",
    ("another member had the old partition", "", R.gets(A, B), Q.gets(MOVED)),
    (
        "another member has the old partition too late",
        "ext-poll-order",
        Q.gets(MOVED),
        R.gets(A, B),
    ),
    # Its partition may have been another's before it committed a position.
    ("two at a time without offsets", "", R.gets(A), R.position(), Q.gets(A, B)),
    ("two at a time with offsets", "duplicate", R.gets(A), R.position(1), Q.gets(A, B)),
    written=commit_moved,
    group="g",
    opened=(R, Q),
)
TABLE.readings(
    "raw",
    ("a new group begins at the start", "unseen-commit", R.gets(MOVED), R.caught_up()),
    ("on a partition that was never resumed", "", R.resumes(1), R.gets(A), R.gets(A, B, MOVED)),
    written=commit_moved,
    group="g",
    starts="position",
)

# Members that say what they resume. Reader w asks for the group's positions, and is given nothing.
TABLE.readings(
    "ordered",
    ("a member does not know yet that another one resumed", "",
     R.resumes(), R.gets(A), Q.resumes(), Q.gets(A, B), W.position(2), R.gets(B)),
    ("a member resumes what has no position yet", "",
     R.resumes(), R.gets(A, B), W.position(1), R.resumes(), R.gets(B, C)),
    ("a member resumes below a position", "duplicate",
     R.resumes(), R.gets(A, B), W.position(1), Q.resumes(), Q.gets(A, B)),
    ("a member is given it again without resuming", "duplicate", R.resumes(), R.gets(A), R.gets(A)),
    ("a member goes back without resuming", "ext-poll-order",
     Q.gets(A, B), R.resumes(), R.gets(B), R.gets(A)),
    group="g",
    starts="position",
    opened=(R, Q, W),
)  # fmt: skip
TABLE.readings(
    "transactions",
    ("a transaction is resumed below the position in the history", "duplicate",
     R.resumes(None), R.gets(A, B), W.position(2, None), Q.resumes(None), Q.gets(A, B)),
    ("a transaction is resumed at the position in the history", "",
     R.resumes(None), R.gets(A, B), R.gets(C), W.position(2, None), Q.resumes(None), Q.gets(C)),
    group="g",
    starts="position",
    opened=(R, Q, W),
)  # fmt: skip


def five_events(tape: Tape) -> None:
    commit_one(tape, "t", ONE, 10, *"abcde")
    tape.log(0, *([n, "k", name, ONE] for n, name in enumerate("abcde")))


ONE_OF_FIVE = {name: row(name, n, ONE) for n, name in enumerate("abcde")}

TABLE.readings(
    "raw",
    # b, c and d
    ("what is between two gaps is given again", "",
     R.gets(ONE_OF_FIVE["a"]), R.in_doubt(), R.gets(ONE_OF_FIVE["e"]), Q.gets(ONE_OF_FIVE["c"])),
    written=five_events,
    group="g",
    opened=(R, Q),
)  # fmt: skip


@wrong("poll-skip")
def one_poll_in_doubt_and_two_gaps(tape: Tape) -> None:
    five_events(tape)
    for reader in (R, Q):
        tape.open(reader.name, "raw", "g", file=reader.name)
    tape.poll("r", ONE_OF_FIVE["a"])
    poll = tape.ask("r", "poll", reader="r")  # b or d, not both
    tape.poll("q", ONE_OF_FIVE["c"], file="q")
    tape.told("r", poll, "unknown")
    tape.poll("q", ONE_OF_FIVE["e"], file="q")


@right
def a_groups_end_is_fixed_when_it_is_given_something(tape: Tape) -> None:
    tape.open("r", "raw", "g", starts="end")
    tape.poll("r")
    commit_two(tape)
    tape.poll("r", C)
    tape.do("r", "caught_up", reader="r")
    log_two(tape)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()
