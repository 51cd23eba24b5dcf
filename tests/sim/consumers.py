"""confluent-kafka's consumer and admin over the in-memory log: the library's own readers run in a world.

What readers rely on is as librdkafka has it: a pause drops what is queued and goes on from the last message given;
the end of a partition is an event of its own; callbacks of a group run within `SimConsumer.poll`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place

from anabranch.batches.records import Record, decode_records
from anabranch.errors import NotReady, UnsupportedSetting
from anabranch.librdkafka import group_member as kafka_consumer
from anabranch.ports import LogError, OffsetOutOfRange, TopicPartition
from tests.sim.groups import Member
from tests.sim.ports import SimCluster, SimLog
from tests.sim.world import Process, SimClock, World

_MODULES = (
    "librdkafka.group_member",
    "reading.feed",
    "reading.history_index",
    "reading.history_search",
    "reading.log_consumer",
    "reading.ordered_reader",
    "reading.snapshot",
    "reading.snapshot_reader",
    "reading.spans",
    "reading.start_positions",
    "reading.stream_order",
    "reading.transaction_reader",
)
_EOF: int = KafkaError._PARTITION_EOF
_GONE: int = KafkaError._AUTO_OFFSET_RESET
_PAUSE_S = 0.05
_SERVE_S = 0.3  # so often a waiting member looks after its group
NO_OFFSET = -1001


@contextmanager
def simulated(cluster: SimCluster) -> Iterator[None]:
    """While this is open, readers of the library are in the world, each as of the process that runs.

    Of a reader's connections some are raw ones, some are refused, so that consumers take their place.
    """
    world = cluster.world

    def make_consumer(_: object, config: dict[str, Any], __: object) -> SimConsumer:
        return SimConsumer(cluster, world.current, config)

    def raw_log(*_: object) -> SimLog:
        if world.random.random() < 0.3:
            raise UnsupportedSetting("this one reads through a consumer")
        return cluster.log_of(world.current)

    with ExitStack() as stack:
        stack.enter_context(patch.object(kafka_consumer, "make_consumer", make_consumer))
        for name in _MODULES:
            module = import_module(f"anabranch.{name}")
            stack.enter_context(patch.object(module, "time", _Time(world)))
            if hasattr(module, "raw_log"):
                stack.enter_context(patch.object(module, "raw_log", raw_log))
            if hasattr(module, "threading"):
                stack.enter_context(patch.object(module, "threading", _Threading(world)))
        yield


@dataclass(frozen=True, slots=True)
class _Time:
    """In the place of the module `time`."""

    world: World

    def monotonic(self) -> float:
        return SimClock(self.world, self.world.current).monotonic()


@dataclass(frozen=True, slots=True)
class _Threading:
    """In the place of the module `threading`."""

    world: World

    def Event(self) -> _Event:
        return _Event(self.world)


class _Event:
    """See `threading.Event`; whoever waits does so in virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> bool:
        if not self._set:
            self._world.sleep(seconds)
        return self._set


class SimMessage:
    """See `confluent_kafka.Message`; ``record`` None: an event or error."""

    def __init__(
        self, place: TopicPartition, offset: int, record: Record | None, code: int
    ) -> None:
        self._place = place
        self._offset = offset
        self._record = record or Record(offset, 0, None, None)
        self._error = KafkaError(code) if record is None else None

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return self._place.topic

    def partition(self) -> int:
        return self._place.partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._record.key

    def value(self) -> bytes | None:
        return self._record.value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return list(self._record.headers) or None

    def timestamp(self) -> tuple[int, int]:
        return 1, self._record.timestamp_ms

    def __len__(self) -> int:
        return len(self._record.value or b"")


@dataclass(slots=True)
class _Feed:
    """A partition that is read. ``given``: the offset after the last message that the caller has got."""

    fetch_at: int
    start: int
    given: int = NO_OFFSET
    eof_at: int = -1
    paused: bool = False
    stopped: bool = False  # its offset is not there


