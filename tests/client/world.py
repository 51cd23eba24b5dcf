"""Real controller, real protocol, log in memory, time by hand: a whole cluster in one thread."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.batches.records import Record, decode_records
from anabranch.client.client import Client
from anabranch.client.reservation import Reservation
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.testing.memory.cluster import CLIENT, MemoryCluster
from anabranch.testing.memory.log import MemoryBrokers
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Receipt
from tests.client.answers import STREAM
from tests.client.doubles import ManualClock, counted


class World(MemoryCluster):
    """A cluster; the controller of control partition 0 runs whenever a client waits. The others have none."""

    def __init__(self, control_partitions: int = 1) -> None:
        self.fault: Callable[[str], BaseException | None] | None = None
        self.calls: list[str] = []
        super().__init__(
            clock=ManualClock(),
            control_partitions=control_partitions,
            on_call=self._on_call,
            entropy=counted(),
            feature_level=1,
        )
        self.client = self.new_client()

    @property
    def cluster(self) -> MemoryBrokers:
        return self.brokers

    def _on_call(self, process: str, name: str) -> None:
        if process != CLIENT:
            return
        self.calls.append(name)
        if self.fault is not None:
            error = self.fault(name)
            if error is not None:
                raise error

    def new_client(self, *, timeout: float = 30.0, one_shot_bytes: int = 4096) -> Client:
        return self.connect(timeout=timeout, one_shot_bytes=one_shot_bytes)

    def part(self, of: Reservation | bytes, *values: bytes) -> Receipt:
        """The receipt of a writer in another process, for what it wrote."""
        with self.new_client() as other, other.join(of) as writer:
            for value in values:
                writer.write(STREAM, value, key=b"k")
        return writer.finish()

    # -- the streams' contents ------------------------------------------------------------------------

    def events(self, stream: str) -> list[Record]:
        """All committed events, partition by partition."""
        topic = stream_topic(stream)
        count = self.cluster.topics[topic].partitions
        return [e for p in range(count) for e in self._read(TopicPartition(topic, p))]

    def commits(self, stream: str) -> list[r.CommitRecord]:
        """All COMMIT records."""
        found = [
            decode(e.value or b"") for e in self._read(TopicPartition(history_topic(stream), 0))
        ]
        return [record for record in found if isinstance(record, r.CommitRecord)]

    def _read(self, partition: TopicPartition) -> list[Record]:
        log = self.cluster.log("reader")
        found: list[Record] = []
        position = log.start_offsets([partition])[partition]
        while True:
            fetched = log.fetch(
                {partition: position}, max_wait=0, max_bytes=1 << 20, committed=True
            ).get(partition)
            if fetched is None:
                return found
            for batch in fetched.batches:
                found += decode_records(batch.data)
            position = fetched.next_offset
