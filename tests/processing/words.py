"""Programs with one word each (sessions, sliding windows, joins …), and a brute-force fold for each.

The folds keep all events and compute everything again for each commit. `app` has all words in one program, as
`anabranch processor run tests.processing.words:app` loads it.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from anabranch import aggregates as agg
from anabranch.errors import SnapshotExpired
from anabranch.processing.app import Processor
from anabranch.protocol.partitioner import task_of

TASKS = 4
SCOPE = os.environ.get("ANABRANCH_TRIAL_SCOPE", "t")
LEFT, RIGHT = f"{SCOPE}/left", f"{SCOPE}/right"

KEYS = [b"k%d" % i for i in range(7)]

FAR = 10_000_000  # a time at which everything is closed


class Given(NamedTuple):
    """An event of a test."""

    stream: str
    key: bytes
    n: int
    at: int


Commits = list[list[Given]]

OUTPUTS = (("out", json), ("late", None))


def random_commits(seed: int, count: int = 60) -> Commits:
    """Input commits over both streams: mostly in time, some late, some much too late; at the end time is far."""
    rng = random.Random(seed)
    now, n, found = 1000, 0, list[list[Given]]()
    for _ in range(count):
        some = list[Given]()
        for _ in range(rng.randint(1, 5)):
            n += 1
            now += rng.choice([0, 1, 30, 60, 200] if rng.random() < 0.9 else [1500])
            at = now - rng.choice([0, 0, 0, 1, 50, 100, 150, 400, 3000])
            some.append(Given(rng.choice([LEFT, RIGHT]), rng.choice(KEYS), n, max(0, at)))
        found.append(sorted(some, key=lambda one: one.stream))  # events come by input
    last = [Given(LEFT, key, 0, FAR) for key in keys_of_tasks()]
    return [*found, last, [one._replace(at=2 * FAR) for one in last]]


def keys_of_tasks() -> list[bytes]:
    """A key of each task, none of `KEYS`."""
    keys = {task_of(b"z%d" % n, TASKS): b"z%d" % n for n in range(100)}
    return [keys[task] for task in range(TASKS)]


class Fold:
    """The event times of tasks. `event` and `close` are those of a program."""

    def __init__(self) -> None:
        self.now: dict[int, int] = defaultdict(int)
        self.wrote: list[tuple[str, bytes | None, Any, int | None]] = []

    def run(self, commits: Commits) -> None:
        for commit in commits:
            for one in commit:
                self.event(one, self.now[task_of(one.key, TASKS)])
            for task in sorted({task_of(one.key, TASKS) for one in commit}):
                latest = max(one.at for one in commit if task_of(one.key, TASKS) == task)
                if latest > self.now[task]:
                    self.now[task] = latest
                    self.close(task, latest)

    def event(self, one: Given, now: int) -> None:
        raise NotImplementedError

    def close(self, task: int, now: int) -> None:
        """Write what is closed by now, in the order of due time and key."""

    def write(self, key: bytes, value: Any, at: int | None, stream: str = f"{SCOPE}/out") -> None:
        self.wrote.append((stream, key, value, at))

    def late(self, one: Given) -> None:
        self.write(one.key, one.n, one.at or None, f"{SCOPE}/late")


class Parts(NamedTuple):
    """A processor with two inputs, an output and a stream for late events."""

    app: Processor
    left: Any
    right: Any
    out: Any
    late: Any

    @classmethod
    def of(cls, app: Processor, word: str = "") -> Parts:
        """``word``: part of the names of its outputs."""
        left, right = app.input(LEFT, value=json), app.input(RIGHT, value=json)
        out, late = (app.output(f"{SCOPE}/{name}{word}", value=codec) for name, codec in OUTPUTS)
        return cls(app, left, right, out, late)


def program(build: Build | None = None) -> Processor:
    """A program with one word."""
    app = Processor(f"{SCOPE}/p", tasks=TASKS)
    if build is not None:
        build(Parts.of(app))
    return app


Build = Callable[[Parts], None]
GAP, GRACE = 150, 120


def sessions_by_name(parts: Parts) -> None:
    app, left, right, out, late = parts
    visits = app.sessions(
        "visits", GAP / 1000, grace=GRACE / 1000, into=agg.top(4, lambda e: e.value), late=late
    )

    @app.on(left, right)
    def visit(event: Any) -> None:
        visits.add(event)

    @visits.on_close
    def closed(session: Any) -> None:
        out.write([session.start, session.end, session.value], key=session.key)


def sessions_by_hand(parts: Parts) -> None:
    app, left, right, out, late = parts
    visits = app.sessions(
        "visits", GAP / 1000, grace=GRACE / 1000, late=late, value=json,
        merge=lambda one, two: sorted(one + two, reverse=True),
    )  # fmt: skip

    @app.on(left, right)
    def visit(event: Any) -> None:
        for session in visits.of(event):
            session.value = sorted([*(session.value or []), event.value], reverse=True)

    @visits.on_close
    def closed(session: Any) -> None:
        out.write([session.start, session.end, session.value[:4]], key=session.key)


class SessionFold(Fold):
    """All open events by key; sessions are the clusters of their times."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[bytes, list[Given]] = defaultdict(list)

    def event(self, one: Given, now: int) -> None:
        near = any(abs(one.at - other.at) < GAP for other in self.open[one.key])
        if one.at + GAP + GRACE <= now and not near:
            self.late(one)
        else:
            self.open[one.key].append(one)

    def close(self, task: int, now: int) -> None:
        over = []
        for key, some in self.open.items():
            clusters = list[list[Given]]()
            for one in sorted(some, key=lambda one: one.at):
                if clusters and one.at - clusters[-1][-1].at < GAP:
                    clusters[-1].append(one)
                else:
                    clusters.append([one])
            over += [
                (cluster[-1].at + GAP + GRACE, key, cluster)
                for cluster in clusters
                if task_of(key, TASKS) == task and cluster[-1].at + GAP + GRACE <= now
            ]
        for due, key, cluster in sorted(over, key=lambda one: one[:2]):
            best = sorted((one.n for one in cluster), reverse=True)[:4]
            self.write(key, [cluster[0].at, cluster[-1].at, best], due)
            self.open[key] = [one for one in self.open[key] if one not in cluster]


