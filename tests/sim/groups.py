"""Consumer groups of the in-memory log: members, generations, and who has which partition (the eager protocol)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.errors import NotReady
from anabranch.ports import LogError, TopicPartition
from tests.sim.world import Crash, Process

if TYPE_CHECKING:
    from tests.sim.ports import SimCluster

_SESSION_S = 6.0  # so long a member may be silent
_REBALANCE_S = 10.0  # and so long it may take to join again

_SERVE_S = 0.3  # so often a waiting member looks after its group

Offsets = dict[TopicPartition, int]


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
        """The committed offsets."""
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
                self.world.random.choice(group.members).given.append(
                    TopicPartition(topic, partition)
                )


class Member:
    """A reader's member of a group: `anabranch.ports.GroupMember`. Callbacks are called within `serve`."""

    def __init__(self, groups: Groups, name: str, process: Process) -> None:
        self._groups = groups
        self._world = groups.world
        self._name = name
        self._group = groups.group(name)
        self._gained: Callable[[], Callable[..., None] | None] | None = None
        self._lost: Callable[[], Callable[..., None] | None] | None = None
        self._owned: list[TopicPartition] | None = None
        self._generation = -1
        self.process = process
        self.topics: list[str] = []
        self.given: list[TopicPartition] = []
        self.joined = False
        self.silent_since: float | None = None

    @property
    def _is_mute(self) -> bool:
        """Nothing has an effect any more: the process is dead, or this is freed by the world."""
        return self.process.dead or self._world.running_name != self.process.name

    def join(
        self,
        topics: Sequence[str],
        gained: Callable[[list[TopicPartition]], None],
        lost: Callable[[list[TopicPartition], bool], None],
    ) -> None:
        """See `GroupMember.join`."""
        self.topics = list(topics)
        self._gained, self._lost = weakref.WeakMethod(gained), weakref.WeakMethod(lost)
        self._join()

    def _join(self) -> None:
        self._group.members.append(self)
        self._groups.rebalance(self._group)

    def serve(self, wait: float) -> None:
        """See `GroupMember.serve`."""
        give_up = self._world.now + wait
        while True:
            self._serve()
            left = give_up - self._world.now
            if left <= 0:
                return
            self._world.sleep(min(left, _SERVE_S))

    def _serve(self) -> None:
        """Do what the group asks of this member."""
        group = self._group
        if self not in group.members:
            self._lose(may_commit=False)
            self._join()
        self._groups.look_after(group)
        if group.joining_until is not None and not self.joined and self in group.members:
            self._lose(may_commit=True)
            self.joined = True
            self._groups.look_after(group)
        if group.joining_until is None and self in group.members:
            if self._generation != group.generation:
                self._generation = group.generation
                self._owned = list(self.given)
                gained = self._gained() if self._gained is not None else None
                if gained is not None:
                    gained(self._owned)
            elif self._world.random.random() < 0.1:
                self._look_at_topics()

    def _lose(self, *, may_commit: bool) -> None:
        owned, self._owned = self._owned, None
        lost = self._lost() if self._lost is not None else None
        if owned is not None and lost is not None:
            lost(owned, may_commit)

    def look(self) -> None:
        """See `GroupMember.look`."""
        self._world.point("list_topics")
        self._look_at_topics()

    def _look_at_topics(self) -> None:
        """New partitions have to be given out."""
        group = self._group
        grown = group.layout != self._groups.layout(self.topics)
        if grown and group.joining_until is None and self in group.members:
            self._groups.rebalance(group)

    def committed(self, places: Iterable[TopicPartition]) -> Offsets:
        """See `GroupMember.committed`."""
        try:
            self._world.point("committed")
        except LogError as error:
            raise NotReady(str(error)) from error
        known = self._groups.offsets(self._name)
        return {place: known[place] for place in places if place in known}

    def commit(self, offsets: Mapping[TopicPartition, int], *, wait: bool) -> bool:
        """See `GroupMember.commit`."""
        if self._is_mute:
            return False
        try:
            self._world.point("commit offsets")
        except (
            LogError,
            Crash,
        ):  # Python drops what a reader's `__del__` raises; a dead process does no more
            return False
        if not self._may_commit():
            return False
        self._groups.offsets(self._name).update(offsets)
        self._world.point("commit offsets.after")
        return True

    def _may_commit(self) -> bool:
        """Whether the coordinator takes offsets of this member."""
        return (
            self in self._group.members
            and not (self._group.joining_until is not None and self.joined)
            and self._generation == self._group.generation
        )

    def close(self) -> None:
        """See `GroupMember.close`."""
        if not self._is_mute and self in self._group.members:
            self._lose(may_commit=True)
        if not self._is_mute and self in self._group.members:
            self._group.members.remove(self)
            self._groups.rebalance(self._group)

    def leak(self) -> None:
        """See `GroupMember.leak`; nothing forks here."""
