"""Where readers begin: the group's committed offsets, or a vector of the history."""

from __future__ import annotations

import time
from collections.abc import Collection

from anabranch.client.history_search import HistorySearch
from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.kafka_consumer import CommittedConsumer, partitions_of
from anabranch.topics.names import history_topic, stream_topic


class Starting:
    """Finds the positions to begin at, for all partitions of a stream."""

    def __init__(
        self,
        admin: KafkaAdmin,
        search: HistorySearch,
        stream: str,
        start: str | int,
        timeout: float,
    ) -> None:
        """``start``: as checked by `check_start`. ``timeout``: seconds, of each question."""
        self._admin = admin
        self._search = search
        self._stream = stream
        self._topic = stream_topic(stream)
        self._mark = (history_topic(stream), 0)
        self._start = start
        self._timeout = timeout

    def alone(self) -> dict[int, int]:
        """Partition -> offset for a reader without a group."""
        _, vector = self._vector()
        return {p: max(first, vector.get(p, 0)) for p, first in self._first_offsets(()).items()}

    def in_group(self, consumer: CommittedConsumer, own: Collection[int]) -> dict[int, int] | None:
        """Partition -> offset for a member with these partitions. None: the group is not made yet, ask again.

        Only the member with partition 0 makes it: it commits a whole vector in one request, with the mark that
        this is done. What the group has already, as that of plain Kafka consumers, stays.
        """
        firsts = self._first_offsets(own)
        places = [(self._topic, partition) for partition in firsts]
        committed = consumer.committed([*places, self._mark])
        if self._mark not in committed:
            if 0 not in own:
                return None
            mark, vector = self._vector()
            made = {(self._topic, p): max(o, vector.get(p, 0)) for p, o in firsts.items()}
            made |= committed
            made[self._mark] = mark
            if not consumer.commit_all(made):
                return None
            committed = made
        return {p: max(first, committed.get((self._topic, p), 0)) for p, first in firsts.items()}

    def _vector(self) -> tuple[int, dict[int, int]]:
        """A record's offset in the history, and its vector; without one, the stream's beginning."""
        found = self._search.as_of(self._start)
        return (0, {}) if found is None else (found.offset, found.vector())

    def _first_offsets(self, own: Collection[int]) -> dict[int, int]:
        """The first offset that is still there, of all partitions."""
        deadline = time.monotonic() + self._timeout
        count = partitions_of(self._admin, [self._stream], deadline)[self._topic]
        places = [(self._topic, p) for p in range(max(count, *(p + 1 for p in own), 0))]
        found = self._admin.start_offsets(places, deadline)
        return {partition: offset for (_, partition), offset in found.items()}
