"""A consumer of confluent-kafka that replaces its native handle if that has lost all brokers (`handles`)."""

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
from anabranch.librdkafka.handles import HandleHealth, create, made, with_error_callback
from anabranch.librdkafka.options import Options

log = logging.getLogger("anabranch.client")

_CLOSE_S = 10.0
# for leaving a group: in all, and for one poll
_LEAVE_S = 5.0
_TOLD_S = 0.02
T = TypeVar("T")
Rebalanced: TypeAlias = "Callable[[LastingConsumer, list[TopicPartition]], None]"


class LastingConsumer:
    """The methods of `confluent_kafka.Consumer` that anabranch uses. One thread at a time may use it.

    A new handle resumes manually assigned partitions after the last message that was returned. A member of a group
    loses its partitions and joins again.
    """

    def __init__(
        self,
        config: dict[str, Any],
        common: Mapping[str, Any],
        *,
        make: Callable[[dict[str, Any]], Consumer] = Consumer,
        on_error: Callable[[KafkaError], None] | None = None,
    ) -> None:
        """``common``: options for any handle on these brokers. ``make``: makes a consumer from its config."""
        self._config = config
        self._common = common
        self._make_consumer = make
        self._on_error = on_error
        self._offsets: dict[tuple[str, int], int] = {}  # assigned manually
        self._subscription: tuple[list[str], Rebalanced, Rebalanced, Rebalanced] | None = None
        self._held: set[tuple[str, int]] = set()  # assigned by the group
        self.native, self._health = self._made("")

    def _made(self, topic: str) -> tuple[Consumer, HandleHealth]:
        """A new handle, and its `HandleHealth`, which asks for ``topic``."""
        native = made(self._make_consumer, with_error_callback(self._config, self._complaint))
        return native, HandleHealth(native, self._common, topic)

    def _complaint(self, error: KafkaError) -> None:
        self._health.complaint(error)
        if self._on_error is not None:
            self._on_error(error)

    # -- messages -------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> Message | None:
        """The next message, or None after the timeout in seconds (a little longer if no broker answers)."""
        message = self.native.poll(timeout)
        if message is None:
            if self._health.lost():
                self._renew()
        elif message.error() is None:
            self._health.answered()
        return message

    def consume(self, number: int, timeout: float) -> list[Message]:
        """Up to this many messages. Call `poll` before, as only `poll` detects lost brokers."""
        return self.native.consume(number, timeout)

    # -- manual assignment ----------------------------------------------------------------------------

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions, from their offsets."""
        self.native.assign(list(partitions))
        self._offsets = {(p.topic, p.partition): p.offset for p in partitions}
        self._learn(partitions)

    def incremental_assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read these partitions, too."""
        self.native.incremental_assign(list(partitions))
        self._offsets |= {(p.topic, p.partition): p.offset for p in partitions}
        self._learn(partitions)

    def incremental_unassign(self, partitions: Sequence[TopicPartition]) -> None:
        self.native.incremental_unassign(list(partitions))
        for place in _places(partitions):
            self._offsets.pop(place, None)

    def unassign(self) -> None:
        self.native.unassign()
        self._offsets.clear()

    def _learn(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions[:1]:
            self._health.topic = place.topic

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Return no messages of these partitions."""
        self.native.pause(list(partitions))

    # -- the group ------------------------------------------------------------------------------------

    def subscribe(
        self, topics: list[str], on_assign: Rebalanced, on_revoke: Rebalanced, on_lost: Rebalanced
    ) -> None:
        """Join the group. The callbacks get this consumer."""
        self._subscription = topics, on_assign, on_revoke, on_lost
        for topic in topics[:1]:
            self._health.topic = topic
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
        if native is self.native:  # a replaced handle, which closes, is ignored
            self._held -= _places(partitions)
            callback(self, partitions)

    def unsubscribe(self) -> None:
        """Leave the group; `subscribe` joins it again."""
        self._subscription = None
        self.native.unsubscribe()

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return self._ask(lambda native: native.committed(partitions, timeout=timeout))

    def commit(
        self, offsets: list[TopicPartition], *, asynchronous: bool
    ) -> list[TopicPartition] | None:
        if asynchronous:
            self.native.commit(offsets=offsets, asynchronous=True)
            return None
        return self.native.commit(offsets=offsets, asynchronous=False)

    # -- questions ------------------------------------------------------------------------------------

    def list_topics(self, *, timeout: float) -> ClusterMetadata:
        return self._ask(
            lambda native: cast("ClusterMetadata", native.list_topics(timeout=timeout))
        )

    def _ask(self, question: Callable[[Consumer], T]) -> T:
        """Ask, and note whether a broker answers. Replaces a lost handle, for callers that never poll."""
        try:
            answer = question(self.native)
        except KafkaException:
            if self._health.lost():
                self._renew()
            raise
        self._health.answered()
        return answer

    # -- the handle -----------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Switch to a new handle, or keep the old handle if no other can be made now.

        The old handle closes in another thread, because it may wait for brokers.
        """
        old, places = self.native, self._where_it_stands()
        try:
            self.native, self._health = self._made(self._health.topic)
        except AnabranchError as error:  # a token or a file is missing at present
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
        """The assigned partitions, each with the next offset to read."""
        places = []
        for place in self.native.position(self.native.assignment()):
            offset = place.offset
            if offset < 0:
                offset = self._offsets.get((place.topic, place.partition), offset)
            places.append(TopicPartition(place.topic, place.partition, offset))
        return places

    def close(self) -> None:
        """Leave the group and free everything. A handle that does not close in time is abandoned.

        During a rebalance librdkafka may wait for itself without end (confluentinc/librdkafka#4884).
        """
        failed: list[BaseException] = []
        member, self._subscription = self._subscription is not None, None

        def end() -> None:
            try:
                _end(self.native, member, lambda: bool(self._held))
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        closing = threading.Thread(target=end, name="anabranch-closing", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the interpreter ends, so no thread can start
            end()
        else:
            closing.join(_CLOSE_S)
            if closing.is_alive():
                log.warning("a consumer of librdkafka did not end in %g s: it is left", _CLOSE_S)
        for error in failed:
            raise error


def _end(native: Consumer, member: bool, holds: Callable[[], bool]) -> None:
    """Close a handle. A member first leaves its group, and gets the callback for that.

    A rebalance callback during the close would wait for the close without end, and hold the GIL meanwhile: the
    whole process would hang.
    """
    try:
        if member:
            native.unsubscribe()
            until = time.monotonic() + _LEAVE_S
            for _ in range(2):  # the first call may serve an earlier event
                native.poll(_TOLD_S)
            while holds() and time.monotonic() < until:
                native.poll(_TOLD_S)
    finally:
        native.close()


def _places(partitions: Sequence[TopicPartition]) -> set[tuple[str, int]]:
    return {(p.topic, p.partition) for p in partitions}


def make_consumer(
    options: Options, config: dict[str, Any], on_error: Callable[[Any], None]
) -> LastingConsumer:
    """A consumer that replaces its handle if the handle loses all brokers. Raises: as `made`."""
    return LastingConsumer(
        config, options.admin(), make=partial(create, Consumer), on_error=on_error
    )