class SimConsumer:
    """See `LastingConsumer`, whose brokers are never lost here."""

    def __init__(self, cluster: SimCluster, process: Process, config: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._process = process
        self._log: SimLog = cluster.log_of(process)
        self._group: str = config["group.id"]
        self._tells_eof = bool(config.get("enable.partition.eof"))
        assert config["auto.offset.reset"] == "error"
        self._feeds: dict[TopicPartition, _Feed] = {}
        self._queue: deque[SimMessage] = deque()
        self._member: Member | None = None
        self._closed = False

    @property
    def _is_mute(self) -> bool:
        """Nothing has an effect any more: the process is dead, or this is freed by the world."""
        return self._closed or self._process.dead or self._world.running_name != self._process.name

    # -- what is read ---------------------------------------------------------------------------------

    def assign(self, places: Sequence[Place]) -> None:
        self._feeds = {
            TopicPartition(p.topic, p.partition): _Feed(p.offset, p.offset) for p in places
        }
        self._queue.clear()

    def incremental_assign(self, places: Sequence[Place]) -> None:
        for p in places:
            self._feeds[TopicPartition(p.topic, p.partition)] = _Feed(p.offset, p.offset)

    def unassign(self) -> None:
        self.assign([])

    def assignment(self) -> list[Place]:
        return [Place(*place) for place in self._feeds]

    def seek(self, given: Place) -> None:
        place = TopicPartition(given.topic, given.partition)
        self._forget(place)
        self._feeds[place] = _Feed(given.offset, given.offset, paused=self._feeds[place].paused)

    def pause(self, places: Iterable[Place]) -> None:
        for p in places:
            place = TopicPartition(p.topic, p.partition)
            feed = self._feeds.get(place)
            if feed is None:
                continue  # an error of this partition, that nobody looks at
            feed.paused = True
            self._forget(place)
            feed.fetch_at = feed.start if feed.given == NO_OFFSET else feed.given

    def resume(self, places: Iterable[Place]) -> None:
        for p in places:
            feed = self._feeds.get(TopicPartition(p.topic, p.partition))
            if feed is not None:
                feed.paused = False

    def _forget(self, place: TopicPartition) -> None:
        kept = [m for m in self._queue if (m.topic(), m.partition()) != place]
        self._queue = deque(kept)

    def position(self, places: Iterable[Place]) -> list[Place]:
        found = []
        for p in places:
            feed = self._feeds.get(TopicPartition(p.topic, p.partition))
            found.append(Place(p.topic, p.partition, NO_OFFSET if feed is None else feed.given))
        return found

    def stands_at(self, topic: str, partition: int) -> int | None:
        feed = self._feeds.get(TopicPartition(topic, partition))
        return None if feed is None else feed.start if feed.given == NO_OFFSET else feed.given

    # -- messages -------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> SimMessage | None:
        if self._closed:
            raise RuntimeError("Consumer closed")
        give_up = self._world.now + timeout
        while True:
            if self._member is not None:
                self._member.serve()
            if self._queue:
                return self._next()
            self._fetch(min(max(give_up - self._world.now, 0.0), _SERVE_S))
            if not self._queue and self._world.now >= give_up:
                return None

    def consume(self, count: int, timeout: float) -> list[SimMessage]:
        assert timeout == 0
        return [self._next() for _ in range(min(count, len(self._queue)))]

    def _next(self) -> SimMessage:
        message = self._queue.popleft()
        place = TopicPartition(message.topic(), message.partition())
        if message.error() is None:
            self._feeds[place].given = message.offset() + 1
        return message

    def _fetch(self, wait: float) -> None:
        """Queue what is there, or comes within so many seconds."""
        asked = {
            place: feed.fetch_at
            for place, feed in self._feeds.items()
            if not feed.paused and not feed.stopped
        }
        if self._tells_eof and self._tell_ends(asked):
            return
        if not asked:
            self._world.sleep(wait)
            return
        size = self._world.random.choice((300, 3000, 1 << 20))
        known = {p: at for p, at in asked.items() if p in self._cluster.partitions}
        asked = known or asked  # what is gone stops nobody but who reads that alone
        try:
            found = self._log.fetch(asked, max_wait=wait, max_bytes=size, committed=True)
        except OffsetOutOfRange as error:
            self._reset(error.partition)
            return
        except LogError:
            self._world.sleep(_PAUSE_S)
            return
        for place, fetched in found.items():
            feed = self._feeds[place]
            for batch in fetched.batches:
                for record in decode_records(batch.data):
                    if record.offset >= feed.fetch_at:
                        self._queue.append(SimMessage(place, record.offset, record, 0))
            feed.fetch_at = fetched.next_offset
        if self._tells_eof:
            self._tell_ends(asked)

    def _tell_ends(self, places: Iterable[TopicPartition]) -> bool:
        """Whether there were any to tell."""
        told = False
        for place in places:
            feed = self._feeds[place]
            partition = self._cluster.partitions.get(place)
            end = partition.stable_offset if partition is not None else 0
            if feed.fetch_at >= end and feed.eof_at != feed.fetch_at:
                feed.eof_at = feed.fetch_at
                self._queue.append(SimMessage(place, feed.fetch_at, None, _EOF))
                told = True
        return told

    def _reset(self, place: TopicPartition) -> None:
        self._queue.append(SimMessage(place, self._feeds[place].fetch_at, None, _GONE))
        self._feeds[place].stopped = True

    # -- questions ------------------------------------------------------------------------------------

    def list_topics(self, topic: str | None = None, timeout: float = 0.0) -> None:
        self._world.point("list_topics")
        if self._member is not None:
            self._member.look_at_topics()

    def bounds(self, asked: Place, timeout: float) -> tuple[int, int]:
        place = TopicPartition(asked.topic, asked.partition)
        start = self._ask(lambda: self._log.start_offsets([place]))[place]
        return start, self._ask(lambda: self._log.end_offsets([place], committed=False))[place]

    def offsets_for_times(self, places: Sequence[Place], timeout: float) -> list[Place]:
        (asked,) = places
        place = TopicPartition(asked.topic, asked.partition)
        found = self._ask(lambda: self._log.offsets_for_time([place], asked.offset))[place]
        return [Place(asked.topic, asked.partition, -1 if found is None else found)]

    def committed(self, places: Sequence[Place], timeout: float) -> list[Place]:
        self._ask(partial(self._world.point, "committed"))
        known = self._cluster.groups.offsets(self._group)
        return [
            Place(p.topic, p.partition, known.get((p.topic, p.partition), NO_OFFSET))
            for p in places
        ]

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except LogError as error:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, str(error))) from error

    # -- groups ---------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], **callbacks: Callable[..., None]) -> None:
        groups = self._cluster.groups
        self._member = Member(groups, self._group, self._process, topics, self, callbacks)

    def commit(self, offsets: Sequence[Place], asynchronous: bool) -> list[Place] | None:
        if self._is_mute:
            return None
        self._ask(partial(self._world.point, "commit offsets"))
        if self._member is not None:
            self._member.check_may_commit()
        known = self._cluster.groups.offsets(self._group)
        known.update({(p.topic, p.partition): p.offset for p in offsets})
        self._world.point("commit offsets.after")
        return None if asynchronous else list(offsets)

    def close(self) -> None:
        if not self._is_mute and self._member is not None:
            self._member.leave()
        self._closed = True


