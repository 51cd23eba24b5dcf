"""One transactional id's producer over raw batches: native transactions of KIP-98 and KIP-890.

Where the cluster has ``transaction.version`` 2, Produce adds partitions by itself and EndTxn gives a new
epoch, so that nothing sent late can hit a later transaction. Else AddPartitionsToTxn comes first and the
epoch stays.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from anabranch.batches.format import Buffer, next_sequence, patch_parts, read_header
from anabranch.kafka.wire import codes, data
from anabranch.kafka.wire.calls import PRODUCE
from anabranch.kafka.wire.cluster import Cluster
from anabranch.kafka.wire.codes import NONE, Act, error_for, meaning
from anabranch.kafka.wire.connection import Connection, ConnectionBroken
from anabranch.kafka.wire.coordinator import (
    ANSWER_S,
    BUSY_S,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    PAUSE_GROWTH,
    PRODUCE_ADDS_FROM,
    Coordinator,
    busy,
)
from anabranch.kafka.wire.lost_markers import Open, open_on
from anabranch.kafka.wire.produce import read_produced, send_produce
from anabranch.ports import (
    CORRUPT_MESSAGE,
    NOT_ENOUGH_REPLICAS,
    CorruptBatch,
    LogBusy,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicPartition,
)

log = logging.getLogger("anabranch.kafka")

# More requests under way on one connection don't help: the broker takes them one at a time.
MAX_IN_FLIGHT = 5
# How long a leader is waited for, and a leader that can't append yet; everybody waits with it.
LEADER_S = 1.0
NOT_YET_S = 3.0


@dataclass(slots=True)
class _Piece:
    """One batch on its way; ``index`` is its place in the caller's list."""

    index: int
    partition: TopicPartition
    parts: tuple[Buffer, Buffer]
    next_sequence: int


@dataclass(slots=True)
class _Wave:
    """One Produce request: at most one batch per partition (the broker's rule)."""

    pieces: dict[TopicPartition, _Piece]
    size: int = 0
    correlation: int = -1


@dataclass(slots=True)
class _Link:
    """A broker that leads some of the partitions, and the requests under way to it."""

    node: int
    connection: Connection
    version: int
    gathering: _Wave
    in_flight: deque[_Wave]
    checked: dict[TopicPartition, int] = field(default_factory=dict)  # under which leader epoch


