"""Readers of the toy service: of each mode, alone and in groups of several at a time, and snapshots."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.checker.serial import Placed, Row, Stream, Task, World, row_of

HISTORY = -1  # as a partition: the commits of the stream, in mode transactions
Cursors = dict[int, int]  # partition -> how many events (commits) were read


@dataclass(eq=False)
class Member:
    """A reader.

    ``notes``: it notes each line that it takes up. ``given``: lines that it has not taken up yet. ``lost``: lines
    that it reads on, and does not know yet that they are another member's.
    """

    name: str
    file: str
    notes: bool = False
    cursors: Cursors = field(default_factory=lambda: defaultdict(int))
    given: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Group:
    """A group's positions and its members. A group without a name is a single reader."""

    name: str | None
    mode: str
    stream: Stream
    starts: str | int
    committed: Cursors = field(default_factory=lambda: defaultdict(int))
    alive: list[Member] = field(default_factory=list)
    owners: dict[int, Member] = field(default_factory=dict)
    is_made: bool = False

    def make(self) -> None:
        """Fix where it begins."""
        self.is_made = True
        stream, starts = self.stream, self.starts
        if starts == "start":
            return
        lines: dict[int, list[int]] = {
            number: [event.timestamp for event in events]
            for number, events in stream.partitions.items()
        }
        lines[HISTORY] = [timestamp for timestamp, _, _ in stream.records]
        for number, times in lines.items():
            past = times if starts == "end" else [t for t in times if t <= int(starts)]
            self.committed[number] = len(past)

    def lines(self) -> list[int]:
        """The items to read."""
        return [HISTORY] if self.mode == "transactions" else list(self.stream.partitions)

    def owned(self, world: World, member: Member) -> list[int]:
        """A member's lines; lines without an owner are dealt."""
        for line in self.lines():
            if line not in self.owners:
                self._give(line, world.random.choice(self.alive))
        return [line for line in self.lines() if self.owners[line] is member]

    def reads(self, world: World, member: Member) -> list[int]:
        """The lines that it has, and has taken up."""
        return [line for line in self.owned(world, member) if line not in member.given]

    def deal(self, world: World) -> None:
        """Members came or went: some lines get another owner, which goes on at the committed position."""
        for line, owner in list(self.owners.items()):
            new = world.random.choice(self.alive) if self.alive else None
            if new is owner:
                continue
            if owner in self.alive and line not in owner.given and world.random.random() < 0.6:
                self.committed[line] = owner.cursors[line]
            if owner.notes and line not in owner.given and world.random.random() < 0.5:
                owner.lost.add(line)
            if new is None:
                del self.owners[line]
            else:
                self._give(line, new)

    def _give(self, line: int, member: Member) -> None:
        self.owners[line] = member
        member.lost.discard(line)
        if member.notes:
            member.given.add(line)
        else:
            member.cursors[line] = self.committed[line]

    def take_up(self, world: World, member: Member) -> Task:
        """The member notes its lines, and then looks up the group's positions."""
        if world.random.random() < 0.5:
            member.lost.clear()
        lines = [line for line in self.owned(world, member) if line in member.given]
        if not lines:
            return
        places = [[self.stream.name, None if line == HISTORY else line] for line in lines]
        op = world.tape.ask(member.file, "resume", reader=member.name, places=places)
        yield
        for line in lines:
            if self.owners.get(line) is member:
                member.cursors[line] = self.committed[line]
                member.given.discard(line)
        world.tape.told(member.file, op)
        yield

    def leave(self, world: World, member: Member) -> None:
        """The member is gone."""
        if member in self.alive:
            self.alive.remove(member)
            self.deal(world)

    def commit(self, world: World, member: Member, cursors: Cursors) -> list[Row]:
        """A member's progress, as positions of partitions."""
        positions: list[Row] = []
        for line in self.reads(world, member):
            at = self.committed[line] = max(self.committed[line], cursors[line])
            if line != HISTORY and at:
                positions.append([self.stream.name, line, self._offset(line, at)])
        return positions

    def _offset(self, line: int, at: int) -> int:
        events = self.stream.partitions[line]
        return events[at].offset if at < len(events) else events[-1].offset + 1


def new_reader(world: World) -> Task:
    """One that is alone, or one more member of a group."""
    random = world.random
    groups = _groups(world)
    named = [group for group in groups if group.name is not None and len(group.alive) < 3]
    if named and random.random() < 0.6:
        return _read(world, random.choice(named))
    stream = random.choice(list(world.streams.values()))
    mode = random.choice(["raw", "ordered", "transactions"])
    starts: str | int = random.choice(["start", "start", "end"])
    if mode != "raw" and random.random() < 0.3:
        starts = world.clock - 100
    group = Group(world.new("g") if random.random() < 0.6 else None, mode, stream, starts)
    groups.append(group)
    return _read(world, group)


def _groups(world: World) -> list[Group]:
    found: list[Group] = world.groups
    return found


