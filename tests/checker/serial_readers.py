"""Readers of the toy service: of each mode, alone and in groups, and snapshots."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tests.checker.serial import SCOPE, Placed, Row, Stream, Task, World, row_of

Cursors = dict[int, int]  # partition (-1: the history) -> how many events (commits) were read


@dataclass
class Group:
    """Where a group has come to, and who is in it. One without a name is a reader that is alone."""

    name: str | None
    mode: str
    stream: Stream
    starts: str | int
    committed: Cursors
    members: int = 0
    is_made: bool = False
    keys: dict[str, int] = field(default_factory=dict)


def new_reader(world: World) -> Task:
    """One that is alone, or the next member of a group: there is one at a time."""
    random = world.random
    mode = random.choice(["raw", "ordered", "transactions"])
    groups: list[Group] = world.__dict__.setdefault("groups", [])
    idle = [group for group in groups if group.members == 0]
    if idle and random.random() < 0.5:
        return _read(world, random.choice(idle))
    stream = random.choice(list(world.streams.values()))
    starts: str | int = random.choice(["start", "start", "end", world.clock - 100])
    if mode == "raw":
        starts = "start"
    name = world.new("g") if random.random() < 0.5 else None
    group = Group(name, mode, stream, starts, defaultdict(int))
    groups.append(group)
    return _read(world, group)


def _make(group: Group) -> None:
    """Where it begins."""
    group.is_made = True
    stream, starts = group.stream, group.starts
    if starts == "start":
        return
    for number, events in stream.partitions.items():
        count = len(events)
        if isinstance(starts, int):
            count = sum(event.timestamp <= starts for event in events)
        group.committed[number] = count
    past = len(stream.records)
    if isinstance(starts, int):
        past = sum(timestamp <= starts for timestamp, _, _ in stream.records)
    group.committed[-1] = past


def _read(world: World, group: Group) -> Task:
    """A member's life."""
    random, tape, file = world.random, world.tape, world.file
    group.members += 1
    name = world.new("r")
    where = "start" if group.starts == "start" else group.starts
    again = "position" if group.is_made and random.random() < 0.5 else where
    group.__dict__["last"] = (name, file)
    more = {"mode": group.mode, "streams": [group.stream.name], "group": group.name}
    op = tape.ask(file, "open", reader=name, starts=again, **more)
    yield
    tape.told(file, op)
    cursors: Cursors | None = None
    for _ in range(random.randint(2, 12)):
        op = tape.ask(file, "poll", reader=name)
        yield
        if cursors is None:
            if not group.is_made:
                _make(group)
            cursors = defaultdict(int, group.committed)
        rows = give(world, group, cursors, random.randint(0, 6))
        yield
        tape.told(file, op, events=rows)
        if group.name is not None and random.random() < 0.5:
            op = tape.ask(file, "position", reader=name)
            yield
            if random.random() < 0.8:
                group.committed = defaultdict(int, cursors)
                tape.told(file, op)
            else:
                tape.told(file, op, "unknown")
                if random.random() < 0.5:
                    group.committed = defaultdict(int, cursors)
        yield
    if cursors is not None:
        group.__dict__["cursors"] = cursors
    if random.random() < 0.5:
        tape.do(file, "close", reader=name)
    elif random.random() < 0.3 and group.name is not None:
        # Killed while it is given some, of which a part is committed.
        tape.ask(file, "poll", reader=name)
        cursors = defaultdict(int, group.committed if cursors is None else cursors)
        give(world, group, cursors, random.randint(0, 3))
        if random.random() < 0.5 and group.is_made:
            group.committed = cursors
    group.members -= 1


def give(world: World, group: Group, cursors: Cursors, most: int) -> list[Row]:
    """What comes next, in an order that the mode allows."""
    stream = group.stream
    if group.mode == "transactions":
        if cursors[-1] >= len(stream.records):
            return []
        events = stream.records[cursors[-1]][2]
        cursors[-1] += 1
        parts = defaultdict(list)
        for event in events:
            parts[event.partition].append(event)
        numbers = list(parts)
        world.random.shuffle(numbers)
        return [row_of(stream.name, event) for number in numbers for event in parts[number]]
    rows = []
    for _ in range(most):
        ready = [n for n in stream.partitions if _is_ready(group, cursors, n)]
        if not ready:
            break
        number = world.random.choice(ready)
        rows.append(row_of(stream.name, stream.partitions[number][cursors[number]]))
        cursors[number] += 1
    return rows


def _is_ready(group: Group, cursors: Cursors, number: int) -> bool:
    events = group.stream.partitions[number]
    if cursors[number] >= len(events):
        return False
    event = events[cursors[number]]
    if group.mode == "raw" or event.key is None:
        return True
    return not any(
        other.key == event.key and other.timestamp < event.timestamp
        for part, others in group.stream.partitions.items()
        if part != number
        for other in others[cursors[part] :]
    )


def drain(world: World) -> None:
    """The last member of each group reads to the end, and so does a reader of each mode."""
    groups: list[Group] = world.__dict__.get("groups", [])
    for stream in world.streams.values():
        for mode in ("raw", "ordered", "transactions"):
            groups.append(Group(None, mode, stream, "start", defaultdict(int)))
    tape = world.tape
    for group in groups:
        if group.name is None and group.is_made:
            continue
        if not group.is_made:
            _make(group)
        name = world.new("r")
        more = {"mode": group.mode, "streams": [group.stream.name], "group": group.name}
        tape.do("last", "open", reader=name, starts=group.starts, **more)
        tape.do("last", "poll", {"events": []}, reader=name)
        cursors = defaultdict(int, group.committed)
        while rows := give(world, group, cursors, 5):
            tape.do("last", "poll", {"events": rows}, reader=name)
        tape.do("last", "caught_up", reader=name)


def take_snapshot(world: World) -> Task:
    """Of now, or of some commit."""
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


__all__ = ["SCOPE", "drain", "give", "new_reader", "take_snapshot"]