class SimAdmin:
    """See `anabranch.librdkafka.admin.KafkaAdmin`: what readers ask."""

    def __init__(self, log: SimLog, clock: SimClock) -> None:
        self._log = log
        self._clock = clock

    def partition_counts(self, topics: Sequence[str], deadline: float) -> dict[str, int]:
        found = self._ask(deadline, lambda: self._log.describe_topics(topics))
        return {name: info.partitions for name, info in found.items()}

    def end_offsets(
        self, partitions: Iterable[tuple[str, int]], deadline: float, *, committed: bool = False
    ) -> dict[tuple[str, int], int]:
        places = [TopicPartition(*place) for place in partitions]
        found = self._ask(deadline, lambda: self._log.end_offsets(places, committed=committed))
        return {(place.topic, place.partition): offset for place, offset in found.items()}

    def start_offsets(
        self, partitions: Iterable[tuple[str, int]], deadline: float
    ) -> dict[tuple[str, int], int]:
        places = [TopicPartition(*place) for place in partitions]
        found = self._ask(deadline, lambda: self._log.start_offsets(places))
        return {(place.topic, place.partition): offset for place, offset in found.items()}

    def _ask(self, deadline: float, question: Callable[[], Any]) -> Any:
        while True:
            try:
                return question()
            except LogError as error:
                if self._clock.monotonic() >= deadline:
                    raise NotReady(f"the brokers can't be asked: {error}") from error
                self._clock.sleep(_PAUSE_S)
