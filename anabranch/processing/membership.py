"""Which tasks a worker should have: its group's word is a hint, the tenure decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.ports import GroupMember, TopicPartition


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
