"""Lasting trouble: brokers' errors for a partition without a leader, with too few replicas, or that takes nothing.

Tests and simulators put it on partitions of a `MemoryBroker`, and take it away again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from anabranch.ports import (
    NOT_ENOUGH_REPLICAS,
    TOPIC_AUTHORIZATION_FAILED,
    LogError,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicInfo,
    TopicPartition,
)

MARKER_BYTES = 78  # the least ``max.message.bytes`` with which a partition takes markers


class Kind(Enum):
    """A kind of trouble."""

    LEADERLESS = "it has no leader"
    FEW_REPLICAS = "too few replicas are in sync"  # read, not written
    FAILED_DISK = "KAFKA_STORAGE_ERROR (56)"  # not written, but the client can't be sure
    REFUSING = "writes are refused"
    DENYING = "writes and reads are refused"
    STALE = "NOT_LEADER_OR_FOLLOWER (6)"  # a former leader answers


@dataclass(frozen=True, slots=True)
class Trouble:
    """Trouble of one partition. ``process``: prefix of the processes that see it. ``end``: of a stale log."""

    kind: Kind
    code: int = TOPIC_AUTHORIZATION_FAILED
    process: str = ""
    end: int = 0


class Troubles(dict[TopicPartition, Trouble]):
    """All trouble that there is."""

    def of(
        self, places: Iterable[TopicPartition], process: str, *kinds: Kind
    ) -> dict[TopicPartition, Trouble]:
        """Trouble of these kinds that a process sees of these partitions."""
        if not self:
            return {}
        found = {place: self[place] for place in places if place in self}
        return {
            place: trouble
            for place, trouble in found.items()
            if trouble.kind in kinds and process.startswith(trouble.process)
        }

    def check_read(self, place: TopicPartition, process: str) -> None:
        """`LogError` unless the partition can be read."""
        if not self:
            return
        for found in self.of([place], process, Kind.LEADERLESS, Kind.DENYING).values():
            raise error_of(place, found)

    def end(self, place: TopicPartition, process: str, end: int) -> int:
        """The log's end, as that process sees it."""
        stale = self.of([place], process, Kind.STALE).get(place) if self else None
        return min(stale.end, end) if stale is not None else end

    def unwritten(
        self, places: Iterable[TopicPartition], process: str
    ) -> tuple[LogError | None, set[TopicPartition]]:
        """The worst error of a write to all of them, and the partitions that it does not reach."""
        found = self.of(places, process, *Kind)
        errors = [error_of(place, trouble) for place, trouble in found.items()]
        for place, trouble in found.items():
            if trouble.kind is Kind.STALE:
                del self[place]  # the process now asks for the leader
        errors.sort(key=lambda error: isinstance(error, LogRefused))
        return (errors[0] if errors else None), set(found)

    def described(self, topic: TopicInfo) -> TopicInfo:
        """The topic as metadata show it in this trouble."""
        found = {place.partition: t.kind for place, t in self.items() if place.topic == topic.name}
        # A broker takes the partitions of a disk that failed off line at once.
        away = Kind.LEADERLESS, Kind.FAILED_DISK
        leaderless = tuple(p for p, kind in found.items() if kind in away)
        in_sync = 0 if Kind.FEW_REPLICAS in found.values() else topic.in_sync
        return replace(topic, leaderless=leaderless, in_sync=in_sync) if found else topic


def error_of(place: TopicPartition, trouble: Trouble) -> LogError:
    """The error of a call that needs that partition."""
    message, topics = f"{place.topic}[{place.partition}]: {trouble.kind.value}", (place.topic,)
    match trouble.kind:
        case Kind.LEADERLESS:
            return LogUnavailable(message, topics)
        case Kind.FEW_REPLICAS:
            return LogRefused(message, NOT_ENOUGH_REPLICAS, topics)
        case Kind.REFUSING | Kind.DENYING:
            return LogRefused(f"{message}, code {trouble.code}", trouble.code, topics)
        case _:
            return LogUncertain(message, topics)
