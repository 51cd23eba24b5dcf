"""Which tasks a worker should have: its group's word is a hint, the tenure decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.ports import GroupMember, TopicPartition
from anabranch.schemas.records import TaskInfo

_LOOKS = 5  # a session apart


class Membership:
    """A member of the workers' group: its share of the partitions of the state topic is its share of the tasks.

    While the group finds its members again, a worker goes on with what it has: only tenures fence.
    """

    def __init__(self, member: GroupMember, topic: str) -> None:
        self._member = member
        self.wanted: frozenset[int] = frozenset()
        self.generation = 0  # raised with each assignment
        member.join([topic], self._gained, self._lost)

    def serve(self, wait: float) -> frozenset[int]:
        """Hear the group, for so many seconds at most. The tasks that this worker should have."""
        self._member.serve(wait)
        return self.wanted

    def close(self) -> None:
        """Leave the group."""
        self._member.close()

    def _gained(self, places: list[TopicPartition]) -> None:
        self.wanted = frozenset(place.partition for place in places)
        self.generation += 1

    def _lost(self, places: Sequence[TopicPartition], may_commit: bool) -> None:
        """The group assigns again; what it says next counts."""


class Lost:
    """Tasks that another one took since the group gave them to this worker.

    Two that both think that a task is theirs would take it in turn without end. So the one that lost it waits until
    the group assigns again, the task is released, or nothing has moved it for some looks: its holder is gone.
    """

    def __init__(self) -> None:
        self.tasks: frozenset[int] = frozenset()
        self._stands: dict[int, tuple[tuple[int, int], int]] = {}

    def look(self, rows: Iterable[TaskInfo], holder: str) -> None:
        """See who has the tasks now."""
        before, self._stands = self._stands, {}
        for row in rows:
            if row.holder not in ("", holder):
                stand, looks = (row.term, row.sequence), 0
                if row.task in before and before[row.task][0] == stand:
                    looks = before[row.task][1] + 1
                self._stands[row.task] = stand, looks
        self.tasks = frozenset(t for t, (_, looks) in self._stands.items() if looks < _LOOKS)


class AllTasks:
    """A worker that is alone, or has fixed tasks."""

    generation = 1

    def __init__(self, tasks: Iterable[int]) -> None:
        self.wanted = frozenset(tasks)

    def serve(self, _: float) -> frozenset[int]:
        """The tasks."""
        return self.wanted

    def close(self) -> None:
        """Nothing is to be left."""
