"""Filters that Spark pushes down: which streams, partitions, offsets and commits they select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter  # 4.0 has none, and pushes none

# By the names of Spark's classes.
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": lambda value, wanted: value == wanted,
    "EqualNullSafe": lambda value, wanted: value == wanted,
    "GreaterThan": lambda value, wanted: value > wanted,
    "GreaterThanOrEqual": lambda value, wanted: value >= wanted,
    "LessThan": lambda value, wanted: value < wanted,
    "LessThanOrEqual": lambda value, wanted: value <= wanted,
    "In": lambda value, wanted: value in wanted,
}


@dataclass
class Interval:
    """A range from ``low`` to ``high``, both included. None means no limit."""

    low: int | None = None
    high: int | None = None

    def narrow(self, low: int | None, high: int | None) -> None:
        """Reduce the interval to the part inside these bounds."""
        if low is not None:
            self.low = low if self.low is None else max(self.low, low)
        if high is not None:
            self.high = high if self.high is None else min(self.high, high)


@dataclass
class Selection:
    """The rows that all filters select, as plain data, because Spark sends it to the tasks."""

    offsets: Interval = field(default_factory=Interval)
    commits: Interval = field(default_factory=Interval)
    segments: frozenset[int] | None = None
    _discrete: list[Filter] = field(default_factory=list)  # of stream and partition

    def take(self, given: Filter) -> bool:
        """Apply a filter, perhaps in part. Returns whether it is applied exactly; else Spark has to check the rows.

        Columns segment and commit_timestamp are null where the history is truncated. As in Spark, a comparison with
        null is never true.
        """
        inner = _inner(given)
        kind_of = _name(inner)
        if kind_of not in _COMPARE:
            return False
        column = inner.attribute[0] if len(inner.attribute) == 1 else None
        values = list(inner.value) if kind_of == "In" else [inner.value]
        kind = str if column == "stream" else int
        if not values or not all(type(value) is kind for value in values):
            return False
        if column in ("stream", "partition"):
            self._discrete.append(given)
            return True
        if inner is not given:
            return False
        if column == "segment":
            return self._take_segments(inner, values)
        if column in ("offset", "commit_timestamp"):
            interval = self.offsets if column == "offset" else self.commits
            interval.narrow(*_interval(inner, values))
            return kind_of != "In"
        return False

    def _take_segments(self, given: Filter, values: list[int]) -> bool:
        if _name(given) not in ("EqualTo", "EqualNullSafe", "In"):
            return False
        wanted = frozenset(values)
        self.segments = wanted if self.segments is None else self.segments & wanted
        return True

    @property
    def prunes(self) -> bool:
        """Whether filters choose commits or segments, which the histories locate."""
        return self.commits != Interval() or self.segments is not None

    def has(self, stream: str, partition: int | None = None) -> bool:
        """Whether the filters select events of a stream, or of one partition of it."""
        values: dict[str, Any] = {"stream": stream, "partition": partition}
        return all(
            values[column] is None or holds != (_name(given) == "Not")
            for given in self._discrete
            for column, holds in [_judge(given, values)]
        )


def _name(given: Filter) -> str:
    return type(given).__name__


def _inner(given: Any) -> Any:
    """A filter, or the filter that it negates."""
    return given.child if _name(given) == "Not" else given


def _judge(given: Filter, values: dict[str, Any]) -> tuple[str, bool]:
    inner = _inner(given)
    column = inner.attribute[0]
    value = values[column]
    return column, value is not None and _COMPARE[_name(inner)](value, inner.value)


def _interval(given: Filter, values: list[int]) -> tuple[int | None, int | None]:
    """The smallest interval with all values that a filter selects."""
    name = _name(given)
    if name == "GreaterThan":
        return values[0] + 1, None
    if name == "GreaterThanOrEqual":
        return values[0], None
    if name == "LessThan":
        return None, values[0] - 1
    if name == "LessThanOrEqual":
        return None, values[0]
    return min(values), max(values)
