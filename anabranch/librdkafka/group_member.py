"""A member of a consumer group on confluent-kafka, which fetches nothing: readers read the log themselves."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place

from anabranch.errors import AnabranchError, FixCallError, NotAuthorized, NotReady
from anabranch.librdkafka.native import leak, make_consumer
from anabranch.librdkafka.options import Options
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer
from anabranch.ports import TopicPartition

log = logging.getLogger("anabranch.client")

_ASK_S = 30.0
_LOOK_S = 5.0
_REFRESH_MS = 2000  # members of a group find new partitions within this time
_HOPELESS = frozenset(
    (
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._FATAL,  # noqa: SLF001
        KafkaError.INVALID_GROUP_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    )
)
_FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
}


class KafkaGroupMember:
    """`anabranch.ports.GroupMember` on confluent-kafka."""

    def __init__(self, options: Options, group: str, session: float | None = None) -> None:
        """``session``: the session timeout in seconds, unless an option sets it.

        Raises: UnsupportedSetting (an option that librdkafka does not take).
        """
        config = options.reader(group, "error")
        if session is not None and "session.timeout.ms" not in config:
            config["session.timeout.ms"] = int(session * 1000)
            config.setdefault("heartbeat.interval.ms", int(session * 1000 / 6))
        config.setdefault("topic.metadata.refresh.interval.ms", _REFRESH_MS)
        self._consumer = make_consumer(options, config, _on_error)
        self._group = group

    def join(
        self,
        topics: Sequence[str],
        gained: Callable[[list[TopicPartition]], None],
        lost: Callable[[list[TopicPartition], bool], None],
    ) -> None:
        """Join the group. References to the callbacks are weak, so that a dropped reader is freed at once."""
        gain, lose = weakref.WeakMethod(gained), weakref.WeakMethod(lost)

        def on_assign(consumer: LastingConsumer, places: list[Place]) -> None:
            consumer.assign([])
            if (method := gain()) is not None:
                method(_plain(places))

        def on_gone(consumer: LastingConsumer, places: list[Place], may_commit: bool) -> None:
            if (method := lose()) is not None:
                method(_plain(places), may_commit)
            consumer.unassign()

        self._consumer.subscribe(
            list(topics),
            on_assign=on_assign,
            on_revoke=lambda consumer, places: on_gone(consumer, places, True),
            on_lost=lambda consumer, places: on_gone(consumer, places, False),
        )

    def serve(self, wait: float) -> None:
        message = self._consumer.poll(max(0.0, wait))  # a negative time would wait without end
        error = message.error() if message is not None else None
        if message is None or error is None:
            return
        if error.code() in _FORBIDDEN:
            raise self._forbidden(error, message.topic() or "")
        if error.fatal() or error.code() in _HOPELESS:
            raise FixCallError(f"the group {self._group} can't be joined: {error}")
        log.info("the group %s: %s", self._group, error)

    def look(self) -> None:
        try:
            self._consumer.list_topics(timeout=_LOOK_S)
        except KafkaException as error:
            log.info("metadata: %s", error)

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        try:
            found = self._consumer.committed([Place(*place) for place in places], timeout=_ASK_S)
        except KafkaException as error:
            raise self._unread(error.args[0]) from error
        for place in found:
            if place.error is not None:  # it may have an offset nevertheless
                raise self._unread(place.error, place.topic)
        return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def commit(self, offsets: Mapping[TopicPartition, int], *, wait: bool) -> bool:
        if not offsets:
            return True
        wanted = [Place(*place, offset) for place, offset in offsets.items()]
        try:
            taken = self._consumer.commit(offsets=wanted, asynchronous=not wait) or []
        except (KafkaException, RuntimeError) as error:
            log.warning("offsets of the group %s were not committed: %s", self._group, error)
            return False
        return all(place.error is None for place in taken)

    def _forbidden(self, error: KafkaError, topic: str) -> NotAuthorized:
        what = _FORBIDDEN[error.code()]
        where = self._group if what == "group" else topic
        return NotAuthorized(f"the right Read on the {what} {where} is missing")

    def _unread(self, error: KafkaError, topic: str = "") -> AnabranchError:
        if error.code() in _FORBIDDEN:
            return self._forbidden(error, topic)
        return NotReady(f"the group's offsets can't be read: {error}")

    def close(self) -> None:
        self._consumer.close()

    def leak(self) -> None:
        leak(self._consumer.native)


def _plain(places: list[Place]) -> list[TopicPartition]:
    return [TopicPartition(p.topic, p.partition) for p in places]


def _on_error(error: KafkaError) -> None:
    log.debug("reading: %s", error)
