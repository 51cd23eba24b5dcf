"""Questions about topics, for clients: partitions, size limits, end offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.admin._resource import ResourceType

from anabranch.client.options import Options
from anabranch.errors import AnabranchError, DeadlineExceeded, NotReady, UnsupportedSetting
from anabranch.ports import Clock

DEFAULT_MAX_MESSAGE_BYTES = 1_048_588  # Kafka's own default, where the setting may not be read
_LIMIT = "max.message.bytes"
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)  # noqa: SLF001
_FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)

T = TypeVar("T")


class KafkaAdmin:
    """Thread-safe; connects when first asked."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._client: AdminClient | None = None
        self._limits: dict[str, int] = {}

    def partition_counts(self, topics: Sequence[str], deadline: float) -> dict[str, int]:
        """How many partitions each of these topics has; those that don't exist are left out."""
        futures = self._ask(
            deadline,
            lambda client, s: client.describe_topics(
                TopicCollection(list(topics)), request_timeout=s
            ),
        )
        found: dict[str, int] = {}
        for topic, future in futures.items():
            try:
                found[topic] = len(self._result(future, deadline).partitions)
            except KafkaException as error:
                if error.args[0].code() not in _MISSING:
                    raise _unavailable(error) from error
        return found

    def max_message_bytes(self, topics: Sequence[str], deadline: float) -> dict[str, int]:
        """The largest batch that each topic takes, remembered; Kafka's default where it may not be read."""
        unknown = [topic for topic in topics if topic not in self._limits]
        if unknown:
            resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in unknown]
            futures = self._ask(
                deadline, lambda client, s: client.describe_configs(resources, request_timeout=s)
            )
            for resource, future in futures.items():
                try:
                    entry = self._result(future, deadline).get(_LIMIT)
                except KafkaException as error:
                    if error.args[0].code() not in _FORBIDDEN:
                        raise _unavailable(error) from error
                    entry = None
                limit = int(entry.value) if entry is not None else DEFAULT_MAX_MESSAGE_BYTES
                self._limits[resource.name] = limit
        return {topic: self._limits[topic] for topic in topics}

    def end_offsets(
        self, partitions: Iterable[tuple[str, int]], deadline: float
    ) -> dict[tuple[str, int], int]:
        """The high watermarks."""
        return self._offsets(partitions, OffsetSpec.latest(), deadline)  # type: ignore[no-untyped-call]

    def start_offsets(
        self, partitions: Iterable[tuple[str, int]], deadline: float
    ) -> dict[tuple[str, int], int]:
        """The first offsets that are still there."""
        return self._offsets(partitions, OffsetSpec.earliest(), deadline)  # type: ignore[no-untyped-call]

    def _offsets(
        self, partitions: Iterable[tuple[str, int]], spec: OffsetSpec, deadline: float
    ) -> dict[tuple[str, int], int]:
        request = {TopicPartition(t, p): spec for t, p in partitions}
        if not request:
            return {}
        futures = self._ask(
            deadline,
            lambda client, s: client.list_offsets(
                request, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=s
            ),
        )
        found: dict[tuple[str, int], int] = {}
        for place, future in futures.items():
            try:
                found[place.topic, place.partition] = self._result(future, deadline).offset
            except KafkaException as error:
                raise _unavailable(error) from error
        return found

    def _ask(self, deadline: float, call: Callable[[AdminClient, float], Any]) -> dict[Any, Any]:
        with self._lock:
            if self._client is None:
                try:
                    self._client = AdminClient(self._options.admin())
                except (KafkaException, TypeError, ValueError) as error:
                    raise UnsupportedSetting(f"librdkafka refuses the options: {error}") from error
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise DeadlineExceeded("no time was left to ask the brokers; call again with more")
        try:
            futures: dict[Any, Any] = call(self._client, max(left, 0.01))
        except KafkaException as error:
            raise _unavailable(error) from error
        return futures

    def _result(self, future: Future[T], deadline: float) -> T:
        try:
            return future.result(max(deadline - self._clock.monotonic(), 0.0) + 1.0)
        except TimeoutError as error:
            raise DeadlineExceeded("the brokers did not answer in time; call again") from error

    @property
    def native(self) -> object:
        """The connection itself, if there is one."""
        return self._client


def _unavailable(error: KafkaException) -> AnabranchError:
    """The error for a question to brokers that failed; repeating it is safe."""
    kind: type[AnabranchError] = NotReady
    if error.args[0].code() in (KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT):  # noqa: SLF001
        kind = DeadlineExceeded
    return kind(f"the brokers can't be asked: {error.args[0].str()}")
