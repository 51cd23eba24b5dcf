"""Correct histories: a toy service that does one thing after the other, and clients that crash, race and time out.

The toy does not know the product: a transaction is a list of events, a commit appends it to lists. All chance comes
from the given `Random`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from checker.reading import Entry
from tests.checker.tape import Tape

Task = Generator[None, None, None]
Row = list[Any]
SCOPE = "s"


@dataclass
class Placed:
    """An event in a stream."""

    partition: int
    offset: int
    key: str | None
    id: str
    txn_id: str | None
    timestamp: int


@dataclass
class Stream:
    """Partitions that keys are dealt to, and the history."""

    name: str
    active: list[int]
    partitions: dict[int, list[Placed]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    records: list[tuple[int, list[str], list[Placed]]] = field(default_factory=list)

    def append(
        self, timestamp: int, txn_id: str | None, events: list[tuple[str | None, str]]
    ) -> None:
        """Events of one commit, each to the partition of its key."""
        placed = []
        for key, name in events:
            number = self.active[sum(map(ord, key or name)) % len(self.active)]
            event = Placed(number, self.ends[number], key, name, txn_id, timestamp)
            self.ends[number] += 1
            self.partitions[number].append(event)
            placed.append(event)
        for number in {event.partition for event in placed}:
            self.ends[number] += 1  # a marker
        if placed:
            ids = [txn_id] if txn_id is not None else ["0" * 32]
            self.records.append((timestamp, ids, placed))


@dataclass
class Open:
    """A transaction at the service."""

    handle: str
    txn_id: str
    state: str = "open"
    # writer -> stream, key, id
    written: dict[str, list[tuple[str, str | None, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    finished: list[str] = field(default_factory=list)
    timestamp: int | None = None
    committed: int = 0


class World:
    """The service, the processes, and the tape."""

    def __init__(self, random: Random, *, steps: int = 40, is_ragged: bool = False) -> None:
        self.random = random
        self.tape = Tape()
        self.clock = 1000
        self.count = 0
        self.streams = {
            name: Stream(name, list(range(random.randint(1, 3)))) for name in ("s/a", "s/b")
        }
        self.txns: dict[str, Open] = {}
        self.series: dict[str, tuple[int, Open]] = {}
        self.later: list[Callable[[], None]] = []  # effects that are still to come
        self.tasks: list[tuple[str, Task]] = []
        self.groups: list[Any] = []  # of `serial_readers`
        self.lives = 0
        self.steps = steps
        self.is_ragged = is_ragged  # the end is not read whole: retention, errors

    def run(self) -> list[Entry]:
        """A whole history."""
        from tests.checker.serial_clients import new_task
        from tests.checker.serial_readers import drain

        random = self.random
        for _ in range(self.steps):
            self.tasks.append((random.choice("pqr") + str(self.lives), new_task(self)))
            for _ in range(random.randint(1, 12)):
                self.step()
            if random.random() < 0.08:
                self.crash()
        while self.tasks:
            self.step()
        while self.later:
            self.later.pop(0)()
        drain(self)
        self._read_all()
        return self.tape.entries

    def step(self) -> None:
        """One task goes on."""
        random = self.random
        if self.later and random.random() < 0.2:
            self.later.pop(0)()
        if not self.tasks:
            return
        if random.random() < 0.2:
            self.tape.stands_still = True  # two entries of one time, maybe of one file
        at = random.randrange(len(self.tasks))
        file, task = self.tasks[at]
        self.file = file
        try:
            next(task)
        except StopIteration:
            self.tasks.pop(at)

    def crash(self) -> None:
        """A process is gone, with all that it was doing."""
        if self.tasks:
            victim = self.random.choice(self.tasks)[0]
            self.tasks = [(file, task) for file, task in self.tasks if file != victim]
            self.lives += 1
            for group in self.groups:
                for member in group.alive:
                    if member.file == victim:  # its session times out
                        self.later.append(partial(group.leave, self, member))

    def new(self, prefix: str) -> str:
        """A name that nothing else has."""
        self.count += 1
        return f"{prefix}{self.count}"

    def key(self) -> str | None:
        """One of few."""
        return self.random.choice(["k", "l", "m", None])

    def tick(self) -> int:
        """The next timestamp."""
        self.clock += self.random.randint(1, 50)
        return self.clock

    def decide(self, txn: Open, writers: list[str]) -> bool:
        """Commit it, if it is not over; returns whether it is committed now."""
        if txn.state == "open":
            txn.state, txn.timestamp = "committed", self.tick()
            taken: dict[str, list[tuple[str | None, str]]] = defaultdict(list)
            for writer in writers:
                for stream, key, name in txn.written[writer]:
                    taken[stream].append((key, name))
                    txn.committed += 1
            for stream, events in taken.items():
                self.streams[stream].append(txn.timestamp, txn.txn_id, events)
        return txn.state == "committed"

    def _read_all(self) -> None:
        for name, stream in self.streams.items():
            for number in stream.active + [p for p in stream.partitions if p not in stream.active]:
                luck = self.random.random() if self.is_ragged else 1.0
                start = self.random.randint(0, stream.ends[number]) if luck < 0.3 else 0
                if luck < 0.05:
                    op = self.tape.ask("end", "log", stream=name, partition=number)
                    self.tape.told("end", op, "unknown")
                    continue
                left = [event for event in stream.partitions[number] if event.offset >= start]
                rows = [[event.offset, event.key, event.id, event.txn_id] for event in left]
                self.tape.log(number, *rows, stream=name, start=start, end=stream.ends[number])
            records = []
            for offset, (timestamp, ids, events) in enumerate(stream.records):
                ranges = []
                for number in sorted({event.partition for event in events}):
                    offsets = [event.offset for event in events if event.partition == number]
                    ranges.append([number, offsets[0], offsets[-1] + 1])
                records.append([offset * 2 + 1, timestamp, ids, ranges])
            more: dict[str, Any] = {"records": records}
            if self.is_ragged and records and self.random.random() < 0.2:
                cut = self.random.randrange(len(records))
                more = {"records": records[cut:], "start": cut * 2}
            if not self.is_ragged or self.random.random() < 0.9:
                self.tape.do("end", "commits", more, stream=name)


def row_of(stream: str, event: Placed) -> Row:
    """As a reader is given it."""
    return [
        stream,
        event.partition,
        event.offset,
        event.key,
        event.id,
        event.txn_id,
        event.timestamp,
    ]


def generate(seed: int, *, steps: int = 40, is_ragged: bool = False) -> list[Entry]:
    """A correct history; ``is_ragged``: of which the end is not all there."""
    return World(Random(seed), steps=steps, is_ragged=is_ragged).run()
