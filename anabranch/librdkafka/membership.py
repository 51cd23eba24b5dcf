"""Which controller should become leader of which control partition, by the assignment of a consumer group.

The assignment is only a hint, and fences no leader.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from anabranch.librdkafka.options import for_librdkafka, logger
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer

log = logging.getLogger("anabranch.controller")

_POLL_S = 0.1
_REFRESH_MS = 5000  # new control partitions get a leader within this time and a rebalance


class Membership:
    """A member of the controllers' group, which calls back with control partitions gained and lost.

    The callbacks run on a thread of its own. ``on_lost`` returns when the leaders have ended, so that the next
    owner can start at once.
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
        self.error: KafkaException | None = None
        self.trouble = ""  # why this member gets no partition
        common = {
            "logger": logger,
            **for_librdkafka(options),
            "bootstrap.servers": bootstrap,
        }
        self._consumer = LastingConsumer(
            {
                **common,
                "group.id": group,
                "session.timeout.ms": int(session_timeout_s * 1000),
                "heartbeat.interval.ms": min(500, int(session_timeout_s * 1000 / 4)),
                "enable.auto.commit": False,
                "topic.metadata.refresh.interval.ms": _REFRESH_MS,
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
        """Leave the group for ``seconds``: other members get the partitions, and may not have this trouble."""
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
        except KafkaException as error:
            self.error = error
        finally:
            self._consumer.close()

    def _complaint(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and not self.trouble:
            self.trouble = f"the right Read on the group {self._group} is missing"
            log.error("no control partition is led from here: %s", self.trouble)

    def _assigned(self, consumer: LastingConsumer, partitions: list[TopicPartition]) -> None:
        # The consumer fetches nothing: the controller reads the log itself.
        consumer.incremental_assign(partitions)
        self.trouble = ""
        if partitions:
            consumer.pause(partitions)
            self._on_gained({p.partition for p in partitions})

    def _revoked(self, consumer: LastingConsumer, partitions: list[TopicPartition]) -> None:
        self._gone(consumer, partitions)
        consumer.incremental_unassign(partitions)

    def _gone(self, _: LastingConsumer, partitions: list[TopicPartition]) -> None:
        if partitions:
            self._on_lost({p.partition for p in partitions})
