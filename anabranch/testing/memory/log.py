"""The in-memory log: the ports of `anabranch.ports` over plain lists, for simulation and tests.

Deterministic: no clock, thread or chance of its own. Many processes share one `MemoryBrokers`; each has
a `MemoryLog` handle. Each call passes through the cluster's hook: there a simulator may switch to another
process, raise a crash, or inject an error before or after the call's effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from anabranch.batches.records import Record
from anabranch.ports import Failed, Fetched, LogBusy, LogError, TopicInfo, TopicPartition, TopicSpec
from anabranch.testing.memory.broker import MemoryBroker
from anabranch.testing.memory.partition import Partition
from anabranch.testing.memory.producer import MemoryProducer
from anabranch.testing.memory.trouble import Kind, error_of

__all__ = ["MemoryBrokers", "MemoryLog", "MemoryProducer"]
_SEND_TROUBLES = Kind.LEADERLESS, Kind.FAILED_DISK, Kind.REFUSING, Kind.DENYING


class MemoryBrokers(MemoryBroker):
    """The brokers that all processes share.

    ``on_call(process, name)`` is called before the effect of every port call with its name, and after it
    with ``name + ".after"``; its errors go to the caller. ``marker_delay``: seconds by ``clock``
    (or a function giving them, asked once a partition) after which the markers of an ended native
    transaction land, as on a broker: until then readers of committed data wait, and the same transactional
    id finds CONCURRENT_TRANSACTIONS and waits too. ``transaction_version`` 2: each end bumps the epoch.
    ``troubles``: partitions in trouble, see `anabranch.testing.memory.trouble`; markers don't land there.
    """

    def log(self, process: str) -> MemoryLog:
        """A process's handle; the hook gets the name ``process``."""
        return MemoryLog(self, process)


