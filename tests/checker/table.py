"""A table of tiny histories: the anomaly of each, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.checker.tape import Tape, row

Case = Callable[[Tape], None]
ONE, TWO, THREE, FOUR = (digit * 32 for digit in "1234")


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

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """``test_an_anomaly`` and ``test_no_anomaly`` of all cases so far, for pytest to find in a file."""

        @pytest.mark.parametrize(("kinds", "case"), self.wrongs, ids=_name_of)
        def test_an_anomaly(kinds: tuple[str, ...], case: Case) -> None:
            """Its kind is named, and nothing else; the evidence are lines of the history."""
            tape = Tape()
            case(tape)
            report = tape.judge()
            assert report.kinds == set(kinds), report.anomalies
            lines = {f"{file}:{line}" for file, line, _ in tape.entries}
            assert all(set(one.evidence) <= lines and one.evidence for one in report.anomalies)

        @pytest.mark.parametrize("case", self.rights, ids=_name_of)
        def test_no_anomaly(case: Case) -> None:
            """The history only looks like an anomaly: nothing is found."""
            tape = Tape()
            case(tape)
            report = tape.judge()
            assert report.ok, report.anomalies

        return test_an_anomaly, test_no_anomaly


def _name_of(one: object) -> str:
    """For test ids."""
    return " ".join(one) if isinstance(one, tuple) else str(getattr(one, "__name__", one))


def commit_one(tape: Tape, txn: str, txn_id: str, timestamp: int, *ids: str) -> None:
    """A transaction."""
    tape.begin(txn, txn_id)
    tape.write(txn, *ids)
    tape.commit(txn, txn_id, timestamp, len(ids))


def commit_two(tape: Tape) -> None:
    """Two transactions, a and b, and c."""
    commit_one(tape, "t", ONE, 10, "a", "b")
    commit_one(tape, "u", TWO, 20, "c")


def log_two(tape: Tape) -> None:
    """As `commit_two` has written them."""
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE], [3, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[0, 3, 4]]])


A, B, C = row("a", 0, ONE, 10), row("b", 1, ONE, 10), row("c", 3, TWO, 20)


def commit_moved(tape: Tape) -> None:
    """As `commit_two`, and the key moves from partition 0 to partition 1 in between."""
    commit_two(tape)
    tape.log(0, [0, "k", "a", ONE], [1, "k", "b", ONE])
    tape.log(1, [0, "k", "c", TWO])
    tape.commits([1, 10, [ONE], [[0, 0, 2]]], [2, 20, [TWO], [[1, 0, 1]]])


MOVED = row("c", 0, TWO, 20, partition=1)
