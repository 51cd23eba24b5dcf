"""What readers go by: items (events, or whole commits), and the lines on which they stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from checker.model import Chronicle, Event, Part, Reader, Record
from checker.reading import UNKNOWN, Operation

Item = Event | Record
Line = Part | Chronicle


@dataclass(slots=True)
class Giving:
    """An item that a reader was given. ``order``: how many it had before."""

    item: Item
    reader: Reader
    poll: Operation
    order: int

    def came_before(self, other: Giving) -> bool:
        """Or may have, if the readers are different ones."""
        if self.reader is other.reader:
            return self.order < other.order
        return not other.poll.ended_before(self.poll)


@dataclass
class Group:
    """The members of a group, or one reader that has none."""

    members: list[Reader]
    givings: list[Giving] = field(default_factory=list)
    by_item: dict[Item, list[Giving]] = field(default_factory=dict)
    by_reader: dict[Reader, list[Giving]] = field(default_factory=dict)
    lowest: dict[Line, int] = field(default_factory=dict)
    highest: dict[Line, int] = field(default_factory=dict)
    first: Operation | None = None  # that told what an `end` is

    @property
    def is_group(self) -> bool:
        """Its members may give again."""
        return self.members[0].group is not None

    @cached_property
    def starts(self) -> set[str | int]:
        """Where its members start if the group has no position yet: at the beginning, if none says otherwise."""
        return {reader.starts for reader in self.members} - {"position"} or {"start"}

    @cached_property
    def unfinished(self) -> list[Operation]:
        """Polls that may have given anything that came next, by time."""
        found = []
        for reader in self.members:
            # Who says that it has caught up has been given nothing by what it still waits for.
            end = max((op.line for op in reader.caught_up if op.ok), default=0)
            for poll in reader.polls:
                if poll.outcome == UNKNOWN and (poll.told is not None or poll.line > end):
                    found.append(poll)
        return sorted(found, key=lambda poll: poll.at)

    @cached_property
    def ends(self) -> list[Operation]:
        """Of members that said that they had caught up."""
        return [op for reader in self.members for op in reader.caught_up if op.ok]

    def must_give(self, item: Item) -> bool:
        """Wherever its members started, this comes after."""
        for start in self.starts:
            if start == "end":
                if self.first is None or not item.asked_after(self.first):
                    return False
            elif isinstance(start, int) and (item.timestamp is None or item.timestamp <= start):
                return False
        return True

    def gave_before(self, item: Item, giving: Giving) -> bool:
        """An item was given, or may have been, before that."""
        return any(other.came_before(giving) for other in self.by_item.get(item, ()))
