"""The log on Kafka-compatible brokers, over raw connections (`anabranch.ports.Log`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from anabranch.kafka import admin as kafka_admin
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.fetch import Fetcher
from anabranch.kafka.sender import Sender
from anabranch.kafka.settings import Settings, parse_settings
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import Failed, Fetched, LogError, TopicInfo, TopicPartition, TopicSpec

_LATEST = -1
T = TypeVar("T")


class KafkaLog:
    """The `Log` port over Kafka's protocol. Thread-safe: each call uses connections of its own.

    ``where``: ``host:port,…`` with ``options`` by librdkafka's names (`UnsupportedSetting`), or settings.
    ``in_sessions``: as in `Fetcher`.
    """

    def __init__(
        self,
        where: str | Settings,
        options: Mapping[str, object] | None = None,
        *,
        in_sessions: bool = False,
    ) -> None:
        self._cluster = Cluster(parse_settings(where, options or {}))
        self._sender = Sender(self._cluster)
        self._fetcher = Fetcher(self._cluster, in_sessions=in_sessions)

    # -- reading --------------------------------------------------------------------------------------

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
        failed: Failed | None = None,
    ) -> dict[TopicPartition, Fetched]:
        return self._fetcher.fetch(
            positions, max_wait=max_wait, max_bytes=max_bytes, committed=committed, failed=failed
        )

    def end_offsets(
        self,
        partitions: Iterable[TopicPartition],
        *,
        committed: bool,
        failed: Failed | None = None,
        sure: bool = False,
    ) -> dict[TopicPartition, int]:
        return self._offsets(partitions, _LATEST, committed=committed, failed=failed, sure=sure)

    def start_offsets(
        self, partitions: Iterable[TopicPartition], *, failed: Failed | None = None
    ) -> dict[TopicPartition, int]:
        return self._offsets(partitions, kafka_admin.EARLIEST, committed=False, failed=failed)

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        """`anabranch.ports.Log.offsets_for_time`; it also counts records of open native transactions."""
        found = self._offsets(partitions, max(timestamp_ms, 0), committed=False)
        return {partition: offset if offset >= 0 else None for partition, offset in found.items()}

    def _offsets(
        self,
        partitions: Iterable[TopicPartition],
        timestamp: int,
        *,
        committed: bool,
        failed: Failed | None = None,
        sure: bool = False,
    ) -> dict[TopicPartition, int]:
        ask = partial(kafka_admin.list_offsets, committed=committed, failed=failed, sure=sure)
        return self._repeat("list offsets", ask, list(partitions), timestamp)

    def _repeat(self, what: str, call: Callable[..., T], *given: object, soon: bool = False) -> T:
        """`Cluster.repeat` for a call of `kafka.admin`, which gets the cluster, ``given`` and a deadline."""
        cluster = self._cluster
        deadline = cluster.soon(cluster.deadline()) if soon else cluster.deadline()
        return cluster.repeat(what, deadline, lambda: call(cluster, *given, deadline))

    # -- writing --------------------------------------------------------------------------------------

    def producer(self, transactional_id: str, *, timeout: float) -> KafkaProducer:
        return KafkaProducer(self._cluster, transactional_id, timeout)

    def send(self, batches: Sequence[tuple[TopicPartition, bytes]], failed: Failed) -> bool:
        return self._sender.send(batches, failed)

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        self._repeat("delete records", kafka_admin.delete_records, before)

    # -- topics ---------------------------------------------------------------------------------------

    def create_topics(self, specs: Sequence[TopicSpec]) -> dict[str, str]:
        """`anabranch.ports.Log.create_topics`; returns when all have leaders."""
        if not specs:
            return {}
        deadline = self._cluster.deadline()
        made: dict[str, str] = {}
        try:
            self._cluster.repeat(
                "create topics",
                deadline,
                lambda: kafka_admin.create_topics(self._cluster, specs, made, deadline),
            )
            kafka_admin.wait_for_leaders(self._cluster, (spec.name for spec in specs), deadline)
        except LogError as error:
            error.made = made
            raise
        return made

    def delete_topics(self, topics: Sequence[TopicInfo]) -> None:
        self._repeat("delete topics", kafka_admin.delete_topics, topics)

    def add_partitions(self, topic: str, partitions: int) -> None:
        deadline = self._cluster.deadline()
        if kafka_admin.count_partitions(self._cluster, topic, deadline) < partitions:
            self._cluster.repeat(
                "add partitions",
                deadline,
                lambda: kafka_admin.add_partitions(self._cluster, topic, partitions, deadline),
            )
        kafka_admin.wait_for_leaders(self._cluster, (topic,), deadline, at_least=partitions)

    def alter_topics(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        for alter in (partial(kafka_admin.alter_topics, dry=dry) for dry in (True, False)):
            self._repeat("alter topics", alter, changes)

    def replicas_of_new(self, topic: str, factor: int = -1) -> int | None:
        """`anabranch.ports.Log.replicas_of_new`, by a dry run."""
        return self._repeat("replicas of a new topic", kafka_admin.replicas_of_new, topic, factor)

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        return self._repeat("describe topics", kafka_admin.describe_topics, names)

    def partition_counts(self, names: Sequence[str]) -> dict[str, int]:
        found = self._cluster.refresh(names, self._cluster.deadline())
        return {name: topic.partitions for name, topic in found.items()}

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        found = self._cluster.refresh(names, self._cluster.deadline())
        return {name: _id_text(topic.topic_id) for name, topic in found.items()}

    def is_known(self, topic: str) -> bool:
        return self._repeat("ask who knows a topic", kafka_admin.is_known, topic, soon=True)

    def is_agreed(self, topic: str, topic_id: str) -> bool:
        what = "ask whether brokers agree about a topic"
        return self._repeat(what, kafka_admin.is_agreed, topic, topic_id, soon=True)

    def id_read(self, topic: str) -> str:
        return _id_text(self._cluster.topic_ids.get(topic, b""))

    def is_gone(self, topic: str, partitions: int, topic_id: str) -> bool:
        what = "ask whether a topic is gone"
        return self._repeat(what, kafka_admin.is_gone, topic, partitions, topic_id, soon=True)

    def close(self) -> None:
        """`anabranch.ports.Log.close`; producers have connections of their own."""
        self._sender.close()
        self._cluster.close()
        self._fetcher.close()


def _id_text(topic_id: bytes) -> str:
    """A topic's id in hexadecimal digits; empty if brokers don't give topics ids."""
    return topic_id.hex() if any(topic_id) else ""
