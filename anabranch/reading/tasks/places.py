"""Inputs while tasks read them: how far each is given, and where the tasks stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from anabranch.reading.history import Found, HistoryCursor
from anabranch.reading.tasks.dealing import Dealing
from anabranch.reading.tasks.shares import Place as Place
from anabranch.reading.tasks.shares import Share
from anabranch.reading.transaction_reader import StreamParts
from anabranch.schemas.records import TaskPosition
from anabranch.types import Event

_ALL = (1 << 63) - 1


@dataclass(slots=True)
class Input:
    """An input while it is read. ``at``: what was given so far; ``stands``: where each task stood at first."""

    number: int
    stream: str
    history: HistoryCursor
    parts: StreamParts
    dealing: Dealing
    at: Place
    stands: dict[int, TaskPosition]
    order: dict[int, int] = field(default_factory=dict)  # segments of the record that is given
    batch: deque[Found] = field(default_factory=deque)
    rest: Iterator[Share] | None = None  # of the first record of the batch
    given: Iterator[tuple[int, Event]] | None = None  # the rest of a share, for single events
    last: tuple[int, int] | None = (
        None  # segment and offset given of that record, not yet in ``at``
    )
    told: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # as of `consumed`

    def place(self) -> Place:
        """The place up to which all was given."""
        if self.last is not None:
            segment, offset = self.last
            inside = self.order[segment], offset + 1, segment
            self.at, self.last = Place(self.batch[0].offset, *inside, self.at.timestamp), None
        return self.at

    def begin_again(self) -> None:
        """The first record of the batch is read again, from what was given."""
        self.place()
        self.rest = self.given = None

    def passed(self) -> None:
        """The first record of the batch is given whole."""
        offset, record = self.batch.popleft()
        self.at = Place(offset + 1, timestamp=record.timestamp)
        self.rest = self.given = self.last = None

    def moved(self, task: int, left: Place | None = None) -> Iterator[TaskPosition]:
        """The position of a task, if that is beyond what was told of it. ``left``: all from there is not done."""
        at = left or self.place()
        if at.segment >= 0 and at is left:
            return  # nothing is done since, and the order of its segments may be another record's
        if at[:3] > self.told_of(task):
            yield TaskPosition(self.number, at.record, at.timestamp, at.segment, at.offset)

    def told_of(self, task: int) -> tuple[int, int, int]:
        """The place of a task as of `consumed`, or its first one if that is beyond: other tasks may stand below.

        The first one's part is known while its record is read, and not before: so it is looked up each time.
        """
        first = place_of(self.stands[task], self.order)[:3]
        return max(first, self.told.get(task, first))


def end_of(place: tuple[int, int, int], here: tuple[int, int]) -> int:
    """Up to which offset of a segment of a record all lies below a place."""
    if place[:2] == here:
        return place[2]
    return _ALL if place[:2] > here else 0


def place_of(position: TaskPosition, order: dict[int, int]) -> Place:
    """The place of a task in, or behind, a record. ``order``: the record's segments."""
    if position.segment < 0:
        return Place(position.record)
    return Place(position.record, order.get(position.segment, -1), position.offset)
