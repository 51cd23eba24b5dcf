"""One stream of a reader: lets its messages through in stream order, and holds back those that must wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from confluent_kafka import TopicPartition

from anabranch.client.history import HistoryIndex, Span
from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.kafka_consumer import CommittedConsumer, CommittedMessage
from anabranch.client.options import Options
from anabranch.errors import RetryError
from anabranch.topics.names import stream_topic

log = logging.getLogger("anabranch.client")

EVERYTHING = range(1 << 31)  # all partitions, those that are not there yet too
_AT_ONCE_S = 0.2  # history comes with the data; more is waited for without standing still
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 0.5
_STARTS_EVERY_S = 5.0
_MOST_HELD = 10_000  # messages of a partition, …
_MOST_HELD_BYTES = 16 << 20  # … or bytes, that are kept for later; then no more is got of it


class OrderedStream:
    """The messages of one stream that a reader's consumer gets, and when they may be given out.

    A partition whose next message has to wait is held: what was got of it is kept here. It pauses only when
    that is much: to resume costs a new fetch.
    """

    def __init__(
        self,
        options: Options,
        admin: KafkaAdmin,
        consumer: CommittedConsumer,
        stream: str,
        timeout: float,
    ) -> None:
        """``consumer``: the reader's. ``timeout``: seconds, of each question."""
        self.stream = stream
        self.topic = stream_topic(stream)
        self.index = HistoryIndex(options, admin, stream, timeout)
        self._admin = admin
        self._consumer = consumer
        self._timeout = timeout
        self._alone = False
        self._own: set[int] = set()
        self._known: set[int] = set()
        self._begun: Mapping[int, int] | None = None
        self._held: dict[int, list[CommittedMessage]] = {}
        self._held_bytes: dict[int, int] = {}
        self._paused: set[int] = set()
        self._pause = _FIRST_PAUSE_S
        self._next_question = 0.0
        self._next_starts = 0.0

    def begin(self, positions: Mapping[int, int], own: Collection[int] | None) -> None:
        """Read the own partitions (None: all there are, and will be) from these positions on.

        ``positions``: partition -> offset, of all partitions.
        """
        self._held.clear()
        self._paused.clear()
        self._alone = own is None
        self._own = set(positions if own is None else own)
        self._known = set(positions)
        self._begun = dict(positions)
        self._next_starts = time.monotonic() + _STARTS_EVERY_S

    def stop(self) -> None:
        """The partitions are gone."""
        self._held.clear()
        self._paused.clear()
        self._own = set()
        self._begun = None

    @property
    def holds(self) -> bool:
        """Whether something is got and has to wait."""
        return bool(self._held)

    # -- messages -------------------------------------------------------------------------------------

    def admit(self, message: CommittedMessage) -> Span | None:
        """The commit that a message is of, if it may be given out; else it is kept for `released`."""
        partition, offset = message.partition(), message.offset()
        held = self._held.get(partition)
        size = len(message)
        if held is None:
            self._held_bytes[partition] = size
            held = self._held[partition] = [message]  # whatever goes wrong now, it is not lost
            span = self._turn(partition, offset, _AT_ONCE_S)
            if span is not None and self._held.pop(partition, None) is None:
                return None  # another thread closed the reader meanwhile: the next member gets it
            return span
        held.append(message)
        self._held_bytes[partition] += size
        return None

    def released(self) -> list[CommittedMessage]:
        """What was held and may be given out now, to be admitted again."""
        out: list[CommittedMessage] = []
        for partition, held in list(self._held.items()):
            place = [TopicPartition(self.topic, partition)]
            if self._turn(partition, held[0].offset(), 0) is not None:
                out += self._held.pop(partition, [])
                if partition in self._paused:
                    self._paused.discard(partition)
                    self._consumer.native.resume(place)
            elif partition not in self._paused and self._is_much(partition, held):
                self._paused.add(partition)
                self._consumer.native.pause(place)
        return out

    def _is_much(self, partition: int, held: Sequence[CommittedMessage]) -> bool:
        return len(held) >= _MOST_HELD or self._held_bytes[partition] >= _MOST_HELD_BYTES

    def _turn(self, partition: int, offset: int, wait: float) -> Span | None:
        self._cover()
        span = self.index.find(partition, offset, wait)
        order = self.index.order
        order.moved({partition: offset})  # all before it is given out, or gone
        if span is None or not order.readable(span.segment_id):
            return None
        return span

    def _cover(self) -> None:
        if self._begun is not None:
            self.index.cover(self._begun, EVERYTHING if self._alone else self._own)
            self._begun = None

    # -- progress -------------------------------------------------------------------------------------

    def settle(self, idle: bool) -> dict[int, int]:
        """Between batches: learn what there is to learn. Call it when all that was admitted is processed.

        Returns positions that no event has told, to be committed: all below a held message is done, and
        what retention deleted is too. ``idle``: nothing else is to be done, so the history is read on.
        """
        if idle:
            self._cover()
            self.index.read_on()
        order = self.index.order
        told: dict[int, int] = {p: held[0].offset() for p, held in self._held.items()}
        watched = order.watched & self._own
        if watched or self._held:
            order.moved(self._consumer.positions(self.topic, self._own - self._held.keys()))
            order.moved(told)
            self._ask_others()
            if time.monotonic() >= self._next_starts:
                told |= self._deleted((order.watched & self._own) - told.keys())
        self._take_new()
        return told

    def _ask_others(self) -> None:
        """Look where others have come to on the partitions that are waited for, at a modest pace."""
        now = time.monotonic()
        if self._alone or now < self._next_question:
            return
        awaited = self._awaited() - self._own
        if not awaited:
            return
        places = [(self.topic, partition) for partition in awaited]
        found = self._consumer.committed(places)
        before = len(awaited)
        self.index.order.moved({partition: offset for (_, partition), offset in found.items()})
        moved = len(self._awaited() - self._own) < before
        self._pause = _FIRST_PAUSE_S if moved else min(2 * self._pause, _LAST_PAUSE_S)
        self._next_question = now + self._pause

    def _awaited(self) -> set[int]:
        """Partitions on which something is to be read before what is held."""
        awaited = set()
        for partition, held in self._held.items():
            span = self.index.find(partition, held[0].offset(), 0)
            if span is not None and not self.index.order.readable(span.segment_id):
                awaited |= self.index.order.awaited(span.segment_id)
        return awaited

    def _deleted(self, watched: set[int]) -> dict[int, int]:
        """Where partitions begin now that nobody can read to a segment's end: retention deleted it."""
        self._next_starts = time.monotonic() + _STARTS_EVERY_S
        asked = self._own | self._awaited()
        try:
            found = self._admin.start_offsets(
                [(self.topic, p) for p in asked], time.monotonic() + self._timeout
            )
        except RetryError as error:
            log.info("%s: %s", self.topic, error)
            return {}
        starts = {partition: offset for (_, partition), offset in found.items()}
        self.index.order.moved(starts)
        for partition in self._own:
            self.index.drop(partition, starts[partition])
        return {partition: starts[partition] for partition in watched}

    def _take_new(self) -> None:
        """Partitions that the history names anew: a group is given them soon, others take them."""
        new = self.index.new_partitions - self._known
        self.index.new_partitions.clear()
        self._known |= new
        if new and self._alone:
            self._own |= new
            self._consumer.add(self.topic, dict.fromkeys(new, 0))
        elif new:
            self._consumer.learn()

    def close(self) -> None:
        """Free everything."""
        self.index.close()

    def leak(self) -> None:
        """In a forked child: free nothing, ever."""
        self.index.leak()
