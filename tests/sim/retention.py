"""What is deleted by brokers: the oldest segments of streams and of replies, and commands that nobody read.

As Kafka's retention does: by the largest timestamp of a segment, or by the size of the partition; only whole
segments, from the oldest on; the last one too, if all of it is old. It asks nobody: not whether a native
transaction is open there, nor whether a reader has seen it. Histories have no retention; but sometimes an operator
deletes what speaks of nothing that is left, up to an EPOCH record. The run's own checks look at all that there ever
was; clients, and the checker of histories, at what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from anabranch.batches.records import decode_records
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.testing.memory.partition import Entry, Partition
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    history_topic,
    replies_topic,
    stream_topic,
)
from tests.sim.faults import Faults
from tests.sim.ledger import Ledger
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.ports import SimCluster

_UNREAD = 0.1  # how often commands go that nobody has read
_BY_HAND = 0.3  # how often somebody deletes from histories
_SEGMENT = 3  # batches of a segment, on average


@dataclass(slots=True)
class KeptPartition(Partition):
    """A partition that keeps what is deleted, where only the run's checks find it."""

    gone: list[Entry] = field(default_factory=list)

    def delete_below(self, offset: int) -> None:
        """See `Partition`."""
        before = self.entries[:]
        Partition.delete_below(self, offset)
        self.gone += before[: len(before) - len(self.entries)]

    def mark(self, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> None:
        """See `Partition`; what is deleted was of that native transaction too."""
        first = self.open.get(producer_id)
        Partition.mark(self, producer_id, epoch, commit=commit, now_ms=now_ms)
        if not commit and first is not None:
            for entry in self.gone:
                is_of_it = entry.producer_id == producer_id and entry.is_transactional
                entry.is_aborted |= is_of_it and entry.base_offset >= first


class Rule(NamedTuple):
    """A topic's retention. -1: for ever, however much."""

    ms: float = -1
    bytes: int = -1


class Retention:
    """Deletes now and then. Each stream has a rule of its own; some keep everything."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self._world = world
        self._cluster = cluster
        self._faults = faults
        self._prefix = ledger.prefix
        random = world.random
        rules = [Rule()]
        rules += [Rule(ms=1000 * seconds) for seconds in (0.5, 4, 15)]
        rules += [Rule(bytes=size) for size in (0, 500, 4000)]
        self._rules = {stream_topic(name): random.choice(rules) for name in ledger.streams}
        self._rules[replies_topic(self._prefix)] = random.choice(rules)
        self._histories = {history_topic(name): stream_topic(name) for name in ledger.streams}

    def start(self) -> None:
        """From now on, if the weather has it."""
        if self._faults.weather.retain_s:
            self._world.later(self._faults.span(self._faults.weather.retain_s), self._delete)

    def _delete(self) -> None:
        if self._faults.calm:
            return
        unread = (commands_topic(self._prefix), control_topic(self._prefix))
        for place, partition in self._cluster.partitions.items():
            if place.topic in self._rules:
                self._move(place, self._limit(partition, self._rules[place.topic]))
            elif place.topic in self._histories:
                if self._world.random.random() < _BY_HAND:
                    self._move(place, self._useless(self._histories[place.topic], partition))
            elif place.topic in unread and self._world.random.random() < _UNREAD:
                bounds = [partition.start_offset, *(e.next_offset for e in partition.entries)]
                self._move(place, self._world.random.choice(bounds))
        self._world.changed()
        self.start()

    def _move(self, place: TopicPartition, offset: int) -> None:
        """Let the log begin there."""
        partition = self._cluster.partition(place)
        name = f"{place.topic}[{place.partition}]"
        if offset > partition.start_offset and self._faults.strikes(1.0, "retention", name):
            self._world.note("brokers", f"{name} begins at {offset}")
            partition.delete_below(offset)

    def _limit(self, partition: Partition, rule: Rule) -> int:
        """Where the log begins by its rule."""
        offset = partition.start_offset
        now_ms = self._cluster.now_ms()
        size = sum(len(entry.data) for entry in partition.entries)
        for segment in self._segments(partition):
            is_old = max(entry.max_timestamp for entry in segment) < now_ms - rule.ms
            size -= sum(len(entry.data) for entry in segment)
            if not (is_old if rule.ms >= 0 else size >= rule.bytes >= 0):
                break
            offset = segment[-1].next_offset
        return offset

    def _useless(self, topic: str, history: Partition) -> int:
        """The last EPOCH record of a history before which all events are deleted; the history's beginning."""
        offset = history.start_offset
        for entry in history.entries:
            is_decided = entry.next_offset <= history.stable_offset
            if entry.is_control or entry.is_aborted or not is_decided:
                continue
            for found in decode_records(entry.data):
                record = decode(found.value or b"")
                if isinstance(record, r.EpochRecord):
                    offset = max(offset, found.offset)
                elif any(self._is_left(topic, part) for part in record.segments):
                    return offset
        return offset

    def _is_left(self, topic: str, part: r.SegmentCommit) -> bool:
        partition = self._cluster.partitions.get(TopicPartition(topic, part.partition))
        return partition is not None and part.end > partition.start_offset

    def _segments(self, partition: Partition) -> Iterator[Sequence[Entry]]:
        segment: list[Entry] = []
        for entry in partition.entries:
            begins = f"{self._world.seed}/{partition.name}/{entry.base_offset}"
            if segment and crc32(begins.encode()) % _SEGMENT == 0:
                yield segment
                segment = []
            segment.append(entry)
        if segment:
            yield segment