def _read(world: World, group: Group) -> Task:
    """A member's life."""
    random, tape, file = world.random, world.tape, world.file
    notes = group.name is not None and random.random() < 0.5
    member = Member(world.new("r"), file, notes)
    starts = "position" if group.is_made and random.random() < 0.5 else group.starts
    more: dict[str, Any] = {"mode": group.mode, "streams": [group.stream.name]}
    op = tape.ask(file, "open", reader=member.name, starts=starts, group=group.name, **more)
    yield
    tape.told(file, op)
    yield
    if not group.is_made:
        group.make()
    group.alive.append(member)
    group.deal(world)
    for _ in range(random.randint(2, 12)):
        if notes:
            yield from group.take_up(world, member)
        op = tape.ask(file, "poll", reader=member.name)
        yield
        rows = give(world, group, member, random.randint(0, 6))
        if random.random() < 0.05:
            tape.told(file, op, "unknown")
            continue
        yield
        tape.told(file, op, events=rows)
        if group.name is not None and random.random() < 0.5:
            yield from _position(world, group, member)
        yield
    if random.random() < 0.5:
        group.leave(world, member)
        tape.do(file, "close", reader=member.name)
    elif group.name is not None:
        world.later.append(lambda: group.leave(world, member))


def _position(world: World, group: Group, member: Member) -> Task:
    random, tape, file = world.random, world.tape, member.file
    # The position is fixed before the commit is asked for; partitions may go meanwhile.
    cursors = defaultdict(int, member.cursors)
    is_bare = random.random() < 0.5
    positions = group.commit(world, member, cursors)
    more = {} if is_bare else {"positions": positions}
    op = tape.ask(file, "position", reader=member.name, **more)
    yield
    tape.told(file, op, random.choice(["ok", "ok", "ok", "unknown"]))


def give(world: World, group: Group, member: Member, most: int) -> list[Row]:
    """The next items, in an order that the mode allows. Some of them may be committed at once."""
    stream, cursors = group.stream, member.cursors
    owned = group.reads(world, member) + sorted(member.lost)
    if group.mode == "transactions":
        if HISTORY not in owned or cursors[HISTORY] >= len(stream.records):
            return []
        events = stream.records[cursors[HISTORY]][2]
        cursors[HISTORY] += 1
        parts = defaultdict(list)
        for event in events:
            parts[event.partition].append(event)
        numbers = list(parts)
        world.random.shuffle(numbers)
        return [row_of(stream.name, event) for number in numbers for event in parts[number]]
    rows = []
    for _ in range(most):
        ready = [number for number in owned if _is_ready(group, member, number)]
        if not ready:
            break
        if group.name is not None and world.random.random() < 0.1:
            group.commit(world, member, cursors)  # who asks for the next one has processed the last
        number = world.random.choice(ready)
        rows.append(row_of(stream.name, stream.partitions[number][cursors[number]]))
        cursors[number] += 1
    return rows


def _is_ready(group: Group, member: Member, number: int) -> bool:
    """Everything of its key that was committed before is read: by it, or by others who have said so."""
    events = group.stream.partitions[number]
    at = member.cursors[number]
    if at >= len(events):
        return False
    event = events[at]
    if group.mode == "raw" or event.key is None:
        return True
    for other, others in group.stream.partitions.items():
        owner = group.owners.get(other)
        past = member.cursors[other] if owner is member else group.committed[other]
        for one in others[past:] if other != number else ():
            if one.key == event.key and one.timestamp < event.timestamp:
                return False
    return True


def drain(world: World) -> None:
    """The last member of each group reads to the end, and so does a reader of each mode."""
    groups = _groups(world)
    for stream in world.streams.values():
        groups += [Group(None, mode, stream, "start") for mode in ("raw", "ordered")]
        groups.append(Group(None, "transactions", stream, "start"))
    tape = world.tape
    for group in groups:
        if group.name is None and group.is_made:
            continue
        for member in list(group.alive):
            group.leave(world, member)
        if not group.is_made:
            group.make()
        last = Member(world.new("r"), "last")
        more: dict[str, Any] = {"mode": group.mode, "streams": [group.stream.name]}
        more |= {"group": group.name, "starts": group.starts}
        tape.do("last", "open", reader=last.name, **more)
        tape.do("last", "poll", {"events": []}, reader=last.name)
        group.alive.append(last)
        while rows := give(world, group, last, 5):
            tape.do("last", "poll", {"events": rows}, reader=last.name)
        tape.do("last", "caught_up", reader=last.name)


def take_snapshot(world: World) -> Task:
    """A timestamp: now, or of some commit."""
    random, tape, file = world.random, world.tape, world.file
    label = world.new("n")
    times = [t for stream in world.streams.values() for t, _, _ in stream.records]
    wanted = random.choice(times) if times and random.random() < 0.4 else None
    streams = list(world.streams)
    op = tape.ask(file, "snapshot", snapshot=label, streams=streams, asked_for=wanted)
    yield
    timestamp = world.tick() if wanted is None else wanted
    yield
    tape.told(file, op, timestamp=timestamp)
    for stream in world.streams.values():
        op = tape.ask(file, "snapshot_read", snapshot=label, stream=stream.name)
        yield
        found: list[Placed] = [
            event
            for _, _, events in stream.records
            for event in events
            if event.timestamp <= timestamp
        ]
        tape.told(file, op, events=[row_of(stream.name, event) for event in found])
