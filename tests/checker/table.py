"""A table of tiny histories: the anomaly of each, or none.

A case is a function that writes a history, or a row of `Table.readings` or `Table.snapshots`. For most of
them there is a wrong change of the checker at which no other case fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from tests.checker.tape import Tape, row

Case = Callable[[Tape], None]
ONE, TWO, THREE, FOUR = (digit * 32 for digit in "1234")


class Step(NamedTuple):
    """Something that a reader does."""

    reader: str
    done: Case


@dataclass(frozen=True)
class Reader:
    """A reader of s/a in a row of `Table.readings`; each method is a step of the history."""

    name: str

    def gets(self, *rows: list[Any]) -> Step:
        """A poll, and the events that it returned."""
        return Step(self.name, lambda tape: tape.poll(self.name, *rows, file=self.name))

    def _asks(self, what: str, outcome: str = "ok", **more: Any) -> Step:
        def ask(tape: Tape) -> None:
            op = tape.ask(self.name, what, reader=self.name, **more)
            if outcome:
                tape.told(self.name, op, outcome)

        return Step(self.name, ask)

    def in_doubt(self) -> Step:
        """A poll that failed: it may have returned anything."""
        return self._asks("poll", "unknown")

    def waits(self) -> Step:
        """A poll without an answer."""
        return self._asks("poll", "")

    def caught_up(self, outcome: str = "ok") -> Step:
        return self._asks("caught_up", outcome)

    def closes(self) -> Step:
        return self._asks("close")

    def position(
        self, offset: int | None = None, partition: int | None = 0, outcome: str = "ok"
    ) -> Step:
        """It commits its position, or one in a partition (None: in the history)."""
        if offset is None:
            return self._asks("position", outcome)
        return self._asks("position", outcome, positions=[["s/a", partition, offset]])

    def resumes(self, partition: int | None = 0, outcome: str = "ok") -> Step:
        """It takes over a partition (None: the history)."""
        return self._asks("resume", outcome, places=[["s/a", partition]])


R, Q, W = Reader("r"), Reader("q"), Reader("w")


class Table:
    """Cases in the order in which they are written down."""

    def __init__(self) -> None:
        self.wrongs: list[tuple[tuple[str, ...], Case]] = []
        self.rights: list[Case] = []

    def wrong(self, *kinds: str) -> Callable[[Case], Case]:
        """The history shows these kinds of anomalies (mostly one), and no other."""

        def register(case: Case) -> Case:
            self.wrongs.append((kinds, case))
            return case

        return register

    def right(self, case: Case) -> Case:
        """The history is correct."""
        self.rights.append(case)
        return case

    def row(self, name: str, kinds: str, case: Case) -> None:
        """A case by its name, with words for the kinds of its anomalies; none: it is correct."""
        case.__name__ = name.replace(" ", "_")
        (self.wrong(*kinds.split()) if kinds else self.right)(case)

    def readings(
        self,
        mode: str,
        *rows: tuple[str, str, *tuple[Step, ...]],
        written: Case | None = None,
        group: str | None = None,
        starts: str | int = "start",
        opened: Sequence[Reader] = (),
    ) -> None:
        """Cases in which readers of one mode read what `commit_two` wrote: name, kinds, steps.

        A reader is opened when it does its first step, unless it is one of ``opened``.
        """

        def case_of(steps: tuple[Step, ...]) -> Case:
            def case(tape: Tape) -> None:
                (written or commit_two_and_log)(tape)
                first = [one.name for one in opened]
                for name in first:
                    tape.open(name, mode, group, starts, file=name)
                known = set(first)
                for step in steps:
                    if step.reader not in known:
                        tape.open(step.reader, mode, group, starts, file=step.reader)
                        known.add(step.reader)
                    step.done(tape)

            return case

        for name, kinds, *steps in rows:
            self.row(name, kinds, case_of(tuple(steps)))

    def snapshots(
        self, *rows: tuple[str, str, int, int | None, list[list[Any]]], written: Case | None = None
    ) -> None:
        """Cases in which one snapshot of s/a is read: name, kinds, timestamp, asked for, events."""

        def case_of(timestamp: int, asked_for: int | None, events: list[list[Any]]) -> Case:
            def case(tape: Tape) -> None:
                (written or commit_two_and_log)(tape)
                snapshot(tape, timestamp, *events, asked_for=asked_for)

            return case

        for name, kinds, timestamp, asked_for, events in rows:
            self.row(name, kinds, case_of(timestamp, asked_for, events))

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """The two tests of all cases so far, for pytest to find in a file."""

        @pytest.mark.parametrize(("kinds", "case"), self.wrongs, ids=_name_of)
        def test_each_anomaly_is_named(kinds: tuple[str, ...], case: Case) -> None:
            """Its kind is named, and nothing else; the evidence are lines of the history."""
            tape = Tape()
            case(tape)
            report = tape.judge()
            assert report.kinds == set(kinds), report.anomalies
            lines = {f"{file}:{line}" for file, line, _ in tape.entries}
            assert all(set(one.evidence) <= lines and one.evidence for one in report.anomalies)

        @pytest.mark.parametrize("case", self.rights, ids=_name_of)
        def test_a_sound_history_is_accepted(case: Case) -> None:
            """The history only looks like an anomaly: nothing is found."""
            tape = Tape()
            case(tape)
            report = tape.judge()
            assert report.ok, report.anomalies

        return test_each_anomaly_is_named, test_a_sound_history_is_accepted


def _name_of(one: object) -> str:
    """For test ids."""
    return " ".join(one) if isinstance(one, tuple) else str(getattr(one, "__name__", one))


def commit_one(tape: Tape, txn: str, txn_id: str, timestamp: int, *ids: str) -> None:
    """A transaction."""
    tape.begin(txn, txn_id)
    tape.write(txn, *ids)
    tape.commit(txn, txn_id, timestamp, len(ids))


def begin_one(tape: Tape, txn_id: str | None = ONE) -> None:
    """Transaction t has written event a."""
    tape.begin("t", txn_id)
    tape.write("t", "a")


def commit_in_doubt(tape: Tape, txn: str = "t") -> None:
    """A commit that took effect or not."""
    tape.told("p", tape.ask("p", "commit", txn=txn, writers=["w"]), "unknown")


def state(tape: Tape, found: str, timestamp: int | None = None) -> None:
    """The answer to a question for the first transaction's state."""
    tape.do("q", "state", {"state": found, "timestamp": timestamp}, txn_id=ONE)


def commit_two(tape: Tape) -> None:
    """Two transactions, a and b, and c."""
    commit_one(tape, "t", ONE, 10, "a", "b")
    commit_one(tape, "u", TWO, 20, "c")


def log_two(tape: Tape) -> None:
    """As `commit_two` has written them."""
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


def commit_two_and_log(tape: Tape) -> None:
    commit_two(tape)
    log_two(tape)


A, B, C = row("a", 0, ONE, 10), row("b", 1, ONE, 10), row("c", 3, TWO, 20)


def commit_moved(tape: Tape) -> None:
    """As `commit_two`, and the key moves from partition 0 to partition 1 in between."""
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])
    tape.log(1, [0, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[1, 0, 1]]])


def snapshot(
    tape: Tape, timestamp: int, *events: list[Any], asked_for: int | None = None, **more: Any
) -> None:
    """A snapshot of s/a and what was read of it."""
    asked = {"snapshot": "n", "streams": ["s/a"], "asked_for": asked_for, **more}
    tape.do("n", "snapshot", {"timestamp": timestamp}, **asked)
    tape.do("n", "snapshot_read", {"events": list(events)}, snapshot="n", stream="s/a")


MOVED = row("c", 0, TWO, 20, partition=1)
