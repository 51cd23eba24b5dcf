"""What readers get in stream order: one that knows everything, and groups of readers that crash.

Both follow EPOCH records and positions only. Whoever reads an event must have had all earlier ones of its key.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

from anabranch.protocol.legal_names import is_state
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas import records as r
from anabranch.reading.epoch_order import StreamOrder
from tests.sim.check_log import hold
from tests.sim.ledger import Ledger
from tests.sim.picture import Picture, Placed
from tests.sim.world import Violation

Ranks = dict[
    tuple[int, int], tuple[bytes, int]
]  # (partition, offset) -> (key, its how-manieth event)


def check_readers(picture: Picture, random: Random) -> None:
    """Every stream, by both kinds of readers; a state has no order of keys, but of tasks (`check_tasks`)."""
    for stream, found in picture.history.items():
        if is_state(stream):
            continue
        records = [record for _, record in found]
        epochs = [record for record in records if isinstance(record, r.EpochRecord)]
        ranks = ranks_of(picture, stream, records)
        check_by_epochs(picture, stream, epochs, ranks)
        for _ in range(2):
            Group(picture, stream, records, ranks, random).read()


def check_snapshots(picture: Picture, ledger: Ledger) -> None:
    """What was read is what the plan says, each event once, whatever was deleted since."""
    for stream, cut, places in ledger.snapshots:
        due = [
            (partition, event.offset)
            for partition, end in cut.offsets.items()
            for event in picture.events[stream, partition]
            if cut.start_offsets[partition] <= event.offset < end
        ]
        hold(sorted(places) == sorted(due), f"a snapshot of {stream}: {places}, and not {due}")


def ranks_of(picture: Picture, stream: str, records: list[object]) -> Ranks:
    """Each keyed event's place among those of its key, in the order of the commits."""
    counts: dict[bytes, int] = defaultdict(int)
    ranks: Ranks = {}
    for record in records:
        if not isinstance(record, r.CommitRecord):
            continue
        for at in record.segments:
            for event in picture.events[stream, at.partition]:
                if at.first <= event.offset < at.end and event.record.key is not None:
                    key = event.record.key
                    ranks[at.partition, event.offset] = (key, counts[key])
                    counts[key] += 1
    return ranks


def check_by_epochs(
    picture: Picture, stream: str, epochs: list[r.EpochRecord], ranks: Ranks
) -> None:
    """Segment by segment, in the order of the epochs that made them: all events, each key in order."""
    ends = {end.segment_id: end.end_offset for epoch in epochs for end in epoch.sealed}
    done: set[int] = set()
    got: dict[bytes, int] = defaultdict(int)
    count = 0
    for epoch in epochs:
        for segment in epoch.segments:
            if segment.segment_id in done:
                continue
            done.add(segment.segment_id)
            for event in picture.events[stream, segment.partition]:
                end = ends.get(segment.segment_id)
                if event.offset < segment.start_offset or (end is not None and event.offset >= end):
                    continue
                count += 1
                _follows(stream, event, ranks, got, again=False)
                key = event.record.key
                if key is not None:
                    inside = segment.low <= position_of(key) < segment.high
                    hold(inside, f"{stream}: {event} is not of {segment}")
    total = sum(len(events) for (name, _), events in picture.events.items() if name == stream)
    hold(count == total, f"{stream}: by epochs there are {count} events of {total}")


def _follows(
    stream: str, event: Placed, ranks: Ranks, got: dict[bytes, int], *, again: bool
) -> None:
    """It is the next event of its key; or, after a crash, one that came before."""
    if event.record.key is None:
        return
    key, rank = ranks[event.partition, event.offset]
    right = rank <= got[key] if again else rank == got[key]
    where = f"{stream}[{event.partition}] offset {event.offset}"
    hold(right, f"{where}: event {rank} of {key!r} is read behind {got[key]} of them")
    got[key] = max(got[key], rank + 1)


@dataclass
class Member:
    """A reader of some partitions. ``told``: how much of the history it has read."""

    own: list[int]
    order: StreamOrder
    positions: dict[int, int]
    told: int = 0
    layouts: list[r.EpochRecord] = field(default_factory=list)
    vector: dict[int, int] = field(default_factory=dict)  # up to here, commits are known


