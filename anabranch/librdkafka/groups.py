"""Consumer groups on confluent-kafka: the controllers' group, a reader's member, and all groups for operators.

Only the assignment and the offsets are used: controllers and readers fetch records themselves.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient

from anabranch.errors import (
    AnabranchError,
    FixCallError,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
)
from anabranch.librdkafka.admin import GRACE_S, KafkaAdmin
from anabranch.librdkafka.handles import leak
from anabranch.librdkafka.options import Options, for_librdkafka, logger
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer, make_consumer
from anabranch.ports import TopicPartition
from anabranch.waits import here

_controller_log = logging.getLogger("anabranch.controller")

_POLL_S = 0.1
_CONTROL_REFRESH_MS = 5000  # new control partitions get a leader within this time and a rebalance


class Membership:
    """A member of the controllers' group, which calls back with control partitions gained and lost.

    The callbacks run on a thread of the member. ``on_lost`` has to return only when the leaders have ended, so that
    the next owner can start at once.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topic: str,
        session_timeout_s: float,
        options: Mapping[str, str],
        on_gained: Callable[[set[int]], None],
        on_lost: Callable[[set[int]], None],
    ) -> None:
        self._on_gained = on_gained
        self._on_lost = on_lost
        self._topic = topic
        self._group = group
        self._stop = threading.Event()
        self._aside_until: float | None = None  # monotonic
        self.error: Exception | None = None
        self.trouble = ""  # why this member gets no partition
        common = {"logger": logger, **for_librdkafka(options), "bootstrap.servers": bootstrap}
        self._consumer = LastingConsumer(
            {
                **common,
                "group.id": group,
                "session.timeout.ms": int(session_timeout_s * 1000),
                "heartbeat.interval.ms": min(500, int(session_timeout_s * 1000 / 4)),
                "enable.auto.commit": False,
                "topic.metadata.refresh.interval.ms": _CONTROL_REFRESH_MS,
                "auto.offset.reset": "latest",
                "partition.assignment.strategy": "cooperative-sticky",
            },
            common,
        )
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        """Join the group."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Leave the group, so that other members get the partitions at once."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def stand_aside(self, seconds: float) -> None:
        """Leave the group for ``seconds``: other members get the partitions, perhaps without this trouble."""
        self._aside_until = time.monotonic() + seconds

    @property
    def alive(self) -> bool:
        """Whether the thread is still a member of the group."""
        return self._thread.is_alive()

    def _join(self) -> None:
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._gone
        )

    def _run(self) -> None:
        self._join()
        try:
            while not self._stop.is_set():
                if self._aside_until is not None:
                    self._consumer.unsubscribe()
                    while (left := self._aside_until - time.monotonic()) > 0:
                        # Partitions are released only while polling.
                        self._consumer.poll(min(left, _POLL_S))
                        if self._stop.is_set():
                            return
                    self._aside_until = None
                    self._join()
                message = self._consumer.poll(_POLL_S)
                error = message.error() if message is not None else None
                if error is not None:
                    self._complaint(error)
        except Exception as error:  # noqa: BLE001 - `error` is for the owner, who ends the process
            self.error = error
        finally:
            self._consumer.close()

    def _complaint(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and not self.trouble:
            self.trouble = f"the right Read on the group {self._group} is missing"
            _controller_log.error("no control partition is led from here: %s", self.trouble)

    def _assigned(self, consumer: LastingConsumer, partitions: list[Place]) -> None:
        # The consumer fetches nothing: the controller reads the log itself.
        consumer.incremental_assign(partitions)
        self.trouble = ""
        if partitions:
            consumer.pause(partitions)
            self._on_gained({p.partition for p in partitions})

    def _revoked(self, consumer: LastingConsumer, partitions: list[Place]) -> None:
        self._gone(consumer, partitions)
        consumer.incremental_unassign(partitions)

    def _gone(self, _: LastingConsumer, partitions: list[Place]) -> None:
        if partitions:
            self._on_lost({p.partition for p in partitions})


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

    def __init__(
        self, options: Options, group: str, session: float | None = None, name: str = ""
    ) -> None:
        """``session``: the session timeout in seconds, unless an option sets it.

        ``name``: is added to the client's id. Groups deal out partitions in the order of the members' ids, which
        begin with the clients' ids. So a member that joins with the same name again gets the same partitions, if
        the others are the same, too.

        Raises: UnsupportedSetting (an option that librdkafka does not take).
        """
        config = options.reader(group, "error")
        if session is not None and "session.timeout.ms" not in config:
            config["session.timeout.ms"] = int(session * 1000)
            config.setdefault("heartbeat.interval.ms", int(session * 1000 / 6))
        config.setdefault("topic.metadata.refresh.interval.ms", _REFRESH_MS)
        if name:
            config["client.id"] = f"{config['client.id']}-{name}"
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
        wait = here().nap(max(0.0, wait))  # a negative time would wait without end
        message = here().run(lambda: self._consumer.poll(wait))
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
            here().run(lambda: self._consumer.list_topics(timeout=_LOOK_S))
        except KafkaException as error:
            log.info("metadata: %s", error)

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        try:
            wanted = [Place(*place) for place in places]
            found = here().run(lambda: self._consumer.committed(wanted, timeout=_ASK_S))
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
            commit = partial(self._consumer.commit, offsets=wanted, asynchronous=not wait)
            taken = (here().run(commit) if wait else commit()) or []
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
        here().run(self._consumer.close)

    def leak(self) -> None:
        leak(self._consumer.native)


def _plain(places: list[Place]) -> list[TopicPartition]:
    return [TopicPartition(p.topic, p.partition) for p in places]


def _on_error(error: KafkaError) -> None:
    log.debug("reading: %s", error)


EMPTY = ("empty", "dead")  # states without members
_IN_USE = (
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
)


class KafkaGroups:
    """`anabranch.reading.committed_log.Groups` on confluent-kafka."""

    def __init__(self, admin: KafkaAdmin) -> None:
        self._admin = admin

    def names(self, deadline: float) -> list[str]:
        def ask(client: AdminClient, seconds: float) -> list[str]:
            asked = client.list_consumer_groups(request_timeout=seconds)
            found = here().result(asked, seconds + GRACE_S)
            for error in found.errors:  # one for each failed broker; never raised by the library
                raise KafkaException(error)
            return sorted(one.group_id for one in found.valid)

        return self._admin.ask(deadline, ask)

    def state(self, group: str, deadline: float) -> tuple[str, tuple[str, ...]]:
        def ask(client: AdminClient, seconds: float) -> tuple[str, tuple[str, ...]]:
            with _explained(group, "Describe"):
                futures = client.describe_consumer_groups([group], request_timeout=seconds)
                found = here().result(futures[group], seconds + GRACE_S)
            members = tuple(f"{one.client_id} ({one.host.lstrip('/')})" for one in found.members)
            return found.state.name.lower(), members

        return self._admin.ask(deadline, ask)

    def offsets(self, group: str, deadline: float) -> dict[TopicPartition, int]:
        def ask(client: AdminClient, seconds: float) -> dict[TopicPartition, int]:
            wanted = [ConsumerGroupTopicPartitions(group)]
            with _explained(group, "Describe"):
                futures = client.list_consumer_group_offsets(wanted, request_timeout=seconds)
                found = here().result(futures[group], seconds + GRACE_S).topic_partitions
            return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

        return self._admin.ask(deadline, ask)

    def move(self, group: str, offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        if self.state(group, deadline)[0] not in EMPTY:
            raise _in_use(group)
        wanted = [Place(*place, offset) for place, offset in offsets.items()]

        def ask(client: AdminClient, seconds: float) -> None:
            with _explained(group, "Read"):
                futures = client.alter_consumer_group_offsets(
                    [ConsumerGroupTopicPartitions(group, wanted)], request_timeout=seconds
                )
                for place in here().result(futures[group], seconds + GRACE_S).topic_partitions:
                    if place.error is not None:
                        raise KafkaException(place.error)

        self._admin.ask(deadline, ask)


@contextmanager
def _explained(group: str, right: str) -> Iterator[None]:
    """Convert errors about a group into errors that say what to do."""
    try:
        yield
    except KafkaException as error:
        code = error.args[0].code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise NotAuthorized(f"the right {right} on the group {group} is missing") from error
        if code == KafkaError.INVALID_GROUP_ID:
            raise InvalidArgument(f"{group!r} is not a group's name") from error
        if code in _IN_USE:
            raise _in_use(group) from error
        raise


def _in_use(group: str) -> IllegalState:
    return IllegalState(f"members are in the group {group}: stop them first; nothing was changed")