class MemoryLog:
    """`anabranch.ports.Log` in memory; one handle a process."""

    def __init__(self, cluster: MemoryBrokers, process: str) -> None:
        self.cluster = cluster
        self.process = process
        self._turn = 0

    def called(self, name: str) -> None:
        """Pass through the cluster's hook."""
        if self.cluster.on_call is not None:
            self.cluster.on_call(self.process, name)

    def _await(self, places: Sequence[TopicPartition], failed: Failed | None = None) -> None:
        """Wait until all of these have a leader; not so with ``failed``."""
        troubles = self.cluster.troubles
        if failed is None and troubles:
            self.cluster.wait_for(lambda: not troubles.of(places, self.process, Kind.LEADERLESS))

    def _readable(self, partition: TopicPartition) -> Partition:
        """The partition; `LogError` unless it can be read."""
        self.cluster.troubles.check_read(partition, self.process)
        return self.cluster.partition(partition)

    def _all_readable(
        self, places: Sequence[TopicPartition], failed: Failed | None
    ) -> Iterator[tuple[TopicPartition, Partition]]:
        """The partitions that can be read; ``failed`` takes the others' errors, without it they are raised."""
        for place in places:
            try:
                yield place, self._readable(place)
            except LogError as error:
                if failed is None:
                    raise
                failed[place] = error

    def _end(self, partition: TopicPartition, end: int) -> int:
        return self.cluster.troubles.end(partition, self.process, end)

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
        failed: Failed | None = None,
    ) -> dict[TopicPartition, Fetched]:
        self.called("fetch")
        cluster = self.cluster
        self._await(list(positions), failed)
        give_up = cluster.clock.monotonic() + max_wait
        while True:
            result = self._read(positions, max_bytes, committed, failed)
            left = give_up - cluster.clock.monotonic()
            if result or left <= 0 or failed:
                break
            cluster.pause(left)
        self.called("fetch.after")
        return result

    def _read(
        self,
        positions: Mapping[TopicPartition, int],
        max_bytes: int,
        committed: bool,
        failed: Failed | None,
    ) -> dict[TopicPartition, Fetched]:
        result: dict[TopicPartition, Fetched] = {}
        with self.cluster.lock:
            self.cluster.catch_up()
            wanted = list(positions)
            turn = self._turn % len(wanted) if wanted else 0
            self._turn += 1
            left = max_bytes
            for partition in wanted[turn:] + wanted[:turn]:
                if left <= 0 and result:
                    break
                try:
                    found = self._readable(partition)
                    fetched = found.read(
                        positions[partition],
                        committed=committed,
                        max_bytes=max(left, 1),
                        limit=self._end(partition, found.end_offset),
                    )
                except LogError as error:
                    if failed is None:
                        raise
                    failed[partition] = error
                    continue
                if fetched is not None:
                    result[partition] = fetched
                    left -= sum(len(batch.data) for batch in fetched.batches)
        return result

    def end_offsets(
        self,
        partitions: Iterable[TopicPartition],
        *,
        committed: bool,
        failed: Failed | None = None,
        sure: bool = False,
    ) -> dict[TopicPartition, int]:
        self.called("end_offsets")
        places = list(partitions)
        self._await(places, failed)
        with self.cluster.lock:
            self.cluster.catch_up()
            result = {}
            for name, partition in self._all_readable(places, failed):
                end = partition.stable_offset if committed else partition.end_offset
                result[name] = end if sure else self._end(name, end)
        self.called("end_offsets.after")
        return result

    def start_offsets(
        self, partitions: Iterable[TopicPartition], *, failed: Failed | None = None
    ) -> dict[TopicPartition, int]:
        self.called("start_offsets")
        places = list(partitions)
        self._await(places, failed)
        with self.cluster.lock:
            result = {
                name: found.start_offset for name, found in self._all_readable(places, failed)
            }
        self.called("start_offsets.after")
        return result

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        self.called("offsets_for_time")
        places = list(partitions)
        self._await(places)
        with self.cluster.lock:
            self.cluster.catch_up()
            result = {name: self._readable(name).offset_for_time(timestamp_ms) for name in places}
        self.called("offsets_for_time.after")
        return result

    def producer(self, transactional_id: str, *, timeout: float) -> MemoryProducer:
        self.called("producer")
        given: list[tuple[int, int]] = []

        def initialised() -> bool:
            with self.cluster.lock:
                found = self.cluster.initialise(transactional_id, timeout)
            given.extend([found] if found is not None else [])
            return found is not None

        if not self.cluster.wait_for(initialised):
            raise LogBusy(f"{transactional_id}: markers can't be written")
        self.called("producer.after")
        return MemoryProducer(self, transactional_id, *given[0])

    def produce(self, partition: TopicPartition, records: Sequence[Record]) -> int:
        """A client's plain append, outside of any native transaction; the base offset."""
        self.called("produce")
        self._await_writable(partition)
        offset = self.cluster.produce(partition, records)
        self.called("produce.after")
        return offset

    def _await_writable(self, partition: TopicPartition) -> None:
        """Wait as an idempotent producer does: a refusal is raised at once, all else is tried again."""
        troubles = self.cluster.troubles
        lasting = [kind for kind in Kind if kind not in (Kind.REFUSING, Kind.DENYING)]
        self.cluster.wait_for(lambda: not troubles.of([partition], self.process, *lasting))
        error, _ = troubles.unwritten([partition], self.process)
        if error is not None:
            raise error

    def produce_batch(self, partition: TopicPartition, data: bytes) -> int:
        """`produce` of a ready batch."""
        self.called("produce")
        self._await_writable(partition)
        offset = self.cluster.produce_batch(partition, data)
        self.called("produce.after")
        return offset

    def send(self, batches: Sequence[tuple[TopicPartition, bytes]], failed: Failed) -> bool:
        """`anabranch.ports.Log.send`; nothing is kept for later. A leader without its followers takes it."""
        if batches:
            self.called("send")
            for place, data in batches:
                found = self.cluster.troubles.of([place], self.process, *_SEND_TROUBLES)
                try:
                    for trouble in found.values():
                        raise error_of(place, trouble)
                    self.cluster.produce_batch(place, data)
                except LogError as error:
                    failed[place] = error
            self.called("send.after")
        return False

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        self.called("delete_records")
        self._await(list(before))
        with self.cluster.lock:
            for name, offset in before.items():
                self._readable(name).delete_below(offset)
        self.called("delete_records.after")

    def create_topics(self, specs: Sequence[TopicSpec]) -> dict[str, str]:
        self.called("create_topics")
        with self.cluster.lock:
            new = [spec.name for spec in specs if spec.name not in self.cluster.topics]
            self.cluster.create(specs)
            made = {name: self.cluster.topics[name].topic_id for name in new}
        self.called("create_topics.after")
        return made

    def delete_topics(self, topics: Sequence[TopicInfo]) -> None:
        self.called("delete_topics")
        with self.cluster.lock:
            for topic in topics:
                now = self.cluster.topics.get(topic.name)
                if now is not None and now.topic_id == topic.topic_id:
                    self.cluster.delete_topic(topic.name)
        self.called("delete_topics.after")

    def add_partitions(self, topic: str, partitions: int) -> None:
        self.called("add_partitions")
        with self.cluster.lock:
            self.cluster.grow(topic, partitions)
        self.called("add_partitions.after")

    def alter_topics(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        self.called("alter_topics")
        with self.cluster.lock:
            self.cluster.alter(changes)
        self.called("alter_topics.after")

    def replicas_of_new(self, topic: str, factor: int = -1) -> int | None:
        return max(1, factor)

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        self.called("describe_topics")
        with self.cluster.lock:
            known = [n for n in names if n in self.cluster.topics]
            result = {n: self.cluster.troubles.described(self.cluster.topics[n]) for n in known}
        self.called("describe_topics.after")
        return result

    def partition_counts(self, names: Sequence[str]) -> dict[str, int]:
        return {name: info.partitions for name, info in self.describe_topics(names).items()}

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        return {name: info.topic_id for name, info in self.describe_topics(names).items()}

    def is_known(self, topic: str) -> bool:
        self.called("is_known")
        return topic in self.cluster.topics

    def is_agreed(self, topic: str, topic_id: str) -> bool:
        self.called("is_agreed")
        found = self.cluster.topics.get(topic)
        return found is not None and found.topic_id == topic_id

    def id_read(self, topic: str) -> str:
        return self.cluster.topics[topic].topic_id if topic in self.cluster.topics else ""

    def is_gone(self, topic: str, partitions: int, topic_id: str) -> bool:
        self.called("is_gone")
        with self.cluster.lock:
            found = self.cluster.topics.get(topic)
        self.called("is_gone.after")
        if found is None or found.partitions < partitions:
            return True
        return bool(topic_id) and found.topic_id != topic_id

    def close(self) -> None:
        """`anabranch.ports.Log.close`: nothing to free."""
