"""Plain numbers of a long-lived process: its own threads write them, others may read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal, NamedTuple

BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Labels = tuple[str, ...]


class Number(NamedTuple):
    """A number as `/metrics` shows it. ``labels``: beside the one that names whose it is."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: Labels = ()


class Table(NamedTuple):
    """The numbers of one kind of process. ``owner``: the label that names whose they are.

    ``timed``: name and help of what is timed, as a histogram.
    """

    numbers: Mapping[str, Number]
    owner: str
    timed: tuple[str, str]


class Numbers:
    """The numbers of a table. Each mapping is replaced or grows: a reader copies it first."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.values: dict[str, dict[Labels, float]] = {
            name: {} if number.labels else {(): 0} for name, number in table.numbers.items()
        }
        self.seconds = [0] * (len(BOUNDS_S) + 1)  # times by their bounds; the last: longer than all
        self.seconds_sum = 0.0

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Count, one or ``by``, under these labels."""
        values = self.values[name]
        values[labels] = values.get(labels, 0) + by

    def set(self, name: str, value: float) -> None:
        """Set the present value of a number without labels."""
        self.values[name] = {(): value}

    def total(self, name: str) -> float:
        """A number, whatever the labels."""
        return sum(self.values[name].copy().values())

    def took(self, seconds: float) -> None:
        """Count a time."""
        self.seconds[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds_sum += seconds
