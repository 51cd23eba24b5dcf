"""The shared state of an in-memory log: topics, partitions, and the producers of transactional ids."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.batches.records import Record, encode_batch
from anabranch.ports import (
    Clock,
    LogFenced,
    LogRefused,
    TopicGone,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from anabranch.testing.memory.partition import Partition
from anabranch.testing.memory.trouble import MARKER_BYTES, Kind, Troubles

OnCall = Callable[[str, str], None]

UNKNOWN_TOPIC = 3
# Kafka's defaults of the settings that the memory log and the declarations look at.
DEFAULT_CONFIG = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
_UNMARKED = (Kind.LEADERLESS, Kind.FEW_REPLICAS, Kind.FAILED_DISK)
_MAX_EPOCH = (1 << 15) - 2
_FIRST_PRODUCER_ID = 1000
CONCURRENT_PAUSE_S = 0.001
_LONG_PAUSE_S = 0.1  # between questions, once the wait is ten times as long
PATIENCE_S = 3.0  # seconds for leaders, replicas and markers, like the ports over Kafka


@dataclass(slots=True)
class Transactions:
    """The coordinator's view of a transactional id."""

    producer_id: int
    epoch: int
    timeout: float
    started: float | None = None
    partitions: dict[TopicPartition, None] = field(default_factory=dict)
    # Markers still to land: (due, partition, producer id, epoch, commit).
    landing: list[tuple[float, TopicPartition, int, int, bool]] = field(default_factory=list)


