"""A journal writer's producer on confluent-kafka, and its first error."""

from __future__ import annotations

import logging
import threading

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from anabranch.errors import NotReady, WriteFailed
from anabranch.librdkafka.broker_contact import Contact
from anabranch.librdkafka.native import drop, make
from anabranch.librdkafka.options import Options
from anabranch.ports import Clock

log = logging.getLogger("anabranch.client")

_METADATA_S = 5.0
_PAUSE_S = 0.05


class Channel:
    """One producer and its first error."""

    def __init__(self, options: Options, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.failure: str | None = None
        self.forbidden: str | None = None  # a topic that refuses writes
        config = options.journal(max_bytes) | {"on_delivery": self._undelivered}
        self.producer: Producer = make(Producer, config, self._on_error)
        self.contact = Contact(self.producer, options.admin())
        self._unsent = 0  # when the producer's contact was last checked
        self._known: dict[str, int] = {}  # topic -> partitions that the producer knows, at least
        self._closing = threading.Lock()
        self._closed = False

    def _undelivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                self.forbidden = message.topic()
            self.fail(f"a write to {message.topic()}[{message.partition()}] failed: {error.str()}")

    def _on_error(self, error: KafkaError) -> None:
        self.contact.complaint(error)
        if error.fatal():
            self.fail(f"the producer failed: {error.str()}")
        else:
            log.debug("journal writes: %s", error)

    def fail(self, reason: str) -> None:
        """Keep the first failure."""
        if self.failure is None:
            self.failure = reason

    def learn(self, topic: str, partitions: int, clock: Clock, deadline: float) -> None:
        """Wait until the producer knows a topic with so many partitions.

        librdkafka refreshes its metadata every few minutes, and gives up records for partitions that were added
        since. Brokers, too, may know new ones a little late.
        """
        self.contact.topic = topic
        trouble = "they know fewer"
        while self._known.get(topic, 0) < partitions:
            left = deadline - clock.monotonic()
            if left <= 0:
                raise NotReady(
                    f"the brokers were asked in vain for {partitions} partitions of {topic}: {trouble}"
                )
            try:
                found = self.producer.list_topics(topic, timeout=min(left, _METADATA_S))
            except KafkaException as error:
                trouble = error.args[0].str()
            except RuntimeError as error:
                if not self._closed:  # else by another thread, as the client was
                    raise
                raise WriteFailed("the client was closed") from error
            else:
                self._known[topic] = len(found.topics[topic].partitions)
            if self._known.get(topic, 0) < partitions:
                clock.sleep(min(_PAUSE_S, max(0.0, deadline - clock.monotonic())))

    def poll(self, seconds: float, *, flush: bool = False) -> None:
        """Serve delivery reports; ``flush``: send at once what waits, and wait until all is told."""
        try:
            (self.producer.flush if flush else self.producer.poll)(seconds)
        except RuntimeError:
            if not self._closed:  # else by another thread, as the client was
                raise
            self.fail("the client was closed")

    def watch(self) -> None:
        """Called while records wait: fail early if brokers are there, and this producer finds none."""
        unsent = len(self.producer)
        if unsent < self._unsent:
            self.contact.heard()
        elif self.contact.lost():
            self.fail("the producer has lost the brokers")
        self._unsent = unsent

    def close(self) -> None:
        """Free the producer. Its unsent records are purged; records in flight may still be written."""
        with self._closing:
            if not self._closed:
                self._closed = True
                drop(self.producer)
