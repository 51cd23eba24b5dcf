"""The in-memory log: the ports of `anabranch.ports` over plain lists, for simulation and tests.

Deterministic: no clock, thread or chance of its own. One `MemoryCluster` is shared by many processes;
each has a `MemoryLog` handle, and each call passes through the cluster's hook, where a simulator may
switch to another process, raise a crash, or inject an error before or after the call's effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.ports import (
    Clock,
    Fetched,
    LogError,
    LogFenced,
    LogRefused,
    LogUncertain,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from anabranch.topics.batch import Buffer, next_sequence, read_header
from anabranch.topics.memory_partition import Partition
from anabranch.topics.records import Record, encode_batch

OnCall = Callable[[str, str], None]

UNKNOWN_TOPIC = 3
# Kafka's defaults of what the memory log and the declarations look at.
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
_MAX_EPOCH = (1 << 15) - 2
_FIRST_PRODUCER_ID = 1000
_CONCURRENT_PAUSE_S = 0.001


@dataclass(slots=True)
class _Transactions:
    """The coordinator's view of a transactional id."""

    producer_id: int
    epoch: int
    timeout: float
    started: float | None = None
    partitions: dict[TopicPartition, None] = field(default_factory=dict)
    # Markers still to land: (due, partition, producer id, epoch, commit).
    landing: list[tuple[float, TopicPartition, int, int, bool]] = field(default_factory=list)


