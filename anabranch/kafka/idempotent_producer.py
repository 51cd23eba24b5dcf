"""An idempotent producer over raw batches, outside of native transactions (KIP-98).

A batch keeps its sequence: if it is unknown whether it is stored, the same bytes are sent again, and the broker
stores them once. One request is under way to each broker while the batches of the next one are made, so no batch
can overtake an earlier one of its partition.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager

from anabranch.batches.format import Packed, next_sequence
from anabranch.kafka import codes
from anabranch.kafka.calls import INIT_PRODUCER_ID, ConnectionBroken
from anabranch.kafka.cluster import Cluster, raise_or_again
from anabranch.kafka.codes import DUPLICATE_SEQUENCE, NONE, Act, error_for, meaning
from anabranch.kafka.produce import BrokerLink, PendingBatch, ProducePipeline, ProduceRequest
from anabranch.ports import LogError, LogUnavailable, LogUncertain, TopicPartition
from anabranch.waits import here

_NO_TRANSACTION = dt.timedelta(minutes=1)  # the broker needs a timeout even without transactions


class JournalProducer:
    """A producer with an id of its own. The first failure ends it for good.

    Only one thread at a time may use it, except `interrupt`.
    """

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        """Get a producer id. ``deadline``: by `time.monotonic`, as everywhere here.

        Raises:
            LogUnavailable: no broker issued a producer id until the deadline.
            LogRefused: the broker does not allow a producer id.
        """
        self._cluster = cluster
        self._pipeline = ProducePipeline(cluster)
        # Partition -> the broker that gets its batches, until all are known to be stored.
        self._homes: dict[TopicPartition, int] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, bytes] = {}
        # Partition -> highest offset that a batch got.
        self._highest: dict[TopicPartition, int] = {}
        self._failure: LogError | None = None
        self._trouble = ""
        self._busy = here().lock()
        self.producer_id, self.producer_epoch = cluster.repeat(
            "initialise a producer", deadline, lambda: self._initialise(deadline)
        )

    def _initialise(self, deadline: float) -> tuple[int, int]:
        with self._cluster.connection(None, deadline) as connection:
            found = connection.ask(
                INIT_PRODUCER_ID,
                self._cluster.soon(deadline),
                transactional_id=None,
                transaction_timeout=_NO_TRANSACTION,
            )
        code = int(found.error_code)
        if code != NONE:
            raise_or_again(codes.INIT_CODES, code, "initialise a producer")
        return int(found.producer_id), int(found.producer_epoch)

    # -- writing --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of batches that are not known to be stored."""
        return self._pipeline.waiting

    @property
    def failure(self) -> LogError | None:
        """The error that ended the producer."""
        return self._failure

    def append(self, partition: TopicPartition, batch: Packed, deadline: float) -> None:
        """Send a batch, or keep it until the request under way is answered. Memory: two requests for each broker.

        Raises:
            LogError: the producer failed for good, perhaps because of an earlier batch.
        """
        with self._working():
            sequence = self._sequences.get(partition, 0)
            following = self._sequences[partition] = next_sequence(sequence, batch.rows)
            framed = batch.frame(self.producer_id, self.producer_epoch, sequence)
            most = self._cluster.settings.max_request_bytes
            link = self._link(partition, deadline)
            while not link.next.has_room(partition, len(framed), most):
                self._next_request(link, deadline)
                link = self._link(partition, deadline)  # the leader may have moved
            link.next.add(PendingBatch(partition, (framed,), following))
            if link.has_answer():
                self._next_request(link, deadline)

    def flush(self, deadline: float) -> None:
        """Wait until everything is stored on all in-sync replicas.

        Raises:
            LogError: the producer failed for good, or not all is stored at the deadline.
        """
        with self._working():
            while self.waiting:
                for link in list(self._pipeline.links.values()):
                    self._next_request(link, deadline)

    def interrupt(self, reason: str) -> None:
        """End the producer, from any thread: a thread that waits in it stops waiting."""
        self._failure = self._failure or LogUncertain(reason)
        self._pipeline.interrupt()

    def close(self) -> None:
        """Close the connections. Unflushed batches may be stored or not."""
        self._failure = self._failure or LogUncertain("the producer is closed")
        with self._busy:
            self._pipeline.close()

    def after_fork(self) -> None:
        """In a forked child: close its copies of the connections; the parent's connections stay open."""
        self._busy = here().lock()
        self.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._busy:
            self._check()
            try:
                yield
            except LogError as error:
                self._failure = self._failure or error
                raise
            except BaseException as error:
                # An interrupt may come in the middle of a request.
                self._failure = LogUncertain(f"the producer was interrupted: {error!r}")
                raise

    def _check(self) -> None:
        if self._failure is not None:
            raise LogUncertain(str(self._failure)) from self._failure

    # -- requests -------------------------------------------------------------------------------------

    def _link(self, partition: TopicPartition, deadline: float) -> BrokerLink:
        node = self._homes.get(partition)
        if node is None:
            node = self._cluster.leaders((partition,), deadline)[partition].node
            self._homes[partition] = node
        return self._pipeline.link(node)

    def _next_request(self, link: BrokerLink, deadline: float) -> None:
        """Read the answer under way, and send the batches collected meanwhile."""
        if again := self._read(link, deadline):
            self._recover(again, deadline)
        if link.next.batches:
            request = link.take()
            if again := self._send(link, request, deadline):
                self._recover(again, deadline)

    def _send(
        self, link: BrokerLink, request: ProduceRequest, deadline: float
    ) -> list[PendingBatch]:
        """Send one request. Returns the batches to send again at once if the connection broke."""
        self._check_topics(request)
        try:
            self._pipeline.connect(link, deadline)
            self._pipeline.send(link, request, deadline)
        except ConnectionBroken as error:
            self._trouble = str(error)
            return list(request.batches.values())
        return []

    def _read(self, link: BrokerLink, deadline: float) -> list[PendingBatch]:
        """The batches to send again, because of the answer under way, or because no answer came.

        Raises:
            LogError: the broker refuses, and sending again is useless.
        """
        if not link.in_flight:
            return []
        request = link.take_oldest()
        try:
            answers = self._pipeline.read(link, request, min(deadline, self._cluster.deadline()))
        except ConnectionBroken as error:
            self._trouble = str(error)
            link.close()
            return list(request.batches.values())
        again = []
        for partition, batch in request.batches.items():
            code, offset, message = answers[partition]
            if code == NONE:
                self._check_offset(partition, offset)
                ids = self._cluster.topic_ids
                self._topic_ids.setdefault(partition.topic, ids[partition.topic])
            if code in (NONE, DUPLICATE_SEQUENCE):
                continue
            meant = meaning(codes.IDEMPOTENT_CODES, code)
            what = f"append to {partition.topic}[{partition.partition}]"
            problem = error_for(meant, code, what, message)
            if meant.act not in (Act.RETRY, Act.REFRESH):
                raise problem
            self._trouble = str(problem)
            again.append(batch)
        return again

    def forget(self) -> None:
        """Forget the topics: the next writer may meet other topics of the same names."""
        self._highest.clear()
        self._topic_ids.clear()

    def _check_offset(self, partition: TopicPartition, offset: int) -> None:
        """`LogUncertain`: an offset came twice. Up to Kafka 4.0, a replaced topic accepts batches by its name."""
        if offset <= self._highest.get(partition, -1):
            raise LogUncertain(
                f"topic {partition.topic} was deleted and created again, or has lost records: offset "
                f"{offset} of partition {partition.partition} is given for a second time"
            )
        self._highest[partition] = offset

    def _check_topics(self, request: ProduceRequest) -> None:
        """`LogUncertain`: a topic was replaced, so the stored batches are gone."""
        for topic in {partition.topic for partition in request.batches}:
            now = self._cluster.topic_ids[topic]
            if self._topic_ids.get(topic, now) != now:
                raise LogUncertain(f"topic {topic} was deleted and created again")

    # -- after a failure ------------------------------------------------------------------------------

    def _recover(self, failed: list[PendingBatch], deadline: float) -> None:
        """Send batches again until all are stored, and only then continue, because leaders may have moved.

        Raises:
            LogError: the broker's reason, or batches are not stored at the deadline.
        """
        for link in self._pipeline.links.values():
            failed += self._read(link, deadline)
        later = [
            batch
            for link in self._pipeline.links.values()
            for batch in link.take().batches.values()
        ]
        self._homes.clear()
        while failed:
            failed = self._repeat(failed, deadline)
        for batch in later:
            self._link(batch.partition, deadline).next.add(batch)

    def _repeat(self, batches: list[PendingBatch], deadline: float) -> list[PendingBatch]:
        """Try once more; returns the batches that still have to be sent."""
        self._check()
        pause = self._cluster.settings.retry_backoff
        if time.monotonic() + pause >= deadline:
            raise LogUncertain(f"not acknowledged before the deadline: {self._trouble}")
        here().sleep(pause)
        self._cluster.forget({batch.partition.topic for batch in batches})
        try:
            leaders = self._cluster.leaders([batch.partition for batch in batches], deadline)
        except LogUnavailable as error:
            raise LogUncertain(
                f"not acknowledged before the deadline: {self._trouble}; {error}"
            ) from error
        requests: dict[int, ProduceRequest] = {}
        for batch in batches:
            requests.setdefault(leaders[batch.partition].node, ProduceRequest()).add(batch)
        again = []
        for node, request in requests.items():
            again += self._send(self._pipeline.link(node), request, deadline)
        for node in requests:
            again += self._read(self._pipeline.link(node), deadline)
        return again
