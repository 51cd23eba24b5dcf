"""A producer's connection to one broker: batches for the next Produce request, and the requests under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.batches.format import Buffer
from anabranch.kafka import codes, data
from anabranch.kafka.calls import PRODUCE, ConnectionBroken, MalformedAnswer
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.codes import Act, error_for, meaning
from anabranch.kafka.connection import MOVED_S, Connection, readable
from anabranch.ports import NOT_ENOUGH_REPLICAS, LogError, LogFenced, LogUncertain, TopicPartition

Answers = dict[TopicPartition, data.Produced]


class Piece(NamedTuple):
    """A batch ready to send, with its sequence; ``place`` is its place in the caller's list.

    ``since``: monotonic seconds of its arrival, where batches can get too old.
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
class Wave:
    """One Produce request: at most one batch of a partition (the broker's rule)."""

    pieces: dict[TopicPartition, Piece] = field(default_factory=dict)
    size: int = 0
    correlation: int = -1
    sent: float = 0.0  # monotonic seconds

    def add(self, piece: Piece) -> None:
        """Add a batch."""
        self.pieces[piece.partition] = piece
        self.size += piece.size

    def has_room(self, partition: TopicPartition, size: int, most: int) -> bool:
        """Whether a batch of ``size`` bytes may be added: within ``most`` bytes, unless it is the only one."""
        return not self.pieces or (partition not in self.pieces and self.size + size <= most)


@dataclass(slots=True)
class Link:
    """A broker that leads some of the partitions."""

    node: int
    connection: Connection | None = None
    version: int = -1
    gathering: Wave = field(default_factory=Wave)
    in_flight: deque[Wave] = field(default_factory=deque)
    # Partition -> leader epoch under which this connection checked it for lost markers.
    checked: dict[TopicPartition, int] = field(default_factory=dict)

    def connect(self, cluster: Cluster, deadline: float, highest: int = PRODUCE.highest) -> None:
        """Open a connection, unless there is a usable one. No request may be under way.

        Raises:
            ConnectionBroken: nothing was sent.
            LogRefused: the broker speaks no version up to ``highest``.
        """
        if self.version < 0 or self.connection is None or not self.connection.usable():
            self.version = -1
            self.connection = cluster.pool.open(cluster.address(self.node), deadline)
            self.checked.clear()
            self.version = self.connection.version(PRODUCE, highest)

    def open(self) -> Connection:
        """The connection. `ConnectionBroken` without one."""
        if self.connection is None or self.connection.broken:
            raise ConnectionBroken(f"broker {self.node} is not connected", sent=False)
        return self.connection

    def take(self) -> Wave:
        """Take the collected wave, and begin another one."""
        wave, self.gathering = self.gathering, Wave()
        return wave

    def send(
        self,
        cluster: Cluster,
        wave: Wave,
        name: str | None,
        deadline: float,
        acks: int = data.ACKS_ALL,
    ) -> None:
        """Send a wave whose topics are known to ``cluster``; ``name``: the transactional id. `ConnectionBroken`."""
        batches = {partition: piece.parts for partition, piece in wave.pieces.items()}
        acks_ms = round(cluster.settings.request_timeout * 1000)
        parts = data.produce_request(self.version, name, acks_ms, batches, cluster.topic_ids, acks)
        flexible = self.version >= PRODUCE.flexible_from
        wave.correlation = self.open().send(
            PRODUCE.key, self.version, parts, flexible=flexible, deadline=deadline
        )
        wave.sent = time.monotonic()

    def read(
        self,
        cluster: Cluster,
        wave: Wave,
        deadline: float,
        moved: Callable[[], bool] = lambda: False,
    ) -> Answers:
        """The answer about all batches of a wave that was sent.

        ``moved``: whether a broker for which this one waits has been replaced.

        Raises:
            ConnectionBroken: the answer did not come.
            MalformedAnswer: batches are missing in it, or it is not an answer.
        """
        self.open().wait(deadline, lambda: self._moved(cluster, wave) or moved())
        body = self.open().receive(wave.correlation, deadline)
        answers = data.produce_answer(self.version, body, cluster.topic_names)
        missing = wave.pieces.keys() - answers.keys()
        if missing:
            raise MalformedAnswer(f"no answer about {sorted(missing)[0]}")
        return answers

    def _moved(self, cluster: Cluster, wave: Wave) -> bool:
        """Whether a partition of the wave has another leader by now, by answers of other brokers."""
        cluster.distrust(self.node)
        try:
            cluster.refresh(
                {partition.topic for partition in wave.pieces}, cluster.deadline(MOVED_S)
            )
        except LogError:
            return False
        leaders = [cluster.leader(partition) for partition in wave.pieces]
        return any(leader is not None and leader.node != self.node for leader in leaders)

    def may_send(self) -> bool:
        """Whether nothing is under way, or its answer has begun to arrive."""
        if not self.in_flight or self.connection is None or self.connection.broken:
            return True
        return self.connection.buffered() or bool(readable([self.connection]))

    def close(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()


def failure_of(
    who: str, failed: Iterable[Piece], answers: Answers, *, last: bool
) -> LogError | None:
    """The worst error of the failed batches in the answers to a transactional append.

    None if all of them may be sent again, which they may not if ``last``.
    """
    errors: list[LogError] = []
    for piece in failed:
        produced = answers[piece.partition]
        meant = meaning(codes.PRODUCE_CODES, produced.error)
        if meant.act in (Act.RETRY, Act.REFRESH):
            if not last:
                continue
            # This error precedes the append; others may follow it.
            refused = produced.error == NOT_ENOUGH_REPLICAS
            meant = meant._replace(act=Act.REFUSED if refused else Act.UNCERTAIN)
        topic = piece.partition.topic
        what = f"{who}: append to {topic}[{piece.partition.partition}]"
        errors.append(error_for(meant, produced.error, what, produced.message, (topic,)))
    worst = next(
        (e for kind in (LogFenced, LogUncertain) for e in errors if isinstance(e, kind)),
        errors[0] if errors else None,
    )
    if worst is not None:
        worst.topics = frozenset().union(*(e.topics for e in errors if isinstance(e, type(worst))))
    return worst