class MemoryCluster:
    """What all processes share.

    ``on_call(process, name)`` is called before the effect of every port call with its name, and after it
    with ``name + ".after"``; whatever it raises goes to the caller. ``marker_delay``: seconds by ``clock``
    (or a function giving them, asked once a partition) after which the markers of an ended native
    transaction land, as on a broker: until then readers of committed data wait, and the same transactional
    id finds CONCURRENT_TRANSACTIONS and waits too. ``transaction_version`` 2: each end bumps the epoch.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        on_call: OnCall | None = None,
        marker_delay: float | Callable[[], float] = 0.0,
        transaction_version: int = 2,
        poll: float = 0.005,
    ) -> None:
        self.clock = clock
        self.on_call = on_call
        self.marker_delay = marker_delay
        self.transaction_version = transaction_version
        # How often a waiting fetch looks again, in seconds.
        self.poll = poll
        self.lock = threading.RLock()
        self.partitions: dict[TopicPartition, Partition] = {}
        self.topics: dict[str, TopicInfo] = {}
        self._transactions: dict[str, _Transactions] = {}
        self._next_producer_id = _FIRST_PRODUCER_ID

    def pause(self, seconds: float) -> None:
        """A waiting fetch sleeps, at most so long, before it looks again; a simulator overrides this."""
        self.clock.sleep(min(seconds, self.poll))

    def log(self, process: str) -> MemoryLog:
        """A process's handle; ``process`` is what the hook is told."""
        return MemoryLog(self, process)

    # -- for tests and simulators ---------------------------------------------------------------------

    def compact(self, partition: TopicPartition, *, drop_tombstones: bool = False) -> None:
        """Compact a partition now."""
        with self.lock:
            self.settle()
            self.partition(partition).compact(drop_tombstones=drop_tombstones)

    def produce(self, partition: TopicPartition, records: Sequence[Record]) -> int:
        """Append one plain batch (no native transaction); its base offset."""
        return self.produce_batch(partition, encode_batch(records))

    def produce_batch(self, partition: TopicPartition, data: bytes) -> int:
        """Append one ready batch outside of any native transaction; its base offset."""
        with self.lock:
            self.settle()
            target = self.partition(partition)
            target.check(data, self.now_ms())
            return target.append(data, -1, -1, -1, transactional=False)

    # -- time and topics ------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The clock's Unix milliseconds."""
        return int(self.clock.wall() * 1000)

    def partition(self, partition: TopicPartition) -> Partition:
        """The partition; `LogRefused` (3) if it does not exist."""
        found = self.partitions.get(partition)
        if found is None:
            raise LogRefused(
                f"{partition.topic}[{partition.partition}] does not exist", UNKNOWN_TOPIC
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
                f"memory-{len(self.topics)}",
            )
            for number in range(spec.partitions):
                name = TopicPartition(spec.name, number)
                self.partitions[name] = Partition(name, config)

    # -- the transaction coordinator --------------------------------------------------------------------

    def settle(self) -> None:
        """Land the markers that are due; abort native transactions beyond their timeout."""
        now = self.clock.monotonic()
        for state in self._transactions.values():
            if state.started is not None and now - state.started > state.timeout:
                # The broker fences the producer whose transaction it gave up.
                self._finish(state, commit=False)
                state.epoch += 1
            due = [marker for marker in state.landing if marker[0] <= now]
            if due:
                state.landing = [marker for marker in state.landing if marker[0] > now]
                for _, partition, producer_id, epoch, commit in due:
                    self.partition(partition).mark(
                        producer_id, epoch, commit=commit, now_ms=self.now_ms()
                    )

    def is_ending(self, transactional_id: str) -> bool:
        """Whether markers of its last native transaction are still to land."""
        self.settle()
        state = self._transactions.get(transactional_id)
        return state is not None and bool(state.landing)

    def initialise(self, transactional_id: str, timeout: float) -> tuple[int, int] | None:
        """(producer id, epoch); None while a former native transaction is ending."""
        self.settle()
        state = self._transactions.get(transactional_id)
        if state is None:
            state = _Transactions(self._new_producer_id(), -1, timeout)
            self._transactions[transactional_id] = state
        if state.started is not None:
            self._finish(state, commit=False)
            # The zombie is fenced from here on, whatever becomes of this call.
            self._bump(state)
        self.settle()
        if state.landing:
            return None
        self._bump(state)
        state.timeout = timeout
        return state.producer_id, state.epoch

    def current(self, transactional_id: str, producer_id: int, epoch: int) -> _Transactions:
        """The id's state; `LogFenced` unless this producer is the newest."""
        self.settle()
        state = self._transactions[transactional_id]
        if (state.producer_id, state.epoch) != (producer_id, epoch):
            raise LogFenced(f"{transactional_id}: a newer producer has the id, or it timed out")
        return state

    def begin(self, state: _Transactions, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the native transaction; the first begins it."""
        if state.started is None:
            state.started = self.clock.monotonic()
        for partition in partitions:
            state.partitions.setdefault(partition)

    def end(self, state: _Transactions, *, commit: bool) -> tuple[int, int]:
        """End it: markers land later. The producer id and epoch to go on with."""
        self._finish(state, commit=commit)
        if self.transaction_version >= 2:
            self._bump(state)
        self.settle()
        return state.producer_id, state.epoch

    def _finish(self, state: _Transactions, *, commit: bool) -> None:
        now = self.clock.monotonic()
        for partition in state.partitions:
            delay = self.marker_delay() if callable(self.marker_delay) else self.marker_delay
            state.landing.append((now + delay, partition, state.producer_id, state.epoch, commit))
        state.partitions.clear()
        state.started = None

    def _bump(self, state: _Transactions) -> None:
        if state.epoch >= _MAX_EPOCH:
            state.producer_id, state.epoch = self._new_producer_id(), 0
        else:
            state.epoch += 1

    def _new_producer_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id


class MemoryLog:
    """See `anabranch.ports.Log`; one handle a process."""

    def __init__(self, cluster: MemoryCluster, process: str) -> None:
        self.cluster = cluster
        self.process = process
        self._turn = 0

    def called(self, name: str) -> None:
        """Pass through the cluster's hook."""
        if self.cluster.on_call is not None:
            self.cluster.on_call(self.process, name)

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
    ) -> dict[TopicPartition, Fetched]:
        """See `anabranch.ports.Log.fetch`."""
        self.called("fetch")
        cluster = self.cluster
        give_up = cluster.clock.monotonic() + max_wait
        while True:
            result = self._read(positions, max_bytes, committed)
            left = give_up - cluster.clock.monotonic()
            if result or left <= 0:
                break
            cluster.pause(left)
        self.called("fetch.after")
        return result

    def _read(
        self, positions: Mapping[TopicPartition, int], max_bytes: int, committed: bool
    ) -> dict[TopicPartition, Fetched]:
        result: dict[TopicPartition, Fetched] = {}
        with self.cluster.lock:
            self.cluster.settle()
            wanted = list(positions)
            turn = self._turn % len(wanted) if wanted else 0
            self._turn += 1
            left = max_bytes
            for partition in wanted[turn:] + wanted[:turn]:
                if left <= 0 and result:
                    break
                fetched = self.cluster.partition(partition).read(
                    positions[partition], committed=committed, max_bytes=max(left, 1)
                )
                if fetched is not None:
                    result[partition] = fetched
                    left -= sum(len(batch.data) for batch in fetched.batches)
        return result

    def end_offsets(
        self, partitions: Iterable[TopicPartition], *, committed: bool
    ) -> dict[TopicPartition, int]:
        """See `anabranch.ports.Log.end_offsets`."""
        self.called("end_offsets")
        with self.cluster.lock:
            self.cluster.settle()
            result = {}
            for name in partitions:
                partition = self.cluster.partition(name)
                result[name] = partition.stable_offset if committed else partition.end_offset
        self.called("end_offsets.after")
        return result

    def start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """See `anabranch.ports.Log.start_offsets`."""
        self.called("start_offsets")
        with self.cluster.lock:
            result = {name: self.cluster.partition(name).start_offset for name in partitions}
        self.called("start_offsets.after")
        return result

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        """See `anabranch.ports.Log.offsets_for_time`."""
        self.called("offsets_for_time")
        with self.cluster.lock:
            self.cluster.settle()
            result = {
                name: self.cluster.partition(name).offset_for_time(timestamp_ms)
                for name in partitions
            }
        self.called("offsets_for_time.after")
        return result

    def producer(self, transactional_id: str, *, timeout: float) -> MemoryProducer:
        """See `anabranch.ports.Log.producer`."""
        self.called("producer")
        while True:
            with self.cluster.lock:
                given = self.cluster.initialise(transactional_id, timeout)
            if given is not None:
                break
            self.cluster.clock.sleep(_CONCURRENT_PAUSE_S)
        self.called("producer.after")
        return MemoryProducer(self, transactional_id, *given)

    def produce(self, partition: TopicPartition, records: Sequence[Record]) -> int:
        """A client's plain append, outside of any native transaction; the base offset."""
        self.called("produce")
        offset = self.cluster.produce(partition, records)
        self.called("produce.after")
        return offset

    def produce_batch(self, partition: TopicPartition, data: bytes) -> int:
        """`produce` of a ready batch."""
        self.called("produce")
        offset = self.cluster.produce_batch(partition, data)
        self.called("produce.after")
        return offset

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """See `anabranch.ports.Log.delete_records`."""
        self.called("delete_records")
        with self.cluster.lock:
            for name, offset in before.items():
                self.cluster.partition(name).delete_below(offset)
        self.called("delete_records.after")

    def create_topics(self, specs: Sequence[TopicSpec]) -> None:
        """See `anabranch.ports.Log.create_topics`."""
        self.called("create_topics")
        with self.cluster.lock:
            self.cluster.create(specs)
        self.called("create_topics.after")

    def default_replication_factor(self) -> int:
        """See `anabranch.ports.Log.default_replication_factor`."""
        return 1

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """See `anabranch.ports.Log.describe_topics`."""
        self.called("describe_topics")
        with self.cluster.lock:
            result = {n: self.cluster.topics[n] for n in names if n in self.cluster.topics}
        self.called("describe_topics.after")
        return result

    def close(self) -> None:
        """See `anabranch.ports.Log.close`."""


