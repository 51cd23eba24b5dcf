"""The trial's processor, as `anabranch processor run tests.processing.program:app` loads it, and its plain fold.

The fold knows what is promised: commits of one scope in the order of their timestamps, the events of a key in their
order, event time at the ends of commits.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import anabranch
from anabranch.processing.app import Processor
from anabranch.protocol.partitioner import SPACE, position_of

SCOPE_INPUTS = {"a": 3, "b": 1, "c": 4}  # and how many segments each has at first
SCOPE = os.environ.get("ANABRANCH_TRIAL_SCOPE", "trial")
TASKS = 16
CUT_BYTES = 1 << 20
WINDOW_MS, GRACE_MS, QUIET_MS = 2000, 1000, 1500
EVERY = 7  # each event of such a number sets a timer
# In `tests.processing.joined`: each event of such a number adds to one of so many groups; is joined.
GROUPS, SHARED = 64, 50
TEMPORAL = 10
RATE = b"rate"

app = Processor(f"{SCOPE}/sums", tasks=TASKS, commit_interval=0.05, cut_bytes=CUT_BYTES)
inputs = [app.input(f"{SCOPE}/{name}", value=json) for name in SCOPE_INPUTS]
out, times = app.output(f"{SCOPE}/out", value=json), app.output(f"{SCOPE}/times", value=json)
late = app.output(f"{SCOPE}/late")
sums = app.store("sums", value=json)
spans = app.windows("spans", WINDOW_MS / 1000, grace=GRACE_MS / 1000, value=json, late=late)


@app.timer("quiet")
def quiet(key: bytes, due: int) -> None:
    """Say it."""
    times.write(["quiet", due], key=key)


@app.on(*inputs)
def count(event: Any) -> None:
    """Count, add, and chain by key over all inputs; add by window; set a timer now and then."""
    number = event.value["n"]
    row = following(sums.get(event.key, START), number)
    sums[event.key] = row
    out.write([*row, number], key=event.key)
    for window in spans.of(event):
        window.value = (window.value or 0) + number
    if number % EVERY == 0:
        quiet.set(event.key, event.timestamp + QUIET_MS)


@spans.on_close
def close(window: anabranch.processing.timers.Window) -> None:
    """Say it."""
    times.write(["span", window.start, window.value], key=window.key)


START = [0, 0, 0]


def following(row: Sequence[int], number: int) -> list[int]:
    """Count, sum and chain of a key after one more number: the chain shows the order."""
    return [row[0] + 1, row[1] + number, crc32(b"%d" % number, row[2])]


def task_of(key: bytes) -> int:
    """The task of a key."""
    return position_of(key) * TASKS // SPACE


class Given(NamedTuple):
    """An event of an input."""

    stream: str
    key: bytes
    number: int
    timestamp: int


@dataclass
class Fold:
    """What outputs and stores have to be."""

    out: dict[bytes, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    times: dict[bytes, list[list[Any]]] = field(default_factory=lambda: defaultdict(list))
    late: list[tuple[bytes, int]] = field(default_factory=list)
    sums: dict[bytes, list[int]] = field(default_factory=dict)
    spans: dict[tuple[bytes, int], int] = field(default_factory=dict)
    timers: dict[bytes, int] = field(default_factory=dict)
    _now: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def outputs(self) -> int:
        """How many there have to be."""
        by_key = (*self.out.values(), *self.times.values())
        return sum(len(rows) for rows in by_key) + len(self.late)

    def commit(self, events: Iterable[Given]) -> None:
        """Take in one commit."""
        latest: dict[int, int] = defaultdict(int)
        for _, key, number, timestamp in events:
            task = task_of(key)
            latest[task] = max(latest[task], timestamp)
            self.sums[key] = row = following(self.sums.get(key, START), number)
            self.out[key].append([*row, number])
            start = timestamp - timestamp % WINDOW_MS
            if start + WINDOW_MS + GRACE_MS <= self._now[task]:
                self.late.append((key, number))
            else:
                self.spans[key, start] = self.spans.get((key, start), 0) + number
            if number % EVERY == 0:
                self.timers[key] = timestamp + QUIET_MS
        moved = {task for task, now in latest.items() if now > self._now[task]}
        self._now |= {task: latest[task] for task in moved}
        due = [(at, 1, key, 0) for key, at in self.timers.items()]
        due += [(at + WINDOW_MS + GRACE_MS, 0, key, at) for key, at in self.spans]
        for at, is_timer, key, start in sorted(due):
            if task_of(key) not in moved or at > self._now[task_of(key)]:
                continue
            if is_timer:
                self.times[key].append(["quiet", self.timers.pop(key)])
            else:
                self.times[key].append(["span", start, self.spans.pop((key, start))])


def group_of(number: int) -> bytes:
    """The row that an event's number is added to."""
    return b"%d" % (number // SHARED % GROUPS)


class JoinedFold:
    """What the table and the output have to be. ``commits``: timestamps and events; ``changes``: of the rate."""

    def __init__(
        self,
        commits: Iterable[tuple[int, Sequence[Given]]],
        changes: Iterable[tuple[int, int]],
    ) -> None:
        known = sorted(changes)
        times = [timestamp for timestamp, _ in known]
        self.groups = Counter[bytes]()
        self.joined: dict[int, int] = {}  # number of an event -> the rate
        for timestamp, events in commits:
            at = bisect_right(times, timestamp)
            for one in events:
                if one.number % SHARED == 0:
                    self.groups[group_of(one.number)] += one.number
                if one.number % TEMPORAL == 0:
                    self.joined[one.number] = known[at - 1][1] if at else 0