class KafkaProducer:
    """See `anabranch.ports.Producer`. Made by `KafkaLog.producer`; one thread at a time."""

    def __init__(self, cluster: Cluster, transactional_id: str, timeout: float) -> None:
        """Initialise the transactional id (``timeout`` in seconds, of one native transaction).

        Raises:
            LogBusy: the markers of its last native transaction can't be written.
            LogUnavailable: no coordinator until the deadline.
            LogRefused: the broker does not allow the id or the timeout.
        """
        self._cluster = cluster
        self._id = transactional_id
        self._links: dict[int, _Link] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._acked: dict[TopicPartition, int] = {}
        # Of the native transaction: added at the coordinator (V1), and appended to.
        self._added: set[TopicPartition] = set()
        self._appended: set[TopicPartition] = set()
        self._begun = self._used = False
        self._unmarked: dict[TopicPartition, Open] = {}  # to be ended as soon as nothing is begun
        self._ended: LogError | None = None
        self._refusal: LogRefused | None = None
        self._coordinator = Coordinator(cluster, transactional_id, timeout)

    @property
    def producer_id(self) -> int:
        """The id that its batches carry now."""
        return self._coordinator.producer_id

    @property
    def producer_epoch(self) -> int:
        """The epoch that its batches carry now."""
        return self._coordinator.producer_epoch

    @property
    def is_v2(self) -> bool:
        """Whether the native transactions are those of KIP-890."""
        return self._coordinator.is_v2

    # -- the port -----------------------------------------------------------------------------------

    def append(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> list[int]:
        """See `anabranch.ports.Producer.append`.

        The n-th batches of all partitions of a broker go into one request. Memory: the requests under
        way, at most `MAX_IN_FLIGHT` times ``max_request_bytes`` per broker, besides the given batches.
        """
        seen: dict[TopicPartition, int] = {}
        ranked = []
        for index, (partition, _) in enumerate(batches):
            rank = seen.get(partition, 0)
            seen[partition] = rank + 1
            ranked.append((rank, index))
        ranked.sort()
        order = [index for _, index in ranked]
        self._check_usable()
        try:
            self._look(seen)
            if not self.is_v2:
                self._add_partitions(seen)  # all in one request
        except LogError as error:
            self._cluster.forget({partition.topic for partition in seen})
            self._after_failure(error)
            raise
        offsets = self.append_stream(batches[index] for index in order)
        result = [0] * len(order)
        for index, offset in zip(order, offsets, strict=True):
            result[index] = offset
        return result

    def append_stream(self, batches: Iterable[tuple[TopicPartition, Buffer]]) -> list[int]:
        """Like `append`, of batches that are made while earlier ones are on their way.

        A request goes out when a partition comes a second time, or at ``max_request_bytes``.
        """
        self._check_usable()
        offsets: list[int] = []
        try:
            for index, (partition, batch) in enumerate(batches):
                offsets.append(-1)
                self._gather(index, partition, batch, offsets)
            for link in self._links.values():
                self._send(link, offsets)
            for link in self._links.values():
                while link.in_flight:
                    self._settle(link, offsets)
        except BaseException as error:
            self._after_failure(error)
            raise
        return offsets

    def commit(self) -> None:
        """See `anabranch.ports.Producer.commit`."""
        self._check_usable()
        if self._begun:
            self._end(commit=True)

    def abort(self) -> None:
        """See `anabranch.ports.Producer.abort`."""
        if self._ended is not None:
            raise self._ended
        self._refusal = None
        if self._begun:
            self._end(commit=False)
        self._end_lost()

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """See `anabranch.ports.Producer.check`. Of an id that is not used there is nothing to ask."""
        if self._used or self._coordinator.last.known():
            self._look(partitions)

    def _look(self, partitions: Iterable[TopicPartition]) -> None:
        for node, unseen in self._reach(partitions).items():
            self._find_lost(self._links[node], unseen)
        self._end_lost()

    def close(self) -> None:
        """See `anabranch.ports.Producer.close`."""
        self._ended = self._ended or LogFenced(f"{self._id}: the producer is closed")
        for link in self._links.values():
            link.connection.close()
        self._links.clear()
        self._coordinator.close()

    # -- state ----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended)) from self._ended
        if self._refusal is not None:
            raise LogRefused(
                f"abort first, the native transaction lacks what was refused: {self._refusal}",
                self._refusal.error,
                self._refusal.topics,
            )

    def _after_failure(self, error: BaseException) -> None:
        """Nothing is sent again: either the transaction has to be aborted, or the producer is over."""
        self._cluster.forget({partition.topic for partition in self._sequences})
        if isinstance(error, LogUnavailable) and not self._begun:
            for link in self._links.values():
                link.gathering = _Wave({})  # nothing of it was sent
        elif isinstance(error, LogError) and not isinstance(error, LogRefused):
            self._ended = error
        elif not isinstance(error, Exception):
            # An interrupt, perhaps in the middle of a request.
            self._ended = LogUncertain(f"{self._id}: an append was interrupted: {error!r}")
        elif not self._drain() and not self.is_v2:
            # Without a new epoch a sequence that is not known could make new data look like old.
            self._ended = LogUncertain(f"{self._id}: what was appended is not known: {error}")
        elif isinstance(error, LogRefused):
            self._refusal = error
        else:
            # The caller's own generator failed: the transaction is not whole.
            self._refusal = LogRefused(f"an append was cut short: {error!r}", 0)
        self._sequences = dict(self._acked)

    def _drain(self) -> bool:
        """Read the answers still under way, for what was stored; False if some can't be read."""
        whole = True
        for link in self._links.values():
            link.gathering = _Wave({})
            while link.in_flight:
                wave = link.in_flight.popleft()
                try:
                    answers = self._read(link, wave)
                except LogUncertain:
                    whole = False
                    link.in_flight.clear()
                else:
                    self._take_answers(wave, answers, None)
        return whole

    # -- append ---------------------------------------------------------------------------------------

    def _gather(
        self, index: int, partition: TopicPartition, batch: Buffer, offsets: list[int]
    ) -> None:
        link = self._link(partition)
        wave = link.gathering
        if partition in wave.pieces or (
            wave.pieces and wave.size + len(batch) > self._cluster.settings.max_request_bytes
        ):
            self._send(link, offsets)
            wave = link.gathering
        sequence = self._sequences.get(partition, 0)
        try:
            parts = patch_parts(batch, self.producer_id, self.producer_epoch, sequence)
        except CorruptBatch as error:
            raise LogRefused(f"{self._id}: append: {error}", CORRUPT_MESSAGE) from error
        following = next_sequence(sequence, read_header(parts[0], whole=False).record_count)
        self._sequences[partition] = following
        wave.pieces[partition] = _Piece(index, partition, parts, following)
        wave.size += len(batch)

    def _reach(self, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """Connect to the leaders of all these, before anything is sent: what can't be reached costs nothing.

        Node -> those that were not looked at since it leads them.
        """
        failed: dict[str, LogError] = {}
        unseen: dict[int, list[TopicPartition]] = {}
        links: dict[int, _Link] = {}  # found to be open just now
        for partition in partitions:
            if partition.topic not in failed:
                leader = self._cluster.leader(partition)
                link = links.get(leader.node) if leader is not None else None
                if link is None or leader is None:
                    try:
                        link = self._link(partition)
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

    def _link(self, partition: TopicPartition) -> _Link:
        leader = self._cluster.leader(partition)
        if leader is None:
            deadline = self._cluster.deadline(LEADER_S)
            leader = self._cluster.leaders((partition,), deadline)[partition]
        link = self._links.get(leader.node)
        if link is not None and (
            link.in_flight or link.gathering.pieces or link.connection.usable()
        ):
            return link
        deadline = self._cluster.deadline()
        try:
            connection = self._cluster.open(self._cluster.address(leader.node), deadline)
        except ConnectionBroken as error:
            self._cluster.distrust(leader.node)
            raise self._unreachable(str(error), partition.topic) from error
        version = connection.version(
            PRODUCE, PRODUCE.highest if self.is_v2 else PRODUCE_ADDS_FROM - 1
        )
        gathering = link.gathering if link is not None else _Wave({})
        link = _Link(leader.node, connection, version, gathering, deque())
        self._links[leader.node] = link
        return link

    def _unreachable(self, message: str, topic: str) -> LogError:
        """Nothing of this append was sent there; but what was appended before would lack it."""
        if self._begun:
            return LogUncertain(f"{self._id}: {message}", (topic,))
        return LogUnavailable(f"{self._id}: {message}", (topic,))

    def _send(self, link: _Link, offsets: list[int]) -> None:
        wave = link.gathering
        if not wave.pieces:
            return
        link.gathering = _Wave({})
        new = [partition for partition in wave.pieces if partition not in self._appended]
        if new:
            # The leader may have to wait until it can tell that they are in the transaction, and be asked
            # again; so nothing else may be under way.
            while link.in_flight:
                self._settle(link, offsets)
            epoch = self._cluster.epoch
            if unseen := [place for place in new if link.checked.get(place) != epoch(place)]:
                self._find_lost(link, unseen)
                if self._unmarked:  # to end it gives another epoch than these batches have
                    raise self._lacking()
            for partition in new:
                self._cluster.ended.pop((self.producer_id, partition), None)
            if not self.is_v2:
                self._add_partitions(new)
            first, self._begun, self._used = not self._begun, True, True
            self._send_first(link, wave, offsets, first)
            self._appended.update(new)
            return
        while len(link.in_flight) >= MAX_IN_FLIGHT:
            self._settle(link, offsets)
        self._write(link, wave)
        link.in_flight.append(wave)

    def _write(self, link: _Link, wave: _Wave) -> None:
        batches = {partition: piece.parts for partition, piece in wave.pieces.items()}
        try:
            wave.correlation = send_produce(
                self._cluster,
                link.connection,
                link.version,
                self._id,
                batches,
                self._cluster.deadline(),
            )
        except ConnectionBroken as error:
            raise self._lost(link, wave, error) from error

    def _lost(self, link: _Link, wave: _Wave, error: Exception) -> LogUncertain:
        """It is not known what became of a wave."""
        self._cluster.distrust(link.node)
        topics = {partition.topic for partition in wave.pieces}
        return LogUncertain(f"{self._id}: append: {error}", topics)

    def _read(self, link: _Link, wave: _Wave) -> dict[TopicPartition, data.Produced]:
        try:
            return read_produced(
                self._cluster,
                link.connection,
                link.version,
                wave.correlation,
                wave.pieces.keys(),
                min(self._cluster.deadline(), self._cluster.deadline(ANSWER_S)),
            )
        except (ConnectionBroken, data.MalformedAnswer) as error:
            raise self._lost(link, wave, error) from error

    def _settle(self, link: _Link, offsets: list[int]) -> None:
        """Read the oldest answer under way; any error in it ends the append."""
        wave = link.in_flight.popleft()
        answers = self._read(link, wave)
        failed = self._take_answers(wave, answers, offsets)
        if failed:
            error = self._failure(failed, answers, last=True)
            raise error or LogUncertain(f"{self._id}: append failed")

    def _take_answers(
        self, wave: _Wave, answers: dict[TopicPartition, data.Produced], offsets: list[int] | None
    ) -> list[_Piece]:
        failed = []
        for partition, piece in wave.pieces.items():
            produced = answers[partition]
            if produced.error == NONE:
                if offsets is not None:
                    offsets[piece.index] = produced.base_offset
                self._acked[partition] = piece.next_sequence
            else:
                failed.append(piece)
        return failed

    def _send_first(self, link: _Link, wave: _Wave, offsets: list[int], first: bool) -> None:
        """Send a wave with new partitions; those that can't be added yet are sent again.

        ``first``: nothing else was sent in this native transaction.
        """
        deadline = self._cluster.deadline()
        began = time.monotonic()
        pause = FIRST_PAUSE_S
        while True:
            self._write(link, wave)
            answers = self._read(link, wave)
            failed = self._take_answers(wave, answers, offsets)
            if not failed:
                return
            waited = time.monotonic() - began
            said = {answers[piece.partition].error for piece in failed}
            first &= len(failed) == len(wave.pieces)
            last = time.monotonic() + pause > deadline
            if first and (last or waited > BUSY_S) and said == {codes.CONCURRENT_TRANSACTIONS}:
                self._begun = False
                raise busy(self._id)
            last |= waited > NOT_YET_S and NOT_ENOUGH_REPLICAS in said
            error = self._failure(failed, answers, last=last)
            if error is not None:
                raise error
            time.sleep(pause)
            pause = min(pause * PAUSE_GROWTH, LAST_PAUSE_S)
            wave = _Wave({piece.partition: piece for piece in failed})

    def _failure(
        self, failed: list[_Piece], answers: dict[TopicPartition, data.Produced], *, last: bool
    ) -> LogError | None:
        """The worst of what the answers say; None if all may be sent again (not if ``last``)."""
        errors: list[LogError] = []
        for piece in failed:
            produced = answers[piece.partition]
            meant = meaning(codes.PRODUCE_CODES, produced.error)
            if meant.act in (Act.RETRY, Act.REFRESH):
                if not last:
                    continue
                # The one is checked before the append; of the others it can't be told.
                refused = produced.error == NOT_ENOUGH_REPLICAS
                meant = meant._replace(act=Act.REFUSED if refused else Act.UNCERTAIN)
            topic = piece.partition.topic
            what = f"{self._id}: append to {topic}[{piece.partition.partition}]"
            errors.append(error_for(meant, produced.error, what, produced.message, (topic,)))
        worst = next(
            (e for kind in (LogFenced, LogUncertain) for e in errors if isinstance(e, kind)),
            errors[0] if errors else None,
        )
        if worst is not None:
            worst.topics = frozenset().union(
                *(e.topics for e in errors if isinstance(e, type(worst)))
            )
        return worst

    # -- the coordinator ------------------------------------------------------------------------------

    def _add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        new = [partition for partition in partitions if partition not in self._added]
        if new:
            first, self._begun = not self._begun, True
            try:
                self._coordinator.add_partitions(new)
            except LogBusy:
                self._begun = not first
                raise
            self._added.update(new)

    def _find_lost(self, link: _Link, partitions: Sequence[TopicPartition]) -> None:
        """Find this producer's open native transactions there, beside the one in hand."""
        deadline = self._cluster.soon(self._cluster.deadline())
        try:
            found = open_on(link.connection, self.producer_id, partitions, deadline)
        except (ConnectionBroken, data.MalformedAnswer) as error:
            self._cluster.distrust(link.node)
            raise self._unreachable(str(error), partitions[0].topic) from error
        for partition in partitions:
            link.checked[partition] = self._cluster.epoch(partition)
            if partition in found and partition not in self._appended:
                self._unmarked[partition] = found[partition]

    def _lacking(self) -> LogRefused:
        places = ", ".join(f"{topic}[{number}]" for topic, number in self._unmarked)
        what = f"{self._id}: abort first, to end what lacks a marker in {places}"
        topics = {partition.topic for partition in self._unmarked}
        return LogRefused(what, codes.CONCURRENT_TRANSACTIONS, topics)

    def _end_lost(self) -> None:
        """End what lacks its marker as it was decided: a native transaction without events ends it, too."""
        while self._unmarked:
            partition, lost = next(iter(self._unmarked.items()))
            if self._begun:
                raise self._lacking()
            del self._unmarked[partition]
            what = f"{self._id}: {partition.topic}[{partition.partition}] lacks a marker from {lost.first} on"
            commit = self._cluster.ended.get((self.producer_id, partition))
            if commit is None and self.is_v2:
                commit = self._coordinator.last.of(lost.epoch)
            if commit is None:
                self._link(partition).checked.pop(partition, None)  # look again
                why = f"{what}, and how that ended is not known any more: see docs/runbook.md"
                raise LogUnavailable(why, (partition.topic,))
            try:
                self._add_partitions([partition])
            except LogBusy:
                continue  # its markers are on their way
            self._end(commit=commit)
            log.warning("%s: it is ended, %s", what, "committed" if commit else "aborted")

    def _end(self, *, commit: bool) -> None:
        places = [(self.producer_id, partition) for partition in self._appended]
        try:
            self._coordinator.end(commit=commit)
        except (LogFenced, LogUncertain) as error:
            self._ended = error
            raise
        self._cluster.ended.update(dict.fromkeys(places, commit))
        if self.is_v2:
            # A new epoch starts at 0 everywhere.
            self._sequences.clear()
            self._acked.clear()
        self._begun = False
        self._added.clear()
        self._appended.clear()
