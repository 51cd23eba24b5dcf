"""One transactional id's producer over raw batches: native transactions of KIP-98 and KIP-890.

With ``transaction.version`` 2, Produce adds partitions by itself and EndTxn gives a new
epoch, so that nothing sent late can hit a later transaction. Else AddPartitionsToTxn comes first and the
epoch stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from anabranch.batches.format import Buffer, next_sequence, patch_parts, read_header
from anabranch.kafka.link import Answers, Link, Piece, Wave, failure_of
from anabranch.kafka.wire import codes, data
from anabranch.kafka.wire.calls import PRODUCE
from anabranch.kafka.wire.cluster import Cluster
from anabranch.kafka.wire.codes import NONE
from anabranch.kafka.wire.connection import ConnectionBroken
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
# How long to wait for a leader, or for one that can't append yet; the whole round waits with it.
LEADER_S = 1.0
NOT_YET_S = 3.0


class KafkaProducer:
    """`anabranch.ports.Producer` on brokers. Made by `KafkaLog.producer`; one thread at a time."""

    def __init__(self, cluster: Cluster, transactional_id: str, timeout: float) -> None:
        """Initialise the transactional id (``timeout`` in seconds, of one native transaction).

        Raises:
            LogBusy: the markers of its last native transaction can't be written.
            LogUnavailable: no coordinator until the deadline.
            LogRefused: the broker does not allow the id or the timeout.
        """
        self._cluster = cluster
        self._id = transactional_id
        self._links: dict[int, Link] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._acked: dict[TopicPartition, int] = {}
        # The native transaction's partitions: added at the coordinator (V1), and appended to.
        self._added: set[TopicPartition] = set()
        self._appended: set[TopicPartition] = set()
        self._begun = self._used = False
        self._unmarked: dict[TopicPartition, Open] = {}  # to be ended when no transaction is open
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
        """`anabranch.ports.Producer.append`: one request for the n-th batches of a broker's partitions.

        Memory: the requests under way, at most `MAX_IN_FLIGHT` times ``max_request_bytes`` per broker, besides
        the given batches.
        """
        seen: dict[TopicPartition, int] = {}
        ranks = []
        for partition, _ in batches:
            ranks.append(seen.get(partition, 0))
            seen[partition] = ranks[-1] + 1
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._check_usable()
        try:
            self._look(seen)
            if not self.is_v2:
                self._add_partitions(seen)  # all in one request
        except LogError as error:
            self._cluster.forget({partition.topic for partition in seen})
            self._after_failure(error)
            raise
        offsets = self._append((batches[index] for index in order), self.is_v2)
        return [offset for _, offset in sorted(zip(order, offsets, strict=True))]

    def append_stream(self, batches: Iterable[tuple[TopicPartition, Buffer]]) -> list[int]:
        """Like `append`, for batches made while earlier ones are on their way.

        A request goes out when a partition comes a second time, or at ``max_request_bytes``.
        """
        return self._append(batches, False)

    def _append(self, batches: Iterable[tuple[TopicPartition, Buffer]], reached: bool) -> list[int]:
        self._check_usable()
        most = self._cluster.settings.max_request_bytes
        offsets: list[int] = []
        try:
            for index, (partition, batch) in enumerate(batches):
                offsets.append(-1)
                link = self._link(partition, reached)
                if not link.gathering.has_room(partition, len(batch), most):
                    self._send(link, offsets)
                link.gathering.add(self._piece(index, partition, batch))
            for link in self._links.values():
                self._send(link, offsets)
            for link in self._links.values():
                while link.in_flight:
                    self._finish_oldest(link, offsets)
        except BaseException as error:
            self._after_failure(error)
            raise
        return offsets

    def commit(self) -> None:
        self._check_usable()
        if self._begun:
            self._end(commit=True)

    def abort(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._refusal = None
        if self._begun:
            self._end(commit=False)
        self._end_lost()

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """`anabranch.ports.Producer.check`; an id without a native transaction has nothing to ask."""
        if self._used or self._coordinator.last.known():
            self._look(partitions)

    def _look(self, partitions: Iterable[TopicPartition]) -> None:
        for node, unseen in self._reach(partitions).items():
            self._find_lost(self._links[node], unseen)
        self._end_lost()

    def close(self) -> None:
        self._ended = self._ended or LogFenced(f"{self._id}: the producer is closed")
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._coordinator.close()

    # -- state ----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended)) from self._ended
        if self._refusal is not None:
            raise LogRefused(
                f"abort first, the native transaction lacks the refused batches: {self._refusal}",
                self._refusal.error,
                self._refusal.topics,
            )

    def _after_failure(self, error: BaseException) -> None:
        """Send nothing again: either the transaction has to be aborted, or the producer is over."""
        self._cluster.forget({partition.topic for partition in self._sequences})
        if isinstance(error, LogUnavailable) and not self._begun:
            for link in self._links.values():
                link.take()  # none of these were sent
        elif isinstance(error, LogError) and not isinstance(error, LogRefused):
            self._ended = error
        elif not isinstance(error, Exception):
            # An interrupt, perhaps in the middle of a request.
            self._ended = LogUncertain(f"{self._id}: an append was interrupted: {error!r}")
        elif not self._drain() and not self.is_v2:
            # Without a new epoch an unknown sequence could make new data look like old.
            self._ended = LogUncertain(f"{self._id}: the appended batches are unknown: {error}")
        elif isinstance(error, LogRefused):
            self._refusal = error
        else:
            # The caller's own generator failed: the transaction is not whole.
            self._refusal = LogRefused(f"an append was cut short: {error!r}", 0)
        self._sequences = dict(self._acked)

    def _drain(self) -> bool:
        """Read the answers still under way, to know the stored batches; False if some can't be read."""
        whole = True
        for link in self._links.values():
            link.take()
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

    def _piece(self, index: int, partition: TopicPartition, batch: Buffer) -> Piece:
        sequence = self._sequences.get(partition, 0)
        try:
            parts = patch_parts(batch, self.producer_id, self.producer_epoch, sequence)
        except CorruptBatch as error:
            raise LogRefused(f"{self._id}: append: {error}", CORRUPT_MESSAGE) from error
        following = next_sequence(sequence, read_header(parts[0], whole=False).record_count)
        self._sequences[partition] = following
        return Piece(partition, parts, following, index)

    def _reach(self, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """Connect to the leaders of all these before anything is sent: an unreachable one costs nothing.

        Returns node -> partitions that were not looked at since it leads them.
        """
        failed: dict[str, LogError] = {}
        unseen: dict[int, list[TopicPartition]] = {}
        links: dict[int, Link] = {}  # known to be open
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

    def _link(self, partition: TopicPartition, reached: bool = False) -> Link:
        """The way to the leader. ``reached``: it was found to be open just now."""
        leader = self._cluster.leader(partition)
        if leader is None:
            deadline = self._cluster.deadline(LEADER_S)
            leader = self._cluster.leaders((partition,), deadline)[partition]
        link = self._links.get(leader.node) or self._links.setdefault(
            leader.node, Link(leader.node)
        )
        if not (link.in_flight or link.gathering.pieces or (reached and link.connection)):
            highest = PRODUCE.highest if self.is_v2 else PRODUCE_ADDS_FROM - 1
            try:
                link.connect(self._cluster, self._cluster.deadline(), highest)
            except ConnectionBroken as error:
                self._cluster.distrust(leader.node)
                raise self._unreachable(str(error), partition.topic) from error
        return link

    def _unreachable(self, message: str, topic: str) -> LogError:
        """The error for an append that sent nothing there; earlier appends of the transaction would lack it."""
        if self._begun:
            return LogUncertain(f"{self._id}: {message}", (topic,))
        return LogUnavailable(f"{self._id}: {message}", (topic,))

    def _send(self, link: Link, offsets: list[int]) -> None:
        wave = link.take()
        if not wave.pieces:
            return
        new = [partition for partition in wave.pieces if partition not in self._appended]
        if new:
            # The leader may have to wait until it can tell that they are in the transaction, and be asked
            # again; so nothing else may be under way.
            while link.in_flight:
                self._finish_oldest(link, offsets)
            epoch = self._cluster.epoch
            if unseen := [place for place in new if link.checked.get(place) != epoch(place)]:
                self._find_lost(link, unseen)
                if self._unmarked:  # ending it changes the epoch, these have the old one
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
            self._finish_oldest(link, offsets)
        self._write(link, wave)
        link.in_flight.append(wave)

    def _write(self, link: Link, wave: Wave) -> None:
        try:
            link.send(self._cluster, wave, self._id, self._cluster.deadline())
        except ConnectionBroken as error:
            raise self._lost(link, wave, error) from error

    def _lost(self, link: Link, wave: Wave, error: Exception) -> LogUncertain:
        """The error for a wave whose fate is unknown."""
        self._cluster.distrust(link.node)
        topics = {partition.topic for partition in wave.pieces}
        return LogUncertain(f"{self._id}: append: {error}", topics)

    def _read(self, link: Link, wave: Wave) -> Answers:
        deadline = min(self._cluster.deadline(), self._cluster.deadline(ANSWER_S))
        try:
            return link.read(self._cluster, wave, deadline, self._coordinator.moved)
        except (ConnectionBroken, data.MalformedAnswer) as error:
            raise self._lost(link, wave, error) from error

    def _finish_oldest(self, link: Link, offsets: list[int]) -> None:
        """Read the oldest answer under way; any error in it ends the append."""
        wave = link.in_flight.popleft()
        answers = self._read(link, wave)
        if failed := self._take_answers(wave, answers, offsets):
            error = failure_of(self._id, failed, answers, last=True)
            raise error or LogUncertain(f"{self._id}: append failed")

    def _take_answers(self, wave: Wave, answers: Answers, offsets: list[int] | None) -> list[Piece]:
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

    def _send_first(self, link: Link, wave: Wave, offsets: list[int], first: bool) -> None:
        """Send a wave with new partitions; send those again that can't be added yet.

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
            if error := failure_of(self._id, failed, answers, last=last):
                raise error
            time.sleep(pause)
            pause = min(pause * PAUSE_GROWTH, LAST_PAUSE_S)
            wave = Wave({piece.partition: piece for piece in failed})

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

    def _find_lost(self, link: Link, partitions: Sequence[TopicPartition]) -> None:
        """Find this producer's open native transactions there, beside the one in hand."""
        deadline = self._cluster.soon(self._cluster.deadline())
        try:
            found = open_on(link.open(), self.producer_id, partitions, deadline)
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
        """End open transactions that lack markers, as decided: a native transaction without events does so."""
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
            # A new epoch starts with sequence 0 on each partition.
            self._sequences.clear()
            self._acked.clear()
        self._begun = False
        self._added.clear()
        self._appended.clear()