SIZE = 200


def sliding(parts: Parts) -> None:
    app, left, right, out, late = parts
    last = app.sliding("last", SIZE / 1000, grace=GRACE / 1000, into=agg.sum(), late=late)

    @app.on(left, right)
    def add(event: Any) -> None:
        if (now := last.add(event)) is not None:
            out.write(["now", now], key=event.key)

    @last.on_close
    def closed(window: Any) -> None:
        out.write([window.start, window.end, window.value], key=window.key)


class SlidingFold(Fold):
    """All events that were in time, by key, and the times whose windows are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[bytes, list[Given]] = defaultdict(list)
        self.closed = set[tuple[bytes, int]]()

    def total(self, key: bytes, end: int) -> int:
        return sum(one.n for one in self.events[key] if end - SIZE < one.at <= end)

    def event(self, one: Given, now: int) -> None:
        if one.at + GRACE < now:
            self.late(one)
            return
        self.events[one.key].append(one)
        self.write(one.key, ["now", self.total(one.key, one.at)], one.at or None)

    def close(self, task: int, now: int) -> None:
        ends = {(one.at + GRACE + 1, key) for key, some in self.events.items() for one in some}
        for due, key in sorted(ends):
            end = due - GRACE - 1
            if task_of(key, TASKS) == task and due <= now and (key, end) not in self.closed:
                self.closed.add((key, end))
                self.write(key, [end - SIZE, end, self.total(key, end)], due)


BEFORE, AFTER = 60, 180


def join(kind: Any) -> Build:
    def build(parts: Parts) -> None:
        app, left, right, out, late = parts
        within = BEFORE / 1000, AFTER / 1000

        @app.join("pairs", left, right, within=within, grace=GRACE / 1000, kind=kind, late=late)
        def pair(one: Any, two: Any) -> None:
            key = (one or two).key
            out.write([one and one.value, two and two.value], key=key)

    return build


def join_fold(kind: str) -> type[Fold]:
    class JoinFold(Fold):
        """All events that were in time, and which of them have found others."""

        def __init__(self) -> None:
            super().__init__()
            self.events: dict[bytes, list[Given]] = defaultdict(list)
            self.found, self.gone = set[int](), set[Given]()

        def over(self, one: Given) -> int:
            return one.at + (AFTER if one.stream == LEFT else BEFORE) + GRACE + 1

        def event(self, one: Given, now: int) -> None:
            if self.over(one) <= now:
                self.late(one)
                return
            for other in sorted(self.events[one.key], key=lambda each: each.at):
                left, right = sorted((one, other), key=lambda each: each.stream)
                is_near = -BEFORE <= right.at - left.at <= AFTER
                if left.stream != right.stream and is_near and self.over(other) > now:
                    self.found |= {one.n, other.n}
                    self.write(one.key, [left.n, right.n], max(one.at, other.at) or None)
            self.events[one.key].append(one)

        def close(self, task: int, now: int) -> None:
            alone = {"inner": (), "left": (LEFT,), "outer": (LEFT, RIGHT)}[kind]
            some = [one for each in self.events.values() for one in each if one.stream in alone]
            for due, key, one in sorted((self.over(one), one.key, one) for one in some):
                if task_of(key, TASKS) != task or due > now or one in self.gone:
                    continue
                self.gone.add(one)
                if one.n not in self.found or one.n == 0:
                    value = [one.n, None] if one.stream == LEFT else [None, one.n]
                    self.write(key, value, due)

    return JoinFold


KEEP = 500


def versions(parts: Parts) -> None:
    app, left, right, out, late = parts
    rows = app.latest("rows", left, keep=KEEP / 1000, late=late)

    @app.on(right)
    def enrich(event: Any) -> None:
        try:
            found = rows.get(event.key, -1, at=event.timestamp)
        except SnapshotExpired:
            found = "too early"
        out.write([event.value, found, rows.get(event.key, -1)], key=event.key)


class VersionFold(Fold):
    """All changes of the left stream that were in time."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[bytes, list[Given]] = defaultdict(list)

    def event(self, one: Given, now: int) -> None:
        changes = self.changes[one.key]
        if one.stream == LEFT:
            if one.at + KEEP < now:
                self.late(one)
            else:
                changes.append(one)
                changes.sort(key=lambda each: each.at)
            return
        newest = changes[-1].n if changes else -1
        before = [each.n for each in changes if each.at <= one.at]
        found: Any = before[-1] if before else -1
        if one.at + KEEP < now:
            found = "too early"
        self.write(one.key, [one.n, found, newest], one.at or None)


