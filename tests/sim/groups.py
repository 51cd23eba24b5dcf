"""Consumer groups of the in-memory log: members, generations, and who has which partition (the eager protocol)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place

from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.ports import SimCluster

_SESSION_S = 6.0  # so long a member may be silent
_REBALANCE_S = 10.0  # and so long it may take to join again

Offsets = dict[tuple[str, int], int]


@dataclass(eq=False)
class Group:
    """A group as its coordinator knows it."""

    members: list[Member] = field(default_factory=list)
    generation: int = 0
    joining_until: float | None = None  # a rebalance is under way
    layout: tuple[int, ...] = ()  # partition counts of the topics when partitions were given out


class Groups:
    """The coordinator of all groups."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self._groups: dict[str, Group] = defaultdict(Group)
        self._offsets: dict[str, Offsets] = defaultdict(dict)

    def offsets(self, name: str) -> Offsets:
        """(topic, partition) -> committed offset."""
        return self._offsets[name]

    def group(self, name: str) -> Group:
        """The group of that name."""
        return self._groups[name]

    def expire(self) -> bool:
        """Forget offsets of topics that no member subscribes to, as brokers do after a while; whether any went."""
        before = sum(map(len, self._offsets.values()))
        for name, group in self._groups.items():
            if group.members:
                topics = group.members[0].topics
                known = self._offsets[name]
                self._offsets[name] = {
                    place: at for place, at in known.items() if place[0] in topics
                }
        return sum(map(len, self._offsets.values())) < before

    def rebalance(self, group: Group) -> None:
        """All have to join again."""
        group.joining_until = self.world.now + _REBALANCE_S
        for member in group.members:
            member.joined = False

    def look_after(self, group: Group) -> None:
        """Put out who is silent; give out the partitions once all have joined."""
        now = self.world.now
        for member in list(group.members):
            if not (member.process.dead or member.process.frozen):
                member.silent_since = None
            elif member.silent_since is None:
                member.silent_since = now
            elif now - member.silent_since > _SESSION_S:
                self._put_out(group, member)
        if group.joining_until is None:
            return
        if now > group.joining_until:
            for member in [m for m in group.members if not m.joined]:
                group.members.remove(member)
        if all(member.joined for member in group.members):
            self._give_out(group)

    def _put_out(self, group: Group, member: Member) -> None:
        group.members.remove(member)
        if group.joining_until is None:
            self.rebalance(group)

    def layout(self, topics: Sequence[str]) -> tuple[int, ...]:
        """How many partitions the topics have."""
        known = self.cluster.topics
        return tuple(known[topic].partitions if topic in known else 0 for topic in topics)

    def _give_out(self, group: Group) -> None:
        group.joining_until = None
        group.generation += 1
        for member in group.members:
            member.given = []
        if not group.members:
            return
        topics = group.members[0].topics
        group.layout = self.layout(topics)
        for topic, count in zip(topics, group.layout, strict=True):
            for partition in range(count):
                self.world.random.choice(group.members).given.append(Place(topic, partition))


class Member:
    """A consumer in a group; its callbacks are called within `serve`."""

    def __init__(
        self,
        groups: Groups,
        name: str,
        process: Process,
        topics: Sequence[str],
        consumer: object,
        callbacks: Mapping[str, Callable[..., None]],
    ) -> None:
        self._groups = groups
        self._group = groups.group(name)
        self._consumer = consumer
        self._callbacks = callbacks
        self._owned: list[Place] | None = None
        self._generation = -1
        self.process = process
        self.topics = list(topics)
        self.given: list[Place] = []
        self.joined = False
        self.silent_since: float | None = None
        self._join()

    def _join(self) -> None:
        self._group.members.append(self)
        self._groups.rebalance(self._group)

    def serve(self) -> None:
        """Do what the group asks of this member."""
        group = self._group
        if self not in group.members:
            self._lose("on_lost")
            self._join()
        self._groups.look_after(group)
        if group.joining_until is not None and not self.joined and self in group.members:
            self._lose("on_revoke")
            self.joined = True
            self._groups.look_after(group)
        if group.joining_until is None and self in group.members:
            if self._generation != group.generation:
                self._generation = group.generation
                self._owned = list(self.given)
                self._callbacks["on_assign"](self._consumer, self._owned)
            elif self._groups.world.random.random() < 0.1:
                self.look_at_topics()

    def _lose(self, callback: str) -> None:
        owned, self._owned = self._owned, None
        if owned is not None:
            self._callbacks[callback](self._consumer, owned)

    def look_at_topics(self) -> None:
        """New partitions have to be given out."""
        group = self._group
        grown = group.layout != self._groups.layout(self.topics)
        if grown and group.joining_until is None and self in group.members:
            self._groups.rebalance(group)

    def check_may_commit(self) -> None:
        """`KafkaException` if the coordinator takes no offsets of this member."""
        code: Any = None
        if self not in self._group.members:
            code = KafkaError.UNKNOWN_MEMBER_ID
        elif self._group.joining_until is not None and self.joined:
            code = KafkaError.REBALANCE_IN_PROGRESS
        elif self._generation != self._group.generation:
            code = KafkaError.ILLEGAL_GENERATION
        if code is not None:
            raise KafkaException(KafkaError(code))

    def leave(self) -> None:
        """As `close` of the consumer does."""
        if self in self._group.members:
            self._lose("on_revoke")
        if self in self._group.members:
            self._group.members.remove(self)
            self._groups.rebalance(self._group)
