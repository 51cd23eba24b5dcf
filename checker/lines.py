"""Items (events, or whole commits), and the sequences (*lines*) in which readers get them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from checker.model import Chronicle, Event, Part, Reader, Record
from checker.reading import UNKNOWN, Operation

Item = Event | Record
Line = Part | Chronicle


@dataclass(slots=True)
class Giving:
    """An item that a reader got. ``order``: its number among the reader's items."""

    item: Item
    reader: Reader
    poll: Operation
    order: int

    def came_before(self, other: Giving) -> bool:
        """Whether this came before another one; if the readers differ, whether it may have."""
        if self.reader is other.reader:
            return self.order < other.order
        return not other.poll.ended_before(self.poll)


@dataclass
class Group:
    """The members of a group, or one reader without a group, and the items that they got."""

    members: list[Reader]
    givings: list[Giving] = field(default_factory=list)
    by_item: dict[Item, list[Giving]] = field(default_factory=dict)
    by_reader: dict[Reader, list[Giving]] = field(default_factory=dict)
    lowest: dict[Line, int] = field(default_factory=dict)
    highest: dict[Line, int] = field(default_factory=dict)
    first: Operation | None = None  # what is requested after this is after a start at the `end`

    @property
    def is_group(self) -> bool:
        """Whether it is a group: its members may repeat items."""
        return self.members[0].group is not None

    @cached_property
    def starts(self) -> set[str | int]:
        """The starts of its members without a position: the beginning, if nothing is recorded."""
        return {reader.starts for reader in self.members} - {"position"} or {"start"}

    @cached_property
    def unfinished(self) -> list[Operation]:
        """Polls without a recorded result, which may have got any later item, by time."""
        found = []
        for reader in self.members:
            # A member that has caught up got nothing from earlier polls without an answer.
            end = max((op.line for op in reader.caught_up if op.ok), default=0)
            for poll in reader.polls:
                if poll.outcome == UNKNOWN and (poll.told is not None or poll.line > end):
                    found.append(poll)
        return sorted(found, key=lambda poll: poll.at)

    @cached_property
    def ends(self) -> list[Operation]:
        """The operations by which members reported that they had caught up."""
        return [op for reader in self.members for op in reader.caught_up if op.ok]

    def must_give(self, item: Item) -> bool:
        """Whether an item is after the start of every member."""
        for start in self.starts:
            if start == "end":
                if self.first is None or not item.asked_after(self.first):
                    return False
            elif isinstance(start, int) and (item.timestamp is None or item.timestamp <= start):
                return False
        return True

    def gave_before(self, item: Item, giving: Giving) -> bool:
        """Whether the group got an item, or may have got it, before that one."""
        return any(other.came_before(giving) for other in self.by_item.get(item, ()))
