"""The batches of one transactional id on their way to leaders, in sequence, and the leaders' answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from anabranch.batches.format import Buffer, next_sequence, patch_parts, read_header
from anabranch.kafka.link import Answers, Link, Piece, Wave, failure_of
from anabranch.kafka.wire import data
from anabranch.kafka.wire.calls import PRODUCE
from anabranch.kafka.wire.cluster import Cluster
from anabranch.kafka.wire.codes import NONE
from anabranch.kafka.wire.connection import ConnectionBroken
from anabranch.kafka.wire.coordinator import ANSWER_S, PRODUCE_ADDS_FROM, Coordinator
from anabranch.ports import (
    CORRUPT_MESSAGE,
    CorruptBatch,
    LogError,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicPartition,
)

LEADER_S = 1.0  # how long to wait for leaders; the whole round waits with it


class _Tries(NamedTuple):
    """``leaders_by``: until when leaders are waited for, monotonic seconds; from then on each is asked for once.

    ``down``: brokers that were not reached.
    """

    leaders_by: float
    down: dict[int, ConnectionBroken]


class Waves:
    """Links to brokers, by node, and the sequences of partitions.

    ``begun``: the native transaction has begun, at the coordinator or by a batch that may be stored.
    """

    def __init__(self, cluster: Cluster, transactional_id: str, coordinator: Coordinator) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._coordinator = coordinator
        self.begun = False
        self.links: dict[int, Link] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._acked: dict[TopicPartition, int] = {}

    @property
    def topics(self) -> set[str]:
        """The topics that batches went to in this epoch."""
        return {partition.topic for partition in self._sequences}

    def rewind(self) -> None:
        """Go on after the last stored batches."""
        self._sequences = dict(self._acked)

    def restart(self) -> None:
        """A new epoch starts with sequence 0 on each partition."""
        self._sequences.clear()
        self._acked.clear()

    def close(self) -> None:
        """Close the connections."""
        for link in self.links.values():
            link.close()
        self.links.clear()

    def piece(self, index: int, partition: TopicPartition, batch: Buffer) -> Piece:
        """Give a batch the producer's id and the partition's next sequence. `LogRefused`: it is no batch."""
        sequence = self._sequences.get(partition, 0)
        try:
            parts = patch_parts(
                batch, self._coordinator.producer_id, self._coordinator.producer_epoch, sequence
            )
        except CorruptBatch as error:
            raise LogRefused(f"{self._id}: append: {error}", CORRUPT_MESSAGE) from error
        following = next_sequence(sequence, read_header(parts[0], whole=False).record_count)
        self._sequences[partition] = following
        return Piece(partition, parts, following, index)

    def reach(self, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """Connect to the leaders of all these before anything is sent: an unreachable one costs nothing.

        Each broker is tried once. Returns node -> partitions that were not looked at since it leads them.
        """
        failed: dict[str, LogError] = {}
        tries = _Tries(self._cluster.deadline(LEADER_S), {})
        unseen: dict[int, list[TopicPartition]] = {}
        links: dict[int, Link] = {}  # known to be open
        for partition in partitions:
            if partition.topic not in failed:
                leader = self._cluster.leader(partition)
                link = links.get(leader.node) if leader is not None else None
                if link is None or leader is None:
                    try:
                        link = self.link(partition, tries=tries)
                    except LogError as error:
                        failed[partition.topic] = error
                        continue
                    links[link.node] = link
                    leader = self._cluster.leader(partition)
                if leader is None or link.checked.get(partition) != leader.epoch:
                    unseen.setdefault(link.node, []).append(partition)
        for problem in failed.values():
            problem.topics |= failed.keys()
            raise problem
        return unseen

    def link(
        self,
        partition: TopicPartition,
        reached: bool = False,
        tries: _Tries | None = None,
    ) -> Link:
        """The way to the leader. ``reached``: it was found to be open just now."""
        tries = tries or _Tries(self._cluster.deadline(LEADER_S), {})
        leader = self._cluster.leader(partition)
        if leader is None and time.monotonic() >= tries.leaders_by:
            failed: dict[TopicPartition, LogError] = {}
            self._cluster.groups((partition,), self._cluster.deadline(LEADER_S), failed)
            if failed:
                raise failed[partition]
            leader = self._cluster.leader(partition)
        if leader is None:
            leader = self._cluster.leaders((partition,), tries.leaders_by)[partition]
        link = self.links.get(leader.node) or self.links.setdefault(leader.node, Link(leader.node))
        if not (link.in_flight or link.gathering.pieces or (reached and link.connection)):
            highest = PRODUCE.highest if self._coordinator.is_v2 else PRODUCE_ADDS_FROM - 1
            soon = self._cluster.soon(self._cluster.deadline())
            try:
                if leader.node in tries.down:
                    raise tries.down[leader.node]
                link.connect(self._cluster, soon, highest)
            except ConnectionBroken as error:
                self._cluster.distrust(leader.node)
                tries.down[leader.node] = error
                raise self.unreachable(str(error), partition.topic) from error
        return link

    def unreachable(self, message: str, topic: str) -> LogError:
        """The error for an append that sent nothing there; earlier appends of the transaction would lack it."""
        if self.begun:
            return LogUncertain(f"{self._id}: {message}", (topic,))
        return LogUnavailable(f"{self._id}: {message}", (topic,))

    def write(self, link: Link, wave: Wave) -> None:
        """Send a wave. `LogUncertain` if a part of it may have arrived."""
        try:
            link.send(self._cluster, wave, self._id, self._cluster.deadline())
        except ConnectionBroken as error:
            raise self._lost(link, wave, error) from error

    def _lost(self, link: Link, wave: Wave, error: Exception) -> LogUncertain:
        """The error for a wave whose fate is unknown."""
        self._cluster.distrust(link.node)
        topics = {partition.topic for partition in wave.pieces}
        return LogUncertain(f"{self._id}: append: {error}", topics)

    def read(self, link: Link, wave: Wave) -> Answers:
        """The answer to a wave that was sent. `LogUncertain` if it does not come."""
        deadline = min(self._cluster.deadline(), self._cluster.deadline(ANSWER_S))
        try:
            return link.read(self._cluster, wave, deadline, self._coordinator.moved)
        except (ConnectionBroken, data.MalformedAnswer) as error:
            raise self._lost(link, wave, error) from error

    def finish_oldest(self, link: Link, offsets: list[int]) -> None:
        """Read the oldest answer under way; any error in it ends the append."""
        wave = link.in_flight.popleft()
        answers = self.read(link, wave)
        if failed := self.take_answers(wave, answers, offsets):
            error = failure_of(self._id, failed, answers, last=True)
            raise error or LogUncertain(f"{self._id}: append failed")

    def take_answers(self, wave: Wave, answers: Answers, offsets: list[int] | None) -> list[Piece]:
        """The batches that were not stored."""
        failed = []
        for partition, piece in wave.pieces.items():
            produced = answers[partition]
            if produced.error == NONE:
                if offsets is not None:
                    offsets[piece.place] = produced.base_offset
                self._acked[partition] = piece.next_sequence
            else:
                failed.append(piece)
        return failed

    def drain(self) -> bool:
        """Read the answers still under way, to know the stored batches; False if some can't be read."""
        whole = True
        for link in self.links.values():
            link.take()
            while link.in_flight:
                wave = link.in_flight.popleft()
                try:
                    answers = self.read(link, wave)
                except LogUncertain:
                    whole = False
                    link.in_flight.clear()
                else:
                    self.take_answers(wave, answers, None)
        return whole