TTL = 300


def expiring(parts: Parts) -> None:
    app, left, right, out, _ = parts
    rows = app.store("kept", value=json, ttl=TTL / 1000)

    @app.on(left)
    def change(event: Any) -> None:
        rows[event.key] = event.value

    @app.on(right)
    def look(event: Any) -> None:
        assert (event.key in rows) == (rows.get(event.key) is not None)
        assert dict(rows.items()).get(event.key) == rows.get(event.key)
        out.write([event.value, rows.get(event.key)], key=event.key)


class ExpiringFold(Fold):
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[bytes, tuple[int, int]] = {}

    def event(self, one: Given, now: int) -> None:
        if one.stream == LEFT:
            self.rows[one.key] = one.n, max(one.at, now)
            return
        n, since = self.rows.get(one.key, (0, -TTL))
        self.write(one.key, [one.n, n if since + TTL > now else None], one.at or None)


def periodic(parts: Parts) -> None:
    app, left, right, out, _ = parts
    clock = app.clock()
    seen = app.store("seen", value=json)

    @app.on(left, right)
    def note(event: Any) -> None:
        seen[event.key] = clock.event_time

    @app.every("tick", 0.1)
    def tick(now: int) -> None:
        for key, value in list(seen.items()):
            out.write([now, clock.event_time, value], key=key)
            del seen[key]


class PeriodicFold(Fold):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[bytes, int] = {}
        self.next: dict[int, int] = {}

    def event(self, one: Given, now: int) -> None:
        self.seen[one.key] = now

    def close(self, task: int, now: int) -> None:
        due = self.next.get(task, now + 1)
        if due <= now:
            for key in sorted(key for key in self.seen if task_of(key, TASKS) == task):
                self.write(key, [now // 100 * 100, now, self.seen.pop(key)], due)
        if due <= now or task not in self.next:
            self.next[task] = now // 100 * 100 + 100


WORDS: dict[str, tuple[Build, type[Fold]]] = {
    "sessions": (sessions_by_name, SessionFold),
    "sliding": (sliding, SlidingFold),
    "inner": (join("inner"), join_fold("inner")),
    "left": (join("left"), join_fold("left")),
    "versions": (versions, VersionFold),
    "expiring": (expiring, ExpiringFold),
    "periodic": (periodic, PeriodicFold),
}

app = Processor(f"{SCOPE}/words", tasks=TASKS, commit_interval=0.05, cut_bytes=2_000)
for _word, (_build, _) in WORDS.items():
    if _word != "inner":  # a left join has all that an inner one has, and the name of its rows
        _build(Parts.of(app, f"-{_word}"))

ORDERS, PEOPLE, NAMED = f"{SCOPE}/orders", f"{SCOPE}/people", f"{SCOPE}/named"
OF_PERSON, TOTALS, VIA = f"{SCOPE}/by-person", f"{SCOPE}/totals", f"{SCOPE}/named-via"

keys_app = Processor(f"{SCOPE}/keys", tasks=TASKS, commit_interval=0.05)
_orders, _people = (keys_app.input(name, value=json) for name in (ORDERS, PEOPLE))
_named, _totals = (keys_app.output(name, value=json) for name in (NAMED, TOTALS))
_counts = keys_app.store("counts", into=agg.count())
_by_person = keys_app.rekey(_orders, OF_PERSON, lambda one: one.value and one.value["of"])


@keys_app.on(_by_person)
def count(event: Any) -> None:
    """Count the changes of orders by the person that they name."""
    _totals.write(_counts.add(event), key=event.key)


@keys_app.join_by_key("named", _orders, _people, by=lambda order: order["of"], via=VIA)
def name(key: Any, order: Any, person: Any) -> None:
    """Write an order with its person, if there is one."""
    _named.write(order and person and [order["n"], person["n"]], key=key)