class MemoryProducer:
    """See `anabranch.ports.Producer`."""

    def __init__(self, log: MemoryLog, transactional_id: str, producer_id: int, epoch: int) -> None:
        self._log = log
        self._cluster = log.cluster
        self._id = transactional_id
        self.producer_id = producer_id
        self.producer_epoch = epoch
        self._sequences: dict[TopicPartition, int] = {}
        self._begun = False
        self._ended: LogError | None = None
        self._refusal: LogRefused | None = None

    def append(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> list[int]:
        """See `anabranch.ports.Producer.append`."""
        self._check_usable()
        if not batches:
            return []
        self._called("append")
        self._wait_for_markers()
        try:
            with self._cluster.lock:
                offsets = self._append(batches)
        except LogFenced as error:
            raise self._over(error) from None
        except LogRefused as error:
            self._refusal = error
            raise
        self._called("append.after")
        return offsets

    def append_stream(self, batches: Iterable[tuple[TopicPartition, Buffer]]) -> list[int]:
        """See `anabranch.ports.Producer.append_stream`."""
        try:
            listed = list(batches)
        except BaseException as error:
            # As on a broker, where some of it may have been stored already.
            self._refusal = LogRefused(f"an append was cut short: {error!r}", 0)
            raise
        return self.append(listed)

    def commit(self) -> None:
        """See `anabranch.ports.Producer.commit`."""
        self._check_usable()
        if self._begun:
            self._end("commit")

    def abort(self) -> None:
        """See `anabranch.ports.Producer.abort`."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        self._refusal = None
        if self._begun:
            self._end("abort")

    def close(self) -> None:
        """See `anabranch.ports.Producer.close`."""
        self._ended = self._ended or LogFenced(f"{self._id}: the producer is closed")

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        if self._refusal is not None:
            raise LogRefused(f"abort first: {self._refusal}", self._refusal.error)

    def _over(self, error: LogError) -> LogError:
        self._ended = error
        return error

    def _called(self, name: str) -> None:
        try:
            self._log.called(name)
        except (LogFenced, LogUncertain) as error:
            raise self._over(error) from None

    def _wait_for_markers(self) -> None:
        """CONCURRENT_TRANSACTIONS: until the markers of the id's last transaction have landed."""
        while True:
            with self._cluster.lock:
                if not self._cluster.is_ending(self._id):
                    return
            self._cluster.clock.sleep(_CONCURRENT_PAUSE_S)

    def _append(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> list[int]:
        state = self._cluster.current(self._id, self.producer_id, self.producer_epoch)
        targets = [self._cluster.partition(partition) for partition, _ in batches]
        self._cluster.begin(state, dict.fromkeys(partition for partition, _ in batches))
        self._begun = True
        offsets = []
        for target, (partition, given) in zip(targets, batches, strict=True):
            data = bytes(given)
            target.check(data, self._cluster.now_ms())
            sequence = self._sequences.get(partition, 0)
            offsets.append(
                target.append(
                    data, self.producer_id, self.producer_epoch, sequence, transactional=True
                )
            )
            self._sequences[partition] = next_sequence(sequence, read_header(data).record_count)
        return offsets

    def _end(self, name: str) -> None:
        self._called(name)
        try:
            with self._cluster.lock:
                state = self._cluster.current(self._id, self.producer_id, self.producer_epoch)
                self.producer_id, self.producer_epoch = self._cluster.end(
                    state, commit=name == "commit"
                )
        except LogFenced as error:
            raise self._over(error) from None
        if self._cluster.transaction_version >= 2:
            self._sequences.clear()
        self._begun = False
        self._called(f"{name}.after")
