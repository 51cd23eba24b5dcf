"""An idempotent producer over raw batches, outside of native transactions (KIP-98).

A batch keeps its sequence for ever: where it is not known whether it was stored, the very same bytes are sent
again, and the broker stores them once. One request is under way to each broker, while the batches of the next
one are made; so no batch can overtake an earlier one of its partition.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from anabranch.batches.format import Packed, next_sequence
from anabranch.kafka.wire import codes, data
from anabranch.kafka.wire.calls import INIT_PRODUCER_ID, PRODUCE
from anabranch.kafka.wire.cluster import Cluster, raise_or_again
from anabranch.kafka.wire.codes import DUPLICATE_SEQUENCE, NONE, Act, error_for, meaning
from anabranch.kafka.wire.connection import Connection, ConnectionBroken, readable
from anabranch.kafka.wire.produce import read_produced, send_produce
from anabranch.ports import LogError, LogUnavailable, LogUncertain, TopicPartition

_NO_TRANSACTION = dt.timedelta(minutes=1)  # the broker wants a timeout even where it uses none


@dataclass(frozen=True, slots=True)
class _Piece:
    """A batch with its sequence in it, as it is sent, perhaps several times."""

    partition: TopicPartition
    data: bytes


@dataclass(slots=True)
class _Link:
    """A broker that leads some of the partitions: the request under way to it, and what goes next.

    In each at most one batch of a partition (the broker's rule).
    """

    node: int
    connection: Connection | None = None
    version: int = -1
    correlation: int = -1
    under_way: dict[TopicPartition, _Piece] = field(default_factory=dict)
    gathering: dict[TopicPartition, _Piece] = field(default_factory=dict)
    gathered_bytes: int = 0

    def add(self, piece: _Piece) -> None:
        self.gathering[piece.partition] = piece
        self.gathered_bytes += len(piece.data)

    def take(self) -> list[_Piece]:
        pieces = list(self.gathering.values())
        self.gathering.clear()
        self.gathered_bytes = 0
        return pieces

    def may_send(self) -> bool:
        """Nothing is under way, or its answer has begun to arrive."""
        if not self.under_way or self.connection is None or self.connection.broken:
            return True
        if self.connection.buffered():
            return True
        return bool(readable([self.connection]))


class JournalProducer:
    """One producer id. One thread at a time; `interrupt` from any. The first failure ends it for good."""

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        """Get a producer id. ``deadline``: of `time.monotonic`, as everywhere here.

        Raises:
            LogUnavailable: no broker gave one until the deadline.
            LogRefused: the broker does not allow it.
        """
        self._cluster = cluster
        self._links: dict[int, _Link] = {}
        # The broker that a partition's batches go to, until all of them are known to be stored.
        self._homes: dict[TopicPartition, int] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, bytes] = {}
        self._highest: dict[TopicPartition, int] = {}  # offset that was given to a batch
        self._failure: LogError | None = None
        self._trouble = ""
        self._busy = threading.Lock()
        self.producer_id, self.producer_epoch = cluster.repeat(
            "initialise a producer", deadline, lambda: self._initialise(deadline)
        )

    def _initialise(self, deadline: float) -> tuple[int, int]:
        with self._cluster.connection(None, deadline) as connection:
            version = connection.version(INIT_PRODUCER_ID)
            found = connection.ask(
                INIT_PRODUCER_ID,
                version,
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
        """Batches that are not known to be stored."""
        return sum(len(link.under_way) + len(link.gathering) for link in self._links.values())

    @property
    def failure(self) -> LogError | None:
        """Why it has ended."""
        return self._failure

    def append(self, partition: TopicPartition, batch: Packed, deadline: float) -> None:
        """Send a batch, or keep it until what is under way is answered. Memory: two requests a broker.

        Raises:
            LogError: it failed, perhaps because of an earlier batch: for good.
        """
        with self._working():
            sequence = self._sequences.get(partition, 0)
            self._sequences[partition] = next_sequence(sequence, batch.rows)
            piece = _Piece(partition, batch.frame(self.producer_id, self.producer_epoch, sequence))
            most = self._cluster.settings.max_request_bytes
            link = self._link(partition, deadline)
            while partition in link.gathering or (
                link.gathering and link.gathered_bytes + len(piece.data) > most
            ):
                self._go_on(link, deadline)
                link = self._link(partition, deadline)  # it may have moved
            link.add(piece)
            if link.may_send():
                self._go_on(link, deadline)

    def flush(self, deadline: float) -> None:
        """Wait until everything is stored on all in-sync replicas.

        Raises:
            LogError: it failed, or is not stored at the deadline: for good.
        """
        with self._working():
            while busy := [one for one in self._links.values() if one.under_way or one.gathering]:
                for link in busy:
                    self._go_on(link, deadline)

    def interrupt(self, reason: str) -> None:
        """End it, from any thread: whoever waits in it stops waiting."""
        self._failure = self._failure or LogUncertain(reason)
        for link in list(self._links.values()):
            if link.connection is not None:
                link.connection.interrupt()

    def close(self) -> None:
        """Close the connections. What is not flushed may be stored or not."""
        self._failure = self._failure or LogUncertain("the producer is closed")
        with self._busy:
            for link in self._links.values():
                if link.connection is not None:
                    link.connection.close()

    def after_fork(self) -> None:
        """In a forked child: close its copies of the connections; the parent's stay as they are."""
        self._busy = threading.Lock()
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
                # Perhaps in the middle of a request.
                self._failure = LogUncertain(f"the producer was interrupted: {error!r}")
                raise

    def _check(self) -> None:
        if self._failure is not None:
            raise LogUncertain(str(self._failure)) from self._failure

    # -- requests -------------------------------------------------------------------------------------

    def _link(self, partition: TopicPartition, deadline: float) -> _Link:
        node = self._homes.get(partition)
        if node is None:
            node = self._cluster.leaders((partition,), deadline)[partition].node
            self._homes[partition] = node
        return self._links.setdefault(node, _Link(node))

    def _go_on(self, link: _Link, deadline: float) -> None:
        """Read the answer under way, and send what was gathered meanwhile."""
        if link.under_way:
            again = self._read(link, deadline)
            if again:
                self._recover(again, deadline)
        if link.gathering:
            again = self._send(link, link.take(), deadline)
            if again:
                self._recover(again, deadline)

    def _send(self, link: _Link, pieces: list[_Piece], deadline: float) -> list[_Piece]:
        """One request; what has to be sent again at once, because it can't have arrived."""
        self._check_topics(pieces)
        try:
            if link.connection is None or not link.connection.usable():
                address = self._cluster.address(link.node)
                link.connection = self._cluster.open(address, deadline)
                link.version = link.connection.version(PRODUCE)
            batches = {piece.partition: (piece.data,) for piece in pieces}
            link.correlation = send_produce(
                self._cluster, link.connection, link.version, None, batches, deadline
            )
        except ConnectionBroken as error:
            self._trouble = str(error)
            return pieces
        link.under_way = {piece.partition: piece for piece in pieces}
        return []

    def _read(self, link: _Link, deadline: float) -> list[_Piece]:
        """What has to be sent again, by the answer under way or for lack of one.

        Raises:
            LogError: the broker's reason why it is of no use.
        """
        pieces, link.under_way = link.under_way, {}
        if link.connection is None:
            return list(pieces.values())
        try:
            answers = read_produced(
                self._cluster,
                link.connection,
                link.version,
                link.correlation,
                pieces.keys(),
                min(deadline, self._cluster.deadline()),
            )
        except (ConnectionBroken, data.MalformedAnswer) as error:
            self._trouble = str(error)
            link.connection.close()
            return list(pieces.values())
        again = []
        for partition, piece in pieces.items():
            code, offset, message = answers[partition]
            if code == NONE:
                self._check_offset(partition, offset)
            if code in (NONE, DUPLICATE_SEQUENCE):
                continue
            meant = meaning(codes.IDEMPOTENT_CODES, code)
            what = f"append to {partition.topic}[{partition.partition}]"
            problem = error_for(meant, code, what, message)
            if meant.act not in (Act.RETRY, Act.REFRESH):
                raise problem
            self._trouble = str(problem)
            again.append(piece)
        return again

    def _check_offset(self, partition: TopicPartition, offset: int) -> None:
        """Up to Kafka 4.0, batches name their topic by its name: one that was made anew just takes them."""
        if offset <= self._highest.get(partition, -1):
            raise LogUncertain(
                f"topic {partition.topic} was deleted and made anew, or has lost what was stored: offset "
                f"{offset} of partition {partition.partition} is given for a second time"
            )
        self._highest[partition] = offset

    def _check_topics(self, pieces: Iterable[_Piece]) -> None:
        """A topic that was made anew has forgotten what was stored."""
        for topic in {piece.partition.topic for piece in pieces}:
            now = self._cluster.topic_ids[topic]
            if self._topic_ids.setdefault(topic, now) != now:
                raise LogUncertain(f"topic {topic} was deleted and made anew")

    # -- after a failure ------------------------------------------------------------------------------

    def _recover(self, failed: list[_Piece], deadline: float) -> None:
        """Send again until it is stored, and only then go on: leaders may have moved.

        Raises:
            LogError: the broker's reason, or it is not stored at the deadline.
        """
        for link in self._links.values():
            if link.under_way:
                failed += self._read(link, deadline)
        later = [piece for link in self._links.values() for piece in link.take()]
        self._homes.clear()
        while failed:
            failed = self._repeat(failed, deadline)
        for piece in later:
            self._link(piece.partition, deadline).add(piece)

    def _repeat(self, pieces: list[_Piece], deadline: float) -> list[_Piece]:
        """One more try; what is still to be sent."""
        self._check()
        pause = self._cluster.settings.retry_backoff
        if time.monotonic() + pause >= deadline:
            raise LogUncertain(f"not acknowledged before the deadline: {self._trouble}")
        time.sleep(pause)
        self._cluster.forget({piece.partition.topic for piece in pieces})
        try:
            leaders = self._cluster.leaders([piece.partition for piece in pieces], deadline)
        except LogUnavailable as error:
            raise LogUncertain(
                f"not acknowledged before the deadline: {self._trouble}; {error}"
            ) from error
        groups: dict[int, list[_Piece]] = {}
        for piece in pieces:
            groups.setdefault(leaders[piece.partition].node, []).append(piece)
        again = []
        asked = []
        for node, group in groups.items():
            link = self._links.setdefault(node, _Link(node))
            again += self._send(link, group, deadline)
            asked.append(link)
        for link in asked:
            if link.under_way:
                again += self._read(link, deadline)
        return again
