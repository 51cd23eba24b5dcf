"""The positions at which readers begin: the group's committed offsets, or a vector of the history."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from anabranch.ports import GroupMember, TopicPartition
from anabranch.reading.committed_log import CommittedLog, partitions_of
from anabranch.reading.history_search import HistorySearch
from anabranch.topics.names import stream_topic


class Starting:
    """Finds the positions to begin at, for all partitions of a stream."""

    def __init__(
        self,
        source: CommittedLog,
        search: HistorySearch,
        stream: str,
        start: str | int,
        timeout: float,
    ) -> None:
        """``start``: as checked by `check_start`. ``timeout``: seconds, of each question."""
        self._source = source
        self._search = search
        self._stream = stream
        self._topic = stream_topic(stream)
        self._start = start
        self._timeout = timeout
        self._making: dict[TopicPartition, int] = {}  # offered to the group, and not all taken yet

    def alone(self) -> dict[int, int]:
        """Partition -> offset for a reader without a group."""
        return self._placed(self._first_offsets(()))

    def in_group(self, member: GroupMember, own: Collection[int]) -> dict[int, int] | None:
        """Partition -> offset for a member with these partitions. None: the group is not made yet, ask again.

        A group with any position in the stream is made: what it has stays, as that of plain Kafka consumers, and
        partitions without a position are new, and begin at their beginning. Only the member with partition 0 makes
        a group: it commits a whole vector in one request. Nothing else tells that a group is made: brokers drop a
        group's offsets of topics that its members do not subscribe to, however busy it is.
        """
        firsts = self._first_offsets(own)
        committed = member.committed(
            [TopicPartition(self._topic, partition) for partition in firsts]
        )
        if 0 in own and (self._making or not committed):
            made = {
                TopicPartition(self._topic, p): offset for p, offset in self._placed(firsts).items()
            }
            self._making = committed = made | self._making
            if not member.commit(committed, wait=True):
                return None
            self._making = {}
        if not committed:
            return None
        return {
            p: max(first, committed.get(TopicPartition(self._topic, p), 0))
            for p, first in firsts.items()
        }

    def _placed(self, firsts: Mapping[int, int]) -> dict[int, int]:
        """Partition -> where a reader starts, of these partitions and the first offsets that are left of them."""
        found = self._search.as_of(self._start)
        vector = {} if found is None else found.vector()
        return {p: max(first, vector.get(p, 0)) for p, first in firsts.items()}

    def _first_offsets(self, own: Collection[int]) -> dict[int, int]:
        """The first offset that is still there, of all partitions."""
        deadline = self._source.clock.monotonic() + self._timeout
        count = partitions_of(self._source, [self._stream], deadline)[self._topic]
        places = [
            TopicPartition(self._topic, p) for p in range(max(count, *(p + 1 for p in own), 0))
        ]
        found = self._source.start_offsets(places, deadline)
        return {partition: offset for (_, partition), offset in found.items()}
