"""Sends batches outside of native transactions without waiting for a broker.

Answers to earlier requests are read when they have arrived. A broker that is away or frozen only affects the
batches for it: they are kept for a while, then dropped. A batch in doubt is sent again, so it may arrive twice.
Acknowledgement by the leader is enough (acks=1): a batch lost with the leader is lost like a dropped one, too few
replicas stop nothing, and a request does not wait for the slowest replica.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from anabranch.kafka import codes
from anabranch.kafka.calls import ConnectionBroken
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.codes import NONE, UNKNOWN_TOPIC_ID, Act, error_for, meaning
from anabranch.kafka.health import Use
from anabranch.kafka.produce import BrokerLink, PendingBatch, ProducePipeline, ProduceRequest
from anabranch.ports import (
    UNKNOWN_TOPIC_OR_PARTITION,
    Failed,
    LogError,
    LogRefused,
    TopicGone,
    TopicPartition,
)

log = logging.getLogger("anabranch.kafka")

ACKS_LEADER = 1
# Limits for batches that can't be sent.
KEPT_S = 5.0
KEPT_BYTES = 8 << 20
# Limit of bytes under way to one broker: about what system buffers take for a frozen one.
MAX_IN_FLIGHT = 5
IN_FLIGHT_BYTES = 256 << 10
ANSWER_S = 2.0  # a broker that is silent for this long counts as frozen
CALL_S = 0.5  # the caller's time for a connection or for metadata
ASK_AGAIN_S = 0.25
_ANY = -1  # key for any broker, when metadata are requested
_NEVER: tuple[float, LogError | None] = 0.0, None


class Sender:
    """`anabranch.ports.Log.send` on brokers. One thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pipeline = ProducePipeline(cluster, acks=ACKS_LEADER)
        self._kept: list[PendingBatch] = []  # batches that are not under way
        # Partition without a leader that answers -> when to ask again, and the reason.
        self._asked: dict[TopicPartition, tuple[float, LogError | None]] = {}
        self._topic_ids: dict[str, bytes] = {}

    def send(self, batches: Sequence[tuple[TopicPartition, bytes]], failed: Failed) -> bool:
        if not (
            batches or self._kept or any(link.in_flight for link in self._pipeline.links.values())
        ):
            return False
        now = time.monotonic()
        for link in self._pipeline.links.values():
            self._read_answers(link, now, failed)
        waiting = [
            *self._kept,
            *(PendingBatch(place, (batch,), since=now) for place, batch in batches),
        ]
        self._kept = []
        self._cluster.confirm_leaders({batch.partition.topic for batch in waiting})
        self._find_leaders({batch.partition for batch in waiting}, now)
        for batch in waiting:
            self._place(batch, now, failed)
        for link in list(self._pipeline.links.values()):
            if link.next.batches:
                self._write(link)
        self._drop_most()
        return bool(self._kept)

    def close(self) -> None:
        self._pipeline.close()

    # -- requests ---------------------------------------------------------------------------------------

    def _find_leaders(self, places: Iterable[TopicPartition], now: float) -> None:
        """Now and then look for leaders that are not known, or that do not answer."""
        lost = [
            place
            for place in places
            if self._leader(place) is None and now >= self._asked.get(place, _NEVER)[0]
        ]
        if not lost or self._cluster.health.is_skipped(Use.FIND_LEADERS, _ANY):
            return
        self._cluster.forget({place.topic for place in lost})
        failed: dict[TopicPartition, LogError] = {}
        try:
            self._cluster.groups(lost, self._cluster.deadline(CALL_S), failed)
            self._cluster.health.serves(Use.FIND_LEADERS, _ANY)
        except LogError as error:
            log.warning("leaders can't be asked for: %s", error)
            self._cluster.health.skip(Use.FIND_LEADERS, _ANY)
        again = time.monotonic() + ASK_AGAIN_S
        self._asked.update({place: (again, failed.get(place)) for place in lost})

    def _leader(self, place: TopicPartition) -> int | None:
        """The broker to send to, if it is known and not silent."""
        leader = self._cluster.leader(place)
        return (
            None
            if leader is None or self._cluster.health.is_skipped(Use.SEND, leader.node)
            else leader.node
        )

    def _place(self, batch: PendingBatch, now: float, failed: Failed) -> None:
        """Put a batch into the next request to its leader, or keep it, or drop it."""
        place = batch.partition
        node = self._leader(place)
        why = self._asked.get(place, _NEVER)[1] if node is None else None
        if isinstance(why, LogRefused):
            failed[place] = why
        elif now - batch.since > KEPT_S:
            if why is not None:
                failed[place] = why
        elif node is None:
            self._kept.append(batch)
        elif self._is_replaced(place.topic):
            what = f"topic {place.topic} was deleted and created again"
            failed[place] = TopicGone(what, place.topic)
        else:
            link = self._pipeline.link(node)
            under_way = (
                sum(request.size for request in link.in_flight) + link.next.size + batch.size
            )
            full = link.in_flight and (
                len(link.in_flight) >= MAX_IN_FLIGHT or under_way > IN_FLIGHT_BYTES
            )
            most = self._cluster.settings.max_request_bytes
            if full or not link.next.has_room(place, batch.size, most):
                self._kept.append(batch)
            else:
                link.next.add(batch)

    def _is_replaced(self, topic: str) -> bool:
        """Whether the topic was replaced: true once. Then the caller of `send` decides what to do."""
        now = self._cluster.topic_ids[topic]
        if self._topic_ids.setdefault(topic, now) == now:
            return False
        del self._topic_ids[topic]
        return True

    def _write(self, link: BrokerLink) -> None:
        request = link.take()
        deadline = self._cluster.deadline(CALL_S)
        try:
            if not link.in_flight:
                self._pipeline.connect(link, deadline)
            self._pipeline.send(link, request, deadline)
        except (ConnectionBroken, LogRefused) as error:
            self._lose(link, error, request)

    def _drop_most(self) -> None:
        """Drop the oldest kept batches above the limit."""
        size = sum(batch.size for batch in self._kept)
        while size > KEPT_BYTES:
            size -= self._kept.pop(0).size

    # -- answers ----------------------------------------------------------------------------------------

    def _read_answers(self, link: BrokerLink, now: float, failed: Failed) -> None:
        """Read the answers that have arrived."""
        while link.in_flight:
            if not link.has_answer():
                if now - link.in_flight[0].sent > ANSWER_S:
                    self._lose(link, f"broker {link.node} does not answer")
                return
            request = link.take_oldest()
            try:
                answers = self._pipeline.read(link, request, self._cluster.deadline(CALL_S))
            except ConnectionBroken as error:
                self._lose(link, error, request)
                return
            self._cluster.health.serves(Use.SEND, link.node)
            for place, batch in request.batches.items():
                code, _, message = answers[place]
                if code == NONE:
                    continue
                self._cluster.forget((place.topic,))
                meant = meaning(codes.IDEMPOTENT_CODES, code)
                passes = meant.act in (Act.RETRY, Act.REFRESH)
                if passes and code not in (UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID):
                    self._kept.append(batch)
                else:
                    what = f"append to {place.topic}[{place.partition}]"
                    failed[place] = error_for(meant, code, what, message, (place.topic,))

    def _lose(self, link: BrokerLink, why: object, *lost: ProduceRequest) -> None:
        """Handle a broker's failure: keep the batches that it may not have, and ask for their leaders."""
        log.warning("what was sent without waiting is in doubt: %s", why)
        link.close()
        for request in (*link.in_flight, *lost):
            self._kept += request.batches.values()
        link.in_flight.clear()
        self._cluster.distrust(link.node)
        self._cluster.health.skip(Use.SEND, link.node)
