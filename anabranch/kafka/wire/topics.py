"""Topics as the cluster's metadata show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

NO_TOPIC_ID = bytes(16)


class Leader(NamedTuple):
    """A partition's leader, and its leader epoch (-1: not known)."""

    node: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster's metadata show it. ``topic_id`` is all zeros with older brokers."""

    name: str
    topic_id: bytes
    leaders: dict[int, Leader]
    partitions: int
    replication_factor: int
    in_sync: int  # replicas in sync of the partition with the fewest
    replicas: frozenset[int] = frozenset()  # brokers

    @property
    def leading(self) -> set[int]:
        """The brokers that lead it."""
        return {leader.node for leader in self.leaders.values()}


def newer(topic: Topic, leaders: Mapping[int, Leader]) -> Topic:
    """The topic with those of these leaders that are newer."""
    newest = {
        number: max(leader, leaders.get(number, leader), key=attrgetter("epoch"))
        for number, leader in topic.leaders.items()
    }
    return replace(topic, leaders=newest)


def topic_of(found: Any) -> Topic:
    """A topic of a Metadata answer."""
    leaders = {}
    replicas = 0
    nodes: set[int] = set()
    in_sync = []
    for partition in found.partitions:
        replicas = max(replicas, len(partition.replica_nodes))
        nodes.update(map(int, partition.replica_nodes))
        in_sync.append(len(partition.isr_nodes))
        node = int(partition.leader_id)
        if node >= 0:
            epoch = int(getattr(partition, "leader_epoch", -1))
            leaders[int(partition.partition_index)] = Leader(node, epoch)
    topic_id = getattr(found, "topic_id", None)
    return Topic(
        name=str(found.name),
        topic_id=topic_id.bytes if topic_id is not None else NO_TOPIC_ID,
        leaders=leaders,
        partitions=len(found.partitions),
        replication_factor=replicas,
        in_sync=min(in_sync, default=-1),
        replicas=frozenset(nodes),
    )
