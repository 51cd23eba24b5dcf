"""Sessions, sliding windows, joins, aggregates and expiring rows: each equals a brute-force fold of its input.

The folds keep all events and compute everything again for each commit. The programs are run with batches of any
size, with input commits in parts, with restarts, and with batches that are full after any timer.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

import anabranch
from anabranch import aggregates as agg
from anabranch.processing.app import Processor
from anabranch.processing.batch import WorkBatch
from anabranch.processing.handlers import Handlers
from anabranch.protocol.partitioner import task_of
from anabranch.reading.slices import Piece
from anabranch.testing.driver import MemoryRows

TASKS = 4
KEYS = [b"k%d" % i for i in range(7)]
SEEDS = range(25)
LEFT, RIGHT = "t/left", "t/right"
FAR = 10_000_000  # a time at which everything is closed


class Given(NamedTuple):
    """An event of a test."""

    stream: str
    key: bytes
    n: int
    at: int


Commits = list[list[Given]]
Build = Callable[[], Processor]


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


class Runner:
    """Runs a program as a worker does, over a dict of rows. ``wrote``: stream, key, value and timestamp."""

    def __init__(self, app: Processor, rng: random.Random | None = None) -> None:
        self.app, self.rng = app, rng
        self.rows = MemoryRows(TASKS)
        self.wrote: list[tuple[str, bytes | None, Any, int | None]] = []
        self.handlers = self._handlers()

    def _handlers(self) -> Handlers:
        handlers = Handlers(self.app, tuple(self.app.stores), pauses=False)
        if self.rng is not None:
            handlers.batch_bytes = self.rng.choice([300, 2000, 1 << 20])
        handlers.resume(self.rows, range(TASKS))
        return handlers

    def run(self, commits: Commits) -> None:
        """All commits; with a random generator in batches, parts and lives of any size."""
        pieces = [piece for n, some in enumerate(commits) for piece in self._pieces(n + 1, some)]
        while pieces:
            count = 1 if self.rng is None else self.rng.randint(1, 9)
            some, pieces = pieces[:count], pieces[count:]
            while some or self._is_due():
                some = self._batch(some)
            if self.rng is not None and self.rng.random() < 0.2:
                self.handlers = self._handlers()

    def _is_due(self) -> bool:
        before = len(self.wrote)
        self._batch([])
        return len(self.wrote) > before

    def _batch(self, pieces: list[Piece]) -> list[Piece]:
        batch = WorkBatch(self.rows, TASKS)
        self.handlers.fire_wall(batch, range(TASKS), 0)
        left = self.handlers.handle(batch, pieces)
        batch.open = False
        for task, rows in batch.rows.items():
            self.rows.by_task[task].change(rows)
        for stream, events in batch.outputs.items():
            for value, key, _, at in events:  # type: ignore[misc]
                self.wrote.append((stream, key, json.loads(value or b"null"), at))
        return left

    def _pieces(self, number: int, commit: list[Given]) -> Iterator[Piece]:
        events = [
            anabranch.Event(g.stream, g.key, b"%d" % g.n, [], g.at, None, number, 0, 0, g.n)
            for g in commit
        ]
        places = [task_of(one.key, TASKS) for one in commit]
        cut = self.rng.randint(0, len(events)) if self.rng is not None else 0
        for some in (slice(0, cut), slice(cut, None)):
            for stream in (LEFT, RIGHT):
                mine = [n for n in range(len(events))[some] if events[n].stream == stream]
                if mine:
                    last = mine[-1] == len(events) - 1
                    yield Piece(
                        stream, number, [events[n] for n in mine], [places[n] for n in mine], last
                    )


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

    def write(self, key: bytes, value: Any, at: int | None, stream: str = "t/out") -> None:
        self.wrote.append((stream, key, value, at))

    def late(self, one: Given) -> None:
        self.write(one.key, one.n, one.at or None, "t/late")


def check(build: Build, fold: type[Fold], seed: int) -> list[Any]:
    """The same, one commit for one and in any batches, and as the fold says. Returns what was written."""
    commits, wanted = random_commits(seed), fold()
    wanted.run(commits)
    for rng in (None, random.Random(seed), random.Random(seed + 1000)):
        runner = Runner(build(), rng)
        runner.run(commits)
        assert _by_stream(runner.wrote) == _by_stream(wanted.wrote)
        left = [row for rows in runner.rows.by_task for row in rows.scan(b"\0\2", b"\xff\xff")]
        due = [row for rows in runner.rows.by_task for row in rows.scan(b"\0\1d", b"\0\1e")]
        assert len(left) <= 2 * TASKS, "rows of what is closed stay"
        assert len(due) <= 2 * TASKS, "timers of what is closed stay"
    return wanted.wrote


def _by_stream(wrote: Iterable[Any]) -> dict[str, list[Any]]:
    found = defaultdict(list)
    for stream, *rest in wrote:
        found[stream].append(rest)
    return found


def program() -> tuple[Processor, Any, Any, Any, Any]:
    """A processor with two inputs, an output and a stream for late events."""
    app = Processor("t/p", tasks=TASKS)
    left, right = app.input(LEFT, value=json), app.input(RIGHT, value=json)
    return app, left, right, app.output("t/out", value=json), app.output("t/late")


# -- sessions -----------------------------------------------------------------------------------------


GAP, GRACE = 150, 120


def sessions_by_name() -> Processor:
    app, left, right, out, late = program()
    visits = app.sessions(
        "visits", GAP / 1000, grace=GRACE / 1000, into=agg.top(4, lambda e: e.value), late=late
    )

    @app.on(left, right)
    def visit(event: Any) -> None:
        visits.add(event)

    @visits.on_close
    def closed(session: Any) -> None:
        out.write([session.start, session.end, session.value], key=session.key)

    return app


def sessions_by_hand() -> Processor:
    app, left, right, out, late = program()
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

    return app


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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("build", [sessions_by_name, sessions_by_hand])
def test_sessions_are_clusters_of_events(build: Build, seed: int) -> None:
    wrote = check(build, SessionFold, seed)
    assert any(stream == "t/late" for stream, *_ in wrote)
    assert any(stream == "t/out" and value[0] < value[1] for stream, _, value, _ in wrote)


# -- sliding windows ----------------------------------------------------------------------------------


SIZE = 200


def sliding() -> Processor:
    app, left, right, out, late = program()
    last = app.sliding("last", SIZE / 1000, grace=GRACE / 1000, into=agg.sum(), late=late)

    @app.on(left, right)
    def add(event: Any) -> None:
        if (now := last.add(event)) is not None:
            out.write(["now", now], key=event.key)

    @last.on_close
    def closed(window: Any) -> None:
        out.write([window.start, window.end, window.value], key=window.key)

    return app


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


@pytest.mark.parametrize("seed", SEEDS)
def test_sliding_windows_end_at_each_event(seed: int) -> None:
    assert any(stream == "t/late" for stream, *_ in check(sliding, SlidingFold, seed))


# -- joins of streams ---------------------------------------------------------------------------------


BEFORE, AFTER = 60, 180


def join(kind: Any) -> Build:
    def build() -> Processor:
        app, left, right, out, late = program()
        within = BEFORE / 1000, AFTER / 1000

        @app.join("pairs", left, right, within=within, grace=GRACE / 1000, kind=kind, late=late)
        def pair(one: Any, two: Any) -> None:
            key = (one or two).key
            out.write([one and one.value, two and two.value], key=key)

        return app

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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["inner", "left", "outer"])
def test_a_join_finds_each_pair_once(kind: str, seed: int) -> None:
    wrote = check(join(kind), join_fold(kind), seed)
    assert any(stream == "t/out" and None not in value for stream, _, value, _ in wrote)
    assert any(stream == "t/late" for stream, *_ in wrote)