class MemoryBroker:
    """Topics, partitions and the transaction coordinator of a `anabranch.testing.memory.log.MemoryBrokers`."""

    def __init__(
        self,
        clock: Clock,
        *,
        on_call: OnCall | None = None,
        marker_delay: float | Callable[[], float] = 0.0,
        transaction_version: int = 2,
        poll: float = 0.005,
        patience: float = PATIENCE_S,
        loses_markers: bool = False,
    ) -> None:
        self.clock = clock
        self.on_call = on_call
        self.marker_delay = marker_delay
        self.transaction_version = transaction_version
        # Seconds between the tries of a waiting fetch.
        self.poll = poll
        # Seconds that a call waits for trouble to pass before it fails.
        self.patience = patience
        # Whether a partition without a leader gets no marker, ever (KAFKA-20734); and those without one:
        # (partition, producer id) -> epoch, commit.
        self.loses_markers = loses_markers
        self.lost_markers: dict[tuple[TopicPartition, int], tuple[int, bool]] = {}
        self.troubles = Troubles()
        self.lock = threading.RLock()
        self.partitions: dict[TopicPartition, Partition] = {}
        self.topics: dict[str, TopicInfo] = {}
        self._topic_ids = itertools.count(1)
        self._transactions: dict[str, Transactions] = {}
        self._next_producer_id = _FIRST_PRODUCER_ID

    def pause(self, seconds: float) -> None:
        """Sleep up to ``seconds``, in a fetch that waits, before its next try; a simulator overrides this."""
        self.clock.sleep(min(seconds, self.poll))

    def wait_for(self, done: Callable[[], bool]) -> bool:
        """Wait until ``done()``; False once a call's patience is over."""
        began = self.clock.monotonic()
        while not done():
            waited = self.clock.monotonic() - began
            if waited >= self.patience:
                return False
            long = waited >= 10 * _LONG_PAUSE_S
            self.clock.sleep(_LONG_PAUSE_S if long else CONCURRENT_PAUSE_S)
        return True

    # -- for tests and simulators ---------------------------------------------------------------------

    def compact(self, partition: TopicPartition, *, drop_tombstones: bool = False) -> None:
        """Compact a partition now."""
        with self.lock:
            self.catch_up()
            self.partition(partition).compact(drop_tombstones=drop_tombstones)

    def produce(self, partition: TopicPartition, records: Sequence[Record]) -> int:
        """Append one plain batch (no native transaction); its base offset."""
        return self.produce_batch(partition, encode_batch(records))

    def produce_batch(self, partition: TopicPartition, data: bytes) -> int:
        """Append one ready batch outside of any native transaction; its base offset."""
        with self.lock:
            self.catch_up()
            target = self.partition(partition)
            target.check(data, self.now_ms())
            return target.append(data, -1, -1, -1, transactional=False)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, as an operator may by hand."""
        with self.lock:
            self.topics.pop(topic)
            for partition in [place for place in self.partitions if place.topic == topic]:
                del self.partitions[partition]

    # -- time and topics ------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The clock's Unix milliseconds."""
        return int(self.clock.wall() * 1000)

    def partition(self, partition: TopicPartition) -> Partition:
        """The partition; `TopicGone` if it does not exist."""
        found = self.partitions.get(partition)
        if found is None:
            raise TopicGone(
                f"{partition.topic}[{partition.partition}] does not exist", partition.topic
            )
        return found

    def create(self, specs: Sequence[TopicSpec]) -> None:
        """Create the topics that are not there."""
        for spec in specs:
            if spec.name in self.topics:
                continue
            config = {**DEFAULT_CONFIG, **spec.config}
            self.topics[spec.name] = TopicInfo(
                spec.name,
                spec.partitions,
                max(spec.replication_factor, 1),
                config,
                f"{next(self._topic_ids):032x}",
            )
            self._add(spec.name, range(spec.partitions), config)

    def grow(self, topic: str, partitions: int) -> None:
        """Grow a topic to ``partitions``; `LogRefused` (3) if there is no such topic."""
        info = self.topics.get(topic)
        if info is None:
            raise LogRefused(f"{topic} does not exist", UNKNOWN_TOPIC)
        if partitions > info.partitions:
            self.topics[topic] = replace(info, partitions=partitions)
            self._add(topic, range(info.partitions, partitions), dict(info.config))

    def alter(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        """Change settings of topics; `LogRefused` (3), before anything, if one does not exist."""
        for topic in changes.keys() - self.topics.keys():
            raise LogRefused(f"{topic} does not exist", UNKNOWN_TOPIC)
        for topic, settings in changes.items():
            info = self.topics[topic]
            default = {n: DEFAULT_CONFIG[n] for n, v in settings.items() if v is None}
            config = {**info.config, **{n: v for n, v in settings.items() if v}, **default}
            self.topics[topic] = replace(info, config=config)
            for number in range(info.partitions):
                self.partitions[TopicPartition(topic, number)].config = config

    def _add(self, topic: str, numbers: Iterable[int], config: dict[str, str]) -> None:
        for number in numbers:
            name = TopicPartition(topic, number)
            self.partitions[name] = Partition(name, config)

    # -- the transaction coordinator --------------------------------------------------------------------

    def catch_up(self) -> None:
        """Land the markers that are due; abort native transactions beyond their timeout."""
        now = self.clock.monotonic()
        for state in self._transactions.values():
            if state.started is not None and now - state.started > state.timeout:
                # The broker fences the producer whose transaction it gave up.
                self._finish(state, commit=False)
                state.epoch += 1
            if not state.landing:
                continue
            if self.loses_markers:
                self._lose(state)
            due = [m for m in state.landing if m[0] <= now and self._takes_markers(m[1])]
            if due:
                state.landing = [marker for marker in state.landing if marker not in due]
                for _, partition, producer_id, epoch, commit in due:
                    self.land(partition, producer_id, epoch, commit=commit)

    def _takes_markers(self, partition: TopicPartition) -> bool:
        """Whether a native transaction can be ended there: until then its id can't be used again."""
        found = self.partitions.get(partition)
        if found is None:
            return True
        if int(found.config["max.message.bytes"]) < MARKER_BYTES:
            return False
        trouble = self.troubles.get(partition)
        return trouble is None or trouble.kind not in _UNMARKED

    def _lose(self, state: Transactions) -> None:
        for marker in list(state.landing):
            _, partition, producer_id, epoch, commit = marker
            trouble = self.troubles.get(partition)
            if trouble is not None and trouble.kind is Kind.LEADERLESS:
                state.landing.remove(marker)
                self.lost_markers[partition, producer_id] = epoch, commit

    def land_lost(self, partition: TopicPartition, producer_id: int) -> None:
        """A producer ends the transaction that it finds open there."""
        found = self.lost_markers.pop((partition, producer_id), None)
        if found is not None:
            self.land(partition, producer_id, found[0], commit=found[1])

    def land(
        self, partition: TopicPartition, producer_id: int, epoch: int, *, commit: bool
    ) -> None:
        """Put a marker on its partition, unless the topic was deleted meanwhile."""
        found = self.partitions.get(partition)
        if found is not None:
            found.mark(producer_id, epoch, commit=commit, now_ms=self.now_ms())

    def is_ending(self, transactional_id: str) -> bool:
        """Whether markers of its last native transaction are still to land."""
        self.catch_up()
        state = self._transactions.get(transactional_id)
        return state is not None and bool(state.landing)

    def initialise(self, transactional_id: str, timeout: float) -> tuple[int, int] | None:
        """(producer id, epoch); None while a former native transaction is ending."""
        self.catch_up()
        state = self._transactions.get(transactional_id)
        if state is None:
            state = Transactions(self._new_producer_id(), -1, timeout)
            self._transactions[transactional_id] = state
        if state.started is not None:
            self._finish(state, commit=False)
            # The zombie is fenced from here on, even if this call fails.
            self._bump(state)
        self.catch_up()
        if state.landing:
            return None
        self._bump(state)
        state.timeout = timeout
        return state.producer_id, state.epoch

    def current(self, transactional_id: str, producer_id: int, epoch: int) -> Transactions:
        """The id's state; `LogFenced` unless this producer is the newest."""
        self.catch_up()
        state = self._transactions[transactional_id]
        if (state.producer_id, state.epoch) != (producer_id, epoch):
            raise LogFenced(f"{transactional_id}: a newer producer has the id, or it timed out")
        return state

    def begin(self, state: Transactions, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the native transaction; the first begins it."""
        if state.started is None:
            state.started = self.clock.monotonic()
        for partition in partitions:
            state.partitions.setdefault(partition)

    def end(self, state: Transactions, *, commit: bool) -> tuple[int, int]:
        """End it: markers land later. Returns the producer id and epoch to continue with."""
        self._finish(state, commit=commit)
        if self.transaction_version >= 2:
            self._bump(state)
        self.catch_up()
        return state.producer_id, state.epoch

    def _finish(self, state: Transactions, *, commit: bool) -> None:
        now = self.clock.monotonic()
        for partition in state.partitions:
            delay = self.marker_delay() if callable(self.marker_delay) else self.marker_delay
            state.landing.append((now + delay, partition, state.producer_id, state.epoch, commit))
        state.partitions.clear()
        state.started = None

    def _bump(self, state: Transactions) -> None:
        if state.epoch >= _MAX_EPOCH:
            state.producer_id, state.epoch = self._new_producer_id(), 0
        else:
            state.epoch += 1

    def _new_producer_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id
