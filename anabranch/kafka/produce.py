"""The produce path of all producers: batches for the next Produce request to each broker, and requests under way.

Three producers use it: `transactional_producer` for native transactions, `idempotent_producer` for journals, and
`sender` for answers that may get lost. They differ in what they do after an error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.batches.format import Buffer
from anabranch.kafka import data
from anabranch.kafka.calls import PRODUCE, ConnectionBroken, MalformedAnswer
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.connection import Connection
from anabranch.ports import TopicPartition

Answers = dict[TopicPartition, data.Produced]
SLOW_MS = 1_000  # a broker that throttles this process for this time or longer is logged
THROTTLED = (
    "broker %d throttles what this process writes, now for %.1f s: raise its quota of Kafka; "
    "a controller merges less at once with --chunk-bytes"
)


class PendingBatch(NamedTuple):
    """A batch that is not known to be stored.

    ``next_sequence``: the sequence after it. ``place``: its place in the caller's list. ``since``: when it came, in
    monotonic seconds, where batches can get too old.
    """

    partition: TopicPartition
    parts: tuple[Buffer, ...]  # its bytes, in consecutive buffers
    next_sequence: int = -1
    place: int = 0
    since: float = 0.0

    @property
    def size(self) -> int:
        """The batch's bytes."""
        return sum(map(len, self.parts))


@dataclass(slots=True)
class ProduceRequest:
    """One Produce request: at most one batch of a partition (the broker's rule)."""

    batches: dict[TopicPartition, PendingBatch] = field(default_factory=dict)
    size: int = 0
    correlation: int = -1
    sent: float = 0.0  # monotonic seconds

    def add(self, batch: PendingBatch) -> None:
        self.batches[batch.partition] = batch
        self.size += batch.size

    def has_room(self, partition: TopicPartition, size: int, most: int) -> bool:
        """Whether a batch of ``size`` bytes may be added: within ``most`` bytes; the first may have any size."""
        return not self.batches or (partition not in self.batches and self.size + size <= most)


@dataclass(slots=True)
class BrokerLink:
    """A broker that leads some of the partitions: the next request to it, and the requests under way."""

    node: int
    connection: Connection | None = None
    version: int = -1
    next: ProduceRequest = field(default_factory=ProduceRequest)
    in_flight: deque[ProduceRequest] = field(default_factory=deque)
    # Partition -> leader epoch under which this connection checked it for lost markers.
    checked: dict[TopicPartition, int] = field(default_factory=dict)

    def open(self) -> Connection:
        """The connection. `ConnectionBroken` without one."""
        if self.connection is None or self.connection.broken:
            raise ConnectionBroken(f"broker {self.node} is not connected", sent=False)
        return self.connection

    def take(self) -> ProduceRequest:
        """Take the next request, and begin another request."""
        request, self.next = self.next, ProduceRequest()
        return request

    def take_oldest(self) -> ProduceRequest:
        """Take the oldest request under way, to read its answer."""
        return self.in_flight.popleft()

    def has_answer(self) -> bool:
        """Whether nothing is under way, or its answer has begun to arrive."""
        return not self.in_flight or self.connection is None or self.connection.has_arrived()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class ProducePipeline:
    """One producer's links to brokers, by node."""

    def __init__(
        self, cluster: Cluster, transactional_id: str | None = None, acks: int = data.ACKS_ALL
    ) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._acks = acks
        self._closed = False
        self.links: dict[int, BrokerLink] = {}

    def link(self, node: int) -> BrokerLink:
        """The link to a broker, perhaps not connected."""
        return self.links.get(node) or self.links.setdefault(node, BrokerLink(node))

    @property
    def waiting(self) -> int:
        """The number of batches that are not known to be stored."""
        return sum(
            len(request.batches)
            for link in self.links.values()
            for request in (*link.in_flight, link.next)
        )

    def connect(self, link: BrokerLink, deadline: float, highest: int = PRODUCE.highest) -> None:
        """Open a connection, unless the link has a usable connection. No request may be under way.

        Raises:
            ConnectionBroken: nothing was sent.
            LogRefused: the broker speaks no version up to ``highest``.
        """
        if link.version < 0 or link.connection is None or not link.connection.usable():
            link.close()
            link.version = -1
            address = self._cluster.address(link.node)
            link.connection = self._cluster.pool.open(address, deadline)
            if self._closed:  # perhaps meanwhile, by another thread
                link.close()
                raise ConnectionBroken("the producer is closed", sent=False)
            link.checked.clear()
            link.version = link.connection.version(PRODUCE, highest)

    def send(self, link: BrokerLink, request: ProduceRequest, deadline: float) -> None:
        """Send a request whose topics are known to the cluster: it is then under way. `ConnectionBroken`."""
        parts = data.produce_request(
            link.version,
            self._id,
            round(self._cluster.settings.request_timeout * 1000),
            {partition: batch.parts for partition, batch in request.batches.items()},
            self._cluster.topic_ids,
            self._acks,
        )
        flexible = link.version >= PRODUCE.flexible_from
        request.correlation = link.open().send(
            PRODUCE.key, link.version, parts, flexible=flexible, deadline=deadline
        )
        request.sent = time.monotonic()
        link.in_flight.append(request)

    def read(
        self,
        link: BrokerLink,
        request: ProduceRequest,
        deadline: float,
        is_replaced: Callable[[], bool] = lambda: False,
    ) -> Answers:
        """The answer about all batches of a request, after `BrokerLink.take_oldest`.

        ``is_replaced``: whether another broker, for which this broker waits, has been replaced.

        Raises:
            ConnectionBroken: the answer did not come; or batches are missing in it, or it is not an answer.
        """
        self._cluster.wait(
            link.open(),
            deadline,
            lambda: self._cluster.is_replaced(link.node, request.batches.keys()) or is_replaced(),
        )
        body = link.open().receive(request.correlation, deadline)
        answers = data.produce_answer(link.version, body, self._cluster.topic_names)
        missing = request.batches.keys() - answers.keys()
        if missing:
            raise MalformedAnswer(f"no answer about {sorted(missing)[0]}")
        if (waits := data.throttle_ms(link.version, body)) >= SLOW_MS:
            self._cluster.warnings.warning(THROTTLED, link.node, waits / 1000)
        return answers

    def interrupt(self) -> None:
        """Make a thread that waits for a broker stop waiting. Any thread may call this."""
        for link in list(self.links.values()):
            if link.connection is not None:
                link.connection.interrupt()

    def close(self) -> None:
        """Close all connections; `connect` fails from now on."""
        self._closed = True
        for link in list(self.links.values()):
            link.close()
