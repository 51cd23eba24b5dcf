"""The log on Kafka-compatible brokers, over raw connections (`anabranch.ports.Log`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from anabranch.kafka import admin as kafka_admin
from anabranch.kafka import codes, data
from anabranch.kafka.calls import FETCH, ConnectionBroken, MalformedAnswer
from anabranch.kafka.cluster import Again, Cluster, raise_or_again
from anabranch.kafka.codes import NONE, Act, error_for, meaning
from anabranch.kafka.connection import Connection, readable
from anabranch.kafka.health import SilentBrokers
from anabranch.kafka.sender import Sender
from anabranch.kafka.settings import Settings, parse_settings
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import (
    OFFSET_OUT_OF_RANGE,
    CorruptBatch,
    Failed,
    Fetched,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)

_LATEST = -1
_MAX_I32 = (1 << 31) - 1
# A broker that is silent for this long after others answered is skipped (`SilentBrokers`).
_SLACK_S = 0.3
_NEVER = (0, 0)
_MOST_FED = 10_000
_NEAR_S = 300.0  # after this time the leader is asked again, as Kafka's own consumer does
_LEADER_S = 5.0  # how long the leader serves what a follower could not
T = TypeVar("T")


class KafkaLog:
    """The `Log` port over Kafka's protocol. Thread-safe: each call uses connections of its own.

    ``where``: ``host:port,…`` with ``options`` by librdkafka's names (`UnsupportedSetting`), or settings.
    """

    def __init__(self, where: str | Settings, options: Mapping[str, object] | None = None) -> None:
        self._cluster = Cluster(parse_settings(where, options or {}))
        self._sender = Sender(self._cluster)
        self._turn = 0
        # Partition with records -> number of the last fetch with some, and their bytes.
        self._fed: dict[TopicPartition, tuple[int, int]] = {}
        self._silent = SilentBrokers()  # brokers that did not answer a fetch
        self._replicas = Replicas(self._cluster.settings.rack)

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
        """`anabranch.ports.Log.fetch`: one request per broker; each batch's CRC is checked.

        A broker that does not answer is skipped as long as another one does. While leaders move, the call waits up
        to the request timeout and then raises `LogUnavailable`; with ``failed`` it does neither.
        """
        if not positions:
            return {}
        now = time.monotonic()
        give_up = now + max_wait
        deadline = give_up + self._cluster.settings.request_timeout
        return self._cluster.repeat(
            "fetch",
            deadline,
            lambda: self._fetch(positions, give_up, max_bytes, committed, deadline, failed),
        )

    def _fetch(
        self,
        positions: Mapping[TopicPartition, int],
        give_up: float,
        max_bytes: int,
        committed: bool,
        deadline: float,
        failed: Failed | None,
    ) -> dict[TopicPartition, Fetched]:
        groups = self._replicas.groups(self._cluster.groups(positions, deadline, failed))
        if failed is not None:
            self._leave_out_silent(groups, failed)
        asked: list[Asked] = []
        wait = max(0.0, give_up - time.monotonic())
        self._turn += 1
        result: dict[TopicPartition, Fetched] = {}
        broken: list[ConnectionBroken] = []
        moved: list[TopicPartition] = []  # partitions for which another replica has to be asked
        try:
            for node, partitions in groups.items():
                group = self._in_turn(partitions)
                try:
                    asked.append(
                        self._ask(node, group, positions, wait, max_bytes, committed, deadline)
                    )
                except ConnectionBroken as error:
                    broken.append(error)
                    self._pass_over(node, group, error, failed)
            # A frozen broker accepts requests and does not answer: others become leaders soon.
            limit = self._cluster.soon(deadline) + wait
            waiting = list(asked)
            while waiting and not result and not moved:
                if failed is not None and len(waiting) < len(asked):
                    limit = min(limit, max(give_up, time.monotonic()) + _SLACK_S)
                for one in ready(waiting, limit):
                    waiting.remove(one)
                    try:
                        result.update(self._take(one, committed, limit, failed, moved))
                        self._silent.answered(one.node)
                        self._cluster.trust(one.address)
                    except ConnectionBroken as error:
                        broken.append(error)
                        self._pass_over(one.node, list(one.positions), error, failed)
            # Also take other answers that have arrived.
            for one in ready(waiting, None) if waiting else ():
                result.update(self._take(one, committed, limit, failed, moved))
            if failed is None and len(broken) == len(groups):
                raise broken[0]
            if moved and not result and not failed:
                raise Again(LogUnavailable(f"{moved[0].topic} is read from another replica"), 0.001)
        except (Again, ConnectionBroken):
            # Partitions that moved are asked for next time; the other answers are used.
            if result:
                return result
            raise
        finally:
            for one in asked:
                self._cluster.pool.give(one.connection, one.address)
        return result

    def _in_turn(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """The partitions, those without records for the longest time first: a flooded partition fills the answer.

        Only the first one with records may exceed ``max_bytes``, so busy partitions take turns.
        """
        turn = self._turn % len(partitions)
        group = partitions[turn:] + partitions[:turn]
        return sorted(group, key=lambda place: self._fed.get(place, _NEVER)) if self._fed else group

    def _note_fed(self, result: Mapping[TopicPartition, Fetched]) -> None:
        if len(self._fed) > _MOST_FED:
            self._fed.clear()
        for place, fetched in result.items():
            self._fed[place] = self._turn, sum([len(batch.data) for batch in fetched.batches])

    def _leave_out_silent(self, groups: dict[int, list[TopicPartition]], failed: Failed) -> None:
        now = time.monotonic()
        for node in [node for node in groups if self._silent.has(node, now)]:
            for partition in groups.pop(node):
                why = f"broker {node}, which leads {partition.topic}, does not answer"
                failed[partition] = LogUnavailable(why, (partition.topic,))

    def _pass_over(
        self,
        node: int,
        partitions: Sequence[TopicPartition],
        error: ConnectionBroken,
        failed: Failed | None,
    ) -> None:
        """Continue without a broker that can't be reached or does not answer, and ask for the new leaders."""
        self._cluster.distrust(node)
        self._replicas.fails(partitions, node)
        if failed is None:
            return
        self._silent.failed(node)
        for partition in partitions:
            failed[partition] = LogUnavailable(str(error), (partition.topic,))

    def _ask(
        self,
        node: int,
        partitions: Sequence[TopicPartition],
        positions: Mapping[TopicPartition, int],
        wait: float,
        max_bytes: int,
        committed: bool,
        deadline: float,
    ) -> Asked:
        address = self._cluster.address(node)
        connection = self._cluster.pool.wait_on(address, self._cluster.soon(deadline))
        version = connection.version(FETCH)
        asked = {}
        for partition in partitions:
            epoch = self._cluster.epoch(partition)
            asked[partition] = data.FetchPosition(positions[partition], epoch)
        parts = data.fetch_request(
            version,
            asked,
            self._cluster.topic_ids,
            max_wait_ms=min(round(wait * 1000), _MAX_I32),
            max_bytes=min(max_bytes, _MAX_I32),
            isolation=data.READ_COMMITTED if committed else data.READ_UNCOMMITTED,
            rack=self._replicas.rack_for(asked),
        )
        correlation = connection.send(
            FETCH.key,
            version,
            parts,
            flexible=version >= FETCH.flexible_from,
            deadline=deadline,
        )
        wanted = {partition: positions[partition] for partition in partitions}
        return Asked(node, connection, address, version, correlation, wanted)

    def _take(
        self,
        asked: Asked,
        committed: bool,
        deadline: float,
        failed: Failed | None,
        moved: list[TopicPartition],
    ) -> dict[TopicPartition, Fetched]:
        body = asked.connection.receive(asked.correlation, deadline)
        try:
            error, answers = data.fetch_answer(asked.version, body, self._cluster.topic_names)
        except MalformedAnswer as problem:
            raise Again(problem) from problem
        if error != NONE:
            self._cluster.forget({partition.topic for partition in asked.positions})
            raise_or_again(codes.FETCH_CODES, error, "fetch")
        result: dict[TopicPartition, Fetched] = {}
        failure: tuple[str, int] | None = None
        for partition, answer in answers.items():
            position = asked.positions.get(partition)
            if position is None:
                continue
            topic = partition.topic
            if answer.replica not in (data.NO_REPLICA, asked.node):
                self._replicas.named(partition, answer.replica)
                moved.append(partition)
                continue
            # A follower may lag: ask its leader, also for an offset out of the follower's range.
            if answer.error != NONE and self._replicas.fails((partition,), asked.node):
                self._cluster.forget((topic,))
                moved.append(partition)
                continue
            if answer.error not in (NONE, OFFSET_OUT_OF_RANGE):
                failure = topic, answer.error
                self._cluster.forget((topic,))
                meant = meaning(codes.FETCH_CODES, answer.error)
                why = error_for(meant, answer.error, f"fetch {topic}", topics=(topic,))
                if failed is not None:
                    failed[partition] = why
                elif meant.act is Act.REFUSED:
                    raise why
                continue
            try:
                if answer.error == OFFSET_OUT_OF_RANGE:
                    self._cluster.forget((topic,))  # this broker may not be leader any more
                    raise OffsetOutOfRange(partition, position)
                fetched = data.fetched(partition, answer, position, committed)
            except (OffsetOutOfRange, CorruptBatch) as problem:
                if failed is None:
                    raise
                failed[partition] = problem
                continue
            if fetched is not None:
                result[partition] = fetched
        if failure is not None and failed is None and not result:
            topic, code = failure
            raise_or_again(codes.FETCH_CODES, code, f"fetch {topic}", topics=(topic,))
        self._note_fed(result)
        return result

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
        wanted = list(partitions)
        return self._repeat(
            "list offsets",
            lambda deadline: kafka_admin.list_offsets(
                self._cluster,
                wanted,
                timestamp,
                committed=committed,
                deadline=deadline,
                failed=failed,
                sure=sure,
            ),
        )

    def _repeat(self, what: str, attempt: Callable[[float], T], *, soon: bool = False) -> T:
        """`Cluster.repeat` for a call of `kafka.admin`, with its deadline."""
        deadline = self._cluster.deadline()
        deadline = self._cluster.soon(deadline) if soon else deadline
        return self._cluster.repeat(what, deadline, lambda: attempt(deadline))

    # -- writing --------------------------------------------------------------------------------------

    def producer(self, transactional_id: str, *, timeout: float) -> KafkaProducer:
        return KafkaProducer(self._cluster, transactional_id, timeout)

    def send(self, batches: Sequence[tuple[TopicPartition, bytes]], failed: Failed) -> bool:
        return self._sender.send(batches, failed)

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """Delete all records below the given offsets; reading then starts there."""
        self._repeat(
            "delete records",
            lambda deadline: kafka_admin.delete_records(self._cluster, before, deadline),
        )

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
        self._repeat(
            "delete topics",
            lambda deadline: kafka_admin.delete_topics(self._cluster, topics, deadline),
        )

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
            self._repeat("alter topics", partial(alter, self._cluster, changes))

    def default_replication_factor(self, topic: str) -> int | None:
        """`anabranch.ports.Log.default_replication_factor`, by a dry run."""
        return self._repeat(
            "default replication factor",
            lambda deadline: kafka_admin.default_replication_factor(self._cluster, topic, deadline),
        )

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        return self._repeat(
            "describe topics",
            lambda deadline: kafka_admin.describe_topics(self._cluster, names, deadline),
        )

    def partition_counts(self, names: Sequence[str]) -> dict[str, int]:
        found = self._cluster.refresh(names, self._cluster.deadline())
        return {name: topic.partitions for name, topic in found.items()}

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        found = self._cluster.refresh(names, self._cluster.deadline())
        return {name: _id_text(topic.topic_id) for name, topic in found.items()}

    def is_known(self, topic: str) -> bool:
        ask = partial(kafka_admin.is_known, self._cluster, topic)
        return self._repeat("ask who knows a topic", ask, soon=True)

    def is_agreed(self, topic: str, topic_id: str) -> bool:
        ask = partial(kafka_admin.is_agreed, self._cluster, topic, topic_id)
        return self._repeat("ask whether brokers agree about a topic", ask, soon=True)

    def id_read(self, topic: str) -> str:
        return _id_text(self._cluster.topic_ids.get(topic, b""))

    def is_gone(self, topic: str, partitions: int, topic_id: str) -> bool:
        ask = partial(kafka_admin.is_gone, self._cluster, topic, partitions, topic_id)
        return self._repeat("ask whether a topic is gone", ask, soon=True)

    def close(self) -> None:
        """`anabranch.ports.Log.close`; producers have connections of their own."""
        self._sender.close()
        self._cluster.close()