class Group:
    """Members that share the partitions and know each other by committed offsets only."""

    def __init__(
        self,
        picture: Picture,
        stream: str,
        records: list[object],
        ranks: Ranks,
        random: Random,
    ) -> None:
        self.stream, self.records, self.ranks, self.random = stream, records, ranks, random
        self.partitions = [number for name, number in picture.events if name == stream]
        self.events = {p: picture.events[stream, p] for p in self.partitions}
        self.committed: dict[int, int] = {}
        self.got: dict[bytes, int] = defaultdict(int)
        self.read_places: set[tuple[int, int]] = set()
        self.members: list[Member] = []
        self._share()

    def read(self) -> None:
        """Until nothing is left."""
        random = self.random
        crashes, idle = 6, 0
        total = sum(len(events) for events in self.events.values())
        while len(self.read_places) < total or any(
            m.told < len(self.records) for m in self.members
        ):
            member = random.choice(self.members)
            if crashes and random.random() < 0.02:
                crashes -= 1
                if random.random() < 0.5:
                    self._share()
                else:
                    self._start(member)
                continue
            worked = self._learn(member)
            worked |= self._take(member)
            if random.random() < 0.3 or idle > 20:
                self.committed.update({p: member.positions[p] for p in member.own})
            idle = 0 if worked else idle + 1
            if idle > 300:
                left = [
                    (event.partition, event.offset)
                    for events in self.events.values()
                    for event in events
                    if (event.partition, event.offset) not in self.read_places
                ]
                hold(False, f"{self.stream}: readers wait for each other; unread: {left}")

    def _share(self) -> None:
        """The group is rebalanced: all begin at what is committed."""
        count = self.random.choice((1, 2, 3))
        owners = [self.random.randrange(count) for _ in self.partitions]
        self.members = []
        for number in range(count):
            own = [p for p, owner in zip(self.partitions, owners, strict=True) if owner == number]
            member = Member(own, StreamOrder(frozenset(own)), {})
            self._start(member)
            self.members.append(member)

    def _start(self, member: Member) -> None:
        member.order = StreamOrder(frozenset(member.own))
        member.positions = {p: self.committed.get(p, 0) for p in member.own}
        member.order.moved(self.committed)
        member.told = 0
        member.layouts = []
        member.vector = {}

    def _learn(self, member: Member) -> bool:
        """Read on in the history; look where the others are."""
        before = member.told
        for _ in range(self.random.choice((0, 1, 3, 10))):
            if member.told == len(self.records):
                break
            record = self.records[member.told]
            member.told += 1
            if isinstance(record, r.EpochRecord):
                member.order.add(record)
                member.layouts.append(record)
            elif isinstance(record, r.CommitRecord):
                for at in record.segments:
                    member.vector[at.partition] = at.end
        member.order.moved(self.committed)
        return member.told > before

    def _take(self, member: Member) -> bool:
        """Some events of one partition, as far as they may be read."""
        if not member.own:
            return False
        partition = self.random.choice(member.own)
        took = False
        for event in self.events[partition]:
            if event.offset < member.positions[partition]:
                continue
            if event.offset >= member.vector.get(partition, 0):
                break
            if not member.order.readable(self._segment(member, event)):
                break
            _follows(self.stream, event, self.ranks, self.got, again=True)
            self.read_places.add((partition, event.offset))
            member.positions[partition] = event.offset + 1
            member.order.moved({partition: event.offset + 1})
            took = True
            if self.random.random() < 0.3:
                break
        return took

    def _segment(self, member: Member, event: Placed) -> int:
        """The segment of an event: of those on its partition the last one that begins at it or before."""
        for layout in member.layouts:
            for segment in layout.segments:
                if (
                    segment.partition == event.partition
                    and segment.start_offset <= event.offset
                    and event.offset < self._ends(member).get(segment.segment_id, 1 << 62)
                ):
                    return segment.segment_id
        raise Violation(f"{self.stream}: {event} is in no segment")

    def _ends(self, member: Member) -> dict[int, int]:
        return {e.segment_id: e.end_offset for layout in member.layouts for e in layout.sealed}
