"""One transactional id's producer over raw batches: native transactions of KIP-98 and KIP-890.

With ``transaction.version`` 2, Produce adds partitions by itself, and EndTxn returns a new epoch, so that nothing
that arrives late can belong to a later transaction. Without it AddPartitionsToTxn comes first, and the epoch stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.batches.format import Buffer, next_sequence, patch_parts, read_header
from anabranch.kafka import codes
from anabranch.kafka.calls import PRODUCE, ConnectionBroken
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.codes import NONE, Act, error_for, meaning
from anabranch.kafka.connection import Connection
from anabranch.kafka.coordinator import (
    ANSWER_S,
    BUSY_S,
    PRODUCE_ADDS_FROM,
    Coordinator,
    busy,
    new_pauses,
)
from anabranch.kafka.lost_markers import Open, open_on
from anabranch.kafka.produce import (
    Answers,
    BrokerLink,
    PendingBatch,
    ProducePipeline,
    ProduceRequest,
)
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
    Producer,
    Steps,
    TopicPartition,
    all_steps,
)

log = logging.getLogger("anabranch.kafka")

# More requests under way on one connection don't help: the broker processes one at a time.
MAX_IN_FLIGHT = 5
# How long to wait for a leader that can't append yet, and for partitions without a leader. The whole round waits.
NOT_YET_S = 3.0
LEADER_S = 1.0


class _Tries(NamedTuple):
    """Tries to find leaders. ``down``: brokers that were not reached.

    ``leaders_by``: the end of waiting for leaders, monotonic seconds; after it each leader is asked for once.
    """

    leaders_by: float
    down: dict[int, ConnectionBroken]


@dataclass(slots=True)
class _Sequences:
    """Sequences by partition. ``next``: of the next batch; ``stored``: after the last stored batch."""

    next: dict[TopicPartition, int] = field(default_factory=dict)
    stored: dict[TopicPartition, int] = field(default_factory=dict)

    def rewind(self) -> None:
        """Continue after the last stored batches."""
        self.next = dict(self.stored)

    def restart(self) -> None:
        """Restart at 0 on each partition, for a new epoch."""
        self.next.clear()
        self.stored.clear()


class KafkaProducer(Producer):
    """`anabranch.ports.Producer` on brokers. Only one thread at a time may use it."""

    def __init__(self, cluster: Cluster, transactional_id: str, timeout: float) -> None:
        """Initialise the transactional id; arguments and errors as for `Coordinator`."""
        self._cluster = cluster
        self._id = transactional_id
        # Partitions of the native transaction: added at the coordinator (V1), and appended to.
        self._added: set[TopicPartition] = set()
        self._appended: set[TopicPartition] = set()
        self._used = False
        # Open native transactions without a marker, to be ended when no other one is open.
        self._unmarked: dict[TopicPartition, Open] = {}
        self._awaited: Connection | None = None  # of the last step's request
        self._ended: LogError | None = None  # why this producer is unusable
        self._refusal: LogRefused | None = None  # why the native transaction has to be aborted
        # Whether the native transaction has begun, at the coordinator or by a batch that may be stored.
        self._begun = False
        self._coordinator = Coordinator(cluster, transactional_id, timeout)
        self._pipeline = ProducePipeline(cluster, transactional_id)
        self._sequences = _Sequences()

    @property
    def producer_id(self) -> int:
        """The producer id of its present batches."""
        return self._coordinator.producer_id

    @property
    def producer_epoch(self) -> int:
        """The producer epoch of its present batches."""
        return self._coordinator.producer_epoch

    @property
    def is_v2(self) -> bool:
        """Whether native transactions follow KIP-890."""
        return self._coordinator.is_v2

    # -- the port -----------------------------------------------------------------------------------

    def appending(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> Steps[list[int]]:
        """See `anabranch.ports.Producer`. A broker gets its partitions' first batches in one request, and so on.

        Memory: the given batches, and requests under way, at most `MAX_IN_FLIGHT` times ``max_request_bytes`` per
        broker.
        """
        seen: dict[TopicPartition, int] = {}
        ranks = []
        for partition, _ in batches:
            ranks.append(seen.get(partition, 0))
            seen[partition] = ranks[-1] + 1
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._check_usable()
        try:
            links = self._check_markers(seen)
            if not self.is_v2:
                self._add_partitions(seen)  # all in one request
                links = {}  # meanwhile a connection may have ended
        except LogError as error:
            self._cluster.forget({partition.topic for partition in seen})
            self._after_failure(error)
            raise
        return (yield from self._append(((place, *batches[place]) for place in order), links))

    def append_stream(self, batches: Iterable[tuple[TopicPartition, Buffer]]) -> list[int]:
        """`anabranch.ports.Producer.append_stream`.

        A request is sent when a partition comes a second time, or at ``max_request_bytes``.
        """
        return all_steps(self._append(((at, *one) for at, one in enumerate(batches)), {}))

    def _append(
        self,
        batches: Iterable[tuple[int, TopicPartition, Buffer]],
        links: Mapping[TopicPartition, BrokerLink],
    ) -> Steps[list[int]]:
        """Append batches, each with its place in the result. ``links``: open links to leaders, as far as known."""
        self._check_usable()
        most = self._cluster.settings.max_request_bytes
        offsets: dict[int, int] = {}  # by place
        try:
            for place, partition, batch in batches:
                link = links.get(partition) or self._link(partition)
                if not link.next.has_room(partition, len(batch), most):
                    yield from self._send(link, offsets)
                link.next.add(self._pending(place, partition, batch))
            for link in self._pipeline.links.values():
                yield from self._send(link, offsets)
            for link in self._pipeline.links.values():
                while link.in_flight:
                    self._finish_oldest(link, offsets)
        except BaseException as error:
            self._after_failure(error)
            raise
        return [offsets[place] for place in sorted(offsets)]

    def committing(self) -> Steps[None]:
        self._check_usable()
        if self._begun:
            yield from self._end(commit=True)

    def is_answered(self) -> bool:
        return self._awaited is None or self._awaited.has_arrived()

    def abort(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._refusal = None
        if self._begun:
            all_steps(self._end(commit=False))
        self._end_lost()

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """`anabranch.ports.Producer.check`. If the id had no native transaction, there is nothing to ask."""
        if self._used or self._coordinator.last.known():
            self._check_markers(partitions)

    def _check_markers(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, BrokerLink]:
        """End this producer's open native transactions on the partitions. Returns the links to their leaders."""
        links, unseen = self._reach(partitions)
        for node, places in unseen.items():
            self._find_lost(self._pipeline.links[node], places)
        self._end_lost()
        return links

    def close(self) -> None:
        self._ended = self._ended or LogFenced(f"{self._id}: the producer is closed")
        self._pipeline.close()
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
        """Prevent further sending: either the transaction has to be aborted, or the producer is unusable.

        Raises: LogUnavailable, for a `LogUncertain` that an abort makes harmless.
        """
        self._cluster.forget({partition.topic for partition in self._sequences.next})
        if isinstance(error, LogUnavailable) and not self._begun:
            for link in self._pipeline.links.values():
                link.take()  # none of these were sent
        elif isinstance(error, LogUncertain) and self.is_v2:
            # The abort begins a new epoch: what is still under way can't be stored after it (KIP-890).
            self._drain()
            self._refusal = LogRefused(str(error), 0, error.topics)
        elif isinstance(error, LogFenced | LogUncertain):
            self._ended = error
        elif not isinstance(error, Exception):
            # Interrupted, perhaps in the middle of a request.
            self._ended = LogUncertain(f"{self._id}: an append was interrupted: {error!r}")
        elif not self._drain() and not self.is_v2:
            # Without a new epoch an unknown sequence could make new data look like old.
            self._ended = LogUncertain(f"{self._id}: the appended batches are unknown: {error}")
        elif isinstance(error, LogRefused):
            self._refusal = error
        else:
            # A leader is away, or the caller's generator failed: the transaction is incomplete.
            self._refusal = LogRefused(f"an append was cut short: {error!r}", 0)
        self._sequences.rewind()
        if isinstance(error, LogUncertain) and self._ended is None:
            raise LogUnavailable(str(error), error.topics) from error

    # -- links ------------------------------------------------------------------------------------------

    def _link(self, partition: TopicPartition, tries: _Tries | None = None) -> BrokerLink:
        """The link to the leader, which is connected."""
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
        link = self._pipeline.link(leader.node)
        if not (link.in_flight or link.next.batches):
            highest = PRODUCE.highest if self._coordinator.is_v2 else PRODUCE_ADDS_FROM - 1
            soon = self._cluster.soon(self._cluster.deadline())
            try:
                if leader.node in tries.down:
                    raise tries.down[leader.node]
                self._pipeline.connect(link, soon, highest)
            except ConnectionBroken as error:
                self._cluster.distrust(leader.node)
                tries.down[leader.node] = error
                raise self._unreachable(str(error), partition.topic) from error
        return link

    def _reach(
        self, partitions: Iterable[TopicPartition]
    ) -> tuple[dict[TopicPartition, BrokerLink], dict[int, list[TopicPartition]]]:
        """Connect to all leaders before anything is sent, so that nothing is lost if one can't be reached.

        Each broker is tried once. Returns the links to the leaders, and node -> partitions that were not checked
        since it became their leader.
        """
        failed: dict[str, LogError] = {}
        tries = _Tries(self._cluster.deadline(LEADER_S), {})
        unseen: dict[int, list[TopicPartition]] = {}
        links: dict[TopicPartition, BrokerLink] = {}
        reached: dict[int, BrokerLink] = {}
        for partition in partitions:
            if partition.topic not in failed:
                leader = self._cluster.leader(partition)
                link = reached.get(leader.node) if leader is not None else None
                if link is None or leader is None:
                    try:
                        link = self._link(partition, tries)
                    except LogError as error:
                        failed[partition.topic] = error
                        continue
                    reached[link.node] = link
                    leader = self._cluster.leader(partition)
                links[partition] = link
                if leader is None or link.checked.get(partition) != leader.epoch:
                    unseen.setdefault(link.node, []).append(partition)
        for problem in failed.values():
            problem.topics |= failed.keys()
            raise problem
        return links, unseen

    def _unreachable(self, message: str, topic: str) -> LogError:
        """The error for an append that sent nothing: uncertain if the native transaction has earlier appends."""
        if self._begun:
            return LogUncertain(f"{self._id}: {message}", (topic,))
        return LogUnavailable(f"{self._id}: {message}", (topic,))

    # -- append ---------------------------------------------------------------------------------------

    def _send(self, link: BrokerLink, offsets: dict[int, int]) -> Steps[None]:
        request = link.take()
        if not request.batches:
            return
        new = [partition for partition in request.batches if partition not in self._appended]
        if new:
            # The leader may have to learn first that the partitions are in the transaction. Then this request is
            # sent again, so nothing else may be under way.
            while link.in_flight:
                self._finish_oldest(link, offsets)
            epoch = self._cluster.epoch
            if unseen := [place for place in new if link.checked.get(place) != epoch(place)]:
                self._find_lost(link, unseen)
                if self._unmarked:  # ending one changes the epoch, and this request has the old one
                    raise self._lacking()
            producer_id = self.producer_id
            for partition in new:
                self._cluster.ended.pop((producer_id, partition), None)
            if not self.is_v2:
                self._add_partitions(new)
            first, self._begun, self._used = not self._begun, True, True
            self._appended.update(new)  # from here on an abort has to end what may have arrived
            try:
                yield from self._send_first(link, request, offsets, first)
            except LogBusy:
                self._appended.difference_update(new)
                raise
            return
        while len(link.in_flight) >= MAX_IN_FLIGHT:
            self._finish_oldest(link, offsets)
        self._write(link, request)

    def _send_first(
        self, link: BrokerLink, request: ProduceRequest, offsets: dict[int, int], first: bool
    ) -> Steps[None]:
        """Send a request with new partitions. Send it again for partitions that the transaction can't get yet.

        A step ends after each sending.

        ``first``: nothing else was sent in this native transaction.
        """
        deadline = self._cluster.deadline()
        began = time.monotonic()
        pauses = new_pauses()
        while True:
            self._write(link, request)
            self._awaited = link.connection
            yield
            request, answers = self._read_oldest(link)
            failed = self._take_answers(request, answers, offsets)
            if not failed:
                return
            waited = time.monotonic() - began
            said = {answers[batch.partition].error for batch in failed}
            first &= len(failed) == len(request.batches)
            last = not pauses.ends_by(deadline)
            if first and (last or waited > BUSY_S) and said == {codes.CONCURRENT_TRANSACTIONS}:
                self._begun = False
                raise busy(self._id)
            last |= waited > NOT_YET_S and NOT_ENOUGH_REPLICAS in said
            if error := _failure_of(self._id, failed, answers, last=last):
                raise error
            pauses.sleep()
            request = ProduceRequest({batch.partition: batch for batch in failed})

    def _pending(self, place: int, partition: TopicPartition, batch: Buffer) -> PendingBatch:
        """Put the producer's id and the partition's next sequence into a batch. `LogRefused`: it is malformed."""
        sequence = self._sequences.next.get(partition, 0)
        try:
            parts = patch_parts(
                batch, self._coordinator.producer_id, self._coordinator.producer_epoch, sequence
            )
        except CorruptBatch as error:
            raise LogRefused(f"{self._id}: append: {error}", CORRUPT_MESSAGE) from error
        following = next_sequence(sequence, read_header(parts[0], whole=False).record_count)
        self._sequences.next[partition] = following
        return PendingBatch(partition, parts, following, place)

    def _write(self, link: BrokerLink, request: ProduceRequest) -> None:
        """Send a request. `LogUncertain` if a part of it may have arrived."""
        try:
            self._pipeline.send(link, request, self._cluster.deadline())
        except ConnectionBroken as error:
            raise self._lost(link, request, error) from error

    def _lost(self, link: BrokerLink, request: ProduceRequest, error: Exception) -> LogUncertain:
        """The error for a request whose fate is unknown."""
        self._cluster.distrust(link.node)
        topics = {partition.topic for partition in request.batches}
        return LogUncertain(f"{self._id}: append: {error}", topics)

    def _read_oldest(self, link: BrokerLink) -> tuple[ProduceRequest, Answers]:
        """The oldest request under way, with its answer. `LogUncertain` if it does not come."""
        request = link.take_oldest()
        deadline = min(self._cluster.deadline(), self._cluster.deadline(ANSWER_S))
        try:
            answers = self._pipeline.read(link, request, deadline, self._coordinator.is_replaced)
        except ConnectionBroken as error:
            raise self._lost(link, request, error) from error
        return request, answers

    def _finish_oldest(self, link: BrokerLink, offsets: dict[int, int]) -> None:
        """Read the oldest answer under way. Any error in it ends the append."""
        request, answers = self._read_oldest(link)
        if failed := self._take_answers(request, answers, offsets):
            error = _failure_of(self._id, failed, answers, last=True)
            raise error or LogUncertain(f"{self._id}: append failed")

    def _take_answers(
        self, request: ProduceRequest, answers: Answers, offsets: dict[int, int] | None
    ) -> list[PendingBatch]:
        """Note what was stored. Returns the batches that were not stored."""
        failed = []
        for partition, batch in request.batches.items():
            produced = answers[partition]
            if produced.error == NONE:
                if offsets is not None:
                    offsets[batch.place] = produced.base_offset
                self._sequences.stored[partition] = batch.next_sequence
            else:
                failed.append(batch)
        return failed

    def _drain(self) -> bool:
        """Read the answers under way, to know which batches are stored. False: some answers can't be read."""
        whole = True
        for link in self._pipeline.links.values():
            link.take()
            while link.in_flight:
                try:
                    request, answers = self._read_oldest(link)
                except LogUncertain:
                    whole = False
                    link.in_flight.clear()
                else:
                    self._take_answers(request, answers, None)
        return whole

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

    def _find_lost(self, link: BrokerLink, partitions: Sequence[TopicPartition]) -> None:
        """Find this producer's open native transactions on these partitions, except the present transaction."""
        deadline = self._cluster.soon(self._cluster.deadline())
        try:
            found = open_on(link.open(), self.producer_id, partitions, deadline)
        except ConnectionBroken as error:
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
        """End open transactions without markers, as they were decided, by a native transaction without events."""
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
                self._link(partition).checked.pop(partition, None)  # check again
                why = f"{what}, and how that ended is not known any more: see docs/runbook.md"
                raise LogUnavailable(why, (partition.topic,))
            try:
                self._add_partitions([partition])
            except LogBusy:
                continue  # its markers are being written
            except LogUncertain as error:
                # The commit may have been accepted, and an abort would undo the decision.
                self._ended = error
                all_steps(self._end(commit=commit))
                raise
            all_steps(self._end(commit=commit))
            log.warning("%s: it is ended, %s", what, "committed" if commit else "aborted")

    def _end(self, *, commit: bool) -> Steps[None]:
        producer_id = self.producer_id
        places = [(producer_id, partition) for partition in self._appended]
        try:
            for _ in self._coordinator.end(commit=commit):
                self._awaited = self._coordinator.connection
                yield
        except (LogFenced, LogUncertain) as error:
            self._ended = error
            raise
        ended = self._cluster.ended
        ended.update(dict.fromkeys(places, commit))
        if self.producer_id != producer_id:  # the former id's epochs are used up
            for place in [place for place in list(ended) if place[0] == producer_id]:
                ended.pop(place, None)
        if self.is_v2:
            self._sequences.restart()
        self._begun = False
        self._added.clear()
        self._appended.clear()


def _failure_of(
    who: str, failed: Iterable[PendingBatch], answers: Answers, *, last: bool
) -> LogError | None:
    """The worst error of the failed batches of a transactional append. None: all of them may be sent again.

    ``last``: they may not be sent again.
    """
    errors: list[LogError] = []
    for batch in failed:
        produced = answers[batch.partition]
        meant = meaning(codes.PRODUCE_CODES, produced.error)
        if meant.act in (Act.RETRY, Act.REFRESH):
            if not last:
                continue
            # This error precedes the append; others may follow it.
            refused = produced.error == NOT_ENOUGH_REPLICAS
            meant = meant._replace(act=Act.REFUSED if refused else Act.UNCERTAIN)
        topic = batch.partition.topic
        what = f"{who}: append to {topic}[{batch.partition.partition}]"
        errors.append(error_for(meant, produced.error, what, produced.message, (topic,)))
    worst = next(
        (e for kind in (LogFenced, LogUncertain) for e in errors if isinstance(e, kind)),
        errors[0] if errors else None,
    )
    if worst is not None:
        worst.topics = frozenset().union(*(e.topics for e in errors if isinstance(e, type(worst))))
    return worst
