"""A confluent-kafka consumer that replaces its handle when that one has lost all brokers (`contact`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import ClusterMetadata

from anabranch.errors import AnabranchError
from anabranch.librdkafka.broker_contact import Contact, made, with_error_callback

log = logging.getLogger("anabranch.client")

_CLOSE_S = 10.0
# for leaving a group: at most, and for one look at its news
_LEAVE_S = 5.0
_TOLD_S = 0.02
T = TypeVar("T")
Rebalanced: TypeAlias = "Callable[[LastingConsumer, list[TopicPartition]], None]"


class LastingConsumer:
    """`confluent_kafka.Consumer`, as far as it is used here, with the same methods. One thread at a time.

    A new handle goes on where the old one stood: partitions assigned by hand are read on behind the last message
    given. A member of a group loses its partitions and joins again.
    """

    def __init__(
        self,
        config: dict[str, Any],
        common: Mapping[str, Any],
        *,
        make: Callable[[dict[str, Any]], Consumer] = Consumer,
        on_error: Callable[[KafkaError], None] | None = None,
    ) -> None:
        """``common``: the options of any client of these brokers. ``make``: makes a consumer by its config."""
        self._config = config
        self._common = common
        self._make_consumer = make
        self._on_error = on_error
        self._offsets: dict[tuple[str, int], int] = {}  # assigned by hand
        self._subscription: tuple[list[str], Rebalanced, Rebalanced, Rebalanced] | None = None
        self._held: set[tuple[str, int]] = set()  # given by the group
        self.native, self._contact = self._made("")

    def _made(self, topic: str) -> tuple[Consumer, Contact]:
        """A new handle, watched."""
        native = made(self._make_consumer, with_error_callback(self._config, self._complaint))
        return native, Contact(native, self._common, topic)

    def _complaint(self, error: KafkaError) -> None:
        self._contact.complaint(error)
        if self._on_error is not None:
            self._on_error(error)

    # -- messages -------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Message | None:
        """The next message, None if there is none in time (seconds; some more where no broker answers)."""
        message = self.native.poll(timeout)
        if message is None:
            if self._contact.lost():
                self._renew()
        elif message.error() is None:
            self._contact.heard()
        return message

    def consume(self, number: int, timeout: float) -> list[Message]:
        """Up to so many messages. Call `poll` before: only that sees whether there are brokers."""
        return self.native.consume(number, timeout)

    # -- partitions by hand ---------------------------------------------------------------------------

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these, from their offsets on."""
        self.native.assign(list(partitions))
        self._offsets = {(p.topic, p.partition): p.offset for p in partitions}
        self._learn(partitions)

    def incremental_assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read these, too."""
        self.native.incremental_assign(list(partitions))
        self._offsets |= {(p.topic, p.partition): p.offset for p in partitions}
        self._learn(partitions)

    def incremental_unassign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read these no more."""
        self.native.incremental_unassign(list(partitions))
        for place in _places(partitions):
            self._offsets.pop(place, None)

    def unassign(self) -> None:
        """Read nothing."""
        self.native.unassign()
        self._offsets.clear()

    def _learn(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions[:1]:
            self._contact.topic = place.topic

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Give nothing of these."""
        self.native.pause(list(partitions))

    # -- the group ------------------------------------------------------------------------------------

    def subscribe(
        self, topics: list[str], on_assign: Rebalanced, on_revoke: Rebalanced, on_lost: Rebalanced
    ) -> None:
        """Join the group. The callbacks get this consumer."""
        self._subscription = topics, on_assign, on_revoke, on_lost
        for topic in topics[:1]:
            self._contact.topic = topic
        self._subscribe()

    def _subscribe(self) -> None:
        if self._subscription is None:
            return
        topics, on_assign, on_revoke, on_lost = self._subscription
        native = self.native

        def gained(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._held |= _places(partitions)
            on_assign(self, partitions)

        def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._goes(native, partitions, on_revoke)

        def lost(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._goes(native, partitions, on_lost)

        native.subscribe(topics, on_assign=gained, on_revoke=revoked, on_lost=lost)

    def _goes(
        self, native: Consumer, partitions: list[TopicPartition], callback: Rebalanced
    ) -> None:
        if native is self.native:  # else it is a lost one, which closes
            self._held -= _places(partitions)
            callback(self, partitions)

    def unsubscribe(self) -> None:
        """Leave the group; `subscribe` joins it again."""
        self._subscription = None
        self.native.unsubscribe()

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """The group's offsets."""
        return self._ask(lambda native: native.committed(partitions, timeout=timeout))

    def commit(
        self, offsets: list[TopicPartition], *, asynchronous: bool
    ) -> list[TopicPartition] | None:
        """Commit offsets in the group."""
        if asynchronous:
            self.native.commit(offsets=offsets, asynchronous=True)
            return None
        return self.native.commit(offsets=offsets, asynchronous=False)

    # -- questions ------------------------------------------------------------------------------------

    def list_topics(self, *, timeout: float) -> ClusterMetadata:
        """The brokers' metadata of all topics."""
        return self._ask(
            lambda native: cast("ClusterMetadata", native.list_topics(timeout=timeout))
        )

    def _ask(self, question: Callable[[Consumer], T]) -> T:
        """An answer is a sign of brokers; who asks in vain again and again, and never polls, gets a new handle."""
        try:
            answer = question(self.native)
        except KafkaException:
            if self._contact.lost():
                self._renew()
            raise
        self._contact.heard()
        return answer

    # -- the handle -----------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Go on with a new handle. The old one closes aside: it may wait for brokers that it does not find."""
        old, places = self.native, self._where_it_stands()
        try:
            self.native, self._contact = self._made(self._contact.topic)
        except AnabranchError as error:  # a token or a file is missing, for now
            log.warning("a handle that has lost all brokers can't be replaced yet: %s", error)
            return
        end = partial(_end, old, self._subscription is not None, lambda: False)
        threading.Thread(target=end, name="anabranch-lost-handle", daemon=True).start()
        if self._subscription is None:
            self.native.assign(places)
            self._offsets = {(p.topic, p.partition): p.offset for p in places}
            return
        self._offsets.clear()
        held, self._held = [TopicPartition(*place) for place in self._held], set()
        *_, on_lost = self._subscription
        if held:
            on_lost(self, held)
        self._subscribe()

    def _where_it_stands(self) -> list[TopicPartition]:
        """The assigned partitions, each with the offset to read on from."""
        places = []
        for place in self.native.position(self.native.assignment()):
            offset = place.offset
            if offset < 0:
                offset = self._offsets.get((place.topic, place.partition), offset)
            places.append(TopicPartition(place.topic, place.partition, offset))
        return places

    def close(self) -> None:
        """Leave the group and free everything; a handle that does not come to its end is left to itself.

        In a rebalance librdkafka may wait for itself without end (confluentinc/librdkafka#4884).
        """
        failed: list[BaseException] = []
        member, self._subscription = self._subscription is not None, None

        def end() -> None:
            try:
                _end(self.native, member, lambda: bool(self._held))
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        aside = threading.Thread(target=end, name="anabranch-closing", daemon=True)
        try:
            aside.start()
        except RuntimeError:  # the interpreter ends: no thread begins any more
            end()
        else:
            aside.join(_CLOSE_S)
            if aside.is_alive():
                log.warning("a consumer of librdkafka did not end in %g s: it is left", _CLOSE_S)
        for error in failed:
            raise error


def _end(native: Consumer, member: bool, holds: Callable[[], bool]) -> None:
    """Close a handle; a member leaves its group first, and hears of it.

    A rebalance that is told in the middle of closing waits without end for what closes, and keeps Python's lock
    meanwhile: no thread of the process would go on.
    """
    try:
        if member:
            native.unsubscribe()
            until = time.monotonic() + _LEAVE_S
            for _ in range(2):  # what was on its way already is told by the first call, perhaps
                native.poll(_TOLD_S)
            while holds() and time.monotonic() < until:
                native.poll(_TOLD_S)
    finally:
        native.close()


def _places(partitions: Sequence[TopicPartition]) -> set[tuple[str, int]]:
    return {(p.topic, p.partition) for p in partitions}
