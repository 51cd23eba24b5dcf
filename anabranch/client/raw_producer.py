"""An idempotent producer of ready record batches, on the raw connections of `anabranch.topics`.

Order and exactly-once come from the broker's rule: batches of one producer id carry a sequence for each
partition, and up to five under way are told apart from repeats. So a batch without an answer is sent again under
its sequence; before that, everything under way to its broker is awaited, so that nothing overtakes. What the
broker refuses for good ends the producer: there is no gap, ever.
"""

from __future__ import annotations

import datetime as dt
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.ports import LogError, LogUnavailable, TopicPartition
from anabranch.topics.batch import frame, next_sequence
from anabranch.topics.compression import NONE as NO_CODEC
from anabranch.topics.compression import compress
from anabranch.topics.wire import calls, codes, data
from anabranch.topics.wire.calls import INIT_PRODUCER_ID, PRODUCE
from anabranch.topics.wire.cluster import Cluster, raise_or_again
from anabranch.topics.wire.connection import Connection, ConnectionBroken

MAX_IN_FLIGHT = 5  # the broker tells so many batches of a partition from repeats
MAX_QUEUED_BYTES = 32 << 20
_REQUEST_BYTES = 4 << 20
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 1.0
_SLICE_S = 0.2

_STORED_BEFORE = 46  # DUPLICATE_SEQUENCE_NUMBER
_OUT_OF_ORDER = codes.OUT_OF_ORDER_SEQUENCE
# Sent again under the same sequence: at worst the broker says that it has it.
_AGAIN = frozenset(
    (
        3,  # UNKNOWN_TOPIC_OR_PARTITION: not known to this broker yet
        5,  # LEADER_NOT_AVAILABLE
        6,  # NOT_LEADER_OR_FOLLOWER
        7,  # REQUEST_TIMED_OUT: appended, maybe not replicated in time
        9,  # REPLICA_NOT_AVAILABLE
        13,  # NETWORK_EXCEPTION
        14,  # COORDINATOR_LOAD_IN_PROGRESS
        19,  # NOT_ENOUGH_REPLICAS
        20,  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
        56,  # KAFKA_STORAGE_ERROR: another leads soon
        74,  # FENCED_LEADER_EPOCH
        75,  # UNKNOWN_LEADER_EPOCH
        78,  # OFFSET_NOT_AVAILABLE
        100,  # UNKNOWN_TOPIC_ID
    )
)

Acknowledged = Callable[[TopicPartition, int, int], None]


class ProducerFailed(Exception):
    """A batch was refused, or can't be sent in order any more. The producer is over."""


@dataclass(slots=True)
class _Batch:
    partition: TopicPartition
    data: bytes
    count: int
    order: int
    tries: int = 0


@dataclass(slots=True)
class _Request:
    correlation: int
    batches: dict[TopicPartition, _Batch]
    sent_at: float


@dataclass(slots=True)
class _Link:
    """A connection to a broker, and the requests under way on it."""

    node: int
    address: tuple[str, int]
    connection: Connection
    requests: deque[_Request] = field(default_factory=deque)