@dataclass(slots=True)
class Asked:
    """A fetch request under way to one broker."""

    node: int
    connection: Connection
    address: tuple[str, int]
    version: int
    correlation: int
    positions: dict[TopicPartition, int]


def ready(waiting: Sequence[Asked], deadline: float | None) -> list[Asked]:
    """The requests whose answer has begun to arrive. Wait for one until ``deadline`` (None: not at all)."""
    buffered = [one for one in waiting if one.connection.buffered()]
    if buffered:
        return buffered
    if deadline is not None and len(waiting) == 1:
        # Reading waits on its own.
        return list(waiting)
    wait = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
    found = readable([one.connection for one in waiting], wait)
    if not found and deadline is not None:
        return list(waiting)  # past the deadline: reading raises the error
    return [one for one in waiting if one.connection.fileno() in found]


class Replicas:
    """The replica to fetch a partition from: its leader, or a follower in the reader's rack (KIP-392).

    The leader names the follower. A follower that can't serve a partition is skipped for a while.
    """

    def __init__(self, rack: str) -> None:
        """``rack``: the reader's; if it is empty, leaders serve everything."""
        self._rack = rack
        # Partition -> (follower, or None for the leader; until when, monotonic seconds).
        self._chosen: dict[TopicPartition, tuple[int | None, float]] = {}

    def named(self, place: TopicPartition, node: int) -> None:
        """Note that the leader has named this follower."""
        self._chosen[place] = node, time.monotonic() + _NEAR_S

    def fails(self, places: Iterable[TopicPartition], node: int) -> bool:
        """Note that a broker can't serve these. True if it was a follower of one: then leaders are asked."""
        until = time.monotonic() + _LEADER_S
        followed = [place for place in places if self._chosen.get(place, (None,))[0] == node]
        self._chosen |= dict.fromkeys(followed, (None, until))
        return bool(followed)

    def groups(self, by_leader: dict[int, list[TopicPartition]]) -> dict[int, list[TopicPartition]]:
        """The partitions by the broker to ask. ``by_leader``: by their leaders."""
        if not self._chosen:
            return by_leader
        now = time.monotonic()
        self._chosen = {p: chosen for p, chosen in self._chosen.items() if chosen[1] > now}
        groups: dict[int, list[TopicPartition]] = {}
        for leader, places in by_leader.items():
            for place in places:
                follower, _ = self._chosen.get(place, (None, 0.0))
                groups.setdefault(leader if follower is None else follower, []).append(place)
        return groups

    def rack_for(self, places: Iterable[TopicPartition]) -> str:
        """The rack for a request; empty if the broker has to serve one of these itself."""
        chosen = self._chosen
        return "" if any(p in chosen and chosen[p][0] is None for p in places) else self._rack


def _id_text(topic_id: bytes) -> str:
    """A topic's id in hexadecimal digits; empty if brokers don't give topics ids."""
    return topic_id.hex() if any(topic_id) else ""