class RawProducer:
    """See above. One thread at a time. Deadlines are seconds of `time.monotonic`."""

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        """Get a producer id. `LogError` if there is none in time."""
        self._cluster = cluster
        self._links: dict[int, _Link] = {}
        self._waiting: dict[TopicPartition, deque[_Batch]] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, bytes] = {}
        # Where the batches of a partition are under way, and how many.
        self._under_way: dict[TopicPartition, tuple[int, int]] = {}
        self._orders = 0
        self._pause = _FIRST_PAUSE_S
        self._not_before = 0.0
        self._answer_s = cluster.settings.request_timeout
        self.queued_bytes = 0
        self.unacknowledged = 0
        self.acknowledged: Acknowledged | None = None
        self.producer_id, self.epoch = self._init(deadline)

    def _init(self, deadline: float) -> tuple[int, int]:
        def ask() -> tuple[int, int]:
            with self._cluster.connection(None, deadline) as connection:
                version = connection.version(INIT_PRODUCER_ID)
                body = calls.request(
                    INIT_PRODUCER_ID,
                    version,
                    transactional_id=None,
                    transaction_timeout=dt.timedelta(milliseconds=(1 << 31) - 1),
                )
                found = calls.answer(
                    INIT_PRODUCER_ID,
                    version,
                    connection.call(INIT_PRODUCER_ID, version, body, deadline),
                )
            if int(found.error_code):
                raise_or_again(codes.INIT_CODES, int(found.error_code), "a producer id")
            return int(found.producer_id), int(found.producer_epoch)

        return self._cluster.repeat("a producer id", deadline, ask)

    # -- batches --------------------------------------------------------------------------------------

    def add(
        self,
        partition: TopicPartition,
        body: bytearray,
        *,
        codec: int,
        count: int,
        base_timestamp: int,
        max_timestamp: int,
    ) -> None:
        """Queue a batch of these records; nothing is sent yet."""
        sequence = self._sequences.get(partition, 0)
        packed = compress(codec, body)
        if len(packed) >= len(body):
            codec, packed = NO_CODEC, bytes(body)
        batch = frame(
            packed,
            compression=codec,
            last_offset_delta=count - 1,
            count=count,
            base_timestamp=base_timestamp,
            max_timestamp=max_timestamp,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
        )
        self._sequences[partition] = next_sequence(sequence, count)
        self._orders += 1
        self._waiting.setdefault(partition, deque()).append(
            _Batch(partition, batch, count, self._orders)
        )
        self.queued_bytes += len(batch)
        self.unacknowledged += 1

    def pump(self, deadline: float | None) -> None:
        """Send what can be sent, take the answers that are there; with a deadline wait for one until then.

        `ProducerFailed`: the end of this producer.
        """
        try:
            self._send(deadline)
            self._receive(deadline)
            self._send(deadline)
        except LogUnavailable:
            self._back_off()
        except LogError as error:
            raise ProducerFailed(str(error)) from error

    def _send(self, deadline: float | None) -> None:
        if not self._waiting:
            return
        now = time.monotonic()
        if now < self._not_before:
            if deadline is None:
                return
            time.sleep(max(0.0, min(self._not_before, deadline) - now))
            if time.monotonic() < self._not_before:
                return
        groups = self._cluster.by_leader(self._waiting, now + _SLICE_S)
        self._check_topics()
        for node, partitions in groups.items():
            try:
                self._send_to(node, partitions)
            except ConnectionBroken as error:
                self._lose(node, str(error))

    def _check_topics(self) -> None:
        """A topic that was made anew has not what was written before."""
        for topic in {partition.topic for partition in self._waiting}:
            found = self._cluster.topic_ids.get(topic, b"")
            if self._topic_ids.setdefault(topic, found) != found:
                raise ProducerFailed(f"topic {topic} was deleted and made anew")

    def _send_to(self, node: int, partitions: list[TopicPartition]) -> None:
        link = self._links.get(node)
        if link is None:
            address = self._cluster.address(node)
            connection = self._cluster.take(address, time.monotonic() + self._answer_s)
            link = self._links[node] = _Link(node, address, connection)
        while len(link.requests) < MAX_IN_FLIGHT:
            chosen: dict[TopicPartition, _Batch] = {}
            size = 0
            for partition in partitions:
                queue = self._waiting.get(partition)
                elsewhere = self._under_way.get(partition, (node, 0))[0] != node
                if not queue or elsewhere:  # nothing overtakes what is under way to a former leader
                    continue
                if not chosen or size + len(queue[0].data) <= _REQUEST_BYTES:
                    chosen[partition] = queue.popleft()
                    size += len(chosen[partition].data)
                    if not queue:
                        del self._waiting[partition]
            if not chosen:
                return
            # Noted before it is sent: what breaks on the way is sent again.
            request = _Request(-1, chosen, time.monotonic())
            link.requests.append(request)
            for partition in chosen:
                count = self._under_way.get(partition, (node, 0))[1]
                self._under_way[partition] = (node, count + 1)
            version = link.connection.version(PRODUCE)
            parts = data.produce_request(
                version,
                None,
                round(self._answer_s * 1000),
                {partition: (batch.data,) for partition, batch in chosen.items()},
                self._cluster.topic_ids,
            )
            request.correlation = link.connection.send(
                PRODUCE.key,
                version,
                parts,
                flexible=version >= PRODUCE.flexible_from,
                deadline=time.monotonic() + self._answer_s,
            )

    def _receive(self, deadline: float | None) -> None:
        """Answers that are there; with a deadline, at least one if any is under way."""
        while busy := [link for link in self._links.values() if link.requests]:
            wait = 0.0
            if deadline is not None:
                wait = max(0.0, min(deadline - time.monotonic(), _SLICE_S))
            ready = [link for link in busy if link.connection.buffered()]
            if not ready:
                readable, _, _ = select.select([link.connection for link in busy], (), (), wait)
                ready = [link for link in busy if link.connection in readable]
            for link in ready:
                self._take_answer(link)
            now = time.monotonic()
            for link in busy:
                if link.requests and now - link.requests[0].sent_at > self._answer_s:
                    self._lose(link.node, "no answer in time")
            if ready:
                deadline = None
            elif deadline is None or now >= deadline:
                return

    def _take_answer(self, link: _Link) -> None:
        request = link.requests[0]
        try:
            version = link.connection.version(PRODUCE)
            body = link.connection.receive(request.correlation, time.monotonic() + self._answer_s)
            answers = data.produce_answer(version, body, self._cluster.topic_names)
        except (ConnectionBroken, data.MalformedAnswer) as error:
            self._lose(link.node, str(error))
            return
        link.requests.popleft()
        self._landed(request)
        again = self._judge(request, answers)
        if again:
            self._recover(link, again)

    def _landed(self, request: _Request) -> None:
        """A request is under way no more."""
        for partition in request.batches:
            node, count = self._under_way[partition]
            if count > 1:
                self._under_way[partition] = (node, count - 1)
            else:
                del self._under_way[partition]

    def _judge(
        self,
        request: _Request,
        answers: dict[TopicPartition, data.Produced],
        *,
        draining: bool = False,
    ) -> list[_Batch]:
        """Take what was stored; the batches to send again. `ProducerFailed` for what is refused."""
        again = []
        for partition, batch in request.batches.items():
            found = answers.get(partition)
            if found is None:
                again.append(batch)
            elif found.error in (codes.NONE, _STORED_BEFORE):
                self._done(batch, found.base_offset if found.error == codes.NONE else -1)
            elif found.error in _AGAIN or (found.error == _OUT_OF_ORDER and draining):
                again.append(batch)
            else:
                name = codes.meaning(codes.PRODUCE_CODES, found.error).name
                raise ProducerFailed(
                    f"{partition.topic}[{partition.partition}] refused a batch: {name} "
                    f"({found.error}) {found.message or ''}".rstrip()
                )
        return again

    def _done(self, batch: _Batch, base_offset: int) -> None:
        self._pause = _FIRST_PAUSE_S
        self.queued_bytes -= len(batch.data)
        self.unacknowledged -= 1
        if self.acknowledged is not None:
            self.acknowledged(batch.partition, base_offset, batch.count)

    # -- sending again ----------------------------------------------------------------------------------

    def _recover(self, link: _Link, again: list[_Batch]) -> None:
        """Some batches are to be sent again: first hear of all that are under way behind them."""
        while link.requests:
            request = link.requests[0]
            try:
                version = link.connection.version(PRODUCE)
                body = link.connection.receive(
                    request.correlation, time.monotonic() + self._answer_s
                )
                answers = data.produce_answer(version, body, self._cluster.topic_names)
            except (ConnectionBroken, data.MalformedAnswer):
                link.connection.close()
                break
            link.requests.popleft()
            self._landed(request)
            again += self._judge(request, answers, draining=True)
        self._lose(link.node, "sent again", again)

    def _lose(self, node: int, why: str, again: list[_Batch] | None = None) -> None:
        """Give the link up; what was under way on it is sent again, in order."""
        link = self._links.pop(node, None)
        again = list(again or ())
        if link is not None:
            for request in link.requests:
                self._landed(request)
                again += request.batches.values()
            if link.requests:
                link.connection.close()
            self._cluster.give(link.connection, link.address)
        touched = {batch.partition for batch in again}
        for batch in again:
            batch.tries += 1
            self._waiting.setdefault(batch.partition, deque()).append(batch)
        for partition in touched:
            ordered = sorted(self._waiting[partition], key=lambda batch: batch.order)
            self._waiting[partition] = deque(ordered)
        self._cluster.forget({partition.topic for partition in touched})
        self._back_off()

    def _back_off(self) -> None:
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LAST_PAUSE_S)

    # -- its end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give connections back; those with requests under way are closed."""
        for link in self._links.values():
            if link.requests:
                link.connection.close()
            self._cluster.give(link.connection, link.address)
        self._links.clear()
        self._waiting.clear()
